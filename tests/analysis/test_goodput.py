"""Rates, outcomes and latencies in the steady window, on records whose figures are counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.analysis.goodput import (
    UNFINISHED,
    UNSENT,
    Window,
    bucket,
    buckets,
    due_in,
    measured,
    percentiles,
    uncached_rows,
    wilson,
)
from biphase.analysis.slo import Slo
from tests.analysis.load_records import failure, record

WINDOW = Window(10.0, 20.0)


def test_each_request_that_was_due_is_counted_once() -> None:
    records = [
        record("before", 9.99),
        record("first", 10.0),
        record("slow", 15.0, first=30.0),  # ends after the window: waited for, and measured
        record("after", 20.0),
        failure("refused", 11.0, "HTTP 429", 429, 11.1),
        failure("busy", 11.5, "HTTP 503", 503, 11.6),
        failure("broken", 12.0, "HTTP 500", 500, 12.1),
        failure("cut", 13.0, "the stream was cut", 200, 13.1),
        failure("running", 14.0, UNFINISHED),
        failure("never", 14.5, UNSENT),
    ]
    found = measured(records, WINDOW, True, None, 9.0)
    o = found.outcomes
    assert (o.due, o.completed, o.turned_away, o.failed, o.unfinished) == (8, 2, 2, 2, 2)
    assert found.errors == {"HTTP 500": 1, "the stream was cut": 1}
    assert found.before_s == 1.0
    assert found.ttft_ms is not None
    assert found.ttft_ms.n == 2
    assert found.ttft_ms.max == pytest.approx(30_000)


def test_goodput_is_what_was_due_in_the_window_and_kept_the_slo() -> None:
    """Ten requests a second apart with TTFT 100, 200 ... 1000 ms, one more that failed; limit 450 ms: four keep it."""
    records = [record(str(i), 10.0 + i, first=0.1 * (i + 1), gap=0.01) for i in range(10)]
    found = measured([*records, failure("f", 12.5, "broken", 500)], WINDOW, True, Slo(ttft_ms=450, itl_ms=20), 0.0)
    assert found.attainment is not None
    assert found.attainment.good == 4
    assert found.attainment.all == pytest.approx(4 / 11)
    assert found.attainment.by_limit == {"ttft": pytest.approx(4 / 11), "itl": pytest.approx(10 / 11)}
    assert found.flow.goodput == pytest.approx(0.4)
    assert found.flow.asked == pytest.approx(1.1)


def test_rates_count_what_happens_in_the_window_whenever_it_was_due() -> None:
    """One request began before the window, one runs beyond it: 3 and 2 of their 5 tokens lie inside."""
    early = record("early", 9.0, first=0.975, gap=0.01, tokens=5, prompt=50)  # tokens at 9.975 ... 10.015
    late = record("late", 19.0, first=0.985, gap=0.01, tokens=5, prompt=70, cached=30)  # 19.985 ... 20.025
    found = measured([early, late], WINDOW, False, None, 0.0)
    assert found.flow.output_tokens == pytest.approx((2 + 2) / 10)
    assert found.flow.completed == pytest.approx(1 / 10)  # early ended inside, late did not
    assert found.flow.input_tokens == pytest.approx(7.0)  # with the first token, which early got before
    assert found.flow.cached_tokens == pytest.approx(3.0)
    assert found.flow.sent == pytest.approx(0.1)
    assert found.flow.asked is None


def test_little_s_law_holds_of_what_is_in_flight() -> None:
    """Every second a request of 2.5 s: 2.5 in flight, 3 or 2 at any moment."""
    records = [record(str(i), float(i), first=2.4, gap=0.1, tokens=2) for i in range(40)]
    found = measured(records, Window(10.05, 20.05), True, None, 0.0)
    assert found.occupancy.mean == pytest.approx(2.5)
    assert found.occupancy.at_start == 3
    assert found.occupancy.at_end == 3


def test_itl_pools_raw_gaps() -> None:
    """Nine requests of 4 gaps of 10 ms, one of 4 gaps of 110 ms: the mean of gaps is 20 ms, the 99th percentile 110."""
    records = [record(str(i), 10.0 + 0.1 * i, gap=0.01) for i in range(9)] + [record("slow", 11.0, gap=0.11)]
    found = measured(records, WINDOW, True, None, 0.0)
    assert found.itl_ms is not None
    assert found.itl_ms.n == 40
    assert found.itl_ms.mean == pytest.approx(20.0)
    assert found.itl_ms.p99 == pytest.approx(110.0)
    assert found.gaps is not None
    assert sum(count for _, _, count in found.gaps.histogram) == 40


def test_lag_is_between_the_due_moment_and_the_sending() -> None:
    found = measured([record("a", 11.0, late=0.25), failure("never", 12.0, UNSENT)], WINDOW, True, None, 0.0)
    assert found.lag_ms is not None
    assert (found.lag_ms.median, found.lag_ms.n) == (pytest.approx(250.0), 1)


@pytest.mark.parametrize(("tokens", "edge"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (512, 512), (513, 1024)])
def test_buckets_end_at_powers_of_two(tokens: int, edge: int) -> None:
    assert bucket(tokens) == edge


@given(st.integers(1, 10**7))
def test_every_length_lies_in_its_bucket(tokens: int) -> None:
    assert bucket(tokens) // 2 < tokens <= bucket(tokens)


def test_a_cached_prompt_counts_as_the_rest_of_it() -> None:
    """1,000 tokens of which 900 are cached wait as long as 100 do: both lie in the bucket of 65 to 128."""
    records = [
        record("cached", 11.0, prompt=1000, cached=900, first=0.1),
        record("short", 12.0, prompt=100, first=0.2),
        record("long", 13.0, prompt=1000, cached=0, first=0.9),
        failure("f", 14.0, "broken"),
    ]
    due = due_in(records, WINDOW)
    assert [(b.above, b.up_to, b.ttft_ms.n, b.mean_uncached_tokens) for b in buckets(due)] == [
        (64, 128, 2, 100.0),
        (512, 1024, 1, 1000.0),
    ]
    assert buckets(due)[0].ttft_ms.median == pytest.approx(150.0)
    assert [(row.prompt_tokens, row.requests) for row in uncached_rows(due)] == [(128, 2), (1024, 1)]
    assert uncached_rows(due)[1].ttft_ms.median == pytest.approx(900.0)


def test_percentiles_are_numpy_s() -> None:
    found = percentiles([0.001 * i for i in range(1, 101)])
    assert found is not None
    assert (found.median, found.p90, found.p95, found.p99) == tuple(
        pytest.approx(v) for v in (50.5, 90.1, 95.05, 99.01)
    )
    assert (found.mean, found.max, found.n) == (pytest.approx(50.5), pytest.approx(100.0), 100)
    assert percentiles([None]) is None


def test_wilson_s_interval() -> None:
    """Values of the interval's table: 8 of 10 is 0.490 to 0.943, 0 of 10 is 0 to 0.278 (Wilson 1927, z = 1.96)."""
    assert wilson(8, 10) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))
    assert wilson(0, 10) == (0.0, pytest.approx(0.278, abs=1e-3))
    assert wilson(10, 10)[1] == 1.0
