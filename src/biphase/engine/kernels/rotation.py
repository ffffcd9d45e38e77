"""Between the projection and attention: queries and keys rotate, keys and values go to the cache.

Everything is named by address: a view of an array costs two atomic counts, more than the rotation of a head.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from biphase.engine.kernels.activations import rms_norm
from biphase.engine.kernels.row_attention import BLOCK
from biphase.engine.kernels.vectors import (
    get_f32,
    load_f32,
    put_f16,
    put_f32,
    store_f16,
    store_f32,
)


class Rotation(NamedTuple):
    """Addresses of one layer: tables [positions, D / 2], norms [2, D] (or 0), caches of keys and of values."""

    cos: Any
    sin: Any
    norms: Any
    k: Any
    v: Any


@njit(nogil=True, cache=True, error_model="numpy")
def rotation_of(layer: Any, shape: Any, image: Any, k: Any, v: Any) -> Any:
    """``k`` and ``v`` are the layer's caches [blocks, G, D, 16] and [blocks, G, 16, D], float16 as uint16."""
    norms = np.int64(0)
    if len(image.qk_norms):
        norms = np.int64(image.qk_norms.ctypes.data + layer * 2 * shape.dim * 4)
    return Rotation(
        np.int64(image.cos.ctypes.data),
        np.int64(image.sin.ctypes.data),
        norms,
        np.int64(k.ctypes.data),
        np.int64(v.ctypes.data),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_and_store(turn: Any, head: Any, position: Any, slot: Any, shape: Any, qkv: Any) -> None:
    """One head of a row ``qkv`` [(H + 2 G) D]: a query or key rotates in place, a key or value goes to its slot."""
    dim, keys = shape.dim, head - shape.heads
    x = qkv + 4 * head * dim
    if keys < shape.kv_heads:
        if turn.norms:
            norm = turn.norms + (0 if keys < 0 else 4 * dim)
            rms_norm(x, norm, dim, np.float32(shape.eps), x)
        table = np.int64(position) * (dim // 2) * 4
        rotate(x, turn.cos + table, turn.sin + table, dim // 2)
    if keys >= 0:
        block = ((slot // BLOCK) * shape.kv_heads + keys % shape.kv_heads) * dim * BLOCK * 2
        if keys < shape.kv_heads:
            _store_key(x, turn.k + block + 2 * (slot % BLOCK), dim)
        else:
            _store_value(x, turn.v + block + 2 * dim * (slot % BLOCK), dim)


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(x: Any, cos: Any, sin: Any, half: Any) -> None:
    """Rotary embedding of one head [2 ``half``] in place; pairs are (i, i + half). Su et al. 2021, section 3.2."""
    other, whole = x + 4 * half, half // 16 * 64
    for at in range(0, whole, 64):
        low, high, c, s = load_f32(x + at), load_f32(other + at), load_f32(cos + at), load_f32(sin + at)
        store_f32(x + at, low * c - high * s)
        store_f32(other + at, high * c + low * s)
    for at in range(whole, 4 * half, 4):
        first, second, c, s = get_f32(x + at), get_f32(other + at), get_f32(cos + at), get_f32(sin + at)
        put_f32(x + at, first * c - second * s)
        put_f32(other + at, second * c + first * s)


@njit(nogil=True, cache=True, error_model="numpy")
def _store_key(x: Any, column: Any, dim: Any) -> None:
    """A key [D] as one column of a block [D, 16]."""
    for d in range(dim):
        put_f16(column + 2 * BLOCK * d, get_f32(x + 4 * d))


@njit(nogil=True, cache=True, error_model="numpy")
def _store_value(x: Any, row: Any, dim: Any) -> None:
    """A value [D] as one row of a block [16, D]; D is a multiple of 16."""
    for d in range(0, dim, 16):
        store_f16(row + 2 * d, load_f32(x + 4 * d))
