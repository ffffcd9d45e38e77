"""The compiled model: the golden file of the default model, and every family against the torch model in float32."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from biphase.engine import kv_cache
from biphase.engine.build import build
from biphase.engine.compiled import MOST_FEW_ROWS, CompiledModel, PagedCache
from biphase.engine.config import ModelConfig
from biphase.engine.engine import Engine
from biphase.engine.model import Model
from biphase.engine.options import EngineOptions
from biphase.engine.packing import pack
from biphase.engine.rows import DecodeRows, PrefillChunk, Rows
from biphase.engine.safetensors_files import shapes
from biphase.engine.weights import assemble
from biphase.scheduling.config import SchedulerConfig
from tests.engine.forms import FORMS, inside_a_form, run_tests_in
from tests.engine.many_rows import Part, run_step, step_of
from tests.engine.tiny import prefill, run, submit

CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())["cases"]


@cache
def build_engine(**options: str) -> Engine:
    return build(EngineOptions(model="smollm2-135m", kv_cache_gb=0.3, **options))[0]


@pytest.mark.parametrize("crossover", [2, MOST_FEW_ROWS + 1], ids=["many-row program", "few-row program"])
@pytest.mark.parametrize(
    "numbers",
    [range(len(CASES)), [1, 6, 8]],
    ids=["one batch", "one by one"],
)
def test_every_token_of_the_reference(numbers: Sequence[int], crossover: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever program decodes, which on another machine may be the other one.

    One by one: the shortest prompt, one of 40 and the one of 600 tokens. A single row of any decodes in one program.
    """
    engine, got, together = build_engine(), {}, len(numbers) == len(CASES)
    monkeypatch.setattr(engine.runner.model, "crossover", crossover)
    for n in numbers:
        submit(engine, str(n), tuple(CASES[n]["prompt_token_ids"]), len(CASES[n]["greedy_token_ids"]))
        if not together:
            got |= run(engine)
    got |= run(engine)
    assert got == {str(n): CASES[n]["greedy_token_ids"] for n in numbers}


@pytest.mark.parametrize("n", range(len(CASES)))
def test_first_token_logprobs(n: int) -> None:
    model, case = build_engine().runner.model, CASES[n]
    logprobs = torch.log_softmax(prefill(model, case["prompt_token_ids"])[0], dim=-1)
    for token, expected in case["first_token_top5_logprobs"]:
        assert float(logprobs[token]) == pytest.approx(expected, abs=0.05)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Of a hundred columns a second thread computes nothing in time; on a busy machine it is waited for, 15 ms each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPE = {
    "family": "llama",
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 203,
    "max_position": 640,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
VARIANTS = {
    "llama": {},
    "one KV head": {"num_kv_heads": 1},
    "a KV head for each": {"num_kv_heads": 6},
    "head size 64": {"head_dim": 64, "num_heads": 3, "num_kv_heads": 1},
    "odd sizes": {"hidden_size": 75, "intermediate_size": 133, "vocab_size": 129},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 32},
    "tied": {"tied_embeddings": True},
}


class Noise:
    """A source of random weights in a file's type; biases and norms say something too."""

    where = "noise"

    def __init__(self, config: ModelConfig, kept: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self._kept = kept
        self._tensors = {
            name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.5) + ("norm" in name) * 1.0
            for name, shape in shapes(config).items()
        }

    def names(self) -> set[str]:
        return set(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        return self._kept

    def blocks(self, name: str) -> None:
        return None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._tensors[name]
        return (tensor.to(self._kept) if tensor.ndim > 1 else tensor).to(dtype)


@cache
def pair(variant: str, kept: torch.dtype = torch.bfloat16) -> tuple[CompiledModel, Model]:
    """The same weights in both models."""
    config = ModelConfig(**(SHAPE | VARIANTS[variant]))
    source = Noise(config, kept)
    weights = assemble(config, source, torch.float32)
    torch_model = Model(config, weights, kv_cache.allocate(config, 80, 16, torch.float32))
    return CompiledModel(config, pack(config, source), PagedCache(config, 80)), torch_model


def chunk_rows(tokens: list[int], past: int, table: np.ndarray) -> tuple[Rows, np.ndarray]:
    positions = np.arange(past, past + len(tokens))
    return Rows(np.array(tokens), positions, table[positions // 16] * 16 + positions % 16), table


def joined(parts: list[Rows]) -> Rows:
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "positions", "slots")))


def close(got: np.ndarray, expected: np.ndarray) -> None:
    """Keys and values are rounded to float16: half of 2^-10 in a score of 10 or more is 5e-3 in its weight."""
    assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_phases_and_a_mixed_step_equal_torch(variant: str, kept: torch.dtype) -> None:
    """A prompt in chunks of few and of many rows, three decodes, and two decodes beside a chunk of a third sequence."""
    compiled, reference = pair(variant, kept)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, compiled.config.vocab_size, size).tolist() for size in (5, 90, 300)]
    tables = [rng.permutation(np.arange(n * 25, n * 25 + 25)) for n in range(3)]
    for tokens, table in zip(prompts, tables, strict=True):
        for begin, end in ((0, 3), (3, 60), (60, 90), (90, 300)):
            part = tokens[begin:end]
            if part:
                rows, blocks = chunk_rows(part, begin, table)
                chunks = [PrefillChunk(0, len(part), begin, blocks, True)]
                close(compiled.prefill(rows, chunks), reference.prefill(rows, chunks))
    lengths = np.array([6, 91, 301], dtype=np.int32)
    decodes = DecodeRows(np.stack(tables).astype(np.int32), lengths)
    rows = joined([chunk_rows([7 + n], int(lengths[n]) - 1, tables[n])[0] for n in range(3)])
    close(compiled.decode(rows, decodes), reference.decode(rows, decodes))
    pair_of = DecodeRows(decodes.tables[1:], lengths[1:] + 1)
    singles = [chunk_rows([9 + n], int(lengths[n]), tables[n])[0] for n in (1, 2)]
    for size in (4, 40):
        chunk, table = chunk_rows([11] * size, 6, tables[0])
        rows = joined([*singles, chunk])
        chunks = [PrefillChunk(2, 2 + size, 6, table, True)]
        close(compiled.mixed(rows, pair_of, chunks), reference.mixed(rows, pair_of, chunks))


def test_rows_of_no_interest_cost_no_logits() -> None:
    compiled, _ = pair("llama")
    for size in (4, 40):
        rows, table = chunk_rows([1] * size, 0, np.arange(25))
        assert compiled.prefill(rows, [PrefillChunk(0, size, 0, table, False)]).shape == (0, 203)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_programs_read_and_write_the_same_int8_cache(variant: str) -> None:
    """A prompt through the many-row program, its next tokens one by one, against one prompt of all of them."""
    config, packed = pair(variant)[0].config, pair(variant)[0].packed
    tokens, table = np.random.default_rng(5).integers(0, config.vocab_size, 300).tolist(), np.arange(25)
    one, other = (CompiledModel(config, packed, PagedCache(config, 25, int8=True)) for _ in range(2))
    one.prefill(chunk_rows(tokens[:280], 0, table)[0], [PrefillChunk(0, 280, 0, table, False)])
    for position in range(280, 300):
        row, _ = chunk_rows([tokens[position]], position, table)
        got = one.decode(row, DecodeRows(table[None].astype(np.int32), np.array([position + 1], dtype=np.int32)))
    want = other.prefill(chunk_rows(tokens, 0, table)[0], [PrefillChunk(0, 300, 0, table, True)])
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"activations": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_lossy_choices_lose_little(options: dict[str, str]) -> None:
    """Of the tokens that the reference chose by a logit of 1 or more, nineteen in twenty stay.

    All are ends of rows of one step: the prompts, each with the reference's answer, as chunks of many sequences.
    """
    model = build_engine(**options).runner.model
    assert isinstance(model, CompiledModel)
    cases = CASES[:8]
    tables = np.arange(8 * len(cases), dtype=np.int32).reshape(-1, 8)
    texts = [[*case["prompt_token_ids"], *case["greedy_token_ids"][:-1]] for case in cases]
    chunks = [Part(text, 0, table) for text, table in zip(texts, tables, strict=True)]
    rows = sum(map(len, texts))
    pages = PagedCache(model.config, tables.size, model.cache.int8)
    logits = run_step(model.packed, pages, step_of([], chunks, range(rows)), model.words)
    last, kept = 0, []
    for case, text in zip(cases, texts, strict=True):
        last += len(text)
        got = logits[last - len(case["greedy_token_ids"]) : last].argmax(-1)
        kept += list((got == case["greedy_token_ids"])[np.array(case["top2_margin"]) > 1.0])
    assert len(kept) > 200
    assert np.mean(kept) >= 0.95


@pytest.mark.forms
@pytest.mark.timeout(1800)
@pytest.mark.skipif(inside_a_form, reason="already inside another form")
@pytest.mark.parametrize("form", FORMS)
def test_both_programs_in_other_forms(form: str, tmp_path: Path) -> None:
    run_tests_in(form, __file__, tmp_path, only="equal_torch or same_int8_cache")


def test_waiting_for_memory_is_no_part_of_what_a_law_of_steps_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand seconds, by a clock that counts in them, in a step that takes no such time."""
    model, _ = pair("llama")
    engine = Engine(model, SchedulerConfig(80, 640))
    monkeypatch.setattr("biphase.engine.compiled.perf_counter", count(step=1000.0).__next__)
    ((_, first), (_, second)) = engine.measure([[(20, 2)]])
    assert -1000 < first < -900
    assert -1000 < second < -900
