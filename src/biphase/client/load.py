"""How requests are run: a closed loop keeps a fixed number in flight, an open loop sends when requests are due."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import aiohttp
import msgspec

from biphase.client.openai import Answer, Call, request
from biphase.client.record import Record

RATE_LIMIT_RETRIES = 5
LONGEST_WAIT_S = 60.0

Send = Callable[[Call], Awaitable[Record]]


async def patient(session: aiohttp.ClientSession, call: Call) -> Answer:
    """Send a call; while the answer is 429, wait as its Retry-After asks (1, 2, 4... s without one) and repeat.

    A server that asks for more than a minute, or keeps refusing, gets its refusal recorded.
    """
    answer = await request(session, call)
    for attempt in range(RATE_LIMIT_RETRIES):
        wait = answer.retry_after if answer.retry_after is not None else 2.0**attempt
        if answer.record.status != 429 or wait > LONGEST_WAIT_S:
            break
        await asyncio.sleep(wait)
        answer = await request(session, call)
    return answer


async def closed_loop(calls: Iterable[Call], send: Send, concurrency: int = 1) -> AsyncIterator[Record]:
    """Records in the order in which they end, ``concurrency`` in flight until the calls are used up.

    When the caller stops listening, what is in flight is cancelled.
    """
    finished: asyncio.Queue[Record | BaseException | None] = asyncio.Queue()
    waiting = iter(calls)
    workers = [asyncio.create_task(_work(waiting, send, finished)) for _ in range(concurrency)]
    try:
        running = len(workers)
        while running:
            record = await finished.get()
            if isinstance(record, BaseException):
                raise record
            if record is None:
                running -= 1
            else:
                yield record
    finally:
        for worker in workers:
            worker.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*workers, return_exceptions=True)


async def _work(waiting: Iterator[Call], send: Send, finished: asyncio.Queue[Record | BaseException | None]) -> None:
    try:
        for call in waiting:
            finished.put_nowait(await send(call))
        finished.put_nowait(None)
    except Exception as error:
        finished.put_nowait(error)


class Achieved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an open loop did: requests a second asked for and sent, and how late the client sent them (seconds).

    ``unfinished`` were cut at the hard end. A load generator that lags measures itself: compare the rates, and the
    lag with the TTFT.
    """

    sent: int
    unfinished: int
    asked_per_s: float | None
    achieved_per_s: float | None
    lag_median_s: float
    lag_max_s: float


SendAt = Callable[[Call, float], Awaitable[Record]]
"""Sends a call that was due at a moment of ``time.perf_counter``."""


class OpenLoop:
    """Sends calls when they are due, whatever is in flight; ``achieved`` says how well once it has run."""

    def __init__(self, send: SendAt, hard_end_s: float) -> None:
        self._send = send
        self._hard_end_s = hard_end_s
        self._due: list[float] = []
        self._sent: list[float] = []
        self._unfinished = 0

    async def run(self, calls: Iterable[tuple[float, Call]]) -> AsyncIterator[Record]:
        """Records as they end, until all calls have ended or ``hard_end_s`` after the start; the rest is cancelled.

        ``calls``: moments in seconds from the start, rising, each with its call.
        """
        finished: asyncio.Queue[Record | BaseException | None] = asyncio.Queue()
        start = time.perf_counter()
        sending = asyncio.create_task(self._send_all(start, iter(calls), finished))
        try:
            while (item := await self._next(finished, start + self._hard_end_s)) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(sending, return_exceptions=True)

    async def _next(
        self, finished: "asyncio.Queue[Record | BaseException | None]", end: float
    ) -> Record | BaseException | None:
        try:
            async with asyncio.timeout(max(0.0, end - time.perf_counter())):
                return await finished.get()
        except TimeoutError:
            return None

    async def _send_all(
        self,
        start: float,
        calls: Iterator[tuple[float, Call]],
        finished: "asyncio.Queue[Record | BaseException | None]",
    ) -> None:
        running: set[asyncio.Task[None]] = set()

        async def one(call: Call, due: float) -> None:
            self._unfinished += 1
            try:
                finished.put_nowait(await self._send(call, due))
                self._unfinished -= 1
            except Exception as error:
                finished.put_nowait(error)

        try:
            for moment, call in calls:
                # also when late: what is in flight must get its turn
                await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
                self._due.append(start + moment)
                self._sent.append(time.perf_counter())
                task = asyncio.create_task(one(call, start + moment))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
            finished.put_nowait(None)
        except Exception as error:
            finished.put_nowait(error)
        finally:
            for task in running:
                task.cancel()

    @property
    def achieved(self) -> Achieved:
        """Rates between the first and the last sending, and the lag of each behind its due moment."""
        lags = sorted(sent - due for sent, due in zip(self._sent, self._due, strict=True)) or [0.0]
        return Achieved(
            sent=len(self._sent),
            unfinished=self._unfinished,
            asked_per_s=_rate(self._due),
            achieved_per_s=_rate(self._sent),
            lag_median_s=lags[len(lags) // 2],
            lag_max_s=lags[-1],
        )


def _rate(moments: Sequence[float]) -> float | None:
    """Intervals a second: n - 1 of them between n moments."""
    span = moments[-1] - moments[0] if moments else 0.0
    return (len(moments) - 1) / span if span > 0 else None
