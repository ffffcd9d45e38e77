"""The profile of scripted servers whose laws are known, and what is left of one that breaks off."""

import asyncio
from typing import Any

import pytest

from biphase.analysis.latency import Spread
from biphase.analysis.profile_result import LengthRow, ProfileResult, Saturation, pooled_itl, saturation
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.client.record import Chunk, Record, RunFacts
from biphase.errors import RunFailed
from biphase.experiments.profile import INTERRUPTED, ProfilePlan, measure
from tests.scripted_server import scripted
from tests.timing import holds_when_undisturbed

TOLERANCE_MS = 3.0  # what waking two processes may cost, on a median of three
QUICK: dict[str, Any] = {"first_token_s": 0.0, "gap_s": 0.001}


def run(plan: ProfilePlan, url: str, **more: Any) -> tuple[ProfileResult, list[Record], list[str]]:
    """Result, records and the texts of the progress of one profile."""
    records: list[Record] = []

    def keep(line: Record | RunFacts) -> None:
        if isinstance(line, Record):
            records.append(line)

    steps: list[str] = []
    result = clock.run(
        measure(
            url,
            None,
            Access(timeout_s=5),
            plan,
            more.get("keep", keep),
            more.get("progress", lambda done, total, text: steps.append(f"{done}/{total} {text}")),
            "0",
        )
    )
    return result, records, steps


def test_the_law_of_the_server_comes_back() -> None:
    """Prefill is 20 ms and 0.5 ms a token, decode 10 ms a token: rows, ITL and rates say so."""
    plan = ProfilePlan((1, 40, 80), tokens=5, repeats=3)
    with scripted(first_token_s=0.020, per_token_s=0.0005, gap_s=0.010, usage="continuous") as url:
        holds_when_undisturbed(lambda: _check_law(*run(plan, url)))


def _check_law(result: ProfileResult, records: list[Record], steps: list[str]) -> None:
    decode = [row.decode_ms_per_token.median for row in result.rows if row.decode_ms_per_token]
    rates = [row.prefill_tok_per_s.median for row in result.rows if row.prefill_tok_per_s]
    assert result.error is None
    assert [row.prompt_tokens for row in result.rows] == [1, 40, 80]
    assert [row.ttft_ms.median for row in result.rows] == pytest.approx([20.5, 40, 60], abs=TOLERANCE_MS)
    assert decode == pytest.approx([10] * 3, abs=TOLERANCE_MS)
    assert [row.e2e_ms.median for row in result.rows] == pytest.approx([60.5, 80, 100], abs=2 * TOLERANCE_MS)
    assert rates[2] == pytest.approx(80 / 0.060, rel=0.06)
    assert result.itl_ms is not None
    assert result.itl_ms.median == pytest.approx(10, abs=TOLERANCE_MS)
    assert result.prefill_saturation == Saturation(None, rates[2])


def test_a_profile_warms_up_and_counts_its_steps() -> None:
    with scripted(**QUICK) as url:
        result, records, steps = run(ProfilePlan((1, 40, 80), tokens=5, repeats=3), url)
    assert [(record.warmup, record.asked_completion_tokens) for record in records] == [(True, 4)] * 3 + [(False, 5)] * 9
    assert [step.split()[0] for step in steps] == [f"{done}/12" for done in range(12)]
    assert steps[0] == "0/12 warm-up, prompt of 1 tokens"
    assert result.itl_ms is not None
    assert result.itl_ms.n == 9 * 4
    assert result.http_round_trip_ms is not None
    assert result.http_round_trip_ms.n == 10


def test_lengths_are_shuffled_and_prompts_never_repeat() -> None:
    plan = ProfilePlan((3, 5, 9), tokens=2, repeats=8)
    with scripted(first_token_s=0.0, gap_s=0.0) as url:
        _, records, _ = run(plan, url)
        bodies = _bodies(url)
    order = [record.asked_prompt_tokens for record in records if not record.warmup]
    assert sorted(order) == sorted([3, 5, 9] * 8)  # type: ignore[type-var]
    assert order != sorted(order)  # type: ignore[type-var]
    firsts = [body["prompt"][0] for body in bodies[1:]]
    assert len(set(firsts)) == len(firsts) == 27


def _bodies(url: str) -> list[dict[str, Any]]:
    import aiohttp

    async def fetch() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/sent") as response:
            bodies: list[dict[str, Any]] = (await response.json())["bodies"]
            return bodies

    return asyncio.run(fetch())


def test_a_length_over_the_servers_known_limit_is_left_out() -> None:
    with scripted(**QUICK, max_model_len=64) as url:
        result, records, _ = run(ProfilePlan((8, 60, 61), tokens=4, repeats=2), url)
    assert [row.prompt_tokens for row in result.rows] == [8, 60]
    (out,) = result.left_out
    assert out.prompt_tokens == 61
    assert out.reason == "with 4 tokens of answer it exceeds the server's limit of 64 tokens"
    assert all(record.error is None for record in records)


def test_a_length_that_the_server_refuses_is_left_out() -> None:
    with scripted(**QUICK, refuses_longer_than=50) as url:
        result, _, _ = run(ProfilePlan((8, 51), tokens=4, repeats=2), url)
    assert [row.prompt_tokens for row in result.rows] == [8]
    assert "maximum context length is 50 tokens" in result.left_out[0].reason
    assert result.error is None


def test_a_length_shorter_than_the_chat_template_is_left_out() -> None:
    with scripted(**QUICK, completions=False, template=12) as url:
        result, _, _ = run(ProfilePlan((1, 12, 13), tokens=4, repeats=2), url)
    assert [row.prompt_tokens for row in result.rows] == [13]
    assert [out.prompt_tokens for out in result.left_out] == [1, 12]
    assert "12 tokens that the server itself puts" in result.left_out[0].reason


def test_no_length_that_fits_is_a_failure() -> None:
    with scripted(**QUICK, max_model_len=10) as url:
        result, _, _ = run(ProfilePlan((16, 32), tokens=4, repeats=2), url)
    assert "no prompt length can be measured" in str(result.error)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ({"stop_after": 2}, "answers ended early, the shortest after 2 of 6 tokens"),
        ({"tokens_per_chunk": 2}, "chunks are not tokens: 2.00 tokens a chunk"),
        ({"cached": 16}, "prefix cache answered in 4 of 4 requests (up to 16 of 32 prompt tokens)"),
        ({"usage": "none"}, "reports no token counts"),
    ],
)
def test_what_spoils_the_numbers_is_said(script: dict[str, Any], line: str) -> None:
    with scripted(**QUICK, **script) as url:
        result, _, _ = run(ProfilePlan((32,), tokens=6, repeats=4), url)
    assert any(line in verdict.sentence for verdict in result.verdicts), result.verdicts


def test_a_server_that_dies_leaves_what_was_measured() -> None:
    """One probe, two warm-ups, five good requests, then the process is gone."""
    with scripted(**QUICK, dies_after=8) as url:
        result, records, _ = run(ProfilePlan((4, 8), tokens=3, repeats=10), url)
    assert "failed after 5 good ones, and the server is gone: http" in str(result.error)
    assert sum(row.requests for row in result.rows) == 5
    assert len(records) == 2 + 5 + 1
    assert records[-1].error is not None


def test_a_stream_that_is_cut_ends_the_run() -> None:
    with scripted(**QUICK, cut_after=2) as url, pytest.raises(RunFailed, match="closed the connection"):
        run(ProfilePlan((4,), tokens=3, repeats=2), url)


def test_an_interrupted_run_keeps_what_was_measured() -> None:
    async def main(url: str) -> ProfileResult:
        def progress(done: int, total: int, text: str) -> None:
            if done == 6:
                task.cancel()

        plan = ProfilePlan((4, 8), tokens=3, repeats=10)
        task = asyncio.create_task(measure(url, None, Access(timeout_s=5), plan, lambda record: None, progress, "0"))
        return await task

    with scripted(**QUICK) as url:
        result = clock.run(main(url))
    assert result.error == INTERRUPTED
    assert sum(row.requests for row in result.rows) in (4, 5)


def row(length: int, rate: float) -> LengthRow:
    one = Spread(1.0, 1.0, 1.0, 1.0, 1.0, 1)
    rates = Spread(rate, rate, rate, rate, rate, 1)
    return LengthRow(length, length, 1, one, rates, one, one, one)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({1: 10, 16: 150, 128: 700, 512: 1000, 2048: 1020}, Saturation(512, 1020)),
        ({1: 10, 16: 150, 128: 990, 512: 1000, 2048: 500}, Saturation(128, 1000)),
        ({1: 10, 16: 150, 128: 500}, Saturation(None, 500)),
        ({1: 100, 16: 100}, Saturation(1, 100)),
        ({16: 100}, None),
        ({}, None),
    ],
)
def test_where_prefill_saturates(rates: dict[int, float], found: Saturation | None) -> None:
    assert saturation([row(length, rate) for length, rate in rates.items()]) == found


def test_latencies_are_pooled_and_not_averaged_by_request() -> None:
    """One request of three 10 ms gaps and one of a single 100 ms gap: the median gap is 10 ms, not 55."""

    def record(*times: float) -> Record:
        return Record(id="r", intended=0, sent=0, chunks=tuple(Chunk(t, 1, "text") for t in times))

    found = pooled_itl([record(1.0, 1.01, 1.02, 1.03), record(2.0, 2.1)])
    assert found is not None
    assert found.median == pytest.approx(10)
    assert found.worst_gap == pytest.approx(100)
    assert found.n == 4
    assert pooled_itl([record(1.0)]) is None


@pytest.mark.parametrize(("tokenize", "source", "per_chunk"), [(True, "tokenize", 3), (False, "chunks", 1)])
def test_without_usage_the_servers_tokenizer_counts(tokenize: bool, source: str, per_chunk: int) -> None:
    """Chunks of three words and no usage: /tokenize counts nine tokens in three chunks; without it one is assumed."""
    script = {**QUICK, "usage": "none", "tokens_per_chunk": 3, "has_tokenize": tokenize}
    with scripted(**script) as url:
        _, records, _ = run(ProfilePlan((8,), tokens=9, repeats=2), url)
    measured = [r for r in records if not r.warmup]
    assert [r.completion_tokens_source for r in measured] == [source] * 2
    assert [[c.tokens for c in r.token_chunks] for r in measured] == [[per_chunk] * 3] * 2
    assert [r.completion_tokens for r in measured] == [3 * per_chunk] * 2
