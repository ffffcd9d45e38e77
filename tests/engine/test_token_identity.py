"""The promise of docs/engine.md: greedy tokens are the same cold, on a cache hit, after eviction, chunked at any size,
preempted and resumed, alone and in a batch. Sampled tokens are too, being keyed by seed and position, but for draws
that fall on an edge.

``PROMISED`` are the values of ``--dtype`` for which that is promised; each is held to all of it.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from biphase.engine.build import build
from biphase.engine.engine import Engine
from biphase.engine.messages import Submit
from biphase.engine.model import Model
from biphase.engine.options import EngineOptions
from biphase.engine.sampling import sample
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.request import LogitRules, SamplingParams
from tests.engine.test_families import GOLDEN
from tests.engine.tiny import run

PROMISED = ("auto", "float32")

SHAPE = GOLDEN["cases"][0]["config"]
BLOCKS = 40
GREEDY = SamplingParams(0.0)
SAMPLED = SamplingParams(0.8, top_p=0.95, top_k=50, seed=11)
RULED = SamplingParams(0.0, rules=LogitRules(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2))

LENGTHS = (1, 15, 16, 17, 33, 48, 70)
"""Around the ends of blocks of 16: a hit leaves one row of 17, 33 and 49 tokens, sixteen of 48."""
PROMPTS = {length: tuple((length * 31 + place * place * 7) % 128 for place in range(length)) for length in LENGTHS}
OUTPUT = 24
LAST_BITS = 3e-4
"""Logits of this model, up to 3, differ by up to a quarter of that between one shape of the products and another."""


@pytest.fixture(scope="module", params=PROMISED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Built as ``biphase serve`` builds it, with a pool of BLOCKS blocks of 16."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    options = EngineOptions(
        model=str(folder), random_weights=True, dtype=request.param, threads=1, max_model_len=160, max_num_seqs=4
    )
    engine, ready = build(options)
    assert ready.num_blocks == BLOCKS
    return engine.runner.model


def engine_of(
    model: Model, num_blocks: int = BLOCKS, budget: int = 256, max_seqs: int = 4, hits: bool = True
) -> Engine:
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": max_seqs, "prefix_caching": hits}
    return Engine(model, SchedulerConfig(num_blocks, 160, 16, **limits))


def ask(engine: Engine, prompts: Iterable[tuple[int, ...]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Submit all at once; the tokens of each."""
    names = [engine.submit(Submit(str(n), prompt, OUTPUT, frozenset(), params)) for n, prompt in enumerate(prompts)]
    tokens = run(engine)
    return [tokens[str(n)] for n in range(len(names))]


@cache
def alone(model: Model, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Each in an engine of its own: nothing is cached, nothing runs beside it, the prompt is one chunk."""
    return [ask(engine_of(model), [prompt], params)[0] for prompt in PROMPTS.values()]


def agree(model: Model, found: list[list[int]], params: SamplingParams, prompts: Iterable[tuple[int, ...]]) -> bool:
    """Whether tokens are those of ``alone``, but for draws on an edge between two. Runs requests: ask before.

    Two shapes of a matrix product differ in the last bits of their sums, so an edge may lie on either side of a draw.
    """
    expected = dict(zip(PROMPTS.values(), alone(model, params), strict=True))
    for prompt, tokens in zip(prompts, found, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(tokens, expected[prompt], strict=True)) if a != b), None)
        if parted is not None and (params.temperature == 0 or not on_an_edge(model, prompt, tokens, parted, params)):
            return False
    return True


def on_an_edge(model: Model, prompt: tuple[int, ...], tokens: list[int], place: int, params: SamplingParams) -> bool:
    """Whether the draw of ``tokens[place]`` gives it for some logits within ``LAST_BITS`` of those of a prefill."""
    engine, vocab = engine_of(model), SHAPE["vocab_size"]
    every = SamplingParams(0.0, logprobs=vocab)
    engine.submit(Submit("0", prompt + tuple(tokens[:place]), 1, frozenset(), every))
    (output,) = engine.step().outputs
    logits = np.zeros(vocab, np.float32)
    for token, logprob in output.logprobs[0].top:
        logits[token] = logprob
    near = logits + np.random.default_rng(0).uniform(-LAST_BITS, LAST_BITS, (500, vocab)).astype(np.float32)
    return tokens[place] in sample(near, [params] * 500, [len(prompt) + place] * 500)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, RULED], ids=["greedy", "sampled", "penalties"])
def test_on_a_hit(model: Model, params: SamplingParams) -> None:
    alone(model, params)  # all engines of a model write to one cache: nothing else may run between cold and hit
    engine = engine_of(model)
    cold, hit = ([ask(engine, [prompt], params)[0] for prompt in PROMPTS.values()] for _ in range(2))
    assert agree(model, cold, params, PROMPTS.values())
    assert agree(model, hit, params, PROMPTS.values())
    assert engine.scheduler.counters.cache_hits >= sum((length - 1) // 16 * 16 for length in LENGTHS)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_after_eviction(model: Model, params: SamplingParams) -> None:
    for prompt in PROMPTS.values():
        engine = engine_of(model, num_blocks=8)
        cold = ask(engine, [prompt], params)
        ask(engine, [tuple(127 - token for token in PROMPTS[70]) + (5,) * 34])  # fills all eight blocks
        hits = engine.scheduler.counters.cache_hits
        evicted = ask(engine, [prompt], params)
        assert engine.scheduler.counters.cache_hits == hits
        assert agree(model, cold, params, [prompt])
        assert agree(model, evicted, params, [prompt])


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 15, 16, 17, 31, 64, 69])
def test_chunked_at_any_size(model: Model, budget: int) -> None:
    engine = engine_of(model, budget=budget, max_seqs=1, hits=False)
    assert [ask(engine, [prompt])[0] for prompt in PROMPTS.values()] == alone(model)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, RULED], ids=["greedy", "sampled", "penalties"])
def test_preempted_and_resumed(model: Model, params: SamplingParams) -> None:
    engine = engine_of(model, num_blocks=9)
    assert agree(model, ask(engine, PROMPTS.values(), params), params, PROMPTS.values())
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, RULED], ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("max_seqs", [2, 3, 4])
def test_in_a_batch(model: Model, params: SamplingParams, max_seqs: int) -> None:
    found = ask(engine_of(model, max_seqs=max_seqs), PROMPTS.values(), params)
    assert agree(model, found, params, PROMPTS.values())


def test_side_by_side_with_itself(model: Model) -> None:
    engine, prompt = engine_of(model), PROMPTS[33]
    assert ask(engine, [prompt] * 4) == [ask(engine_of(model), [prompt])[0]] * 4


@settings(max_examples=25)
@given(
    order=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=8),
    num_blocks=st.integers(8, BLOCKS),
    max_seqs=st.integers(1, 4),
    budget=st.integers(4, 100),
    hits=st.booleans(),
)
def test_all_of_it_at_once(
    model: Model, order: list[int], num_blocks: int, max_seqs: int, budget: int, hits: bool
) -> None:
    first = dict(zip(PROMPTS, alone(model), strict=True))
    engine = engine_of(model, num_blocks, budget, max_seqs, hits)
    assert ask(engine, [PROMPTS[length] for length in order]) == [first[length] for length in order]


def test_the_documentation_promises_what_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("- Token identity (`--dtype`")]
    named = line[line.index("`--dtype`") + len("`--dtype`") : line.index(")")]
    assert tuple(part.strip(" `") for part in named.split(",")) == PROMISED
