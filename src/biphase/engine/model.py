"""The Llama-family forward pass, with the two phases as two functions.

``prefill`` runs chunks of prompts: many rows, bound by arithmetic. ``decode`` runs one row a sequence: few rows, bound
by reading the weights and the KV cache. They share the layers and differ in attention. ``mixed`` runs both in one pass,
so that decodes beside a chunk do not read the weights a second time.
The residual stream is float32 in both, so that bfloat16 weights round only what they multiply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from biphase.engine.config import ModelConfig
from biphase.engine.kernels.arrays import keep_array
from biphase.engine.kernels.linear import Linear
from biphase.engine.kernels.select import Kernels, select_kernels
from biphase.engine.kv_cache import KVCache
from biphase.engine.rows import DecodeRows, Logits, PrefillChunk, Rows
from biphase.engine.weights import LayerWeights, ModelWeights

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [N, (H + 2G) D] rotated and stored) -> [N, H D]"""


@dataclass(frozen=True, slots=True)
class _Rows:
    """``Rows`` as tensors."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor


def _tensors(rows: Rows) -> _Rows:
    tokens, *others = map(torch.from_numpy, (rows.tokens, rows.positions, rows.slots))
    return _Rows(tokens, *map(keep_array, others))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer as it runs: its matrices packed, its part of the KV cache."""

    attn_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    k: Tensor
    v: Tensor


def _layer(weights: LayerWeights, k: Tensor, v: Tensor) -> _Layer:
    norms = weights.qk_norms
    return _Layer(
        attn_norm=keep_array(weights.attn_norm),
        qkv=Linear(weights.qkv, weights.qkv_bias),
        qk_norms=None if norms is None else (keep_array(norms[0]), keep_array(norms[1])),
        o=Linear(weights.o),
        mlp_norm=keep_array(weights.mlp_norm),
        gate_up=Linear(weights.gate_up),
        down=Linear(weights.down),
        k=keep_array(k),
        v=keep_array(v),
    )


class Model:
    """Weights and KV cache of one model; ``prefill`` and ``decode`` return float32 logits of the rows that sample."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, cache: KVCache, kernels: Kernels | None = None
    ) -> None:
        self.config = config
        self.seconds_for_memory = 0.0
        self.cache = cache
        self.kernels = kernels or select_kernels()
        self.dtype = weights.embedding.dtype
        self._embedding = weights.embedding
        self._layers = [_layer(w, k, v) for w, k, v in zip(weights.layers, cache.k, cache.v, strict=True)]
        self._norm = keep_array(weights.norm)
        self._lm_head = Linear(weights.lm_head)
        self._scale = config.head_dim**-0.5
        angles = torch.arange(config.max_position).float()[:, None] * weights.inv_freq
        self._cos, self._sin = keep_array(angles.cos()), keep_array(angles.sin())

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.cache.block_size

    def prefill(self, rows: Rows, chunks: list[PrefillChunk]) -> Logits:
        """Run chunks of prompts together. Returns logits [chunks that sample, vocab] of their last rows."""
        return self._forward(rows, partial(self._attend_prefill, chunks), _last_rows(chunks))

    def decode(self, rows: Rows, decodes: DecodeRows) -> Logits:
        """One token of each sequence. Returns logits [N, vocab]."""
        return self._forward(rows, partial(self._attend_decode, _pair(decodes)), None)

    def mixed(self, rows: Rows, decodes: DecodeRows, chunks: list[PrefillChunk]) -> Logits:
        """Decode rows first, then chunks. Returns logits of the decodes, then of the chunks that sample."""
        n, singles = len(decodes.lengths), _pair(decodes)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            parts = (self._attend_decode(singles, layer, qkv[:n]), self._attend_prefill(chunks, layer, qkv))
            return torch.cat(parts)

        return self._forward(rows, attend, torch.cat((torch.arange(n), _last_rows(chunks))))

    def touch_ahead(self) -> bool:
        """Nothing: torch's cache has its memory as the system hands it out."""
        return False

    def _attend_decode(self, decodes: tuple[Tensor, Tensor], layer: int, qkv: Tensor) -> Tensor:
        k, v = self._layers[layer].k, self._layers[layer].v
        out: Tensor = self.kernels.decode_attention(qkv, k, v, *decodes, self._scale)
        return out

    def _attend_prefill(self, chunks: list[PrefillChunk], layer: int, qkv: Tensor) -> Tensor:
        k, v = self._layers[layer].k, self._layers[layer].v
        attention = self.kernels.prefill_attention
        parts = [attention(qkv[c.begin : c.end], k, v, torch.from_numpy(c.blocks), c.past, self._scale) for c in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def _forward(self, rows: Rows, attend: Attend, last: Tensor | None) -> Logits:
        here = _tensors(rows)
        residual = self._embedding[here.tokens].float()
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            delta = self._run_layer(index, layer, here, residual, delta, attend)
        assert delta is not None
        if last is not None:  # only sampled rows go through the head, the largest matrix
            residual, delta = residual[last], delta[last]
        if not len(residual):
            return np.empty((0, self.config.vocab_size), dtype=np.float32)
        x = self.kernels.add_rms_norm(residual, delta, self._norm, self.config.norm_eps, self.dtype)
        logits: Logits = self._lm_head(x).float().numpy()
        return logits

    def _run_layer(
        self, index: int, layer: _Layer, rows: _Rows, residual: Tensor, delta: Tensor | None, attend: Attend
    ) -> Tensor:
        kernels, eps = self.kernels, self.config.norm_eps
        x = kernels.add_rms_norm(residual, delta, layer.attn_norm, eps, self.dtype)
        qkv = layer.qkv(x)
        kernels.rope_and_store(
            qkv, rows.positions, self._cos, self._sin, layer.qk_norms, eps, layer.k, layer.v, rows.slots
        )
        x = layer.o(attend(index, qkv))
        x = kernels.add_rms_norm(residual, x, layer.mlp_norm, eps, self.dtype)
        return layer.down(kernels.silu_mul(layer.gate_up(x)))


def _pair(decodes: DecodeRows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(decodes.tables), torch.from_numpy(decodes.lengths)


def _last_rows(chunks: list[PrefillChunk]) -> Tensor:
    return torch.tensor([chunk.end - 1 for chunk in chunks if chunk.samples], dtype=torch.int64)
