"""From a model's name to its config and weights in memory."""

from collections.abc import Callable
from pathlib import Path

import torch

from biphase.engine.config import ModelConfig
from biphase.engine.gguf_tensors import GgufTensors
from biphase.engine.kernels.linear import multiplies_bfloat16
from biphase.engine.options import DType
from biphase.engine.safetensors_files import RandomSource, SafetensorsFolder, random_source
from biphase.engine.sources import resolve
from biphase.engine.weights import ModelWeights, assemble
from biphase.errors import BadInput

type_names: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(
    name: str, dtype: DType = "auto", random_weights: bool = False, on_layer: Callable[[int], None] = lambda _: None
) -> tuple[ModelConfig, ModelWeights]:
    """Load a model by the name a user gave. Raises ``BadInput`` with one line for whatever cannot be read."""
    source = open_source(resolve(name), random_weights)
    return source.config, assemble(source.config, source, choose_dtype(dtype), on_layer)


def open_source(path: Path, random_weights: bool) -> GgufTensors | SafetensorsFolder | RandomSource:
    """What holds the tensors behind a resolved path."""
    if path.suffix == ".gguf":
        if random_weights:
            raise BadInput(f"--random-weights wants a config.json or its folder, and {path} is a GGUF file")
        return GgufTensors(path)
    if random_weights:
        return random_source(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.name.endswith(".json"):
        raise BadInput(f"{path} is a shape without weights; to measure its speed, add --random-weights")
    raise BadInput(
        f"{path} is no model: expected a .gguf file, a folder with config.json and safetensors, or a config.json"
    )


def choose_dtype(dtype: DType) -> torch.dtype:
    """``auto`` is bfloat16 where the processor multiplies it natively, float32 elsewhere."""
    if dtype != "auto":
        return type_names[dtype]
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32
