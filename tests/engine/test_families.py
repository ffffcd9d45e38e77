"""Logits of tiny models of each family against transformers, in float32 (tests/data/make_tiny_families.py)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from biphase.engine import kv_cache
from biphase.engine.build import build
from biphase.engine.loading import load
from biphase.engine.model import Model
from biphase.engine.options import EngineOptions
from biphase.engine.rows import DecodeRows, PrefillChunk, Rows
from tests.data.make_tiny_families import values
from tests.engine.tiny import prefill

if TYPE_CHECKING:
    from biphase.engine.compiled import CompiledModel

GOLDEN = json.loads((Path(__file__).parents[1] / "data/tiny_families.json").read_text())


def write_folder(folder: Path, case: dict, shards: int = 1) -> None:
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tensors = {name: torch.from_numpy(values(name, tuple(shape))) for name, shape in case["tensors"].items()}
    names = sorted(tensors)
    for shard in range(shards):
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / f"model-{shard}.safetensors")


def logits_in_chunks(model: Model, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """The last row's logits after a prefill in chunks of the given sizes."""
    past, logits = 0, torch.empty(0)
    for size in sizes:
        logits = prefill(model, tokens[past : past + size], past)
        past += size
    return logits[0]


WITHIN = [case for case in GOLDEN["cases"] if not case["config"].get("sliding_window")]
SLIDING = [case for case in GOLDEN["cases"] if case["config"].get("sliding_window")]


@pytest.mark.parametrize("case", WITHIN, ids=lambda case: case["label"])
def test_logits_equal_transformers(case: dict, tmp_path: Path) -> None:
    write_folder(tmp_path, case, shards=2)
    config, weights = load(str(tmp_path), "float32")
    model = Model(config, weights, kv_cache.allocate(config, 16, 16, torch.float32))
    for row, expected in case["logits"].items():
        n = int(row) + 1
        for sizes in ([n], [n // 2, n - n // 2] if n > 1 else [1]):
            got = logits_in_chunks(model, case["tokens"], sizes)
            # float32 sums in another order: a few units in the sixth digit of logits of magnitude 1 to 10
            torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def compiled_model(case: dict, folder: Path) -> "CompiledModel":
    """With blocks for two sequences."""
    from biphase.engine.compiled import CompiledModel, PagedCache
    from biphase.engine.loading import open_source
    from biphase.engine.packing import pack

    write_folder(folder, case)
    source = open_source(folder, random_weights=False)
    assert source.config.sliding_window == case["config"]["sliding_window"]
    return CompiledModel(source.config, pack(source.config, source), PagedCache(source.config, 64))


@pytest.mark.parametrize("crossover", [2, 17], ids=["many-row program", "few-row program"])
@pytest.mark.parametrize("case", SLIDING, ids=lambda case: case["label"])
def test_windows_of_the_compiled_programs(case: dict, crossover: int, tmp_path: Path) -> None:
    """Prompts in one chunk and in several, then rows one by one, to where the window has left most of them behind."""
    pytest.importorskip("numba")
    model = compiled_model(case, tmp_path)
    model.crossover = crossover
    for row, expected in case["logits"].items():
        n = int(row) + 1
        for sizes in ([n], [n - n // 3, *[1] * (n // 3)], [5] * (n // 5) + [1] * (n % 5)):
            got = logits_in_chunks(model, case["tokens"], sizes)
            # integers of 16 bits: measured below 0.002 beside logits of up to 10
            torch.testing.assert_close(got, torch.tensor(expected), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("case", SLIDING, ids=lambda case: case["label"])
def test_windows_of_a_row_beside_a_chunk(case: dict, tmp_path: Path) -> None:
    """One step decodes the last token of one sequence and runs the same tokens, but few, as another's chunk."""
    pytest.importorskip("numba")
    model, tokens = compiled_model(case, tmp_path), case["tokens"]
    last, chunk = len(tokens) - 1, min(int(row) for row in case["logits"] if row != "0") + 1
    prefill(model, tokens[:last])
    first = -(-len(tokens) // 16)
    positions = np.array([last, *range(chunk)])
    slots = positions + np.array([0, *[16 * first] * chunk])
    rows = Rows(np.array([tokens[last], *tokens[:chunk]]), positions, slots)
    tables, blocks = np.arange(first, dtype=np.int32)[None], np.arange(first, first + -(-chunk // 16))
    decodes = DecodeRows(tables, np.array([last + 1], dtype=np.int32))
    got = torch.from_numpy(model.mixed(rows, decodes, [PrefillChunk(1, 1 + chunk, 0, blocks, samples=True)]))
    for logits, row in zip(got, (last, chunk - 1), strict=True):
        torch.testing.assert_close(logits, torch.tensor(case["logits"][str(row)]), atol=1e-2, rtol=1e-2)


def test_torch_stays_within_the_window(tmp_path: Path) -> None:
    """Its attention has none, and within it a model is one without."""
    case = next(case for case in SLIDING if "mistral" in case["label"])
    write_folder(tmp_path, case)
    for dtype, positions in (("float32", 19), ("auto", 512)):
        options = EngineOptions(model=str(tmp_path), dtype=dtype, kv_cache_gb=0.01)
        assert build(options)[1].max_model_len == positions
