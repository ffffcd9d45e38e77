"""The clock of a measurement, and how far behind the network this process was when it read it.

Every stamp is ``time.perf_counter()`` when the event loop hands bytes over, before anything parses them. Bytes that
arrive while the loop is busy wait for it; the loop's own selector knows for how long at most, so each record can say
how much of a gap may be the client's.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LagSelector(selectors.DefaultSelector):
    """A selector that remembers since when the bytes it reports can have been waiting."""

    def __init__(self) -> None:
        super().__init__()
        now = time.perf_counter()
        self._returned = self._earliest = self._earliest_before = now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in the base class."""
        ready = super().select(0)
        earliest = self._returned  # what is there already came at some time since the last look
        if not ready and (timeout is None or timeout > 0):
            ready = super().select(timeout)
            earliest = time.perf_counter()  # what ends a wait has just come
        self._earliest_before, self._earliest, self._returned = self._earliest, earliest, time.perf_counter()
        return ready

    def lag(self, now: float) -> float:
        """Longest wait in seconds of bytes that wake a coroutine ``now``: asyncio does so one turn after the read."""
        return now - self._earliest_before


class MeasuringLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop on a selector that knows its lag."""

    def __init__(self) -> None:
        self.arrivals = LagSelector()
        super().__init__(self.arrivals)


_running: asyncio.Task[Any] | None = None


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a loop whose lag can be asked for; ``interrupt`` ends it as Ctrl-C does."""
    with asyncio.Runner(loop_factory=MeasuringLoop) as runner:
        try:
            return runner.run(_noted(main))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


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


def lag(now: float) -> float:
    """Upper bound in seconds of this loop's lag at a stamp taken ``now``; 0 on a loop that ``run`` did not make."""
    loop = asyncio.get_running_loop()
    return loop.arrivals.lag(now) if isinstance(loop, MeasuringLoop) else 0.0
