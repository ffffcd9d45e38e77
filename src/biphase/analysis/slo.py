"""Service-level objectives: limits on one request's latencies, and which requests keep them."""

import re
from collections.abc import Callable, Mapping

import msgspec

from biphase.analysis.latency import e2e, itl, percentile, tpot, ttft
from biphase.client.record import Record
from biphase.errors import BadInput

ITL_PERCENT = 99.0
"""Of a request's inter-token latencies, the percentile that an ``itl`` limit holds."""

LEAST_MS, MOST_MS = 1e-3, 1e9
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TERM = re.compile(r"(ttft|itl|tpot|e2e)\s*[=:<]=?\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)", re.IGNORECASE)


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits in ms; None: not limited. ``share``: part of the requests that must keep all of them.

    ``ttft``, ``e2e``: of the request, counted from the moment at which it was due, so that a client which is late, or
    a connection that opens slowly, is not hidden. ``tpot``: mean time of its tokens after the first chunk. ``itl``:
    the 99th percentile of its own inter-token latencies, so that a stall counts which a mean would hide.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    share: float = 0.95

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits that are set, in ms, by name."""
        every = {"ttft": self.ttft_ms, "itl": self.itl_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in every.items() if limit is not None}

    @property
    def bounds_waiting(self) -> bool:
        """Whether a queue that grows breaks it sooner or later."""
        return self.ttft_ms is not None or self.e2e_ms is not None

    def __str__(self) -> str:
        terms = [f"{name} <= {limit:g} ms" for name, limit in self.limits.items()]
        return f"{' and '.join(terms)} for {100 * self.share:g} % of the requests"


def parse_slo(text: str, share: float = 0.95) -> Slo:
    """``ttft=500ms,itl=50ms``, each of ttft, itl, tpot, e2e once at most, with its unit."""
    found: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        name = match[1].lower() if match else ""
        limit = float(match[2]) * _UNITS[match[3].lower()] if match else 0.0
        if name in found or not LEAST_MS <= limit <= MOST_MS:
            raise BadInput(
                f"--slo {text!r}, at {term.strip()!r}: expected limits as in ttft=500ms,itl=50ms; "
                "ttft, itl, tpot and e2e can be limited, each once, in us, ms or s, from 1us to a million s"
            )
        found[name] = limit
    if not 0 < share <= 1:
        raise BadInput(f"--slo-share {100 * share:g}%: expected more than 0 and at most 100 %")
    return Slo(**{f"{name}_ms": limit for name, limit in found.items()}, share=share)


def waited(record: Record) -> float:
    """Seconds between the moment at which a request was due and the one at which it went out."""
    return max(0.0, record.sent - record.intended)


def _since_due(of: Callable[[Record], float | None]) -> Callable[[Record], float | None]:
    def seconds(record: Record) -> float | None:
        value = of(record)
        return None if value is None else value + waited(record)

    return seconds


def own_itl(record: Record) -> float | None:
    """The 99th percentile of one request's inter-token latencies, in seconds."""
    gaps = itl(record)
    return percentile(gaps, ITL_PERCENT) if gaps else None


MEASURES: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": _since_due(ttft),
    "itl": own_itl,
    "tpot": tpot,
    "e2e": _since_due(e2e),
}


def keeps(record: Record, name: str, limit_ms: float) -> bool:
    """Whether a request keeps one limit. One that failed keeps none; an answer of one token has no gap to break it."""
    if record.error is not None:
        return False
    seconds = MEASURES[name](record)
    return seconds is None or 1e3 * seconds <= limit_ms


def good(record: Record, slo: Slo) -> bool:
    """Whether a request was answered within all limits."""
    return record.error is None and all(keeps(record, name, limit) for name, limit in slo.limits.items())
