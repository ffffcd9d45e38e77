"""Norm, rotary embedding with the write to the KV cache, and SwiGLU, compiled: one pass over the rows each.

In eager torch these are a dozen calls a layer at about 10 microseconds each, which for one row is more than their work.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from biphase.engine.kernels.arrays import as_array
from biphase.engine.kernels.decode import FASTMATH
from biphase.engine.kernels.scalars import exp, narrow, widen

NO_NORM = np.empty(0, dtype=np.float32)


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As ``reference.add_rms_norm``."""
    out = torch.empty(residual.shape, dtype=dtype)
    if delta is None:
        _rms_norm(residual.numpy(), weight.numpy(), np.float32(eps), as_array(out))
    else:
        _add_rms_norm(residual.numpy(), as_array(delta), weight.numpy(), np.float32(eps), as_array(out))
    return out


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    """As ``reference.rope_and_store``."""
    q_norm, k_norm = (NO_NORM, NO_NORM) if norms is None else (norms[0].numpy(), norms[1].numpy())
    heads = as_array(qkv).reshape(len(qkv), -1, k_cache.shape[3])
    _rope_and_store(
        heads,
        positions.numpy(),
        cos.numpy(),
        sin.numpy(),
        q_norm,
        k_norm,
        np.float32(eps),
        as_array(k_cache),
        as_array(v_cache),
        slots.numpy(),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """As ``reference.silu_mul``."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _silu_mul(as_array(gate_up), as_array(out))
    return out


@njit(inline="always")
def _norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = narrow(x[i] * scale * weight[i], out)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _rms_norm(residual: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in prange(len(residual)):
        _norm_row(residual[row], weight, eps, out[row])


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _add_rms_norm(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in prange(len(residual)):
        for i in range(residual.shape[1]):
            residual[row, i] += widen(delta[row, i])
        _norm_row(residual[row], weight, eps, out[row])


@njit(inline="always")
def _rotate(head: Any, cos: Any, sin: Any, norm: Any, eps: Any) -> None:
    """Norm (if any) and rotate one head in place; arithmetic in float32, one rounding at the end."""
    half = len(cos)
    scale = np.float32(1)
    if len(norm):
        total = np.float32(0)
        for i in range(2 * half):
            total += widen(head[i]) * widen(head[i])
        scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + eps)
    for i in range(half):
        low, high = widen(head[i]), widen(head[i + half])
        if len(norm):
            low, high = low * scale * norm[i], high * scale * norm[i + half]
        head[i] = narrow(low * cos[i] - high * sin[i], head)
        head[i + half] = narrow(high * cos[i] + low * sin[i], head)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _rope_and_store(
    qkv: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
) -> None:
    kv_heads, block_size, dim = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    for row in prange(len(qkv)):
        c, s = cos[positions[row]], sin[positions[row]]
        block, offset = slots[row] // block_size, slots[row] % block_size
        for head in range(heads):
            _rotate(qkv[row, head], c, s, q_norm, eps)
        for head in range(kv_heads):
            _rotate(qkv[row, heads + head], c, s, k_norm, eps)
            for i in range(dim):
                k_cache[block, head, offset, i] = qkv[row, heads + head, i]
                v_cache[block, head, offset, i] = qkv[row, heads + kv_heads + head, i]


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _silu_mul(gate_up: Any, out: Any) -> None:
    columns = out.shape[1]
    for row in prange(len(out)):
        for i in range(columns):
            gate = widen(gate_up[row, i])
            out[row, i] = narrow(gate / (np.float32(1) + exp(-gate)) * widen(gate_up[row, columns + i]), out)
