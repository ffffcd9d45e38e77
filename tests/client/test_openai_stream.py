"""One streamed request against a scripted server in another process: exact times, and every oddity of real servers."""

import asyncio
import statistics
import time
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest

from biphase.analysis.latency import chunk_gaps, decode_rate, itl, tpot, ttft
from biphase.client import clock
from biphase.client.endpoint import Access, connect
from biphase.client.openai import Call, Dialect, PromptForm, _retry_after, make_call, request
from biphase.client.record import Record
from tests.scripted_server import FIRST_TOKEN_S, GAP_S, STALL_S, scripted
from tests.timing import holds_when_undisturbed

TOLERANCE_S = 0.003
"""What waking two processes (the server's thread, the client's loop) may cost on two cores, on a median of three."""


def call_for(url: str, form: PromptForm = "token_ids", tokens: int = 8, id: str = "r") -> Call:
    prompt: str | list[int] = [2000, 2001, 2002] if form == "token_ids" else "time year people"
    return make_call(Dialect(f"{url}/v1", "scripted", form), id, prompt, 3, tokens)


def stream(url: str, *calls: Call, access: Access | None = None) -> list[Record]:
    async def main() -> list[Record]:
        async with connect(access or Access(timeout_s=5)) as session:
            return [(await request(session, call)).record for call in calls]

    return clock.run(main())


def one(form: PromptForm = "token_ids", tokens: int = 8, **script: Any) -> Record:
    """The record of one request to a server that runs this script, without waits."""
    with scripted(**{"first_token_s": 0.0, "gap_s": 0.0, **script}) as url:
        return stream(url, call_for(url, form, tokens))[0]


def sent_by(url: str) -> list[list[float]]:
    async def main() -> list[list[float]]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/sent") as response:
            sent: list[list[float]] = (await response.json())["sent"]
            return sent

    return asyncio.run(main())


def test_the_times_of_the_script_come_back() -> None:
    """80 ms to the first token, gaps of 10 ms and one of 300 ms: each recovered within 3 ms."""
    with scripted(stalls={4: STALL_S}, usage="continuous") as url:
        holds_when_undisturbed(lambda: _check_times(stream(url, *(call_for(url, tokens=9) for _ in range(3)))))


def _check_times(records: list[Record]) -> None:
    assert [record.error for record in records] == [None] * 3
    assert statistics.median(ttft(r) or 0 for r in records) == pytest.approx(FIRST_TOKEN_S, abs=TOLERANCE_S)
    gaps = [statistics.median(column) for column in zip(*map(chunk_gaps, records), strict=True)]
    assert gaps == pytest.approx([GAP_S] * 3 + [STALL_S] + [GAP_S] * 4, abs=TOLERANCE_S)
    assert all(r.sent <= (r.first_byte or 0) <= r.chunks[0].t <= (r.ended or 0) for r in records)


def test_a_stamp_is_taken_when_the_bytes_arrive() -> None:
    """Against the moments at which the server wrote each chunk, on the clock both processes share."""

    def check() -> None:
        records = stream(url, *(call_for(url, tokens=20) for _ in range(3)))
        stamps = [chunk.t for record in records for chunk in record.token_chunks]
        written = [moment for moments in sent_by(url)[-3:] for moment in moments]
        lateness = [stamp - moment for stamp, moment in zip(stamps, written, strict=True)]
        assert min(lateness) > 0
        assert statistics.median(lateness) < TOLERANCE_S

    with scripted(first_token_s=0.01, gap_s=0.005) as url:
        holds_when_undisturbed(check)


def test_a_stream_of_the_plain_server() -> None:
    record = one(usage="final", tokens=5)
    assert [(c.kind, c.tokens) for c in record.chunks] == [("text", 1)] * 5 + [("text", 0), ("usage", 0)]
    assert (record.prompt_tokens, record.prompt_tokens_source) == (3, "usage")
    assert (record.completion_tokens, record.completion_tokens_source) == (5, "usage")
    assert (record.finish_reason, record.status, record.error) == ("length", 200, None)


def test_the_role_chunk_is_not_the_first_token() -> None:
    def check() -> None:
        records = stream(url, *[call_for(url, "chat", tokens=3)] * 3)
        assert all(record.chunks[0].kind == "role" for record in records)
        assert statistics.median(ttft(r) or 0 for r in records) == pytest.approx(FIRST_TOKEN_S, abs=TOLERANCE_S)
        assert all(r.chunks[0].t - r.sent < FIRST_TOKEN_S / 2 for r in records)

    with scripted(usage="final") as url:
        holds_when_undisturbed(check)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("usage", ["final", "null_then_final", "continuous", "final_on_finish"])
@pytest.mark.parametrize("form", ["token_ids", "chat"])
def test_framings_and_usages(newline: str, usage: str, form: PromptForm) -> None:
    record = one(form, newline=newline, usage=usage, comments=True)
    assert record.error is None
    assert record.completion_tokens == 8
    assert [c.tokens for c in record.token_chunks] == [1] * 8
    assert record.prompt_tokens == (3 if form == "token_ids" else 8)


def test_no_usage_at_all() -> None:
    record = one(usage="none")
    assert (record.completion_tokens, record.completion_tokens_source) == (8, "chunks")
    assert (record.prompt_tokens, record.prompt_tokens_source) == (3, "sent_ids")
    assert one("text", usage="none").prompt_tokens is None


@pytest.mark.parametrize(("usage", "source"), [("continuous", "continuous_usage"), ("final", "usage")])
def test_several_tokens_a_chunk(usage: str, source: str) -> None:
    record = one(usage=usage, tokens_per_chunk=3, tokens=8)
    assert [c.tokens for c in record.token_chunks] == [3, 3, 2]
    assert record.completion_tokens_source == source
    assert len(itl(record)) == 5


def test_the_first_chunk_is_not_credited_to_decode() -> None:
    """Four chunks of 4 tokens, 10 ms apart: 12 tokens in 30 ms are 2.5 ms a token and 400 tokens/s."""

    def check() -> None:
        records = stream(url, *[call_for(url, tokens=16)] * 3)
        assert statistics.median(tpot(r) or 0 for r in records) == pytest.approx(0.0025, abs=TOLERANCE_S / 12)
        assert statistics.median(decode_rate(r) or 0 for r in records) == pytest.approx(400, rel=0.1)

    with scripted(first_token_s=0.0, usage="continuous", tokens_per_chunk=4) as url:
        holds_when_undisturbed(check)


def test_without_done_a_finish_reason_is_enough() -> None:
    assert one(done=False).error is None
    assert one(finish=False).error is None
    cut = one(done=False, finish=False, usage="none")
    assert "ended without a finish reason" in str(cut.error)


def test_a_connection_cut_in_mid_stream_keeps_what_came() -> None:
    record = one(cut_after=3)
    assert "closed the connection before its answer was complete" in str(record.error)
    assert len(record.token_chunks) == 3


def test_an_error_object_inside_a_200_stream() -> None:
    record = one(error_after=2)
    assert record.status == 200
    assert record.error == "the server broke off the stream: out of memory"
    assert len(record.token_chunks) == 2


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_has_its_status_and_the_servers_words(status: int) -> None:
    record = one(status=status)
    assert record.status == status
    assert f"HTTP {status}: scripted refusal" in str(record.error)
    assert record.chunks == ()


def test_a_wrong_key_says_what_to_set() -> None:
    record = one(api_key="secret")
    assert record.status == 401
    assert "BIPHASE_API_KEY" in str(record.error)


def test_a_server_that_does_not_stream_says_so() -> None:
    assert "did not stream" in str(one(streams=False).error)


def test_a_server_that_stalls_past_the_timeout() -> None:
    with scripted(first_token_s=0.0, stalls={2: 5.0}) as url:
        record = stream(url, call_for(url), access=Access(timeout_s=0.3))[0]
    assert "--timeout" in str(record.error)
    assert len(record.token_chunks) == 2


def test_a_connection_closed_after_each_stream_is_opened_again() -> None:
    """llama.cpp closes after a stream without announcing it; the next request must not fail for that."""
    with scripted(first_token_s=0.0, gap_s=0.0, closes_after_stream=True) as url:
        records = stream(url, *(call_for(url, tokens=2) for _ in range(20)))
    assert [record.error for record in records] == [None] * 20


def test_nobody_listens() -> None:
    with scripted() as url:
        pass
    assert "no connection" in str(stream(url, call_for(url))[0].error)


def test_the_clients_own_lag_is_in_the_record() -> None:
    """A loop that is kept busy for 50 ms while chunks arrive says so; an idle one stays far below."""

    async def main(url: str, busy: bool) -> Record:
        async with connect(Access()) as session:
            task = asyncio.create_task(request(session, call_for(url, tokens=8)))
            await asyncio.sleep(0.1)  # the first chunks are here, the others come every 10 ms
            if busy:
                _spin(0.05)
            return (await task).record

    with scripted() as url:
        holds_when_undisturbed(lambda: _check_lags(clock.run(main(url, False)), clock.run(main(url, True))))


def _check_lags(idle: Record, busy: Record) -> None:
    assert busy.client_lag >= 0.03
    assert idle.client_lag < 0.005


def _spin(seconds: float) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        pass


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("30", 30), ("0.5", 0.5), ("", None), ("soon", None)])
def test_how_long_a_limited_client_is_to_wait(text: str, seconds: float | None) -> None:
    assert _retry_after(text) == seconds


def test_a_date_to_wait_for() -> None:
    assert _retry_after(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=5)
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
