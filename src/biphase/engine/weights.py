"""The tensors of a Llama-family model, assembled from a file's own names into the matrices that the model multiplies.

q, k and v become one matrix, gate and up another: two products fewer a layer, at one row the cost of their dispatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from biphase.engine.config import ModelConfig, RopeScaling
from biphase.engine.kernels.panels import Blocks
from biphase.errors import BadInput


class TensorSource(Protocol):
    """Reads one tensor by the name that GGUF gives it (``blk.0.attn_q.weight``), shaped [out, in], unpermuted."""

    where: str

    def names(self) -> set[str]: ...
    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...
    def dtype(self, name: str) -> torch.dtype:
        """The floating type in which the file holds a tensor without loss."""

    def blocks(self, name: str) -> Blocks | None:
        """A quantised tensor as it is; None for one that the file holds as plain floats."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms are float32, matrices in the model's dtype, [out, in]."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """``embedding`` and ``lm_head`` are [vocab, hidden], one tensor when tied; ``inv_freq`` is [head_dim / 2]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor
    inv_freq: Tensor

    def decode_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all layers and the head, not the embedding table."""
        tensors = [self.lm_head, self.norm]
        for layer in self.layers:
            tensors += [layer.attn_norm, layer.qkv, layer.o, layer.mlp_norm, layer.gate_up, layer.down]
        return sum(tensor.nbytes for tensor in tensors)


def assemble(
    config: ModelConfig, source: TensorSource, dtype: torch.dtype, on_layer: Callable[[int], None] = lambda _: None
) -> ModelWeights:
    """Read and join every tensor. Raises ``BadInput`` naming a tensor that is missing or has the wrong shape."""
    reader = _Reader(source, dtype)
    h = config.hidden_size
    embedding = reader.matrix("token_embd.weight", config.vocab_size, h)
    head = embedding if config.tied_embeddings else reader.matrix("output.weight", config.vocab_size, h)
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(config, reader, f"blk.{index}."))
        on_layer(index)
    return ModelWeights(
        embedding, tuple(layers), reader.vector("output_norm.weight", h), head, inverse_frequencies(config, source)
    )


def _layer(config: ModelConfig, reader: "_Reader", prefix: str) -> LayerWeights:
    h, q, kv, i = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    parts = (("attn_q", q), ("attn_k", kv), ("attn_v", kv))
    bias = None
    if config.qkv_bias:
        bias = torch.cat([reader.vector(f"{prefix}{name}.bias", rows) for name, rows in parts]).to(reader.dtype)
    norms = None
    if config.qk_norm:
        d = config.head_dim
        norms = (reader.vector(f"{prefix}attn_q_norm.weight", d), reader.vector(f"{prefix}attn_k_norm.weight", d))
    return LayerWeights(
        attn_norm=reader.vector(f"{prefix}attn_norm.weight", h),
        qkv=torch.cat([reader.matrix(f"{prefix}{name}.weight", rows, h) for name, rows in parts]),
        qkv_bias=bias,
        qk_norms=norms,
        o=reader.matrix(f"{prefix}attn_output.weight", h, q),
        mlp_norm=reader.vector(f"{prefix}ffn_norm.weight", h),
        gate_up=torch.cat([reader.matrix(f"{prefix}ffn_{name}.weight", i, h) for name in ("gate", "up")]),
        down=reader.matrix(f"{prefix}ffn_down.weight", h, i),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    source: TensorSource
    dtype: torch.dtype

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._read(name, (rows, columns), self.dtype)

    def vector(self, name: str, length: int) -> Tensor:
        return self._read(name, (length,), torch.float32)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        require(self.source, name)
        tensor = self.source.read(name, dtype)
        require_shape(self.source, name, tuple(tensor.shape), shape)
        return tensor.contiguous()


def require(source: TensorSource, name: str) -> None:
    """Raise ``BadInput`` if the file lacks a tensor."""
    if name not in source.names():
        raise BadInput(f"{source.where} lacks the tensor {name}; the file is incomplete or of another family")


def require_shape(source: TensorSource, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ``BadInput`` if a tensor is not of the shape that the config tells."""
    if shape != expected:
        raise BadInput(f"{source.where}: tensor {name} is {list(shape)}, the config says {list(expected)}")


def inverse_frequencies(config: ModelConfig, source: TensorSource) -> Tensor:
    """Rotary frequencies in radians per position, float32 [head_dim / 2]. Su et al. 2021, RoFormer, section 3.2.2."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponent
    if "rope_freqs.weight" in source.names():  # GGUF carries Llama 3.1's scaling as divisors
        frequencies = frequencies / source.read("rope_freqs.weight", torch.float32).double()
    elif config.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, config.rope_scaling)
    return frequencies.float()


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Linear interpolation (Chen et al. 2023), or Llama 3.1's: long waves divided, short kept, a ramp in between."""
    divided = frequencies / scaling.factor
    if scaling.low_freq_factor is None or scaling.high_freq_factor is None or scaling.original_max_position is None:
        return divided
    turns = scaling.original_max_position * frequencies / (2 * torch.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return divided * (1 - ramp) + frequencies * ramp
