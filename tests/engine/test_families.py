"""Logits of tiny models of each family against transformers, in float32 (tests/data/make_tiny_families.py)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from biphase.engine import kv_cache
from biphase.engine.loading import load
from biphase.engine.model import Model
from tests.data.make_tiny_families import values
from tests.engine.tiny import prefill

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


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["label"])
def test_logits_equal_transformers(case: dict, tmp_path: Path) -> None:
    write_folder(tmp_path, case, shards=2)
    config, weights = load(str(tmp_path), "float32")
    model = Model(config, weights, kv_cache.allocate(config, 16, 16, torch.float32))
    for row, expected in case["logits"].items():
        n = int(row) + 1
        for sizes in ([n], [n // 2, n - n // 2] if n > 1 else [1]):
            got = logits_in_chunks(model, GOLDEN["tokens"], sizes)
            # float32 sums in another order: a few units in the sixth digit of logits of magnitude 1 to 10
            torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=1e-4)
