"""bench/random_models.py: published shapes, and both formats hold one model."""

import json
from pathlib import Path

import pytest
import torch

import random_models
from biphase.engine.build import build
from biphase.engine.engine import Engine
from biphase.engine.options import EngineOptions
from biphase.engine.text import load_text
from biphase.roofline.catalogue import load
from random_models import SHAPES, Shape, config, write_folder, write_gguf
from tests.engine.tiny import run, submit

# Parameter counts of the checkpoints as Hugging Face shows them (safetensors metadata of the three repositories).
PUBLISHED = {"qwen2.5-0.5b": 494_032_768, "llama-3.2-1b": 1_235_814_400, "qwen2.5-1.5b": 1_543_714_304}
TINY = {
    "llama": Shape("llama", 64, 96, 2, 4, 2, 16, 512, 5e5, 1e-5),
    "qwen2": Shape("qwen2", 64, 96, 2, 4, 2, 16, 512, 1e6, 1e-6),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_parameters(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(SHAPES[name])))
    assert load(str(tmp_path)).parameters == PUBLISHED[name]


def generate(path: Path) -> list[int]:
    engine: Engine = build(EngineOptions(model=str(path), dtype="float32", kv_cache_gb=0.05, max_model_len=256))[0]
    submit(engine, "a", tuple(range(300, 400)), 12)
    return list(run(engine)["a"])


@pytest.mark.parametrize("family", TINY)
def test_folder_and_gguf_are_one_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved q and k, rotary divisors, biases: a mistake in any gives other tokens."""
    monkeypatch.setattr(random_models, "DEVIATION", 0.3)  # so that logits of a tiny model lie far apart
    found = write_folder(TINY[family], tmp_path / "hf")
    write_gguf(TINY[family], found, tmp_path / "model.gguf")
    tokens = generate(tmp_path / "hf")
    assert tokens == generate(tmp_path / "model.gguf")
    assert len(set(tokens)) > 3
    assert torch.unique(found["model.embed_tokens.weight"]).numel() > 1000


def test_the_vocabulary_reads_any_text(tmp_path: Path) -> None:
    write_gguf(TINY["qwen2"], write_folder(TINY["qwen2"], tmp_path / "hf"), tmp_path / "model.gguf")
    text = load_text(tmp_path / "model.gguf")
    assert text.vocab_size == 512
    assert (
        b"".join(text.token_bytes(token) for token in text.encode("Grüße", special=False)).strip() == "Grüße".encode()
    )
