"""Activations of many rows as integer tiles: what the many-row products multiply the weights with.

A row becomes integers, one step per block of at most 384 inner elements: 16-bit ones in two signed bytes,
v = 256 upper + lower (``words`` 2: step = max |v| / 32512), or plain int8 ones (``words`` 1: step = max |v| / 127, the
lossy choice). Sums of two products of such bytes for each element are exact in float32 up to 512 elements (2 x 128 x
127 x 512 < 2**24); in shorter blocks an outlier takes less from the others' precision (SmolLM2's logits then differ
from float32's by 0.0069 in the root mean square, with twice the length by 0.0083). Neither the rows beside it nor the
place of a chunk's cut change a row's integers, so they do not change its results.

Tiles lie in the order of use: for each 16 rows and 64 inner elements the tile of upper bytes [16, 64], then that of
lower bytes. Where products are taken by vectors, whose dot product wants one side unsigned, 128 is added to every byte.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from biphase.engine.kernels.activations import copy_row, rms_norm, zero_tail
from biphase.engine.kernels.features import features
from biphase.engine.kernels.panels import HALF_WORD
from biphase.engine.kernels.tiles import TILE_BYTES
from biphase.engine.kernels.vectors import (
    fill_f32,
    fill_i32,
    largest_magnitude,
    load_f32,
    put_f32,
    shift_right_signed,
    store_f32,
    store_i8,
    to_int,
)

BLOCK = 384
"""Inner elements that share one step at most."""
TILE_ROWS, TILE_INNER = 16, 64
BYTE_OFFSET = 0 if features().tiles else 128
"""Added to each byte: the tile product takes signed bytes on both sides, the vector one unsigned ones on this."""


class Quantized(NamedTuple):
    """Rows as integers: addresses of ``tiles`` and of ``scales`` (float32 [row tiles, blocks, 16]), and their shape.

    ``scales`` is what a product's integer ``256 a + b`` is multiplied with (see ``gemm``), beside the weights' step.
    """

    tiles: int
    scales: int
    inner: int
    words: int


class Source(NamedTuple):
    """Rows in float32: address, bytes between rows, RMSNorm weights (address, or 0 for no norm) and its epsilon."""

    address: int
    stride: int
    norm: int
    epsilon: float


@njit(nogil=True, cache=True, error_model="numpy")
def inner_groups(inner: Any) -> Any:
    """Groups of 64 inner elements, the last padded with zeros."""
    return (inner + TILE_INNER - 1) // TILE_INNER


@njit(nogil=True, cache=True, error_model="numpy")
def inner_blocks(inner: Any) -> Any:
    """Blocks with a step of their own."""
    return (inner + BLOCK - 1) // BLOCK


@njit(nogil=True, cache=True, error_model="numpy")
def block_groups(inner: Any) -> Any:
    """Groups of 64 in every block but the last, which may have fewer."""
    blocks = inner_blocks(inner)
    return (inner_groups(inner) + blocks - 1) // blocks


@njit(nogil=True, cache=True, error_model="numpy")
def tile_bytes(x: Any) -> Any:
    """Bytes of 16 rows' tiles."""
    return inner_groups(x.inner) * x.words * TILE_BYTES


@njit(nogil=True, cache=True, error_model="numpy")
def row_scratch_bytes(inner: Any) -> Any:
    """Scratch that ``quantize_tile`` needs."""
    return inner_groups(inner) * TILE_INNER * 4


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_tile(source: Any, rows: Any, tile: Any, x: Any, scratch: Any) -> None:
    """Quantise the 16 rows of row tile ``tile`` of ``source``, of which ``rows`` exist in all, into ``x``."""
    for row in range(tile * TILE_ROWS, (tile + 1) * TILE_ROWS):
        if row >= rows:
            _clear(scratch, inner_groups(x.inner) * TILE_INNER)
        else:
            float_row(source, row, x.inner, scratch)
            _clear_tail(x.inner, scratch)
        _quantize_row(scratch, tile, row % TILE_ROWS, x)


@njit(nogil=True, cache=True, error_model="numpy")
def float_row(source: Any, row: Any, inner: Any, out: Any) -> None:
    """One row of ``source`` in float32, normed where it has a norm; zeros fill its last group of 32."""
    at = source.address + row * source.stride
    if source.norm:
        rms_norm(at, source.norm, inner, np.float32(source.epsilon), out)
        zero_tail(out, inner)
    else:
        copy_row(at, inner, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _clear(address: Any, count: Any) -> None:
    for i in range(0, count, 16):
        store_f32(address + 4 * i, fill_f32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def _clear_tail(inner: Any, scratch: Any) -> None:
    for i in range(inner, inner_groups(inner) * TILE_INNER):
        put_f32(scratch + 4 * i, np.float32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_row(values: Any, tile: Any, row: Any, x: Any) -> None:
    blocks, groups, each = inner_blocks(x.inner), inner_groups(x.inner), block_groups(x.inner)
    out = x.tiles + tile * tile_bytes(x) + row * TILE_INNER
    top = np.float32(HALF_WORD if x.words == 2 else 127)
    unit = np.float32(256 if x.words == 2 else 1)
    for block in range(blocks):
        begin, end = block * each, min((block + 1) * each, groups)
        largest = _largest(values, begin * TILE_INNER, end * TILE_INNER)
        put_f32(x.scales + ((tile * blocks + block) * TILE_ROWS + row) * 4, largest / top * unit)
        inverse = top / largest if largest > 0 else np.float32(0)
        for group in range(begin, end):
            _store_words(values + group * TILE_INNER * 4, inverse, x.words, out + group * x.words * TILE_BYTES)


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(values: Any, begin: Any, end: Any) -> Any:
    """NaN where one of the values is: integers cannot be, so the step has to say it."""
    largest = np.float32(0)
    for i in range(begin, end, 32):
        here = largest_magnitude(load_f32(values + 4 * i), load_f32(values + 4 * i + 64))
        largest = here if here > largest or here != here else largest  # or NaN
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def _store_words(values: Any, inverse: Any, words: Any, out: Any) -> None:
    """64 floats as bytes at ``out``, and their lower bytes one tile further."""
    offset = fill_i32(BYTE_OFFSET)
    for i in range(0, TILE_INNER, 16):
        v = to_int(load_f32(values + 4 * i) * fill_f32(inverse))
        if words == 1:
            store_i8(out + i, v + offset)
        else:
            store_i8(out + i, shift_right_signed(v + fill_i32(128), 8) + offset)
            store_i8(out + TILE_BYTES + i, v + offset)
