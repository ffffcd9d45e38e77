"""Prices of tokens from phase time, worked out by hand."""

from dataclasses import replace

import pytest

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.price import PhaseTime, modelled, phase_time, price
from biphase.client.scrape import Scrape, parse_metrics
from tests.analysis.load_records import record


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


PREFILL = PrefillLaw(
    a_ms=exactly(20.0),
    b_ms_per_token=exactly(0.1),
    c_ms_per_token2=exactly(1e-5),
    http_ms=3.0,
    crossover_tokens=None,
    staircase=None,
    samples=15,
    lengths=5,
    longest_tokens=1000,
    rms_percent=1.0,
    residuals=(),
)
DECODE = DecodeLaw(
    t0_ms=exactly(8.0),
    w_ms_per_sequence=exactly(0.5),
    k_ms_per_token=exactly(0.001),
    batches=(1, 2),
    samples=10,
    shortest_context=100.0,
    longest_context=1000.0,
    rms_percent=1.0,
    residuals=(),
)


def test_the_bill_is_split_as_the_time_was() -> None:
    """3.6 an hour are 0.001 a second; 100 s, 10 of prefill and 30 of decode; 1,000 tokens in, 50 out."""
    records = [record(str(i), float(i), prompt=100, tokens=5) for i in range(10)]
    found = price(3.6, PhaseTime(10.0, 30.0, "measured", ""), records, 100.0)
    assert found is not None
    assert (found.input_tokens, found.output_tokens) == (1000, 50)
    assert found.prefill_share == pytest.approx(0.25)
    assert found.busy == pytest.approx(0.4)
    assert found.input_per_million == pytest.approx(0.1 * 0.25 / 1000 * 1e6)
    assert found.output_per_million == pytest.approx(0.1 * 0.75 / 50 * 1e6)
    assert found.input_at_full_use == pytest.approx(0.01 / 1000 * 1e6)
    assert found.output_at_full_use == pytest.approx(0.03 / 50 * 1e6)
    assert found.output_to_input == pytest.approx(60.0)
    bill = found.input_per_million * found.input_tokens + found.output_per_million * found.output_tokens
    assert bill == pytest.approx(0.1 * 1e6)


def test_no_price_without_time_of_both_phases() -> None:
    assert price(1.0, PhaseTime(0.0, 1.0, "measured", ""), [record()], 1.0) is None
    assert price(1.0, PhaseTime(1.0, 0.0, "measured", ""), [record()], 1.0) is None
    assert price(1.0, PhaseTime(1.0, 1.0, "measured", ""), [], 1.0) is None


def test_prefill_is_modelled_for_each_prompt_without_http_and_without_what_is_cached() -> None:
    """20 + 0.1 S + 1e-5 S^2: 31 ms for 100... 20 + 10 + 0.1 = 30.1; for 600 uncached 20 + 60 + 3.6 = 83.6."""
    records = [record("a", 0.0, prompt=100), record("b", 5.0, prompt=1000, cached=400)]
    assert modelled(records, PREFILL, DECODE).prefill_s == pytest.approx((30.1 + 83.6) / 1e3)


def test_decode_alone_is_the_law_of_one_stream() -> None:
    """Five tokens after a prompt of 100: four steps at contexts 101 to 104, each 8 + 0.5 + 0.001 context."""
    expected = sum(8.5 + 0.001 * context for context in (101, 102, 103, 104))
    assert modelled([record(prompt=100, tokens=5)], PREFILL, DECODE).decode_s == pytest.approx(expected / 1e3)


def test_streams_that_decode_together_share_the_step() -> None:
    """Two alike streams at the same time: each step costs 8 + 2 x 0.5 + both contexts, once."""
    records = [record("a", 0.0, prompt=100, tokens=5), record("b", 0.0, prompt=100, tokens=5)]
    expected = sum(9.0 + 0.002 * context for context in (101, 102, 103, 104))
    found = modelled(records, PREFILL, DECODE)
    assert found.decode_s == pytest.approx(expected / 1e3)
    assert found.source == "modelled"


def scraped(text: str, at: float) -> Scrape:
    return replace(parse_metrics(text), at=at)


BIPHASE = """biphase:engine_seconds_total{{phase="prefill"}} {0}
biphase:engine_seconds_total{{phase="decode"}} {1}
vllm:generation_tokens_total {2}
"""


def test_engine_seconds_are_the_gain_between_two_scrapes() -> None:
    found = phase_time(scraped(BIPHASE.format(1.0, 2.0, 5), 0.0), scraped(BIPHASE.format(4.0, 2.5, 9), 60.0))
    assert found is not None
    assert (found.prefill_s, found.decode_s, found.source) == (3.0, 0.5, "measured")


def test_a_restart_in_between_leaves_no_engine_seconds() -> None:
    assert phase_time(scraped(BIPHASE.format(4.0, 2.5, 9), 0.0), scraped(BIPHASE.format(1.0, 2.0, 5), 60.0)) is None


@pytest.mark.parametrize(
    "text",
    [
        "vllm:generation_tokens_total 5\nvllm:prompt_tokens_total 7\n",
        "llamacpp:prompt_seconds_total 3\nllamacpp:prompt_tokens_total 9\nllamacpp:prompt_tokens_cached_total 0\n",
        "something_else 1\n",
    ],
)
def test_a_server_that_tells_one_phase_or_none_has_no_phase_time(text: str) -> None:
    assert phase_time(scraped(text, 0.0), scraped(text, 60.0)) is None
