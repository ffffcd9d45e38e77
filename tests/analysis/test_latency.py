"""Latencies of records whose numbers were worked out by hand."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.analysis.latency import (
    chunk_gaps,
    decode_rate,
    e2e,
    itl,
    percentile,
    prefill_rate,
    prefilled_tokens,
    spread,
    tpot,
    ttft,
)
from biphase.client.record import Chunk, Record


def record(*chunks: tuple[float, int], **more: object) -> Record:
    return Record(id="r", intended=9.0, sent=10.0, chunks=tuple(Chunk(t, n, "text") for t, n in chunks), **more)  # type: ignore[arg-type]


# Sent at 10 s; a role chunk at 10.1; tokens at 10.5, 10.6, 10.7 and after a stall at 11.1; usage at 11.2.
PLAIN = record((10.1, 0), (10.5, 1), (10.6, 1), (10.7, 1), (11.1, 1), (11.2, 0), prompt_tokens=100)
# Chunks of 4, 2 and 4 tokens at 10.5, 10.7 and 10.9.
BUNDLED = record((10.5, 4), (10.7, 2), (10.9, 4), prompt_tokens=100, cached_tokens=60)
SINGLE = record((10.5, 5), prompt_tokens=100)
EMPTY = record((10.1, 0))


def test_first_token_and_end_skip_what_carries_no_token() -> None:
    assert ttft(PLAIN) == pytest.approx(0.5)
    assert e2e(PLAIN) == pytest.approx(1.1)
    assert ttft(EMPTY) is None
    assert e2e(EMPTY) is None


def test_every_gap_is_kept_and_the_first_wait_is_none_of_them() -> None:
    assert chunk_gaps(PLAIN) == pytest.approx([0.1, 0.1, 0.4])
    assert itl(PLAIN) == pytest.approx([0.1, 0.1, 0.4])


def test_a_gap_before_several_tokens_is_divided() -> None:
    assert chunk_gaps(BUNDLED) == pytest.approx([0.2, 0.2])
    assert itl(BUNDLED) == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.05, 0.05])


def test_decode_counts_the_tokens_after_the_first_chunk() -> None:
    assert tpot(PLAIN) == pytest.approx(0.2)
    assert tpot(BUNDLED) == pytest.approx(0.4 / 6)
    assert decode_rate(BUNDLED) == pytest.approx(15.0)
    assert tpot(SINGLE) is None
    assert decode_rate(SINGLE) is None


def test_prefill_counts_what_was_computed() -> None:
    assert prefill_rate(PLAIN) == pytest.approx(200.0)
    assert prefilled_tokens(BUNDLED) == 40
    assert prefill_rate(BUNDLED) == pytest.approx(80.0)
    assert prefill_rate(record((10.5, 1))) is None


def test_tpot_is_that_of_vllm_bench() -> None:
    """vllm bench serve: (latency - ttft) / (output_len - 1), where each chunk is one token."""
    latency, first, tokens = 1.1, 0.5, 4
    assert tpot(PLAIN) == pytest.approx((latency - first) / (tokens - 1))


def test_spread_of_five() -> None:
    found = spread([0.005, 0.001, None, 0.002, 0.003, 0.004], 1e3)
    assert found is not None
    assert (found.median, found.p25, found.p75, found.min, found.max, found.n) == pytest.approx((3, 2, 4, 1, 5, 5))
    assert found.half_iqr == pytest.approx(1.0)
    assert found.relative == pytest.approx(1 / 3)


def test_spread_of_nothing() -> None:
    assert spread([]) is None
    assert spread([None]) is None


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=50))
@settings(deadline=None)
def test_quartiles_are_those_of_the_standard_library(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    assert [found.p25, found.median, found.p75] == pytest.approx(quartiles, rel=1e-9)


def test_percentile_interpolates() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == pytest.approx(2.5)
    assert percentile(list(range(101)), 99) == pytest.approx(99)
