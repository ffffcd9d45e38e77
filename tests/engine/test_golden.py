"""SmolLM2-135M against the reference implementation in float32 from the same file (tests/data/smollm2_greedy.json)."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from biphase.engine.build import build
from biphase.engine.engine import Engine
from biphase.engine.options import EngineOptions
from tests.engine.tiny import prefill, run, submit

pytestmark = pytest.mark.timeout(300)  # 400 prefills through torch on cores that others may use

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


def test_bfloat16_gives_the_token_wherever_the_margin_exceeds_its_tolerance() -> None:
    engine = build_engine("bfloat16")
    wrong, compared = [], 0
    for n, case in enumerate(CASES):
        prompt, reference = case["prompt_token_ids"], case["greedy_token_ids"]
        for position, margin in enumerate(case["top2_margin"]):
            if margin > BFLOAT16_MARGIN:
                submit(engine, f"{n}/{position}", tuple(prompt + reference[:position]), 1)
                compared += 1
    tokens = run(engine)
    for name, (token,) in tokens.items():
        n, position = map(int, name.split("/"))
        if token != CASES[n]["greedy_token_ids"][position]:
            wrong.append((name, CASES[n]["top2_margin"][position]))
    assert compared > 300
    assert not wrong


@pytest.mark.parametrize("case", CASES[:2], ids=["france", "story"])
def test_first_token_logprobs_match_the_reference(case: dict) -> None:
    logits = prefill(build_engine("float32").runner.model, case["prompt_token_ids"])
    logprobs = torch.log_softmax(logits[0], dim=-1)
    for token, expected in case["first_token_top5_logprobs"]:
        assert float(logprobs[token]) == pytest.approx(expected, abs=2e-3)  # the file keeps four decimals
