"""Sampling keeps what top_k and top_p say, follows the distribution, and is keyed by seed and position."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.special import softmax
from scipy.stats import chisquare

from biphase.engine.sampling import sample, uniform
from biphase.scheduling.request import SamplingParams


def kept_by_hand(probabilities: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The usual definition by a full sort: the first k, then the smallest head of those with top_p of their mass."""
    order = np.argsort(-probabilities, kind="stable")[: top_k or None]
    mass = np.cumsum(probabilities[order]) / probabilities[order].sum()
    return set(order[: int(np.searchsorted(mass, top_p)) + 1].tolist())


def draws(logits: np.ndarray, params: SamplingParams, count: int) -> list[int]:
    rows = np.broadcast_to(logits, (count, len(logits)))
    return [t for t in sample(rows, [params] * count, range(count)) if t is not None]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 12), st.floats(0.05, 1.0))
def test_only_kept_tokens_are_drawn(seed: int, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).standard_normal(50, np.float32) * 2
    params = SamplingParams(0.7, top_p, top_k, seed)
    probabilities = softmax(logits.astype(np.float64) / 0.7)
    # a token whose mass boundary falls within float32 rounding of top_p may be kept or not
    allowed = kept_by_hand(probabilities, top_k, min(top_p + 1e-5, 1.0))
    assert set(draws(logits, params, 200)) <= allowed


def test_top_p_beyond_the_first_candidates_is_exact() -> None:
    logits = np.zeros(2000, dtype=np.float32)  # uniform: top_p 0.5 keeps 1000 tokens, more than are looked at first
    drawn = draws(logits, SamplingParams(1.0, 0.5, 0, 1), 4000)
    assert 900 < len(set(drawn)) <= 1001  # 4000 draws miss one of 1000 with probability e**-4


def test_draws_follow_the_softmax() -> None:
    logits = np.array([2, 1, 0, -1, -2], dtype=np.float32)
    drawn = draws(logits, SamplingParams(1.5, 1.0, 0, 7), 20_000)
    expected = softmax(logits.astype(np.float64) / 1.5) * 20_000
    assert chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 1e-3  # fixed seed: passes always or never


def test_uniform_is_keyed_by_both() -> None:
    values = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(values) == 400
    assert all(0 <= value < 1 for value in values)
    assert uniform(2**64 + 3, 5) == uniform(3, 5)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4])  # the last divides logits to 1e4, far beyond exp
def test_low_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([[1, 3, 2]], dtype=np.float32)
    assert sample(logits, [SamplingParams(temperature)], [0]) == [1]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = np.random.default_rng(0).standard_normal(30, np.float32)
    assert set(draws(logits, SamplingParams(5.0, 1.0, 1, 3), 50)) == {int(logits.argmax())}


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_gives_none_and_the_others_their_token(broken: float) -> None:
    logits = np.array([[0, 1], [broken, 0], [1, 0]], dtype=np.float32)
    assert sample(logits, [SamplingParams(0)] * 3, [0, 0, 0]) == [1, None, 0]


def test_a_row_without_any_allowed_token_is_broken() -> None:
    assert sample(np.full((1, 4), -np.inf, dtype=np.float32), [SamplingParams(0)], [0]) == [None]
