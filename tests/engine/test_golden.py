"""SmolLM2-135M against the reference implementation in float32 from the same file (tests/data/smollm2_greedy.json)."""

import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from biphase.engine.build import build
from biphase.engine.engine import Engine
from biphase.engine.model import Model
from biphase.engine.options import EngineOptions
from biphase.engine.rows import PrefillChunk, Rows, TwoPhaseModel
from tests.engine.tiny import prefill, run, submit

pytestmark = pytest.mark.timeout(300)  # through torch, on cores that others may use

CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())["cases"]
BFLOAT16_MARGIN = 0.25
"""bfloat16 keeps 8 bits: a logit near 20 is rounded to steps of 0.125, and the layers before it add as much again. A
token is held to the reference where the reference's best two logits lie further apart than two such steps."""


@cache
def build_engine(dtype: str) -> Engine:
    return build(EngineOptions(model="smollm2-135m", dtype=dtype, kv_cache_gb=0.3))[0]


def test_float32_gives_every_token_of_the_reference() -> None:
    engine = build_engine("float32")
    for n, case in enumerate(CASES):
        submit(engine, str(n), tuple(case["prompt_token_ids"]), len(case["greedy_token_ids"]))
    assert run(engine) == {str(n): case["greedy_token_ids"] for n, case in enumerate(CASES)}


def held(case: dict) -> list[int]:
    """Positions of the answer at which bfloat16 must give the reference's token."""
    return [position for position, margin in enumerate(case["top2_margin"]) if margin > BFLOAT16_MARGIN]


def test_bfloat16_gives_the_token_wherever_the_margin_exceeds_its_tolerance() -> None:
    """After the prompt and the reference's answer until there: all rows of one prefill a case are such ends."""
    model, compared = build_engine("bfloat16").runner.model, 0
    for case in CASES:
        prompt, reference = case["prompt_token_ids"], case["greedy_token_ids"]
        tokens = logits_of_rows(model, prompt + reference[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert [tokens[position] for position in held(case)] == [reference[position] for position in held(case)]
        compared += len(held(case))
    assert compared > 300


def logits_of_rows(model: TwoPhaseModel, tokens: list[int]) -> torch.Tensor:
    """Of a prompt, at each of its tokens: [len(tokens), vocab]."""
    assert isinstance(model, Model)
    positions = np.arange(len(tokens))
    chunk = PrefillChunk(0, len(tokens), 0, np.arange(-(-len(tokens) // model.block_size)), samples=True)
    rows = Rows(np.array(tokens), positions, positions)
    return torch.from_numpy(model._forward(rows, partial(model._attend_prefill, [chunk]), None))


def test_bfloat16_requests_give_the_token_too() -> None:
    """Of one short and of the long prompt, every eighth of these positions a request: several in a step."""
    engine, expected = build_engine("bfloat16"), {}
    for n in (0, 8):
        prompt, reference = CASES[n]["prompt_token_ids"], CASES[n]["greedy_token_ids"]
        for position in held(CASES[n])[::8]:
            submit(engine, f"{n}/{position}", tuple(prompt + reference[:position]), 1)
            expected[f"{n}/{position}"] = [reference[position]]
    assert run(engine) == expected


@pytest.mark.parametrize("case", CASES[:2], ids=["france", "story"])
def test_first_token_logprobs_match_the_reference(case: dict) -> None:
    logits = prefill(build_engine("float32").runner.model, case["prompt_token_ids"])
    logprobs = torch.log_softmax(logits[0], dim=-1)
    for token, expected in case["first_token_top5_logprobs"]:
        assert float(logprobs[token]) == pytest.approx(expected, abs=2e-3)  # the file keeps four decimals
