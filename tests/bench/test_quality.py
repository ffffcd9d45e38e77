"""bench/quality.py: what llama.cpp saves and answers, the engine held to given tokens, and the arithmetic by hand."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from biphase.engine.build import build
from biphase.engine.engine import Engine
from biphase.engine.options import EngineOptions
from biphase.errors import BadInput, RunFailed
from biphase.models import locate
from engine_worker import options
from llama_quality import candidates, chosen, read_saved
from quality import (
    Answers,
    agreement,
    describe,
    first_differences,
    golden_cases,
    golden_question,
    llama_files,
    markdown,
    perplexity,
    windows_question,
)
from quality_worker import golden, score, windows
from random_models import write_folder
from tests.bench.test_random_models import TINY

DATA = Path(__file__).parent / "data"


def saved_row(logits: NDArray[np.float32]) -> bytes:
    """One row as llama.cpp's tools/perplexity/perplexity.cpp (log_softmax into log_prob) writes it."""
    highest = float(logits.max())
    lowest = max(float(logits.min()), highest - 16)
    log_sum = math.log(float(np.exp(logits - highest).sum()))
    scale = np.float32((highest - lowest) / 65535)
    steps = np.where(logits > lowest, np.rint((logits - lowest) / scale), 0).astype(np.uint16)
    padding = b"\0\0" * (len(logits) % 2)
    return struct.pack("<ff", scale, lowest - highest - log_sum) + steps.tobytes() + padding


def test_what_llama_perplexity_saves_is_read(tmp_path: Path) -> None:
    """3 windows of 8 tokens over a vocabulary of 301: the tokens 5, 6 and 7 of each are scored."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, 301, (3, 8), dtype=np.int32)
    logits = random.normal(0, 3, (3, 3, 301)).astype(np.float32)
    path = tmp_path / "saved"
    rows = b"".join(saved_row(row) for window in logits for row in window)
    path.write_bytes(struct.pack("<8sIii", b"_logits_", 8, 301, 3) + tokens.tobytes() + rows)
    found = read_saved(path)
    assert found.tokens.tolist() == tokens.tolist()
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    expected = exact.gather(2, torch.from_numpy(tokens[:, 5:, None]).long())[..., 0].numpy()
    np.testing.assert_allclose(found.logprobs, expected, atol=16 / 65535)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGUF" * 10)
    with pytest.raises(RunFailed, match="no file of llama-perplexity"):
        read_saved(tmp_path / "x")


def test_candidates_of_a_real_answer() -> None:
    """llama-server (xllamacpp 2026.10.11549) on the first golden prompt; the eight best of 64 candidates are kept."""
    found = candidates(json.loads((DATA / "llama_completion.json").read_text()))
    assert [token for token, _ in found[:3]] == [7042, 260, 4528]
    assert found[0][1] == pytest.approx(-0.2589, abs=1e-4)
    assert len(found) == 8


def test_a_piece_of_a_character_is_chosen_without_probabilities() -> None:
    """As the same server answered on a tiny model whose likeliest token was one byte of UTF-8."""
    assert chosen({"content": "\ufffd", "tokens": [238], "stop_type": "limit"}) == 238


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tiny")
    write_folder(TINY["llama"], folder)
    words = [f"model={folder}", "dtype=float32", "kv_cache_gb=0.05", "max_model_len=256", "prefix_caching=false"]
    engine: Engine = build(options(words))[0]
    return engine


def test_forced_tokens_are_scored_alike_by_decode_and_by_prefill(tiny: Engine) -> None:
    """A decode step after t tokens and a prefill of t tokens are the same distribution."""
    texts = [[7 * n % 500 for n in range(1, 33)], [11 * n % 500 for n in range(1, 33)]]
    found = windows(tiny, {"windows": texts, "first": 16, "rows": 2, "every": 5})
    assert [len(row) for row in found["decode"]] == [15, 15]
    both = [row[n] for row in found["decode"] for n in range(0, 15, 5)]
    assert found["prefill"] == pytest.approx(both, abs=1e-4)
    assert len(set(both)) == 6


def test_forced_log_probabilities_sum_to_one(tiny: Engine) -> None:
    """Every token forced once after the same prompt."""
    found = score(tiny, [((5, 6, 7), (token,)) for token in range(512)], 8)
    assert sum(math.exp(text[0].logprob) for text in found) == pytest.approx(1.0, abs=1e-3)


def test_likeliest_tokens_do_not_depend_on_what_is_forced(tiny: Engine) -> None:
    prompt = (5, 6, 7)
    best = score(tiny, [(prompt, (0,))], 1)[0][0].top[0][0]
    line = {
        "cases": [{"prompt": prompt, "output": [9, 9]}, {"prompt": prompt, "output": [best, 3]}],
        "rows": 2,
        "top": 5,
    }
    found = golden(tiny, line)
    assert [tokens[0] for tokens in found["likeliest"]] == [best, best]
    assert found["first"][0][0][0] == best
    assert len(found["first"][0]) == 5


def test_perplexity_of_even_odds() -> None:
    """A half each: perplexity 2."""
    assert perplexity([math.log(0.5)] * 7) == pytest.approx(2.0)


def answers(shift: float) -> Answers:
    """A reference, and a side whose log-probabilities lie ``shift`` nats below, with one golden token wrong."""
    question = golden_question()
    right = [list(case["output"]) for case in question["cases"]]
    first = [[tuple(pair) for pair in case["first_token_top5_logprobs"]] for case in golden_cases()]
    wrong = [list(row) for row in right]
    wrong[0][0] += 1
    moved = [[(token, value - shift) for token, value in row] for row in first]
    return {
        "reference": {
            "about": "r",
            "windows": {"decode": [[-1.0, -2.0]], "prefill": [-1.0]},
            "golden": {"likeliest": right, "first": first},
        },
        "side": {
            "about": "s",
            "windows": {"decode": [[-1.0 - shift, -2.0 - shift]], "prefill": [-1.0 - shift]},
            "golden": {"likeliest": wrong, "first": moved},
        },
    }


def test_a_shift_in_log_probability_is_that_factor_of_perplexity() -> None:
    found = describe(answers(0.01), {"windows": {"windows": [[0]]}, "golden": golden_question()})
    assert found["golden_tokens"] == 400
    assert found["sides"]["reference"]["agreement"] == 400
    side = found["sides"]["side"]
    assert side["agreement"] == 399
    assert side["perplexity_change"] == pytest.approx(math.exp(0.01) - 1)
    assert side["prefill_change"] == pytest.approx(math.exp(0.01) - 1)
    assert side["mean_difference"] == pytest.approx(0.01)
    assert side["max_first"] == pytest.approx(0.01)
    assert "| side | 4.5267 | +1.005 % | 0.01000 | +1.005 % | 399 | 0.0100 | 0.0100 |" in markdown(found)


def test_golden_file_against_itself() -> None:
    cases = golden_cases()
    assert agreement([case["greedy_token_ids"] for case in cases]) == 400
    tops = [[tuple(pair) for pair in case["first_token_top5_logprobs"]] for case in cases]
    assert first_differences(tops) == [0.0] * 45
    fewer = [case_top[:4] for case_top in tops]
    expected = [abs(case_top[3][1] - case_top[4][1]) for case_top in tops]
    assert sorted(first_differences(fewer)) == pytest.approx(sorted([0.0] * 36 + expected))


def test_windows_of_the_text() -> None:
    found = windows_question(locate("smollm2-135m"), 3)
    assert [len(window) for window in found["windows"]] == [512] * 3
    assert (found["first"], found["every"]) == (256, 16)
    longer = windows_question(locate("smollm2-135m"), 3, 2048)
    assert [len(window) for window in longer["windows"]] == [2048] * 3
    assert longer["windows"][0][:1536] == [token for window in found["windows"] for token in window]
    assert (longer["first"], longer["every"]) == (1024, 64)
    with pytest.raises(BadInput, match="--window 31: 32 tokens are the least"):
        windows_question(locate("smollm2-135m"), 3, 31)
    with pytest.raises(BadInput, match=r"--windows 1000: the text has \d\d windows of 512"):
        windows_question(locate("smollm2-135m"), 1000)


def test_files_of_llama_cpp_are_checked_before_the_work(tmp_path: Path) -> None:
    model, other = tmp_path / "q4_1.gguf", tmp_path / "q4_0.gguf"
    other.touch()
    assert llama_files([f"Q4_0={other}"], model) == {"llama.cpp Q4_1": model, "llama.cpp Q4_0": other}
    for text in ("Q4_0", f"={other}", f"Q4_0={model}"):
        with pytest.raises(BadInput, match="expected NAME=FILE"):
            llama_files([text], model)


def test_options_of_the_engine_reach_it() -> None:
    assert options(["model=m", "prefix_caching=false"]) == EngineOptions(
        model="m", prefix_caching=False, max_num_batched_tokens=8192
    )
