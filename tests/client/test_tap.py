"""The body of a stream read in the transport's callback: what it does to silence, to reuse and to large reads."""

import asyncio
import time

import aiohttp
import pytest

from biphase.client import clock
from biphase.client.endpoint import Access, connect
from biphase.client.openai import Call, Dialect, make_call, request
from biphase.client.record import Record
from tests.scripted_server import scripted


def call_for(url: str, tokens: int) -> Call:
    return make_call(Dialect(f"{url}/v1", "scripted"), "r", [2000, 2001], 2, tokens)


def read(url: str, tokens: int, times: int = 1, timeout_s: float = 5) -> list[Record]:
    async def main() -> list[Record]:
        async with connect(Access(timeout_s=timeout_s)) as session:
            return [(await request(session, call_for(url, tokens))).record for _ in range(times)]

    return clock.run(main())


def test_silence_in_mid_stream_ends_with_what_came() -> None:
    """After three tokens the server is silent for 30 s; the limit is 0.3 s from the last byte."""
    with scripted(first_token_s=0.0, gap_s=0.15, stalls={3: 30.0}) as url:
        began = time.perf_counter()
        (record,) = read(url, 8, timeout_s=0.3)
    assert "no answer within the time limit" in str(record.error)
    assert len(record.token_chunks) == 3
    assert time.perf_counter() - began < 5


def test_a_stream_may_last_longer_than_the_limit_of_silence() -> None:
    with scripted(first_token_s=0.0, gap_s=0.1) as url:
        (record,) = read(url, 8, timeout_s=0.5)
    assert record.error is None
    assert len(record.token_chunks) == 8


def test_a_connection_is_used_again_after_a_stream() -> None:
    """The server counts what it accepts by the client's port: all four requests came from one."""

    async def main(url: str) -> tuple[set[int | None], list[Record]]:
        ports, records = set(), []
        async with connect(Access(timeout_s=5)) as session:
            for _ in range(4):
                records.append((await request(session, call_for(url, 3))).record)
                assert isinstance(session.connector, aiohttp.TCPConnector)
                pools = session.connector._conns.values()
                ports |= {conn[0].transport.get_extra_info("sockname")[1] for pool in pools for conn in pool}
        return ports, records

    with scripted(first_token_s=0.0, gap_s=0.0) as url:
        ports, records = clock.run(main(url))
    assert len(ports) == 1
    assert [record.error for record in records] == [None] * 4


@pytest.mark.parametrize("tokens", [1, 3000])
def test_a_whole_answer_at_once_and_many_chunks(tokens: int) -> None:
    """Without waits, reads hold many chunks, and the first may hold the whole body."""
    with scripted(first_token_s=0.0, gap_s=0.0, usage="continuous") as url:
        records = read(url, tokens, times=3)
    assert [record.completion_tokens for record in records] == [tokens] * 3
    assert all(record.error is None and len(record.token_chunks) == tokens for record in records)
    assert all(a.t <= b.t for record in records for a, b in zip(record.chunks, record.chunks[1:], strict=False))


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async def main(url: str) -> list[str]:
        async with connect(Access(timeout_s=5)) as session:
            task = asyncio.create_task(request(session, call_for(url, 50)))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            record = (await request(session, call_for(url, 2))).record
            return [str(record.error)]

    with scripted(first_token_s=0.0, gap_s=0.02) as url:
        assert clock.run(main(url)) == ["None"]


def test_other_loops_have_no_lag() -> None:
    async def main() -> float:
        before = time.perf_counter()
        return clock.arrival_clock().earliest - before

    assert 0 <= asyncio.run(main()) < 1


def test_on_a_loop_of_another_maker_nothing_stays_behind() -> None:
    """The connection stays open behind the last byte, so what is not passed on then never is."""

    async def main(url: str) -> Record:
        async with connect(Access(timeout_s=1)) as session:
            return (await request(session, call_for(url, 3))).record

    with scripted(first_token_s=0.0, gap_s=0.05) as url:
        record = asyncio.run(main(url))
    assert record.error is None
    assert len(record.token_chunks) == 3
