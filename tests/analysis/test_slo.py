"""Service-level objectives: how they are written, and which requests keep them."""

import pytest

from biphase.analysis.slo import Slo, good, keeps, own_itl, parse_slo
from biphase.client.record import Chunk
from biphase.errors import BadInput
from tests.analysis.load_records import failure, record


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms,itl=50ms", Slo(ttft_ms=500, itl_ms=50)),
        ("TTFT<=0.5s, tpot: 40ms", Slo(ttft_ms=500, tpot_ms=40)),
        ("e2e=10s", Slo(e2e_ms=10_000)),
        ("itl=900us", Slo(itl_ms=0.9)),
        ("ttft=.5s", Slo(ttft_ms=500)),
    ],
)
def test_limits_as_they_are_written(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=500", "ttft=-5ms", "ttft=0ms", "latency=5ms", "ttft=5ms,ttft=6ms", "ttft=5ms,", "ttft=nanms"],
)
def test_what_is_no_limit_is_one_line(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_slo(text)
    assert "ttft=500ms,itl=50ms" in str(caught.value)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(BadInput, match="--slo-share"):
        parse_slo("ttft=1s", share)


def test_ttft_and_e2e_count_from_the_moment_a_request_was_due() -> None:
    """First token 100 ms after sending, sent 50 ms late; five tokens, 10 ms apart."""
    late = record(first=0.1, gap=0.01, tokens=5, late=0.05)
    assert not keeps(late, "ttft", 149)
    assert keeps(late, "ttft", 151)
    assert not keeps(late, "e2e", 189)
    assert keeps(late, "e2e", 191)


def test_a_stall_breaks_itl_and_not_tpot() -> None:
    """Ten gaps of 10 ms and one of 200: mean 27.3 ms, 99th percentile 181 ms by linear interpolation."""
    times = [0.1 + 0.01 * i for i in range(11)] + [0.4]
    stalled = record(chunks=tuple(Chunk(t, 1, "text") for t in times))
    assert own_itl(stalled) == pytest.approx(0.01 + 0.9 * 0.19, abs=1e-9)
    assert keeps(stalled, "tpot", 28)
    assert not keeps(stalled, "tpot", 27)
    assert keeps(stalled, "itl", 182)
    assert not keeps(stalled, "itl", 180)


def test_one_token_has_no_gap_to_break_a_limit() -> None:
    assert keeps(record(tokens=1), "itl", 0.001)
    assert keeps(record(tokens=1), "tpot", 0.001)
    assert not keeps(record(tokens=1), "ttft", 0.001)


def test_a_failed_request_keeps_nothing() -> None:
    assert not keeps(failure("f", 0.0, "broken"), "itl", 1e9)
    assert not good(failure("f", 0.0, "broken"), Slo(ttft_ms=1e9))


def test_a_good_request_keeps_all_limits() -> None:
    assert good(record(first=0.1, gap=0.01), Slo(ttft_ms=101, itl_ms=11, tpot_ms=11, e2e_ms=141))
    assert not good(record(first=0.1, gap=0.01), Slo(ttft_ms=101, itl_ms=9))
    assert not good(record(first=0.1, gap=0.01), Slo(ttft_ms=99, itl_ms=11))


def test_an_slo_says_itself() -> None:
    assert str(Slo(ttft_ms=500, itl_ms=50)) == "ttft <= 500 ms and itl <= 50 ms for 95 % of the requests"
