"""From a model's name to its config and weights in memory."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from biphase.engine.config import ModelConfig
from biphase.engine.gguf_tensors import GgufTensors
from biphase.engine.kernels.linear import multiplies_bfloat16
from biphase.engine.options import DType, EngineOptions
from biphase.engine.safetensors_files import RandomSource, SafetensorsFolder, random_source
from biphase.engine.sources import resolve
from biphase.engine.weights import ModelWeights, assemble
from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.engine.kernels.image import PackedModel

_COMPILED = ("auto", "int8")
"""The values of ``dtype`` that compiled programs serve; the others run through torch."""

type_names: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(
    name: str, dtype: DType = "auto", random_weights: bool = False, on_layer: Callable[[int], None] = lambda _: None
) -> tuple[ModelConfig, ModelWeights]:
    """Load a model by the name a user gave. Raises ``BadInput`` with one line for whatever cannot be read."""
    source = open_source(resolve(name), random_weights)
    return source.config, assemble(source.config, source, choose_dtype(dtype), on_layer)


def load_packed(options: EngineOptions) -> tuple[ModelConfig, "PackedModel"] | None:
    """The model in panels, or None where torch runs it: asked for by ``dtype``, or no numba, or an odd head size."""
    if options.dtype not in _COMPILED or importlib.util.find_spec("numba") is None:
        _refuse_without_panels(options, "numba, which is not installed")
        return None
    source = open_source(resolve(options.model), options.random_weights)
    if source.config.head_dim % 16:
        _refuse_without_panels(options, f"a head size that is a multiple of 16, not {source.config.head_dim}")
        return None
    from biphase.engine.packing import pack

    return source.config, pack(source.config, source, options.dtype == "int8")


def _refuse_without_panels(options: EngineOptions, needed: str) -> None:
    if options.dtype == "int8":
        raise BadInput(f"--dtype int8 needs {needed}; take bfloat16 or float32")
    if options.activations == "int8":
        raise BadInput(f"--activations int8 needs --dtype auto or int8 and {needed}; leave it out")


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
