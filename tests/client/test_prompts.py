"""Prompts of an exact length that no prefix cache can answer."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.client.prompts import ORDINARY_IDS, WORDS, PromptMaker, calibrate, one_token_words


@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 2**32))
@settings(deadline=None)
def test_lengths_are_exact(length: int, overhead: int, seed: int) -> None:
    maker = PromptMaker(ORDINARY_IDS, overhead, rng=random.Random(seed))
    if length <= overhead:
        with pytest.raises(ValueError, match=f"shortest prompt is {overhead + 1} tokens"):
            maker.make(length)
        return
    prompt = maker.make(length)
    assert len(prompt.content) == length - overhead
    assert prompt.tokens == length
    assert set(prompt.content) <= set(ORDINARY_IDS)


def test_no_two_prompts_of_a_run_begin_alike() -> None:
    maker = PromptMaker(ORDINARY_IDS)
    firsts = [maker.make(16).content[0] for _ in range(len(ORDINARY_IDS))]
    assert len(set(firsts)) == len(firsts)


def test_two_runs_differ() -> None:
    assert PromptMaker(ORDINARY_IDS).make(32) != PromptMaker(ORDINARY_IDS).make(32)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 200


def tokenizer(costs: dict[str, int], overhead: int, default: int = 1) -> Callable[[list[str]], Awaitable[int]]:
    async def count(words: list[str]) -> int:
        return overhead + sum(costs.get(word, default) for word in words)

    return count


@given(st.sets(st.sampled_from(WORDS), max_size=60), st.integers(0, 30))
@settings(deadline=None)
def test_calibration_finds_the_overhead_and_leaves_out_words_of_two_tokens(long: set[str], overhead: int) -> None:
    long -= {"time"}  # the word that the overhead is found with
    maker = asyncio.run(calibrate(tokenizer(dict.fromkeys(long, 2), overhead)))
    prompt = maker.make(100 + overhead)
    words = str(prompt.content).split()
    assert maker.shortest == overhead + 1
    assert len(words) == 100
    assert not long & set(words)


def test_a_good_vocabulary_costs_three_questions() -> None:
    asked = []
    good = tokenizer({}, 7)

    async def count(words: list[str]) -> int:
        asked.append(len(words))
        return await good(words)

    asyncio.run(calibrate(count))
    assert asked == [1, 2, len(WORDS)]


def test_a_vocabulary_without_words_gives_lengths_by_proportion() -> None:
    maker = asyncio.run(calibrate(tokenizer({}, 2, default=5)))
    prompt = maker.make(102)
    assert len(str(prompt.content).split()) == 20
    assert prompt.tokens == 102


def test_one_token_words_of_a_single_bad_word() -> None:
    assert asyncio.run(one_token_words(tokenizer({"time": 2}, 0), ["time"], 0)) == []
