"""Tensors of a Hugging Face folder, and random ones for a config.json whose weights are not at hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from biphase.engine.config import ModelConfig, from_hf
from biphase.errors import BadInput

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16}


def read_config(path: Path) -> Mapping[str, Any]:
    """The JSON object in a config.json, or one clear line."""
    try:
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a readable config.json: {error}") from error


class SafetensorsFolder:
    """A ``TensorSource`` over the safetensors files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.config: ModelConfig = from_hf(read_config(folder / "config.json"), str(folder / "config.json"))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise BadInput(
                f"{folder} has a config.json but no *.safetensors; to measure the shape alone, add --random-weights"
            )
        self._files = {key: handle for file in files for handle in [_open(file)] for key in handle.keys()}  # noqa: SIM118
        self._names = {name for name in map(_gguf_name, self._files) if name}

    def names(self) -> set[str]:
        return self._names

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        key = _hf_name(name)
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor.to(dtype)

    def dtype(self, name: str) -> torch.dtype:
        key = _hf_name(name)
        return _FLOATS.get(self._files[key].get_slice(key).get_dtype(), torch.float32)

    def blocks(self, name: str) -> None:
        return None


class RandomSource:
    """A ``TensorSource`` of normal noise in a config's shapes: speed, not sense. 0.02 is the usual initialisation.

    A tensor's numbers depend on ``seed`` and its name, not on who reads it when, or in which type.
    """

    def __init__(self, config: ModelConfig, where: str, seed: int = 0, std: float = 0.02) -> None:
        self.config = config
        self.where = where
        self._std = std
        self._shapes = shapes(config)
        self._seed = seed

    def names(self) -> set[str]:
        return set(self._shapes)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith(".bias") else torch.ones)(shape, dtype=dtype)
        generator = torch.Generator().manual_seed(crc32(name.encode(), self._seed))
        return torch.empty(shape).normal_(0, self._std, generator=generator).to(self.dtype(name)).to(dtype)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def blocks(self, name: str) -> None:
        return None


def random_source(path: Path) -> RandomSource:
    """Random weights in the shape of a config.json, given as the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    return RandomSource(from_hf(read_config(file), str(file)), str(file))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{file} is not a readable safetensors file (cut short?): {error}; download it again") from error


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *layer, stem, suffix = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{HF_NAMES[stem]}.{suffix}"


def _gguf_name(key: str) -> str | None:
    """The inverse of ``_hf_name``; None for a tensor that the model does not use (rotary buffers)."""
    stem, _, suffix = key.rpartition(".")
    parts = stem.split(".")
    layered = parts[:2] == ["model", "layers"] and len(parts) > 3
    prefix, rest = (f"blk.{parts[2]}.", ".".join(parts[3:])) if layered else ("", stem)
    names = {value: name for name, value in HF_NAMES.items()}
    return f"{prefix}{names[rest]}.{suffix}" if rest in names else None


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a config's model by its GGUF name."""
    h, q, kv, i, d = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size, config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (h,),
        "attn_q.weight": (q, h),
        "attn_k.weight": (kv, h),
        "attn_v.weight": (kv, h),
        "attn_output.weight": (h, q),
        "ffn_norm.weight": (h,),
        "ffn_gate.weight": (i, h),
        "ffn_up.weight": (i, h),
        "ffn_down.weight": (h, i),
    }
    if config.qkv_bias:
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if config.qk_norm:
        layer |= {"attn_q_norm.weight": (d,), "attn_k_norm.weight": (d,)}
    shapes = {f"blk.{n}.{name}": shape for n in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (config.vocab_size, h), "output_norm.weight": (h,)}
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, h)
    return shapes
