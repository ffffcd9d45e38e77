"""The largest chunk that keeps an ITL: by formula, by hand and by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.chunk_advice import Passes, advise
from biphase.analysis.laws import PrefillLaw, Staircase


def law(a: float, b: float, c: float, staircase: Staircase | None = None) -> PrefillLaw:
    return PrefillLaw(
        a_ms=Estimate(a, a, a),
        b_ms_per_token=Estimate(b, 0.9 * b, 1.1 * b),
        c_ms_per_token2=Estimate(c, c, c),
        http_ms=1.0,
        crossover_tokens=None,
        staircase=staircase,
        samples=10,
        lengths=5,
        longest_tokens=8000,
        rms_percent=1.0,
        residuals=(),
    )


def test_without_attention_it_is_a_division() -> None:
    """(50 - 10) ms / 0.1 ms a token = 400 tokens; 20 passes of 10 ms and 800 ms of work and 1 ms of HTTP."""
    found = advise(law(8.0, 0.1, 0.0), 10.0, 8000, 50.0, 512)
    assert found.chunk_tokens is not None
    assert found.chunk_tokens.value == 400
    assert found.chunk_tokens.low == pytest.approx(40 / 0.11, abs=1)
    assert found.chunk_tokens.high == pytest.approx(40 / 0.09, abs=1)
    assert found.ttft_ms == pytest.approx(20 * 10 + 800 + 1)
    assert found.ttft_alone_ms == pytest.approx(1 + 8 + 800)
    assert found.worst_gap_ms == pytest.approx(10 + 51.2)


def test_a_pass_costs_at_least_what_the_law_says_it_does() -> None:
    """Prefill passes of 30 ms beside decode steps of 10 leave 20 ms of 50: 200 tokens; a staircase says it better."""
    assert advise(law(30.0, 0.1, 0.0), 10.0, 8000, 50.0, None).chunk_tokens == Estimate(200, 181, 222)
    stairs = law(30.0, 0.1, 0.0, Staircase(512, Estimate(15.0, 10.0, 20.0)))
    found = advise(stairs, 10.0, 8000, 50.0, None)
    assert found.pass_floor_ms == 15.0
    assert found.chunk_tokens is not None
    assert found.chunk_tokens.value == 350
    assert found.worst_gap_ms is None


def test_nothing_keeps_what_decoding_alone_does_not() -> None:
    found = advise(law(8.0, 0.1, 0.0), 10.0, 8000, 9.0, 8000)
    assert found.chunk_tokens is None
    assert found.ttft_ms is None
    assert found.worst_gap_ms == pytest.approx(10 + 800)


def with_noise(b: float, low: float, high: float) -> PrefillLaw:
    return replace(law(8.0, b, 0.0), b_ms_per_token=Estimate(b, low, high))


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.09, 0.11, True),  # 364 to 444 tokens
        (0.05, 0.2, True),  # 200 to 800
        (0.0, 0.11, False),  # up to the whole prompt
        (0.02, 0.2, False),  # 200 to 2000
        (0.02, 100.0, False),  # from none on
    ],
)
def test_a_chunk_of_which_the_law_says_nothing_is_not_found(low: float, high: float, found: bool) -> None:
    """40 ms are left for the tokens of a chunk: at 0.1 ms each, 400 of them."""
    advice = advise(with_noise(0.1, low, high), 10.0, 8000, 50.0, None)
    assert advice.chunk_tokens is not None
    assert advice.chunk_tokens.value == 400
    assert advice.found is found


@given(
    b=st.floats(0.001, 1.0),
    c=st.floats(0.0, 1e-3),
    prompt=st.integers(1, 2000),
    wanted=st.floats(11.0, 500.0),
)
def test_one_token_more_breaks_the_wish(b: float, c: float, prompt: int, wanted: float) -> None:
    """By brute force: the pass with n tokens at the prompt's end, priced token by token."""
    passes = Passes(law(5.0, b, c), 10.0, prompt)
    chunk = passes.largest_chunk(wanted)

    def by_hand(n: int) -> float:
        return 10.0 + sum(b + c * (2 * position + 1) for position in range(prompt - n, prompt))

    best = int(chunk.value) if chunk else 0
    assert best == 0 or by_hand(best) <= wanted * (1 + 1e-9)
    assert best == prompt or by_hand(best + 1) >= wanted * (1 - 1e-9)
