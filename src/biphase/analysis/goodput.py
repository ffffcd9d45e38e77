"""What a server did under one load, in the steady part of the run: rates, latencies, goodput, how the load was kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from biphase.analysis.latency import (
    decode_rate,
    e2e,
    itl,
    prefill_rate,
    prefilled_tokens,
    spread,
    tpot,
    ttft,
)
from biphase.analysis.profile_result import Itl, LengthRow, pooled_itl
from biphase.analysis.slo import Slo, good, keeps, waited
from biphase.client.record import Record

UNFINISHED = "not finished when the run ended"
UNSENT = "not sent when the run ended"
REFUSED_STATUS = (429, 503)


@dataclass(frozen=True)
class Window:
    """The steady part of a run: moments on the records' clock. Requests that were due in it are measured."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start

    def holds(self, moment: float) -> bool:
        """Whether a moment lies in it."""
        return self.start <= moment < self.end


class Percentiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of single values, none averaged before (linear interpolation), with their number."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float
    n: int


class Outcomes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of the requests that were due in the window: ``due`` is the sum of the four others.

    ``turned_away``: answered with 429 or 503, as an overloaded server should. ``unfinished``: still running, or never
    sent, when the drain ended.
    """

    due: int
    completed: int
    turned_away: int
    failed: int
    unfinished: int


class Attainment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of the due requests, 0 to 1, that kept each limit and all; ``low`` and ``high``: Wilson's 95 % interval."""

    by_limit: dict[str, float]
    all: float
    low: float
    high: float
    good: int


class Flow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates in the window, a second. ``asked``: requests that were due (None in a closed loop). ``completed``: requests
    that ended in it; ``goodput``: requests that were due in it and kept the SLO (None without one). Tokens count when
    they arrive, prompt tokens with the first token.
    """

    asked: float | None
    sent: float
    completed: float
    goodput: float | None
    input_tokens: float
    cached_tokens: float
    output_tokens: float


class Occupancy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests in flight at both ends of the window and on average, counted from the moment at which they were due."""

    at_start: int
    at_end: int
    mean: float


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One load level. Latencies in ms of the requests that were due in the window and completed; ``lag_ms``: how long
    after its due moment each request went out, client and connection together."""

    window_s: float
    before_s: float
    outcomes: Outcomes
    flow: Flow
    occupancy: Occupancy
    attainment: Attainment | None
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    lag_ms: Percentiles | None
    gaps: Itl | None
    client_lag_ms: float
    errors: dict[str, int]


def percentiles(values: Iterable[float | None], scale: float = 1e3) -> Percentiles | None:
    """Of those that are there, times ``scale``."""
    found = np.array([value for value in values if value is not None], dtype=float) * scale
    if not len(found):
        return None
    median, p90, p95, p99 = (float(q) for q in np.percentile(found, [50, 90, 95, 99]))
    return Percentiles(float(found.mean()), median, p90, p95, p99, float(found.max()), len(found))


def due_in(records: Sequence[Record], window: Window) -> list[Record]:
    """The requests that the window measures."""
    return [r for r in records if window.holds(r.intended)]


def measured(records: Sequence[Record], window: Window, open_loop: bool, slo: Slo | None, start: float) -> Measured:
    """Everything about one level. ``records``: all of it, also of warm-up and drain; ``start``: when it began."""
    due = due_in(records, window)
    completed = [r for r in due if r.error is None]
    attained = attainment(due, slo) if slo is not None and due else None
    gaps = [gap for r in completed for gap in itl(r)]
    return Measured(
        window_s=window.seconds,
        before_s=window.start - start,
        outcomes=outcomes(due),
        flow=flow(records, window, len(due) if open_loop else None, attained.good if attained else None),
        occupancy=occupancy(records, window),
        attainment=attained,
        ttft_ms=percentiles(map(ttft, completed)),
        tpot_ms=percentiles(map(tpot, completed)),
        itl_ms=percentiles(gaps),
        e2e_ms=percentiles(map(e2e, completed)),
        lag_ms=percentiles(waited(r) for r in due if r.error != UNSENT),
        gaps=pooled_itl(completed),
        client_lag_ms=1e3 * max((r.client_lag for r in completed), default=0.0),
        errors=errors(due),
    )


def outcomes(due: Sequence[Record]) -> Outcomes:
    """Each request counted once."""
    completed = sum(r.error is None for r in due)
    away = sum(r.error is not None and r.status in REFUSED_STATUS for r in due)
    unfinished = sum(r.error in (UNFINISHED, UNSENT) for r in due)
    return Outcomes(len(due), completed, away, len(due) - completed - away - unfinished, unfinished)


def errors(due: Sequence[Record]) -> dict[str, int]:
    """How often requests failed of what, the commonest first, five at most."""
    counts: dict[str, int] = {}
    for record in due:
        turned_away = record.status in REFUSED_STATUS
        if record.error is not None and not turned_away and record.error not in (UNFINISHED, UNSENT):
            counts[record.error] = counts.get(record.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda pair: -pair[1])[:5])


def attainment(due: Sequence[Record], slo: Slo) -> Attainment:
    """Of all requests that were due: one that failed, was turned away or did not finish keeps no limit."""
    kept = sum(good(r, slo) for r in due)
    low, high = wilson(kept, len(due))
    by_limit = {name: sum(keeps(r, name, ms) for r in due) / len(due) for name, ms in slo.limits.items()}
    return Attainment(by_limit, kept / len(due), low, high, kept)


def wilson(kept: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share (Wilson 1927): ``z`` 1.96 for 95 %."""
    p = kept / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    arm = z / (1 + z * z / n) * float(np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)))
    return max(0.0, middle - arm), min(1.0, middle + arm)


def flow(records: Sequence[Record], window: Window, due: int | None, kept: int | None) -> Flow:
    """Rates in the window over all records, whenever they were due."""
    seconds = window.seconds
    firsts = [r for r in records if r.token_chunks and window.holds(r.token_chunks[0].t)]
    arrived = sum(c.tokens for r in records for c in r.token_chunks if window.holds(c.t))
    return Flow(
        asked=None if due is None else due / seconds,
        sent=sum(window.holds(r.sent) and r.error != UNSENT for r in records) / seconds,
        completed=sum(r.error is None and r.ended is not None and window.holds(r.ended) for r in records) / seconds,
        goodput=None if kept is None else kept / seconds,
        input_tokens=sum(r.prompt_tokens or r.asked_prompt_tokens or 0 for r in firsts) / seconds,
        cached_tokens=sum(r.cached_tokens or 0 for r in firsts) / seconds,
        output_tokens=arrived / seconds,
    )


def occupancy(records: Sequence[Record], window: Window) -> Occupancy:
    """By Little's view: from the moment a request is due to its end; one that did not finish stays to the end."""
    spans = [(r.intended, r.ended if r.ended is not None else window.end) for r in records]
    inside = sum(max(0.0, min(end, window.end) - max(start, window.start)) for start, end in spans)
    at = [sum(start < moment <= end for start, end in spans) for moment in (window.start, window.end)]
    return Occupancy(at[0], at[1], inside / window.seconds)


def bucket(tokens: int) -> int:
    """The upper edge of the bucket of a length: the next power of two."""
    return 1 << max(0, tokens - 1).bit_length()


def by_uncached(due: Sequence[Record]) -> Mapping[int, list[Record]]:
    """Completed requests by bucket of the prompt tokens that had to be computed, shortest first."""
    found: dict[int, list[Record]] = {}
    for record in due:
        tokens = uncached(record)
        if record.error is None and tokens is not None:
            found.setdefault(bucket(tokens), []).append(record)
    return {edge: found[edge] for edge in sorted(found)}


def uncached(record: Record) -> int | None:
    """Prompt tokens that had to be computed, as asked for where the server counted none."""
    return prefilled_tokens(record) or record.asked_prompt_tokens


def uncached_rows(due: Sequence[Record]) -> tuple[LengthRow, ...]:
    """A row for each bucket of uncached prompt length, ``prompt_tokens`` its upper edge."""
    return tuple(_row(edge, records) for edge, records in by_uncached(due).items())


def _row(edge: int, records: Sequence[Record]) -> LengthRow:
    first, whole = spread(map(ttft, records), 1e3), spread(map(e2e, records), 1e3)
    assert first is not None  # a request without a token is a failed one
    assert whole is not None
    return LengthRow(
        prompt_tokens=edge,
        counted_tokens=None,
        requests=len(records),
        ttft_ms=first,
        prefill_tok_per_s=spread(map(prefill_rate, records)),
        decode_ms_per_token=spread(map(tpot, records), 1e3),
        decode_tok_per_s=spread(map(decode_rate, records)),
        e2e_ms=whole,
    )


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TTFT in ms of the prompts with more than ``above`` and at most ``up_to`` uncached tokens."""

    above: int
    up_to: int
    mean_uncached_tokens: float
    ttft_ms: Percentiles


def buckets(due: Sequence[Record]) -> tuple[Bucket, ...]:
    """TTFT over the prompt tokens that had to be computed."""
    return tuple(
        Bucket(edge // 2, edge, float(np.mean([uncached(r) or 0 for r in records])), times)
        for edge, records in by_uncached(due).items()
        if (times := percentiles(map(ttft, records))) is not None
    )
