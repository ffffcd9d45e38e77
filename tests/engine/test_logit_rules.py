"""Penalties, biases and bans by hand; log-probabilities; and all of them through preemption."""

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.special import softmax

from biphase.engine.logit_rules import apply_rules
from biphase.engine.messages import Submit
from biphase.engine.sampling import NOT_FINITE, choose
from biphase.scheduling.request import LogitRules, Request, SamplingParams, TokenLogprobs
from tests.engine.tiny import tiny_engine


def request(rules: LogitRules | None = None, output: tuple[int, ...] = (), **fields: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "rules": rules, **fields})
    return Request("r", (0,), 10, frozenset({3}), sampling, output=list(output))


def changed(rules: LogitRules, logits: list[float], output: tuple[int, ...] = ()) -> list[float]:
    row = np.array(logits, dtype=np.float32)
    apply_rules(row, request(rules, output), rules, None)
    return row.tolist()


def test_repetition_divides_above_zero_and_multiplies_below_once_a_token_in_prompt_and_output() -> None:
    rules = LogitRules(repetition_penalty=2.0)
    assert changed(rules, [2.0, -2.0, 1.0, 4.0], output=(1, 1)) == [1.0, -4.0, 1.0, 4.0]


def test_presence_counts_a_token_once_and_frequency_each_time_in_the_output_alone() -> None:
    rules = LogitRules(presence_penalty=0.25, frequency_penalty=0.5)
    assert changed(rules, [1.0, 1.0, 1.0, 1.0], output=(1, 1, 2)) == [1.0, -0.25, 0.25, 1.0]
    assert changed(rules, [1.0, 1.0, 1.0, 1.0]) == [1.0] * 4


def test_negative_penalties_favour_what_came() -> None:
    assert changed(LogitRules(frequency_penalty=-1.0), [0.0] * 4, output=(2, 2)) == [0, 0, 2, 0]


def test_a_bias_is_added_before_the_penalties() -> None:
    rules = LogitRules(logit_bias=((0, 3.0), (1, -100.0)), repetition_penalty=2.0)
    assert changed(rules, [1.0, 1.0, 1.0, 1.0]) == [2.0, -99.0, 1.0, 1.0]


@pytest.mark.parametrize(("output", "chosen"), [((), 1), ((1,), 1), ((1, 1), 3), ((1, 1, 1), 3)])
def test_min_tokens_bans_stop_ids_until_so_many_tokens_came(output: tuple[int, ...], chosen: int) -> None:
    (choice,) = choose(np.array([[0, 2, 1, 5]], dtype=np.float32), [request(LogitRules(min_tokens=2), output)])
    assert choice.token == chosen


def test_a_ban_does_not_hide_a_broken_row() -> None:
    logits = np.array([[0, 1, 2, np.nan], [0, 1, 2, 9]], dtype=np.float32)
    broken, other = choose(logits, [request(LogitRules(min_tokens=2)), request(LogitRules(min_tokens=2))])
    assert (broken.token, broken.error) == (None, NOT_FINITE)
    assert other.token == 2


def test_rules_of_one_row_leave_the_others_and_the_logits_alone() -> None:
    logits = np.array([[0, 1, 2, 3]] * 2, dtype=np.float32)
    before = logits.copy()
    choices = choose(logits, [request(LogitRules(logit_bias=((0, 50.0),))), request()])
    assert [choice.token for choice in choices] == [0, 3]
    assert np.array_equal(logits, before)


def test_logprobs_are_the_model_s_own_before_rules_and_temperature() -> None:
    logits = np.log([[0.5, 0.25, 0.125, 0.125]]).astype(np.float32)
    rules = LogitRules(logit_bias=((0, -100.0),))
    (choice,) = choose(logits, [request(rules, logprobs=2)])
    assert choice.token == 1
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [token for token, _ in choice.logprobs.top] == [0, 1]
    assert [value for _, value in choice.logprobs.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_logprobs_of_zero_likeliest_are_of_the_chosen_token_alone() -> None:
    (choice,) = choose(np.zeros((1, 4), dtype=np.float32), [request(logprobs=0)])
    assert choice.logprobs is not None
    assert (choice.logprobs.top, choice.logprobs.logprob) == ((), pytest.approx(-math.log(4)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 1.0), st.floats(0.3, 3.0))
def test_min_p_keeps_those_of_its_share_of_the_likeliest(seed: int, min_p: float, temperature: float) -> None:
    logits = np.random.default_rng(seed).standard_normal(40, np.float32) * 2
    probabilities = softmax(logits.astype(np.float64) / temperature)
    # float32 rounding may keep or drop what lies on the boundary itself
    allowed = set(np.flatnonzero(probabilities >= (min_p - 1e-5) * probabilities.max()).tolist())
    requests = [request(temperature=temperature, min_p=min_p, seed=draw) for draw in range(100)]
    assert {choice.token for choice in choose(np.broadcast_to(logits, (100, 40)), requests)} <= allowed


PROMPTS = {f"r{n}": tuple((n * 31 + i * 7) % 97 for i in range(3 + 11 * n)) for n in range(6)}


def run_all(num_blocks: int, budget: int, names: tuple[str, ...] = tuple(PROMPTS)) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of each request under penalties, a bias and min_tokens."""
    rules = LogitRules(1.3, 0.4, 0.2, ((5, 2.0),), min_tokens=30)
    engine = tiny_engine(num_blocks, budget)
    for name in names:
        params = SamplingParams(0.8, seed=7, min_p=0.01, logprobs=3, rules=rules)
        engine.submit(Submit(name, PROMPTS[name], 40, frozenset({1, 2, 3}), params))
    found: dict[str, list[Any]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            found.setdefault(output.id, []).extend(zip(output.tokens, output.logprobs, strict=True))
    if num_blocks < 10:
        assert engine.scheduler.counters.preemptions > 0
    return found


def test_a_preempted_request_keeps_its_penalties_logprobs_and_seed() -> None:
    preempted = run_all(num_blocks=9, budget=16)
    for name in PROMPTS:
        alone = run_all(num_blocks=40, budget=256, names=(name,))[name]
        assert [token for token, _ in preempted[name]] == [token for token, _ in alone]
        assert not {1, 2, 3} & {token for token, _ in alone[:30]}
        for (_, one), (_, other) in zip(preempted[name], alone, strict=True):
            assert isinstance(one, TokenLogprobs)
            # another batch may sum in another order: float32 rounding of logits of size 10
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
