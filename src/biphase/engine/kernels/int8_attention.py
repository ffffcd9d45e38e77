"""Attention of a chunk by products of int8, for ``--activations int8``: the steps of ``flash`` for a row tile.

Queries and keys are 16-bit integers in two bytes with a scale each, multiplied as activations and weights are in
``gemm``: keys of some models have channels a hundred times as large as the others, which in one byte leave nothing of
these. (SageAttention, Zhang et al. 2024, subtracts the mean key instead, in which later tokens have a part.)
Probabilities and values are single bytes. A value has a scale of its own, that of the int8 cache where there is one.
Probabilities of a row and a block of 64 keys, times the scales of their values, are bytes in units of the largest of
them. So no finite number that a row does not see changes its result, nor does the place where a chunk was cut.

Only where vectors have the dot product of bytes, which takes four inner elements where float32 takes one. AMX keeps
the words of bfloat16.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from biphase.engine.kernels.cells import BLOCK, LEAST, load_numbers, number_bytes
from biphase.engine.kernels.chunks import KEYS, count_of
from biphase.engine.kernels.features import features
from biphase.engine.kernels.online_softmax import exponentials, query_scale, raise_levels, row_maxima
from biphase.engine.kernels.panels import HALF_WORD
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
    shift_right_signed,
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
_OFFSETS = -0x7F7F7F80
"""128 in each byte."""
_TO_BYTES, _FROM_BYTES = TILE_BYTES, TILE_BYTES + 64
"""Behind the probabilities [16, 64]: what each row's are multiplied with, and what their products are."""


@njit(nogil=True, cache=True, error_model="numpy")
def takes_int8(words: Any) -> Any:
    """Whether attention beside activations of so many ``words`` is taken here."""
    return _THERE and words == 1


@njit(nogil=True, cache=True, error_model="numpy")
def load_queries(q: Any, dim: Any, row: Any, rows: Any, head: Any, state: Any) -> None:
    """A row tile's queries, scaled for powers of 2: [16][2, D] upper and lower bytes + 128, and their scales [16]."""
    scales, wanted = state + 32 * dim, query_scale(dim)
    store_f32(scales, fill_f32(0))
    for i in range(rows):
        at, largest = q.address + (row + i) * q.stride + head * dim * 4, fill_f32(0)
        for d in range(0, dim, 16):
            largest = larger_magnitude(largest, load_f32(at + 4 * d))
        magnitude = largest_magnitude(largest, largest)
        unit = fill_f32(np.float32(HALF_WORD) / max(magnitude, LEAST))
        for d in range(0, dim, 16):
            x, place = to_int(load_f32(at + 4 * d) * unit), state + 2 * i * dim + d
            store_i8(place, _upper(x) + fill_i32(128))
            store_i8(place + dim, x + fill_i32(128))
        put_f32(scales + 4 * i, magnitude / np.float32(HALF_WORD) * wanted)


@njit(nogil=True, cache=True, inline="always")
def _upper(x: Any) -> Any:
    """Of x = 256 upper + lower, both signed bytes."""
    return shift_right_signed(x + fill_i32(128), 8)


@njit(nogil=True, cache=True, error_model="numpy")
def convert_keys(cell: Any, scaled: Any, dim: Any, valid: Any, tile: Any, out: Any) -> None:
    """Tile ``tile`` of a block's keys: [2, D / 4][16 keys][4 of D], lower bytes, then upper ones.

    Of its keys ``valid`` are there. Behind all four tiles their scales [4, 16], and what the products of upper bytes
    and the mixed ones begin with [2][4, 16]: the 128 that the queries have in each byte, taken back.
    """
    scales, unit = out + 2 * KEYS * dim + 64 * tile, fill_f32(256)
    if scaled is None:
        largest = fill_f32(0)
        for d in range(dim):
            largest = larger_magnitude(largest, load_f16(cell + 32 * d))
        unit = fill_f32(HALF_WORD) / greater(largest, fill_f32(LEAST))
        store_f32(scales, largest / fill_f32(HALF_WORD))
    else:
        store_f32(scales, load_f32(cell + BLOCK * dim) / fill_f32(256))
    _forget(scales, valid)
    lower, upper, step = fill_i32(0), fill_i32(0), 16 * number_bytes(scaled)
    for d in range(0, dim, 4):
        at, place = cell + d * step, out + (2 * tile * dim + d) * 16
        p, q = to_int(load_numbers(at, scaled) * unit), to_int(load_numbers(at + step, scaled) * unit)
        r, s = to_int(load_numbers(at + 2 * step, scaled) * unit), to_int(load_numbers(at + 3 * step, scaled) * unit)
        low, high = _bytes(p, q, r, s), _bytes(_upper(p), _upper(q), _upper(r), _upper(s))
        store_i32(place, low)
        store_i32(place + 16 * dim, high)
        lower = dot_int8(lower, fill_i32(_OFFSETS), low)
        upper = dot_int8(upper, fill_i32(_OFFSETS), high)
    store_i32(scales + 256, fill_i32(0) - upper)
    store_i32(scales + 512, fill_i32(0) - (upper + lower))


@njit(nogil=True, cache=True, error_model="numpy")
def convert_values(cell: Any, scaled: Any, dim: Any, valid: Any, tile: Any, columns: Any, out: Any) -> None:
    """Values ``16 tile`` and on of a block: [4][``columns``][16 of D][4 values]; behind all tiles their scales [64]."""
    scales, row = out + KEYS * 16 * columns + 64 * tile, dim * number_bytes(scaled)
    for token in range(0, BLOCK, 4):
        at, place = cell + token * row, out + (4 * tile + token // 4) * columns * 64
        a = _value_unit(at, scaled, dim, cell, token, scales)
        b = _value_unit(at + row, scaled, dim, cell, token + 1, scales)
        c = _value_unit(at + 2 * row, scaled, dim, cell, token + 2, scales)
        d = _value_unit(at + 3 * row, scaled, dim, cell, token + 3, scales)
        for column in range(dim // 16):
            store_i32(place + 64 * column, _quad(at + 16 * column * number_bytes(scaled), row, a, b, c, d, scaled))
    _forget(scales, valid)


@njit(nogil=True, cache=True, error_model="numpy")
def forget(keys: Any, values: Any, dim: Any, tile: Any, columns: Any) -> None:
    """A tile none of whose tokens are there."""
    _forget(keys + 2 * KEYS * dim + 64 * tile, 0)
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
    return _bytes(p, q, r, s)


@njit(nogil=True, cache=True, inline="always")
def _bytes(p: Any, q: Any, r: Any, s: Any) -> Any:
    """The low bytes of four vectors, side by side in each lane."""
    byte = fill_i32(255)
    return (p & byte) | shift_left(q & byte, 8) | shift_left(r & byte, 16) | shift_left(s, 24)


@njit(nogil=True, cache=True, error_model="numpy")
def score(state: Any, present: Any, dim: Any, keys: Any, mixed: Any, scores: Any) -> None:
    """Scores [4 tiles][16 rows] of the ``present`` rows (``count_of``) of a row tile and a block's keys.

    ``mixed``: scratch for as many int32.
    """
    rows = count_of(present)
    _multiply(state, 2 * dim, rows, dim // 4, keys + 16 * dim, 32 * dim, 64, scores)
    _multiply(state, 2 * dim, rows, dim // 2, keys, 32 * dim, 64, mixed)
    for tile in range(4):
        scales = keys + 2 * KEYS * dim + 64 * tile
        scale, first, second = load_f32(scales), load_i32(scales + 256), load_i32(scales + 512)
        scale = scale * fill_f32(256)
        for i in range(rows):
            at = tile * TILE_BYTES + 64 * i
            upper, both = to_float(load_i32(scores + at) + first), to_float(load_i32(mixed + at) + second)
            unit = scale * load_fill_f32(state + 32 * dim + 4 * i)
            store_f32(scores + at, fma(upper, fill_f32(256), both) * unit)


@njit(nogil=True, cache=True, error_model="numpy")
def softmax(scores: Any, present: Any, values: Any, columns: Any, probabilities: Any, sums: Any) -> None:
    """2**(score - level) of 64 keys for each row, as bytes; the sums so far are brought to the new levels."""
    rows = count_of(present)
    levels, scales = sums + columns * TILE_BYTES, values + KEYS * 16 * columns
    raise_levels(scores, levels, sums)
    s, t, u, v = load_f32(scales), load_f32(scales + 64), load_f32(scales + 128), load_f32(scales + 192)
    spoilt = ((s + t) + (u + v)) * fill_f32(0)  # bytes cannot be NaN, so the normaliser is where a value is not finite
    for i in range(rows):
        at, normalizer, level = scores + 64 * i, levels + 128 + 64 * i, load_fill_f32(levels + 4 * i)
        a, b, c, d = exponentials(at, level)
        store_f32(normalizer, load_f32(normalizer) + ((a + b) + (c + d)) + spoilt)
        store_f32(at, a * s)
        store_f32(at + TILE_BYTES, b * t)
        store_f32(at + 2 * TILE_BYTES, c * u)
        store_f32(at + 3 * TILE_BYTES, d * v)
    largest = row_maxima(scores)
    store_f32(probabilities + _TO_BYTES, fill_f32(255) / greater(largest, fill_f32(LEAST)))
    store_f32(probabilities + _FROM_BYTES, largest / fill_f32(255))
    for i in range(rows):
        unit = load_fill_f32(probabilities + _TO_BYTES + 4 * i)
        for tile in range(4):
            store_i8(probabilities + 64 * i + 16 * tile, to_int(load_f32(scores + tile * TILE_BYTES + 64 * i) * unit))


@njit(nogil=True, cache=True, error_model="numpy")
def add_values(probabilities: Any, present: Any, values: Any, columns: Any, products: Any, sums: Any) -> None:
    """Add a block's values to the sums; ``products`` is scratch of four tiles."""
    rows = count_of(present)
    for column in range(0, columns, 4):
        _multiply(probabilities, KEYS, rows, KEYS // 4, values + 64 * column, 64, 64 * columns, products)
        for i in range(rows):
            back = load_fill_f32(probabilities + _FROM_BYTES + 4 * i)
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
