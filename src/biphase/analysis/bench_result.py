"""The result of ``biphase bench``: what a profile says, and under ``bench`` what only a load shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from biphase.analysis.bench_verdicts import level_verdicts
from biphase.analysis.goodput import (
    UNSENT,
    Bucket,
    Measured,
    Window,
    buckets,
    due_in,
    measured,
    uncached_rows,
)
from biphase.analysis.latency import spread
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.price import PhaseTime, Price, modelled, price
from biphase.analysis.profile_result import ProfileResult
from biphase.analysis.saturation import SaturationResult
from biphase.analysis.slo import Slo
from biphase.analysis.verdicts import Verdict
from biphase.analysis.vllm_keys import vllm_keys
from biphase.client.record import Record, RunFacts
from biphase.client.traffic import Fitted, Load
from biphase.client.workloads import Described

WARMUP_SHARE = 0.1
TIMELINE_POINTS = 400

T = TypeVar("T")


@dataclass(frozen=True)
class LevelRun:
    """One level as it was run: all its records, when it began and when the last request was due (moments on the
    records' clock), and the engine-seconds that the server counted meanwhile, where it does."""

    load: Load
    records: Sequence[Record]
    began: float
    ended: float
    phase_time: PhaseTime | None = None
    drained: float | None = None


class Moment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request on the time line: seconds from the start of the level at which it was due, and its TTFT in ms."""

    due_s: float
    ttft_ms: float


class LevelResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One level of load. ``in_flight``: (seconds from the start, requests in flight); ``drain_s``: how long after the
    window the last answer ended or was given up."""

    load: Load
    description: str
    measured: Measured
    drain_s: float
    by_uncached: tuple[Bucket, ...]
    price: Price | None
    verdicts: tuple[Verdict, ...]
    moments: tuple[Moment, ...]
    in_flight: tuple[tuple[float, int], ...]


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked and found beyond a profile. ``shown``: number of the level whose figures stand in the profile's
    keys; ``workers``: client processes, 0 for this one alone."""

    workload: Described
    fitted: Fitted
    slo: Slo | None
    levels: tuple[LevelResult, ...]
    shown: int
    saturation: SaturationResult | None
    workers: int
    duration_s: float


class BenchResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``profile`` holds the shown level in the schema of a profile: its rows are buckets of uncached prompt length."""

    profile: ProfileResult
    bench: Bench


@dataclass(frozen=True)
class Analysis:
    """What the levels are judged by."""

    slo: Slo | None
    warmup_s: float | None
    shares: bool
    per_hour: float | None
    laws: tuple[PrefillLaw | None, DecodeLaw | None] = (None, None)


def window_of(run: LevelRun, warmup_s: float | None) -> Window:
    """The steady part: from the end of the warm-up, by default a tenth of the time in which requests were due, to the
    last moment at which one was due. What came before is not full yet, what comes after runs empty."""
    sending = run.ended - run.began
    start = min(WARMUP_SHARE * sending if warmup_s is None else warmup_s, sending)
    return Window(run.began + start, run.ended)


def analyse_level(run: LevelRun, how: Analysis) -> LevelResult | None:
    """What one level says; None where no request was due after the warm-up."""
    window = window_of(run, how.warmup_s)
    due = due_in(run.records, window)
    if not due or window.seconds <= 0:
        return None
    found = measured(run.records, window, run.load.open, how.slo, run.began)
    ends = [r.ended for r in run.records if r.ended is not None]
    return LevelResult(
        load=run.load,
        description=str(run.load),
        measured=found,
        drain_s=max(0.0, (run.drained or max(ends, default=window.end)) - window.end),
        by_uncached=buckets(due),
        price=_price(run, how),
        verdicts=tuple(level_verdicts(found, due, how.slo, how.shares)),
        moments=tuple(_thin(_moments(run))),
        in_flight=tuple(_thin(_in_flight(run))),
    )


def _price(run: LevelRun, how: Analysis) -> Price | None:
    if how.per_hour is None:
        return None
    time = run.phase_time
    if time is None and how.laws[0] is not None and how.laws[1] is not None:
        time = modelled(run.records, how.laws[0], how.laws[1])
    if time is None:
        return None
    ends = [r.ended for r in run.records if r.ended is not None]
    return price(how.per_hour, time, run.records, max(ends, default=run.ended) - run.began)


def _moments(run: LevelRun) -> list[Moment]:
    found = [(r.intended - run.began, r.token_chunks[0].t - r.sent) for r in run.records if r.token_chunks]
    return [Moment(at, 1e3 * first) for at, first in sorted(found)]


def _in_flight(run: LevelRun) -> list[tuple[float, int]]:
    last = max((r.ended for r in run.records if r.ended is not None), default=run.ended)
    spans = [(r.intended, r.ended if r.ended is not None else last) for r in run.records if r.error != UNSENT]
    edges = sorted([(start - run.began, 1) for start, _ in spans] + [(end - run.began, -1) for _, end in spans])
    found, now = [(0.0, 0)], 0
    for at, step in edges:
        now += step
        found.append((at, now))
    return found


def _thin(points: Sequence[T]) -> Sequence[T]:
    """Every so-manieth of many points: a picture needs no more."""
    return points[:: max(1, len(points) // TIMELINE_POINTS)]


def choose(levels: Sequence[LevelResult], slo: Slo | None, highest: float | None) -> int:
    """The level that stands for the run: the one the search found; else the one with most goodput; else the last."""
    if highest is not None:
        return max(i for i, level in enumerate(levels) if level.load.level == highest)
    if slo is None:
        return len(levels) - 1
    return max(range(len(levels)), key=lambda i: levels[i].measured.flow.goodput or 0.0)


def as_profile(
    facts: RunFacts,
    run: LevelRun,
    level: LevelResult,
    how: Analysis,
    verdicts: Sequence[Verdict],
) -> ProfileResult:
    """One level in the schema of a profile; ``rows`` are buckets of uncached prompt length, ``repeats`` is 1."""
    due = due_in(run.records, window_of(run, how.warmup_s))
    good = [r for r in due if r.error is None]
    return ProfileResult(
        biphase=facts.versions.get("biphase", ""),
        command=facts.command,
        versions=facts.versions,
        started=facts.started,
        url=facts.url,
        model=facts.model,
        tokens=facts.tokens,
        repeats=facts.repeats,
        rows=uncached_rows(due),
        left_out=(),
        itl_ms=level.measured.gaps,
        prefill_saturation=None,
        prefill_law=how.laws[0],
        decode_law=how.laws[1],
        chunked_prefill=None,
        comparison=None,
        http_round_trip_ms=spread(facts.http_round_trip_s, 1e3),
        http_round_trip_path=facts.http_round_trip_path,
        client_lag_ms=level.measured.client_lag_ms,
        notes=facts.notes,
        verdicts=(*verdicts, *level.verdicts),
        vllm_bench=dict(_vllm_bench(good, facts, level)),
        error=facts.error,
    )


def _vllm_bench(good: Sequence[Record], facts: RunFacts, level: LevelResult) -> Mapping[str, float | int | str]:
    found, load = level.measured, level.load
    own: dict[str, float | int | str] = {
        "num_prompts": found.outcomes.due,
        "failed": found.outcomes.due - found.outcomes.completed,
        "request_rate": found.flow.asked if found.flow.asked is not None else "inf",
        "burstiness": load.burstiness,
    }
    own |= {"request_goodput": found.flow.goodput} if found.flow.goodput is not None else {}
    base = dict(vllm_keys(good, facts.model, facts.started))
    base.pop("max_concurrency", None)
    own |= {} if load.open else {"max_concurrency": int(load.level)}
    return base | own if base else own
