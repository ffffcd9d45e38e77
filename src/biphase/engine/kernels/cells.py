"""Cells of the KV cache: the keys or the values of one head in one block of 16 tokens.

| cache   | keys                | values              | then                         | bytes     |
|---------|---------------------|---------------------|------------------------------|-----------|
| float16 | [D, 16 tokens]      | [16 tokens, D]      |                              | 32 D      |
| int8    | [D, 16 tokens], q   | [16 tokens, D], q   | 16 scales float32, by token  | 16 D + 64 |

A number of the int8 cache is q times the scale of its token, which is the largest magnitude of the head's vector / 127.
Both phases write and read the same cells, and one program serves both formats. What loads numbers takes as ``scaled``
either 1, for int8, or None, for float16: a type of its own to numba, so that the loops around are compiled for each.
"""

from typing import Any

import numpy as np
from numba import njit

from biphase.engine.kernels.vectors import (
    fill_f32,
    get_f32,
    largest_magnitude,
    load_f16,
    load_f32,
    load_fill_f32,
    load_i8,
    put_f16,
    put_f32,
    put_i8,
    store_f16,
    to_float,
)

BLOCK = 16
"""Tokens of a cell."""
LEAST = np.float32(1e-36)
"""A vector of nothing larger is zeros: 127 divided by less has no float32."""


@njit(nogil=True, cache=True, inline="always")
def cell_bytes(dim: Any, int8: Any) -> Any:
    """Bytes of a cell of heads of ``dim`` numbers."""
    return 16 * dim + 64 if int8 else 32 * dim


def block_bytes(layers: int, kv_heads: int, dim: int, int8: bool | int) -> int:
    """Bytes of the keys and values of 16 tokens in all layers."""
    return 2 * layers * kv_heads * int(cell_bytes(dim, int8))


@njit(nogil=True, cache=True)
def number_bytes(scaled: Any) -> Any:
    """Bytes of a number."""
    if scaled is None:
        return 2
    return 1


@njit(nogil=True, cache=True)
def load_numbers(at: Any, scaled: Any) -> Any:
    """Sixteen numbers that lie together, not yet scaled."""
    if scaled is None:
        return load_f16(at)
    return to_float(load_i8(at))


@njit(nogil=True, cache=True)
def load_keys(cell: Any, d: Any, dim: Any, scaled: Any) -> Any:
    """Dimension ``d`` of a cell's sixteen keys."""
    numbers = load_numbers(cell + BLOCK * d * number_bytes(scaled), scaled)
    if scaled is None:
        return numbers
    return numbers * load_f32(cell + BLOCK * dim)


@njit(nogil=True, cache=True)
def load_values(cell: Any, token: Any, d: Any, dim: Any, scaled: Any) -> Any:
    """Dimensions ``d`` to ``d + 15`` of the value of a cell's ``token``."""
    numbers = load_numbers(cell + (token * dim + d) * number_bytes(scaled), scaled)
    if scaled is None:
        return numbers
    return numbers * load_fill_f32(cell + BLOCK * dim + 4 * token)


@njit(nogil=True, cache=True, error_model="numpy")
def store_key(x: Any, cell: Any, token: Any, dim: Any, int8: Any) -> None:
    """The float32 key [D] at ``x`` as a cell's ``token``."""
    if int8:
        _store_int8(x, cell + token, BLOCK, cell + BLOCK * dim + 4 * token, dim)
    else:
        for d in range(dim):
            put_f16(cell + 2 * (BLOCK * d + token), get_f32(x + 4 * d))


@njit(nogil=True, cache=True, error_model="numpy")
def store_value(x: Any, cell: Any, token: Any, dim: Any, int8: Any) -> None:
    """The float32 value [D] at ``x`` as a cell's ``token``; D is a multiple of 16."""
    if int8:
        _store_int8(x, cell + dim * token, 1, cell + BLOCK * dim + 4 * token, dim)
    else:
        for d in range(0, dim, 16):
            store_f16(cell + 2 * (dim * token + d), load_f32(x + 4 * d))


@njit(nogil=True, cache=True, error_model="numpy")
def _store_int8(x: Any, first: Any, step: Any, scale: Any, dim: Any) -> None:
    """Bytes from ``first`` on, ``step`` apart. A NaN or an infinity makes the scale, and so the whole token, NaN."""
    largest = np.float32(0)
    for d in range(0, dim, 16):
        largest = largest_magnitude(load_f32(x + 4 * d), fill_f32(largest))
    put_f32(scale, largest / np.float32(127))
    inverse = np.float32(127) / largest if largest > LEAST else np.float32(0)
    for d in range(dim):
        put_i8(first + step * d, np.int32(np.rint(get_f32(x + 4 * d) * inverse)))
