"""The server's counters beside the client's records, by hand."""

import pytest

from biphase.analysis.server_side import server_side
from biphase.client.record import Chunk, Record, ServerCounts
from biphase.client.scrape import parse_metrics
from biphase.experiments.facts import beyond, server_counts


def record(sent: float, first: float, gap: float, tokens: int, prompt: int = 10, cached: int = 0) -> Record:
    chunks = tuple(Chunk(sent + first + n * gap, 1, "text") for n in range(tokens))
    return Record(
        id="r", intended=sent, sent=sent, chunks=chunks, prompt_tokens=prompt, cached_tokens=cached,
        completion_tokens=tokens,
    )  # fmt: skip


RECORDS = [record(1.0, 0.100, 0.010, 3), record(2.0, 0.200, 0.020, 2, prompt=30, cached=4)]


def test_counts_that_agree_and_the_share_of_the_network() -> None:
    """TTFT: 100 and 200 ms, the server's 90 and 180. ITL: 10, 10 and 20 ms over three tokens, the server's 39 ms."""
    counts = ServerCounts(generation_tokens=5, prompt_tokens=40, ttft_s=(0.270, 2), itl_s=(0.039, 3))
    found = server_side(counts, RECORDS)
    assert found is not None
    assert found.agree is True
    assert (found.ttft_mean_ms, found.network_ttft_ms) == (pytest.approx(135), pytest.approx(15))
    assert (found.itl_mean_ms, found.network_itl_ms) == (pytest.approx(13), pytest.approx(1 / 3))


def test_a_server_that_leaves_cached_tokens_out() -> None:
    found = server_side(ServerCounts(generation_tokens=5, prompt_tokens=36, cached_left_out=True), RECORDS)
    assert found is not None
    assert (found.agree, found.own_prompt_tokens, found.network_itl_ms) == (True, 36, None)


def test_counts_that_differ() -> None:
    found = server_side(ServerCounts(generation_tokens=6, prompt_tokens=40), RECORDS)
    assert found is not None
    assert found.agree is False
    assert server_side(None, RECORDS) is None


BEFORE = """vllm:generation_tokens_total{engine="0"} 100
vllm:prompt_tokens_total{engine="0"} 7
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
vllm:time_to_first_token_seconds_count{engine="0"} 3
"""
AFTER = """vllm:generation_tokens_total{engine="0"} 105
vllm:prompt_tokens_total{engine="0"} 47
vllm:time_to_first_token_seconds_sum{engine="0"} 1.77
vllm:time_to_first_token_seconds_count{engine="0"} 5
"""


def test_what_counters_gain_between_two_scrapes() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    counts = server_counts(before, after)
    assert counts is not None
    assert (counts.generation_tokens, counts.prompt_tokens, counts.cached_left_out) == (5, 40, False)
    assert counts.ttft_s == (pytest.approx(0.27), 2)
    assert counts.itl_s is None
    assert beyond(before, after, RECORDS) == 0
    assert server_counts(after, before) is None  # the server began anew
    assert server_counts(None, after) is None


def test_llama_cpp_counts_prompts_without_what_its_cache_held() -> None:
    before = parse_metrics("llamacpp:prompt_tokens_total 1\nllamacpp:tokens_predicted_total 2\n")
    after = parse_metrics("llamacpp:prompt_tokens_total 37\nllamacpp:tokens_predicted_total 7\n")
    counts = server_counts(before, after)
    assert counts == ServerCounts(generation_tokens=5, prompt_tokens=36, cached_left_out=True)
