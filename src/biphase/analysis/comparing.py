"""Two profiles, or two benches, side by side: each ratio with its interval, and a verdict that respects the noise."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from scipy import stats

from biphase.analysis.comparing_levels import Bench, LevelDifference, Outcome, level_differences
from biphase.analysis.latency import Spread
from biphase.errors import BadInput

CONFIDENCE = 0.95
IQR_OF_NORMAL = 1.349
MOST_ARM = 100.0
"""Of an interval of the logarithm of a ratio: what is wider says nothing, and no number could hold its ends."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""


class Row(msgspec.Struct, frozen=True):
    """What a comparison reads of a row of a profile's JSON."""

    prompt_tokens: int
    ttft_ms: Spread
    decode_ms_per_token: Spread | None


class Profile(msgspec.Struct, frozen=True):
    """What a comparison reads of the JSON of a profile, or of a bench."""

    model: str
    url: str
    tokens: int
    rows: tuple[Row, ...]
    error: str | None = None
    bench: Bench | None = None


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number in both profiles: ``ratio`` is second over first with a 95 % interval; above 1 is slower."""

    name: str
    prompt_tokens: int
    first_ms: float
    second_ms: float
    ratio: float
    low: float
    high: float
    outcome: Outcome


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that two results have in common; ``notes`` say what was not compared, and why."""

    differences: tuple[Difference, ...]
    levels: tuple[LevelDifference, ...] = ()
    notes: tuple[str, ...] = ()


def read_profile(path: Path) -> Profile:
    """The JSON that ``biphase profile --json`` or ``biphase bench --json`` wrote; ``BadInput`` for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} is not the JSON of a profile (biphase profile --json, biphase bench --json): {error}"
        ) from error


def compare(first: Profile, second: Profile) -> Comparison:
    """Two of a kind; ``BadInput`` when they are not, or have nothing in common."""
    a, b = first.bench, second.bench
    if a is not None and b is not None:
        return _benches(first, a, second, b)
    if a is not None or b is not None:
        raise BadInput("one is of biphase profile and the other of biphase bench: compare two of a kind")
    found = differences(first, second)
    if not found:
        raise BadInput("the two profiles have no prompt length in common: measure both with the same --lengths")
    return Comparison(tuple(found))


def _benches(first: Profile, a: Bench, second: Profile, b: Bench) -> Comparison:
    """Levels, and the rows by prompt length where they are of the same load."""
    levels, notes = level_differences(a, b)
    alike = a.shown_load == b.shown_load
    if not alike:
        notes.append(f"by prompt length: A's are under {a.shown_load} and B's under {b.shown_load}")
    rows = differences(first, second) if alike else []
    if not rows and not levels:
        raise BadInput(
            "the two benches have no level of load in common: run both with the same --rate, --concurrency or "
            "--trace-speed"
        )
    return Comparison(tuple(rows), tuple(levels), tuple(notes))


def differences(first: Profile, second: Profile) -> list[Difference]:
    """One for each phase and prompt length that both have."""
    others = {row.prompt_tokens: row for row in second.rows}
    pairs = [(row, others[row.prompt_tokens]) for row in first.rows if row.prompt_tokens in others]
    return [found for pair in pairs for found in _of_length(*pair)]


def _of_length(first: Row, second: Row) -> Iterator[Difference]:
    phases: Sequence[tuple[str, Spread | None, Spread | None]] = (
        ("prefill", first.ttft_ms, second.ttft_ms),
        ("decode", first.decode_ms_per_token, second.decode_ms_per_token),
    )
    for name, a, b in phases:
        if a is not None and b is not None and a.median > 0 and b.median > 0:
            yield _difference(name, first.prompt_tokens, a, b)


def _difference(name: str, length: int, a: Spread, b: Spread) -> Difference:
    """Normal errors of both medians from their interquartile ranges, on the logarithm of the ratio, Student's t."""
    ratio = b.median / a.median
    if min(a.n, b.n) < 2:  # one sample says nothing of its noise
        return Difference(name, length, a.median, b.median, ratio, 0.0, float("inf"), "no difference")
    t = float(stats.t.ppf(0.5 + CONFIDENCE / 2, min(a.n, b.n) - 1))
    arm = t * math.hypot(_relative_error(a), _relative_error(b))
    if arm > MOST_ARM:
        return Difference(name, length, a.median, b.median, ratio, 0.0, float("inf"), "no difference")
    low, high = ratio * math.exp(-arm), ratio * math.exp(arm)
    outcome: Outcome = "worse" if low > 1 else "better" if high < 1 else "no difference"
    return Difference(name, length, a.median, b.median, ratio, low, high, outcome)


def _relative_error(value: Spread) -> float:
    return MEDIAN_ERROR * (value.p75 - value.p25) / IQR_OF_NORMAL / value.median / math.sqrt(value.n)


def worse_than(found: Sequence[Difference], limit: float) -> list[Difference]:
    """Those slower by more than ``limit`` (0.05: 5 %), and so beyond the noise: verdict worse and ratio above."""
    return [d for d in found if d.outcome == "worse" and d.ratio > 1 + limit]
