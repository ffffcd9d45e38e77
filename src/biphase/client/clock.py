"""The clock of a measurement, and how far behind the network this process was when it read it.

Every stamp is ``time.perf_counter()`` when the event loop hands bytes over, before anything parses them. Bytes that
arrive while the loop is busy wait for it; the loop's own selector knows for how long at most, so each record can say
how much of a gap may be the client's. What can wait until nothing arrives is put off: a server that writes to all its
streams at once, as an engine's step does, would else have the last of them wait for the parsing of all others.
"""

import asyncio
import gc
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

SLICE_S = 2e-4
"""How long put-off work may go on before the next look for arrivals: far below the 2 ms that a stamp may be late."""
LONGEST_PUT_OFF_S = 0.05
"""How old put-off work may become while there is always something to read: one slice of it is then done a turn."""

COLLECT_AFTER = 50_000
"""New containers before the garbage collector looks at the youngest; 700 by default. It walks what each running stream
has received so far: 5 to 7 ms of every fifth second with 200 streams of 500 chunks. Memory is freed without it; what
waits for it are cycles, some MB of them."""


class LagSelector(selectors.DefaultSelector):
    """A selector that remembers since when the bytes it reports can have been waiting, and works while none do.

    ``earliest``: of bytes that a protocol is given in this turn of the loop. ``earliest_before``: of bytes for which a
    coroutine wakes in this turn, as asyncio does one turn after the read. ``handed_before``: when those bytes were
    handed over, in the turn before this one.
    """

    def __init__(self) -> None:
        super().__init__()
        now = time.perf_counter()
        self._looked = self.earliest = self.earliest_before = self.handed_before = now
        self._put_off: deque[tuple[float, Callable[[], None]]] = deque()

    def put_off(self, since: float, work: Callable[[], None]) -> None:
        """Call ``work`` when nothing arrives, or when ``since`` is long ago; in order."""
        self._put_off.append((since, work))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in the base class; gives an empty list at once when it has worked."""
        self.handed_before = self._looked
        ready = super().select(0)
        earliest = self._looked  # what is there already came at some time since the last look
        self._looked = time.perf_counter()
        if self._put_off:
            if not ready or self._looked - self._put_off[0][0] > LONGEST_PUT_OFF_S:
                self._work(self._looked + SLICE_S)
        elif not ready and (timeout is None or timeout > 0):
            ready = super().select(timeout)
            earliest = self._looked = time.perf_counter()  # what ends a wait has just come
        self.earliest_before, self.earliest = self.earliest, earliest
        return ready

    def _work(self, end: float) -> None:
        while self._put_off:
            self._put_off.popleft()[1]()
            if time.perf_counter() >= end:
                return


class MeasuringLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop on a selector that knows its lag."""

    def __init__(self) -> None:
        self.arrivals = LagSelector()
        super().__init__(self.arrivals)


_running: asyncio.Task[Any] | None = None


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a loop whose lag can be asked for; ``interrupt`` ends it as Ctrl-C does."""
    hosts = gc.get_freeze_count() > 0  # the program around this one froze what it had: that stays so after the run
    gc.collect()
    if not hosts:
        gc.freeze()  # what the imports made stays: a full collection must not walk it between two stamps
    threshold = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *threshold[1:])
    with asyncio.Runner(loop_factory=MeasuringLoop) as runner:
        try:
            return runner.run(_noted(main))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            gc.set_threshold(*threshold)
            if not hosts:
                gc.unfreeze()


async def _noted(main: Coroutine[Any, Any, T]) -> T:
    global _running
    _running = asyncio.current_task()
    try:
        return await main
    finally:
        _running = None


def interrupt() -> bool:
    """Cancel what ``run`` is running; for a signal handler. False when it runs nothing."""
    if _running is None:
        return False
    _running.get_loop().call_soon_threadsafe(_running.cancel)
    return True


class ArrivalClock(Protocol):
    """Since when bytes can have been waiting for this process, in ``time.perf_counter``, and what to do meanwhile."""

    @property
    def earliest(self) -> float: ...

    @property
    def earliest_before(self) -> float: ...

    @property
    def handed_before(self) -> float: ...

    def put_off(self, since: float, work: Callable[[], None]) -> None: ...


class _NoLag:
    """On a loop that ``run`` did not make: no wait is known, and nothing is put off."""

    @property
    def earliest(self) -> float:
        return time.perf_counter()

    earliest_before = handed_before = earliest

    def put_off(self, since: float, work: Callable[[], None]) -> None:
        work()


def arrival_clock() -> ArrivalClock:
    """That of the running loop."""
    loop = asyncio.get_running_loop()
    return loop.arrivals if isinstance(loop, MeasuringLoop) else _NoLag()
