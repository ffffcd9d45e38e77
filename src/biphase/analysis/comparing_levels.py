"""Two benches side by side, level by level: goodput, attainment, completed requests, and where both saturate.

Runs of a level are pooled. In an open loop chance decides how many requests come, and the server how many of them are
good: what is compared is the share, and goodput is the share times the rate at which requests came in both runs. The
difference of two shares has Newcombe's interval (1998, method 10, of Wilson's). In a closed loop the server decides the
rate too: a rate is a count over seconds, and the ratio of two has the exact interval of two Poisson counts
(Przyborowski and Wilenski 1940, Clopper-Pearson on the share of one count in both), which completions are steadier
than. Both take requests as independent: where many miss an SLO together, the intervals are too narrow.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from scipy import stats

from biphase.analysis.goodput import wilson
from biphase.client.traffic import Load
from biphase.errors import BadInput

Outcome = Literal["better", "worse", "no difference"]
TAIL = 0.025
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Outcomes(msgspec.Struct, frozen=True):
    """What a comparison reads of a level's outcomes; so do the other types here, which take what else there is."""

    due: Count
    completed: Count


class Kept(msgspec.Struct, frozen=True):
    """Requests that kept the SLO."""

    good: Count


class Flow(msgspec.Struct, frozen=True):
    """Requests a second."""

    completed: Amount


class Measured(msgspec.Struct, frozen=True):
    """One run of a level."""

    window_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)]
    outcomes: Outcomes
    flow: Flow
    attainment: Kept | None

    def __post_init__(self) -> None:
        good = self.attainment.good if self.attainment is not None else 0
        if max(good, self.outcomes.completed) > self.outcomes.due:
            raise ValueError("more requests were completed, or good, than were due")


class Level(msgspec.Struct, frozen=True):
    """One run of a level, and its load."""

    load: Load
    measured: Measured


class Saturation(msgspec.Struct, frozen=True):
    """The highest level that held and the lowest above it that did not; None: there was none."""

    highest: Amount | None
    lowest_failing: Amount | None


class Traffic(msgspec.Struct, frozen=True):
    """What was sent, apart from its name: a file can be called anything."""

    requests: int
    mean_input_tokens: float
    mean_output_tokens: float
    shares_prefixes: bool


class Bench(msgspec.Struct, frozen=True):
    """What stands under ``bench`` in the JSON of ``biphase bench``."""

    workload: Traffic
    slo: dict[str, float | None] | None
    levels: Annotated[tuple[Level, ...], msgspec.Meta(min_length=1)]
    shown: Count
    saturation: Saturation | None = None

    @property
    def shown_load(self) -> Load:
        """The load of which the rows by prompt length are."""
        return self.levels[min(self.shown, len(self.levels) - 1)].load


class LevelDifference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of a level in both benches, of which more is better. ``change``: second over first, or with ``points``
    second minus first, of shares from 0 to 1; with its interval, for goodput of an open loop that of the difference in
    parts of the first."""

    name: str
    load: str
    unit: str
    first: float
    second: float
    change: float
    low: float
    high: float
    points: bool
    outcome: Outcome


@dataclass
class Pooled:
    """All runs of one level: seconds, and counts of requests: that were due in them, and of these were completed and
    good (None without an SLO); that ended in them, whenever they were due."""

    seconds: float = 0.0
    ended: int = 0
    due: int = 0
    completed: int = 0
    good: int | None = None

    def add(self, run: Measured) -> None:
        """One run more."""
        self.seconds += run.window_s
        self.ended += round(run.flow.completed * run.window_s)
        self.due += run.outcomes.due
        self.completed += run.outcomes.completed
        if run.attainment is not None:
            self.good = (self.good or 0) + run.attainment.good


def level_differences(first: Bench, second: Bench) -> tuple[list[LevelDifference], list[str]]:
    """All numbers that both have, and what is not compared and why; ``BadInput`` for two workloads."""
    if first.workload != second.workload:
        raise BadInput(
            f"the two benches are of different workloads ({_traffic(first.workload)}; {_traffic(second.workload)}): "
            "run both with the same --workload"
        )
    notes = [] if first.slo == second.slo else ["the SLOs differ: goodput and attainment are not compared"]
    a, b = _pooled(first), _pooled(second)
    alone = [str(load) for load in (*a, *b) if (load in a) != (load in b)]
    notes += [f"of one alone: {'; '.join(alone)}"] if alone and first.saturation is None else []
    found = [d for load in a if load in b for d in _of_level(load, a[load], b[load], first.slo == second.slo)]
    return [*found, *_saturations(first, second)], notes


def _traffic(found: Traffic) -> str:
    return (
        f"{found.requests:,} requests of {found.mean_input_tokens:.0f} tokens in and {found.mean_output_tokens:.0f} out"
    )


def _pooled(bench: Bench) -> dict[Load, Pooled]:
    found: dict[Load, Pooled] = {}
    for level in bench.levels:
        found.setdefault(level.load, Pooled()).add(level.measured)
    return found


def _of_level(load: Load, a: Pooled, b: Pooled, same_slo: bool) -> Iterator[LevelDifference]:
    if not (a.due and b.due):
        return
    if same_slo and a.good is not None and b.good is not None:
        yield _goodput_of_rate(load, a, b) if load.open else _rates("goodput", load, (a.good, a), (b.good, b))
        yield _shares("attained", load, (a.good, a.due), (b.good, b.due))
    if load.open:
        yield _shares("completed", load, (a.completed, a.due), (b.completed, b.due))
    else:
        yield _rates("completed", load, (a.ended, a), (b.ended, b))


def _goodput_of_rate(load: Load, a: Pooled, b: Pooled) -> LevelDifference:
    """The shares at the rate of both runs together."""
    share = _shares("goodput", load, (a.good or 0, a.due), (b.good or 0, b.due))
    rate, first = (a.due + b.due) / (a.seconds + b.seconds), share.first
    parts = [1 + part / first if first else math.inf for part in (share.change, share.low, share.high)]
    low = parts[1] if first else 0.0 if share.low <= 0 else math.inf
    return LevelDifference(
        "goodput",
        str(load),
        "requests/s",
        first * rate,
        share.second * rate,
        parts[0],
        max(low, 0.0),
        parts[2],
        False,
        share.outcome,
    )


def _rates(name: str, load: Load, a: tuple[int, Pooled], b: tuple[int, Pooled]) -> LevelDifference:
    """Counts over the seconds of their runs."""
    (first, in_first), (second, in_second) = a, b
    low, high = poisson_ratio((first, in_first.seconds), (second, in_second.seconds))
    rates = first / in_first.seconds, second / in_second.seconds
    ratio = rates[1] / rates[0] if first else math.inf
    return LevelDifference(name, str(load), "requests/s", *rates, ratio, low, high, False, _outcome(low, high, 1.0))


def poisson_ratio(first: tuple[int, float], second: tuple[int, float]) -> tuple[float, float]:
    """95 % interval of second over first, each a count and the seconds in which it was counted."""
    (a, a_s), (b, b_s) = first, second
    low = float(stats.beta.ppf(TAIL, b, a + 1)) if b else 0.0
    high = float(stats.beta.ppf(1 - TAIL, b + 1, a)) if a else 1.0
    odds = [share / (1 - share) if share < 1 else math.inf for share in (low, high)]
    return odds[0] * a_s / b_s, odds[1] * a_s / b_s


def _shares(name: str, load: Load, a: tuple[int, int], b: tuple[int, int]) -> LevelDifference:
    first, second = a[0] / a[1], b[0] / b[1]
    low, high = newcombe(a, b)
    return LevelDifference(
        name, str(load), "of the requests", first, second, second - first, low, high, True,
        _outcome(low, high, 0.0),
    )  # fmt: skip


def newcombe(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """95 % interval of the second share less the first, each so many of so many."""
    p, q = first[0] / first[1], second[0] / second[1]
    (p_low, p_high), (q_low, q_high) = wilson(*first), wilson(*second)
    return q - p - math.hypot(q - q_low, p_high - p), q - p + math.hypot(q_high - q, p - p_low)


def _saturations(first: Bench, second: Bench) -> Iterator[LevelDifference]:
    """The brackets of two searches: each true level lies between the highest that held and the next that did not."""
    a, b, load, other = first.saturation, second.saturation, first.levels[0].load, second.levels[0].load
    alike = (load.kind, load.burstiness) == (other.kind, other.burstiness) and first.slo == second.slo
    if a is None or b is None or not a.highest or not alike:
        return
    highest = b.highest or 0.0
    low = highest / a.lowest_failing if a.lowest_failing else 0.0
    high = b.lowest_failing / a.highest if b.lowest_failing is not None else math.inf
    outcome = _outcome(low, high, 1.0)
    yield LevelDifference(
        "saturation", "the search", load.unit, a.highest, highest, highest / a.highest, low, high, False, outcome
    )


def _outcome(low: float, high: float, none: float) -> Outcome:
    return "better" if low > none else "worse" if high < none else "no difference"


def levels_worse(found: Sequence[LevelDifference], limit: float) -> list[LevelDifference]:
    """Those worse beyond the noise, and by more than ``limit``: 0.05 is 5 % of a rate, or 5 points of a share."""
    return [d for d in found if d.outcome == "worse" and d.change < (0.0 if d.points else 1.0) - limit]
