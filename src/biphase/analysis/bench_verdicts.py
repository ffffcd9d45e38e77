"""Signs that a level of load did not show what it was to show."""

from collections.abc import Callable, Iterator, Sequence

from biphase.analysis.goodput import Measured
from biphase.analysis.saturation import KEPT_UP, backlog
from biphase.analysis.slo import Slo
from biphase.analysis.verdicts import (
    Verdict,
    buffered,
    chunks_not_tokens,
    client_lags,
    ended_early,
    foreign_traffic,
    role_chunk_leads,
)
from biphase.client.record import Record
from biphase.client.traffic import Fitted

FEWEST_DUE = 30
"""Requests from which a 95th percentile is more than the largest one or two."""
LATE_SHARE, LATE_MS = 0.1, 2.0
"""Part of the median TTFT, and ms, up to which the 95th percentile of the client's lag hardly shows."""
UNEXPECTED_CACHE = 0.01

Check = Callable[[Sequence[Record]], Verdict | None]


def level_verdicts(found: Measured, due: Sequence[Record], slo: Slo | None, shares: bool) -> list[Verdict]:
    """What spoils one level, worst first; ``shares``: its prompts are meant to meet a prefix cache."""
    good = [r for r in due if r.error is None]
    own = (_failures(found), _rate(found), _late(found), _queue(found, slo), _few(found), _cached(found, shares))
    checks: tuple[Check, ...] = (ended_early, chunks_not_tokens, buffered, role_chunk_leads, client_lags)
    return [v for v in (*own, *(check(good) for check in checks if good)) if v is not None]


def run_verdicts(
    fitted: Fitted, sent: int, foreign_tokens: int | None, own_tokens: int, busy_before: int | None
) -> Iterator[Verdict]:
    """What spoils the whole run."""
    foreign = foreign_traffic(foreign_tokens, own_tokens, busy_before)
    if foreign is not None:
        yield foreign
    yield from _fitted(fitted, sent)


def _fitted(fitted: Fitted, sent: int) -> Iterator[Verdict]:
    if fitted.clipped:
        yield Verdict(
            "clipped",
            f"{fitted.clipped} of {sent + fitted.dropped} requests were cut to the server's limit of {fitted.limit} "
            "tokens: this is not the whole workload",
            "raise the server's context limit, or leave such requests out (--too-long drop)",
        )
    if fitted.dropped:
        yield Verdict(
            "dropped",
            f"{fitted.dropped} of {sent + fitted.dropped} requests were left out, longer than the server's limit of "
            f"{fitted.limit} tokens: this is not the whole workload",
            "raise the server's context limit, or cut such requests to it (--too-long clip)",
        )
    if fitted.lengthened:
        yield Verdict(
            "lengthened",
            f"{fitted.lengthened} prompts were shorter than the server's own tokens around a prompt and one more",
            "nothing, if they are few",
        )


def _failures(found: Measured) -> Verdict | None:
    o = found.outcomes
    if o.due == o.completed:
        return None
    counts = ((o.failed, "failed"), (o.turned_away, "turned away (429 or 503)"), (o.unfinished, "unfinished"))
    parts = ", ".join(f"{n} {what}" for n, what in counts if n)
    first = next(iter(found.errors), None)
    return Verdict(
        "not-all-answered",
        f"{o.due - o.completed} of {o.due} requests were not answered: {parts}; latencies are of the "
        f"{o.completed} others" + (f"; most often: {first}" if first else ""),
        "goodput counts them as missed; lower the load, or look into the server's log",
    )


def _rate(found: Measured) -> Verdict | None:
    asked, sent = found.flow.asked, found.flow.sent
    if asked is None or sent >= KEPT_UP * asked:
        return None
    return Verdict(
        "rate-not-reached",
        f"{sent:.4g} requests/s were sent of {asked:.4g} asked for: the client, not the server, is the limit",
        "send with more processes (--workers), from a machine of its own",
    )


def _late(found: Measured) -> Verdict | None:
    lag, first = found.lag_ms, found.ttft_ms
    if lag is None or first is None or lag.p95 < max(LATE_SHARE * first.median, LATE_MS):
        return None
    return Verdict(
        "sent-late",
        f"one request in twenty went out {lag.p95:.3g} ms late or more (median TTFT {first.median:.3g} ms): "
        "the client is busy, or connections open slowly; the SLO counts it, the TTFT below does not",
        "send with more processes (--workers), from a machine of its own",
    )


def _queue(found: Measured, slo: Slo | None) -> Verdict | None:
    if found.flow.asked is None or _rate(found) is not None or not backlog(found):
        return None
    place = found.occupancy
    return Verdict(
        "not-steady",
        f"the queue grows: {place.at_start} requests in flight when the window begins, {place.at_end} when it ends; "
        "the load is more than the server bears, and latencies depend on how long the run lasts",
        "read goodput and throughput only; for latencies, lower the rate",
    )


def _few(found: Measured) -> Verdict | None:
    if found.outcomes.due >= FEWEST_DUE:
        return None
    return Verdict(
        "too-few-samples",
        f"{found.outcomes.due} requests were due in the window: too few for percentiles beyond the median "
        f"({FEWEST_DUE} at least)",
        "raise --duration",
    )


def _cached(found: Measured, shares: bool) -> Verdict | None:
    flow = found.flow
    if shares or flow.input_tokens == 0 or flow.cached_tokens < UNEXPECTED_CACHE * flow.input_tokens:
        return None
    return Verdict(
        "prefix-cache",
        f"the server's prefix cache answered {100 * flow.cached_tokens / flow.input_tokens:.1f} % of the prompt "
        "tokens, though no two prompts of this workload begin alike",
        "see what else sends these prompts, or what the server counts as cached",
    )
