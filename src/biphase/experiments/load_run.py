"""One level of a load on one server: every request that was due ends as a record, whatever became of it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from biphase.analysis.goodput import UNFINISHED, UNSENT
from biphase.client.load import OpenLoop, closed_loop
from biphase.client.openai import Call
from biphase.client.record import Keep, Record
from biphase.client.traffic import CallMaker, Fitter, Load, check_size, due, endless
from biphase.client.workers import SendCall
from biphase.client.workloads import Workload

FAILURES_IN_A_ROW = 10
"""Beyond those in flight: so many requests without any answer, and the server is taken for gone."""
BREATH = 64  # prompts made between two looks at Ctrl-C

Progress = Callable[[int, int, str], None]
"""Told how much is done, of how much, and what is being done."""


@dataclass(frozen=True)
class Timing:
    """Seconds in which requests are due, seconds more until the last must have ended, most requests of a level."""

    duration_s: float
    drain_s: float
    most: int | None = None


@dataclass
class Level:
    """A level in progress or done. Moments are on the records' clock; ``ended``: when the last request was due."""

    load: Load
    records: list[Record] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    drained: float = 0.0
    gone: str | None = None


class LevelRunner:
    """Runs levels, one after the other; ``level`` is the one in progress, with its records, also after Ctrl-C."""

    def __init__(
        self, workload: Workload, fitter: Fitter, send: SendCall, keep: Keep, progress: Progress, rng: random.Random
    ) -> None:
        self.level: Level | None = None
        self.sent = 0
        self._workload = workload
        self._fitter = fitter
        self._send = send
        self._keep = keep
        self._progress = progress
        self._rng = rng
        self._running: dict[str, tuple[float, float, Call]] = {}
        self._peak = self._in_a_row = 0

    async def run(self, load: Load, timing: Timing, make: CallMaker) -> Level:
        """Send what the load asks for; ``BadInput`` when it cannot be prepared or nothing fits the server."""
        self.level = level = Level(load)
        self._running.clear()
        self._peak = self._in_a_row = 0
        await (self._open(level, timing, make) if load.open else self._closed(level, timing, make))
        level.drained = time.perf_counter()
        if level.gone is not None:
            level.ended = min(level.ended, level.drained)
        return level

    async def _open(self, level: Level, timing: Timing, make: CallMaker) -> None:
        check_size(self._workload, level.load, timing.duration_s, timing.most)
        calls = await self._prepare(level.load, timing, make)
        moments = {call.id: moment for moment, call in calls}

        async def send(call: Call, moment: float) -> Record:
            level.began = level.began or moment - moments[call.id]
            return await self._tracked(call, moment)

        # the first requests of a run must not wait for the last of its prompts: all are ready before the clock starts
        last = calls[-1][0] if calls else 0.0
        loop = OpenLoop(send, last + timing.drain_s)
        what = str(level.load)
        await self._take(level, loop.run(calls), lambda done: self._progress(done, len(calls), what))
        level.began = level.began or time.perf_counter()
        # arrivals end where the last was asked for: at a low rate that is well before the duration
        level.ended = level.began + (timing.duration_s if timing.most is None and level.load.kind != "trace" else last)
        self._add_unfinished(level)
        answered = {record.id for record in level.records}
        for moment, call in calls if level.gone is None else ():
            if call.id not in answered:
                self._missing(level, call, level.began + moment, level.began + moment, UNSENT)

    async def _prepare(self, load: Load, timing: Timing, make: CallMaker) -> list[tuple[float, Call]]:
        calls = []
        for moment, numbered in due(self._workload, load, timing.duration_s, self._fitter, timing.most, self._rng):
            calls.append((moment, make.make(numbered)))
            if len(calls) % BREATH == 0:
                self._progress(0, len(calls), f"{load}: making prompts")
                await asyncio.sleep(0)
        return calls

    async def _closed(self, level: Level, timing: Timing, make: CallMaker) -> None:
        level.began = time.perf_counter()
        end = level.began + timing.duration_s

        def calls() -> Iterator[Call]:
            for numbered in endless(self._workload, self._fitter):
                if time.perf_counter() >= end or (timing.most is not None and numbered.number >= timing.most):
                    return
                yield make.make(numbered)

        def told(done: int) -> None:
            passed = min(timing.duration_s, time.perf_counter() - level.began)
            self._progress(int(passed), int(timing.duration_s), f"{level.load}: {done} requests done (seconds)")

        streams = closed_loop(calls(), lambda call: self._tracked(call, None), int(level.load.level))
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + timing.duration_s + timing.drain_s):
                await self._take(level, streams, told)
        except TimeoutError:
            pass
        last = max((r.sent for r in level.records), default=level.began)
        level.ended = min(end, time.perf_counter()) if timing.most is None else last
        self._add_unfinished(level)

    async def _take(self, level: Level, records: AsyncIterator[Record], told: Callable[[int], None]) -> None:
        """Collect what ends, until all has or the server is gone."""
        async with aclosing(records) as ending:  # type: ignore[type-var]
            async for record in ending:
                self._running.pop(record.id, None)
                level.records.append(record)
                self._keep(record)
                told(len(level.records))
                unanswered = record.error is not None and record.status is None
                self._in_a_row = self._in_a_row + 1 if unanswered else 0
                if self._in_a_row >= FAILURES_IN_A_ROW + self._peak:
                    level.gone = record.error
                    return

    async def _tracked(self, call: Call, moment: float | None) -> Record:
        now = time.perf_counter()
        self._running[call.id] = (now if moment is None else moment, now, call)
        self._peak = max(self._peak, len(self._running))
        self.sent += 1
        return await self._send(call, moment)

    def _add_unfinished(self, level: Level) -> None:
        """What was given up at the end of the drain is no less a request that was due."""
        for intended, sent, call in self._running.values() if level.gone is None else ():
            self._missing(level, call, intended, sent, UNFINISHED)

    def _missing(self, level: Level, call: Call, intended: float, sent: float, why: str) -> None:
        record = Record(
            id=call.id,
            intended=intended,
            sent=sent,
            asked_prompt_tokens=call.prompt_tokens,
            asked_completion_tokens=call.max_tokens,
            error=why,
        )
        level.records.append(record)
        self._keep(record)


def interrupted(level: Level) -> Level:
    """A level that was broken off now: its window ends here, and what was in flight is no part of it."""
    now = time.perf_counter()
    began = level.began or now
    return Level(level.load, list(level.records), began, now, now, level.gone)
