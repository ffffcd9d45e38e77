"""Client processes: they send what they are given, give up what is given up, and their death is told."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from biphase.client.endpoint import Access
from biphase.client.openai import Call, Dialect, make_call
from biphase.client.record import Record
from biphase.client.workers import worker_pool
from biphase.errors import RunFailed
from tests.scripted_server import scripted
from tests.slot_server import slot_server

ACCESS = Access({"Authorization": "Bearer secret"}, 30.0)


def call(url: str, number: int, tokens: int = 3) -> Call:
    return make_call(Dialect(f"{url}/v1", "m"), f"c{number}", [1000 + number] * 5, 5, tokens)


def children() -> set[int]:
    """Processes whose parent is this one."""
    listed = Path("/proc").glob("[0-9]*/stat")
    found = set()
    for path in listed:
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(path.parent.name))
    return found


def test_records_come_back_with_the_stamps_of_this_clock() -> None:
    async def main(url: str) -> tuple[float, list[Record], float]:
        async with worker_pool(2, ACCESS) as send:
            began = time.perf_counter()
            records = await asyncio.gather(*(send(call(url, n), began - 0.5) for n in range(6)))
            return began, records, time.perf_counter()

    with scripted(first_token_s=0.01, gap_s=0.002, api_key="secret") as url:
        began, records, ended = asyncio.run(main(url))
    assert [record.id for record in records] == [f"c{n}" for n in range(6)]
    for record in records:
        assert record.error is None
        assert record.completion_tokens == 3
        assert record.intended == began - 0.5
        assert began <= record.sent < record.chunks[0].t <= ended


def test_a_call_that_is_given_up_is_given_up_there_too() -> None:
    async def main(url: str) -> Record:
        async with worker_pool(1, ACCESS) as send:
            long = asyncio.create_task(send(call(url, 0, tokens=1000), None))
            await asyncio.sleep(0.3)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            return await send(call(url, 1), None)

    with slot_server(slots=2, gap_s=0.05) as url:
        assert asyncio.run(main(url)).error is None


def test_the_death_of_a_worker_is_told_and_no_worker_outlives_the_block() -> None:
    before = children()

    async def main(url: str) -> None:
        async with worker_pool(1, ACCESS) as send:
            waiting = asyncio.create_task(send(call(url, 0, tokens=1000), None))
            await asyncio.sleep(0.2)
            (worker,) = children() - before - server
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(RunFailed, match="a client process ended"):
                await waiting
            with pytest.raises(RunFailed, match="a client process ended"):
                await send(call(url, 1), None)

    with slot_server(gap_s=0.05) as url:
        server = children() - before
        asyncio.run(main(url))
        assert children() - before == server
