"""Norm, rotary embedding with the write to the KV cache, and SwiGLU, compiled: one pass over the rows each.

In eager torch these are a dozen calls a layer at about 10 microseconds each, which for one row is more than their work.
Each kernel is a loop over rows in two forms: on this thread for few rows, where waking another costs more than the
rows do, and on all threads for many.
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
FEW_ROWS = 16
"""Up to here the rows run on the calling thread: about a microsecond each, a parallel region costs 2 to 40."""


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As ``reference.add_rms_norm``."""
    out = torch.empty(residual.shape, dtype=dtype)
    if delta is None:
        delta = torch.empty(0, residual.shape[1], dtype=dtype)
    kernel = _add_rms_norm_here if len(residual) <= FEW_ROWS else _add_rms_norm_parallel
    kernel(residual.numpy(), as_array(delta), as_array(weight), np.float32(eps), as_array(out))
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
    q_norm, k_norm = (NO_NORM, NO_NORM) if norms is None else (as_array(norms[0]), as_array(norms[1]))
    heads = as_array(qkv).reshape(len(qkv), -1, k_cache.shape[3])
    kernel = _rope_and_store_here if len(qkv) <= FEW_ROWS else _rope_and_store_parallel
    kernel(
        heads,
        as_array(positions),
        as_array(cos),
        as_array(sin),
        q_norm,
        k_norm,
        np.float32(eps),
        as_array(k_cache),
        as_array(v_cache),
        as_array(slots),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """As ``reference.silu_mul``."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    kernel = _silu_mul_here if len(out) <= FEW_ROWS else _silu_mul_parallel
    kernel(as_array(gate_up), as_array(out))
    return out


@njit(inline="always")
def _add_rms_norm_row(row: Any, residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    columns = residual.shape[1]
    if len(delta):
        for i in range(columns):
            residual[row, i] += widen(delta[row, i])
    total = np.float32(0)
    for i in range(columns):
        total += residual[row, i] * residual[row, i]
    scale = np.float32(1) / np.sqrt(total / np.float32(columns) + eps)
    for i in range(columns):
        out[row, i] = narrow(residual[row, i] * scale * weight[i], out)


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _add_rms_norm_here(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in range(len(residual)):
        _add_rms_norm_row(row, residual, delta, weight, eps, out)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _add_rms_norm_parallel(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in prange(len(residual)):
        _add_rms_norm_row(row, residual, delta, weight, eps, out)


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


@njit(inline="always")
def _rope_and_store_row(
    row: Any,
    qkv: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    k: Any,
    v: Any,
    slots: Any,
) -> None:
    kv_heads, block_size, dim = k.shape[1], k.shape[2], k.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    c, s = cos[positions[row]], sin[positions[row]]
    block, offset = slots[row] // block_size, slots[row] % block_size
    for head in range(heads):
        _rotate(qkv[row, head], c, s, q_norm, eps)
    for head in range(kv_heads):
        _rotate(qkv[row, heads + head], c, s, k_norm, eps)
        for i in range(dim):
            k[block, head, offset, i] = qkv[row, heads + head, i]
            v[block, head, offset, i] = qkv[row, heads + kv_heads + head, i]


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _rope_and_store_here(
    qkv: Any, positions: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any, k: Any, v: Any, slots: Any
) -> None:
    for row in range(len(qkv)):
        _rope_and_store_row(row, qkv, positions, cos, sin, q_norm, k_norm, eps, k, v, slots)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _rope_and_store_parallel(
    qkv: Any, positions: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any, k: Any, v: Any, slots: Any
) -> None:
    for row in prange(len(qkv)):
        _rope_and_store_row(row, qkv, positions, cos, sin, q_norm, k_norm, eps, k, v, slots)


@njit(inline="always")
def _silu_mul_row(row: Any, gate_up: Any, out: Any) -> None:
    columns = out.shape[1]
    for i in range(columns):
        gate = widen(gate_up[row, i])
        out[row, i] = narrow(gate / (np.float32(1) + exp(-gate)) * widen(gate_up[row, columns + i]), out)


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _silu_mul_here(gate_up: Any, out: Any) -> None:
    for row in range(len(out)):
        _silu_mul_row(row, gate_up, out)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _silu_mul_parallel(gate_up: Any, out: Any) -> None:
    for row in prange(len(out)):
        _silu_mul_row(row, gate_up, out)
