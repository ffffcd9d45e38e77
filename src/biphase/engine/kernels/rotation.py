"""Between the projection and attention: queries and keys rotate, keys and values go to the cache.

Everything is named by address: a view of an array costs two atomic counts, more than the rotation of a head.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from biphase.engine.kernels.activations import rms_norm
from biphase.engine.kernels.cells import BLOCK, cell_bytes, store_key, store_value
from biphase.engine.kernels.vectors import (
    get_f32,
    load_f32,
    put_f32,
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
    """``k`` and ``v`` are the layer's caches [blocks, G, bytes of a cell]."""
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
        cell = ((slot // BLOCK) * shape.kv_heads + keys % shape.kv_heads) * cell_bytes(dim, shape.int8_kv)
        if keys < shape.kv_heads:
            store_key(x, turn.k + cell, slot % BLOCK, dim, shape.int8_kv)
        else:
            store_value(x, turn.v + cell, slot % BLOCK, dim, shape.int8_kv)


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
