"""How requests are run: a closed loop keeps a fixed number in flight, one for a sequential run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress

import aiohttp

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
