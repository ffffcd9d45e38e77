"""Attention of a chunk by products of int8, for ``--activations int8``: the steps of ``flash`` for a row tile.

As SageAttention (Zhang et al. 2024) takes queries and keys, with a scale for each row of either; here probabilities and
values are bytes as well. A value has a scale of its own, as a key has, both those of the int8 cache where there is one.
Probabilities of a row and a block of 64 keys, times the scales of their values, are bytes in units of the largest of
them. So nothing that a row does not see changes its result, nor does the place where a chunk was cut.

Only where vectors have the dot product of bytes: it takes four inner elements where float32 takes one. AMX keeps the
words of bfloat16.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from biphase.engine.kernels.cells import BLOCK, LEAST
from biphase.engine.kernels.chunks import KEYS, count_of
from biphase.engine.kernels.features import features
from biphase.engine.kernels.online_softmax import power2, query_scale, raise_maxima, row_maxima
from biphase.engine.kernels.tiles import TILE_BYTES
from biphase.engine.kernels.vectors import (
    I32,
    I64,
    V_I32,
    constant,
    dot_int8,
    emit_dot_int8,
    fill_f32,
    fill_i32,
    fma,
    get_f32,
    greater,
    larger_magnitude,
    largest_magnitude,
    load_f16,
    load_f32,
    load_fill_f32,
    load_i8,
    load_i32,
    pointer,
    put_f32,
    shift_left,
    splat,
    store_f32,
    store_i8,
    store_i32,
    to_float,
    to_int,
)

_THERE = features().int8_dot and not features().tiles
_ROWS = 4 if features().int8_dot else 1
"""Rows whose sums with four columns stay in registers: 4 x 4 of 32."""
_UNITS, _BACK = TILE_BYTES, TILE_BYTES + 64
"""Behind the probabilities [16, 64]: what makes integers of a row's, and what makes numbers of these."""


@njit(nogil=True, cache=True, error_model="numpy")
def takes_int8(words: Any) -> Any:
    """Whether attention beside activations of so many ``words`` is taken here."""
    return _THERE and words == 1


@njit(nogil=True, cache=True, error_model="numpy")
def load_queries(q: Any, dim: Any, row: Any, rows: Any, head: Any, state: Any) -> None:
    """A row tile's queries, scaled for powers of 2: [16, D] integers + 128, and their scales [16]."""
    scales, wanted = state + 16 * dim, query_scale(dim)
    store_f32(scales, fill_f32(0))
    for i in range(rows):
        at, largest = q.address + (row + i) * q.stride + head * dim * 4, fill_f32(0)
        for d in range(0, dim, 16):
            largest = larger_magnitude(largest, load_f32(at + 4 * d))
        magnitude = largest_magnitude(largest, largest)
        unit = fill_f32(np.float32(127) / max(magnitude, LEAST))
        for d in range(0, dim, 16):
            store_i8(state + i * dim + d, to_int(load_f32(at + 4 * d) * unit) + fill_i32(128))
        put_f32(scales + 4 * i, magnitude / np.float32(127) * wanted)


@njit(nogil=True, cache=True, error_model="numpy")
def convert_keys(cell: Any, scaled: Any, dim: Any, valid: Any, tile: Any, out: Any) -> None:
    """Tile ``tile`` of a block's keys: [D / 4][16 keys][4 of D]; of its keys ``valid`` are there.

    Behind all four tiles their scales [4, 16], and what their products begin with [4, 16]: the queries' 128 taken back.
    """
    scales, unit = out + KEYS * dim + 64 * tile, fill_f32(0)
    if scaled is None:
        largest = fill_f32(0)
        for d in range(dim):
            largest = larger_magnitude(largest, load_f16(cell + 32 * d))
        unit = fill_f32(127) / greater(largest, fill_f32(LEAST))
        store_f32(scales, largest / fill_f32(127))
    else:
        store_f32(scales, load_f32(cell + BLOCK * dim))
    _forget(scales, valid)
    total = fill_i32(0)
    for d in range(0, dim, 4):
        quad = _quad(cell + 16 * d * _size(scaled), 16 * _size(scaled), unit, unit, unit, unit, scaled)
        store_i32(out + (tile * dim + d) * 16, quad)
        total = dot_int8(total, fill_i32(-0x7F7F7F80), quad)
    store_i32(scales + 256, fill_i32(0) - total)


@njit(nogil=True, cache=True, error_model="numpy")
def convert_values(cell: Any, scaled: Any, dim: Any, valid: Any, tile: Any, columns: Any, out: Any) -> None:
    """Values ``16 tile`` and on of a block: [4][``columns``][16 of D][4 values]; behind all tiles their scales [64]."""
    scales, row = out + KEYS * 16 * columns + 64 * tile, dim * _size(scaled)
    for token in range(0, BLOCK, 4):
        at, place = cell + token * row, out + (4 * tile + token // 4) * columns * 64
        a = _value_unit(at, scaled, dim, cell, token, scales)
        b = _value_unit(at + row, scaled, dim, cell, token + 1, scales)
        c = _value_unit(at + 2 * row, scaled, dim, cell, token + 2, scales)
        d = _value_unit(at + 3 * row, scaled, dim, cell, token + 3, scales)
        for column in range(dim // 16):
            store_i32(place + 64 * column, _quad(at + 16 * column * _size(scaled), row, a, b, c, d, scaled))
    _forget(scales, valid)


@njit(nogil=True, cache=True, inline="always")
def _size(scaled: Any) -> Any:
    return 2 if scaled is None else 1


@njit(nogil=True, cache=True, error_model="numpy")
def forget(keys: Any, values: Any, dim: Any, tile: Any, columns: Any) -> None:
    """A tile none of whose tokens are there."""
    _forget(keys + KEYS * dim + 64 * tile, 0)
    _forget(values + KEYS * 16 * columns + 64 * tile, 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _forget(scales: Any, valid: Any) -> None:
    """The numbers of tokens that are not there count nothing, whatever they are."""
    for token in range(valid, BLOCK):
        put_f32(scales + 4 * token, np.float32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def _value_unit(value: Any, scaled: Any, dim: Any, cell: Any, token: Any, scales: Any) -> Any:
    """What makes integers of a value, whose scale goes to its place."""
    if scaled is None:
        largest = fill_f32(0)
        for d in range(0, dim, 16):
            largest = larger_magnitude(largest, load_f16(value + 2 * d))
        magnitude = largest_magnitude(largest, largest)
        put_f32(scales + 4 * token, magnitude / np.float32(127))
        return fill_f32(np.float32(127) / max(magnitude, LEAST))
    scale = get_f32(cell + BLOCK * dim + 4 * token)
    put_f32(scales + 4 * token, scale)
    return fill_f32(scale)  # which nobody uses: the numbers are integers


@njit(nogil=True, cache=True, inline="always")
def _quad(at: Any, step: Any, a: Any, b: Any, c: Any, d: Any, scaled: Any) -> Any:
    """Four vectors of numbers, ``step`` bytes apart, as bytes side by side."""
    if scaled is None:
        p, q = to_int(load_f16(at) * a), to_int(load_f16(at + step) * b)
        r, s = to_int(load_f16(at + 2 * step) * c), to_int(load_f16(at + 3 * step) * d)
    else:
        p, q, r, s = load_i8(at), load_i8(at + step), load_i8(at + 2 * step), load_i8(at + 3 * step)
    byte = fill_i32(255)
    return (p & byte) | shift_left(q & byte, 8) | shift_left(r & byte, 16) | shift_left(s, 24)


@njit(nogil=True, cache=True, error_model="numpy")
def score(state: Any, present: Any, dim: Any, keys: Any, scores: Any) -> None:
    """Scores [4 tiles][16 rows] of the ``present`` rows (``count_of``) of a row tile and a block's keys."""
    rows = count_of(present)
    _multiply(state, dim, rows, dim // 4, keys, 16 * dim, 64, scores)
    for tile in range(4):
        scales = keys + KEYS * dim + 64 * tile
        scale, start = load_f32(scales), load_i32(scales + 256)
        for i in range(rows):
            at = scores + tile * TILE_BYTES + 64 * i
            both = scale * load_fill_f32(state + 16 * dim + 4 * i)
            store_f32(at, to_float(load_i32(at) + start) * both)


@njit(nogil=True, cache=True, error_model="numpy")
def softmax(scores: Any, present: Any, values: Any, columns: Any, probabilities: Any, sums: Any) -> None:
    """2**(score - level) of 64 keys for each row, as bytes; the sums so far are brought to the new levels."""
    rows = count_of(present)
    maxima, scales = sums + columns * TILE_BYTES, values + KEYS * 16 * columns
    raise_maxima(scores, maxima, sums)
    s, t, u, v = load_f32(scales), load_f32(scales + 64), load_f32(scales + 128), load_f32(scales + 192)
    spoilt = ((s + t) + (u + v)) * fill_f32(0)  # bytes cannot be NaN, so the normaliser is where a value is not finite
    for i in range(rows):
        at, normalizer, level = scores + 64 * i, maxima + 128 + 64 * i, load_fill_f32(maxima + 4 * i)
        a, b = power2(load_f32(at) - level), power2(load_f32(at + TILE_BYTES) - level)
        c, d = power2(load_f32(at + 2 * TILE_BYTES) - level), power2(load_f32(at + 3 * TILE_BYTES) - level)
        store_f32(normalizer, load_f32(normalizer) + ((a + b) + (c + d)) + spoilt)
        store_f32(at, a * s)
        store_f32(at + TILE_BYTES, b * t)
        store_f32(at + 2 * TILE_BYTES, c * u)
        store_f32(at + 3 * TILE_BYTES, d * v)
    largest = row_maxima(scores)
    store_f32(probabilities + _UNITS, fill_f32(255) / greater(largest, fill_f32(LEAST)))
    store_f32(probabilities + _BACK, largest / fill_f32(255))
    for i in range(rows):
        unit = load_fill_f32(probabilities + _UNITS + 4 * i)
        for tile in range(4):
            store_i8(probabilities + 64 * i + 16 * tile, to_int(load_f32(scores + tile * TILE_BYTES + 64 * i) * unit))


@njit(nogil=True, cache=True, error_model="numpy")
def add_values(probabilities: Any, present: Any, values: Any, columns: Any, products: Any, sums: Any) -> None:
    """Add a block's values to the sums; ``products`` is scratch of four tiles."""
    rows = count_of(present)
    for column in range(0, columns, 4):
        _multiply(probabilities, KEYS, rows, KEYS // 4, values + 64 * column, 64, 64 * columns, products)
        for i in range(rows):
            back = load_fill_f32(probabilities + _BACK + 4 * i)
            for at in range(64 * i, 4 * TILE_BYTES + 64 * i, TILE_BYTES):
                place = sums + column * TILE_BYTES + at
                store_f32(place, fma(to_float(load_i32(products + at)), back, load_f32(place)))


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply(left: Any, stride: Any, rows: Any, steps: Any, right: Any, column: Any, step: Any, out: Any) -> None:
    """int32 [4 tiles][16]: ``rows`` rows of unsigned bytes, ``stride`` apart, with four columns of signed ones.

    Columns are ``column`` bytes apart, their vectors ``step``. Rows up to the next multiple of 4 are computed too.
    """
    for row in range(0, rows, _ROWS):
        _multiply_rows(left + row * stride, stride, steps, right, column, step, out + 64 * row)


def _generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
    left, stride, steps, right, column, step, out = values
    sums = [[cgutils.alloca_once_value(b, constant(0, V_I32)) for _ in range(4)] for _ in range(_ROWS)]
    rows = [b.add(left, b.mul(stride, I64(row))) for row in range(_ROWS)]
    columns = [b.add(right, b.mul(column, I64(c))) for c in range(4)]
    with cgutils.for_range(b, steps) as inner:
        from_row, from_column = b.mul(inner.index, I64(4)), b.mul(inner.index, step)
        weights = [b.load(pointer(b, b.add(at, from_column), V_I32), align=1) for at in columns]
        for at, totals in zip(rows, sums, strict=True):
            four = splat(b, b.load(pointer(b, b.add(at, from_row), I32), align=1), V_I32)
            for total, weight in zip(totals, weights, strict=True):
                b.store(emit_dot_int8(b, b.load(total), four, weight), total)
    for row, totals in enumerate(sums):
        for c, total in enumerate(totals):
            b.store(b.load(total), pointer(b, b.add(out, I64(64 * row + c * TILE_BYTES)), V_I32), align=1)
    return context.get_dummy_value()


@intrinsic
def _multiply_rows(
    typing_context: Any, left: Any, stride: Any, steps: Any, right: Any, column: Any, step: Any, out: Any
) -> Any:
    """``_multiply`` for ``_ROWS`` rows, whose sums stay in registers."""
    return types.void(*[types.int64] * 7), _generate
