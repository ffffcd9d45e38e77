"""The highest load that keeps an SLO: bracketed by doubling, then bisected, each level tried more than once.

Latency under load is noise around a knee, so one run decides nothing: a level holds when most of its runs do. Every
run stays in the result as evidence.
"""

import math
from collections.abc import Sequence

import msgspec

from biphase.analysis.goodput import Measured
from biphase.analysis.slo import Slo

MOST_PROBES = 40
FLOOR = 1 / 64
"""Part of the first level below which no level is tried."""
CEILING = 1024.0
ALONE = 0.3
"""Requests in flight on average below which a lower rate would change little."""
KEPT_UP = 0.9
"""Part of the asked rate that the client must have sent for a run to say anything of the server."""


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: ``level`` as asked (requests a second, or times a trace's speed), what was sent and kept, and whether
    it holds. ``in_flight``: requests, on average. ``why`` says in words what decided."""

    level: float
    asked_per_s: float
    sent_per_s: float
    due: int
    attained: float
    low: float
    high: float
    goodput_per_s: float
    ttft_p95_ms: float | None
    itl_p99_ms: float | None
    in_flight: float
    holds: bool
    client_limited: bool
    why: str


class SaturationResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``highest``: the highest level that held; None when none did. ``lowest_failing``: the next level tried above it
    that did not; None when the search ended before one failed. ``ended`` says why it ended."""

    highest: float | None
    lowest_failing: float | None
    precision: float
    repeats: int
    ended: str
    probes: tuple[Probe, ...]


def judge(level: float, found: Measured, slo: Slo) -> Probe:
    """What one run says of its level."""
    flow, attained = found.flow, found.attainment
    asked = flow.asked or 0.0
    limited = asked > 0 and flow.sent < KEPT_UP * asked
    share = attained.all if attained else 0.0
    grows = backlog(found)
    holds = share >= slo.share and not limited and (slo.bounds_waiting or not grows)
    return Probe(
        level=level,
        asked_per_s=asked,
        sent_per_s=flow.sent,
        due=found.outcomes.due,
        attained=share,
        low=attained.low if attained else 0.0,
        high=attained.high if attained else 1.0,
        goodput_per_s=flow.goodput or 0.0,
        ttft_p95_ms=found.ttft_ms.p95 if found.ttft_ms else None,
        itl_p99_ms=found.itl_ms.p99 if found.itl_ms else None,
        in_flight=found.occupancy.mean,
        holds=holds,
        client_limited=limited,
        why=_why(found, slo, share, limited, grows),
    )


def _why(found: Measured, slo: Slo, share: float, limited: bool, grows: bool) -> str:
    if limited:
        return f"the client sent {found.flow.sent:.3g}/s of {found.flow.asked:.3g}: says nothing of the server"
    if share < slo.share:
        worst = min(found.attainment.by_limit.items(), key=lambda pair: pair[1]) if found.attainment else ("all", 0.0)
        return f"{worst[0]} kept by {100 * worst[1]:.0f} %"
    if grows and not slo.bounds_waiting:
        return f"the queue grows: {found.occupancy.at_start} in flight at first, {found.occupancy.at_end} at last"
    return f"kept by {100 * share:.0f} %"


def backlog(found: Measured) -> bool:
    """More requests in flight at the end of the window than chance explains: a tenth of what came, and two standard
    deviations of a Poisson count."""
    n = found.outcomes.due
    return found.occupancy.at_end - found.occupancy.at_start > max(0.1 * n, 2 * math.sqrt(n))


class Search:
    """Which level to try next; ``next`` is None when the search has ended.

    ``precision``: the search ends when the lowest level that fails is within this part above the highest that holds.
    """

    def __init__(self, start: float, precision: float = 0.1, repeats: int = 3) -> None:
        self.probes: list[Probe] = []
        self._start = self._level = start
        self._precision = precision
        self._repeats = repeats
        self._holding: float | None = None
        self._failing: float | None = None
        self._ended: str | None = None

    @property
    def next(self) -> float | None:
        """The level of the next run."""
        return None if self._ended else self._level

    def add(self, probe: Probe) -> None:
        """Take the result of the run that ``next`` asked for."""
        self.probes.append(probe)
        if probe.client_limited:
            self._ended = (
                f"this client sent {probe.sent_per_s:.3g} of {probe.asked_per_s:.3g} requests/s: it is the limit, "
                "not the server; more client processes: --workers"
            )
            return
        decided = self._decision([p.holds for p in self.probes if p.level == self._level])
        if decided is not None:
            self._move(decided)
        if self._ended is None and len(self.probes) >= MOST_PROBES:
            self._ended = f"{MOST_PROBES} runs were made"

    def _decision(self, votes: Sequence[bool]) -> bool | None:
        """The majority, as soon as the runs that are left cannot change it."""
        needed = self._repeats // 2 + 1
        if sum(votes) >= needed:
            return True
        return False if len(votes) - sum(votes) > self._repeats - needed else None

    def _move(self, holds: bool) -> None:
        if holds:
            self._holding = self._level
        else:
            self._failing = self._level
        if self._holding is None and self.probes[-1].in_flight < ALONE:
            self._ended = (
                f"even at {self._level:.3g}, where requests hardly meet each other "
                f"({self.probes[-1].in_flight:.2g} in flight on average), it is not kept"
            )
        elif self._holding is None:
            self._level /= 2
            if self._level < self._start * FLOOR:
                self._ended = f"even {2 * self._level:.3g} did not keep the SLO"
        elif self._failing is None:
            self._level *= 2
            if self._level > self._start * CEILING:
                self._ended = f"no level failed up to {self._holding:.3g}"
        elif self._failing <= self._holding * (1 + self._precision):
            self._ended = f"found to {100 * self._precision:g} %"
        else:
            self._level = (self._holding * self._failing) ** 0.5

    def result(self, interrupted: str | None = None) -> SaturationResult:
        """What is known by now."""
        return SaturationResult(
            self._holding,
            self._failing,
            self._precision,
            self._repeats,
            self._ended or interrupted or "not ended",
            tuple(self.probes),
        )
