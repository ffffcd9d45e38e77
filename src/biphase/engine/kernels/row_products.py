"""A group of weights in registers times rows of activations: what ``few_rows`` unpacks, multiplied and scaled.

Several rows at once. A dot product waits for the one before it in its sum, five cycles where two can start in each, so
about ten sums have to be under way; the processor finds them by itself among rows that come one after the other, as
long as its scheduler is its own, and no longer when the other hyper-thread of the core has half of it. So the dot
products of up to sixteen sums stand in turn here, beside the eight vectors of weights in 32 registers: of sixteen rows,
one sum each for both words; of eight rows by word; of four by word and half of the group. With sixteen rows 21 vector
operations are left of the 24 that a row takes alone, and 25 micro-operations of 36.

The sums are of integers and exact, so a row's result does not depend on how many rows it comes with.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from biphase.engine.kernels.activations import CELL, FIRST_SUM, LOWER, SECOND_SUM, SUM, UPPER
from biphase.engine.kernels.features import features
from biphase.engine.kernels.vectors import (
    F32,
    I32,
    I64,
    V_F32,
    V_I32,
    call,
    constant,
    emit_dot_int8,
    emit_in_register,
    float32x16,
    int32x16,
    pointer,
    splat,
)

_SUMS = 16 if features().int8_dot else 1
"""At once, in registers; 1 is a row alone: narrower vectors, or dot products of other operations, leave no room."""
_AT_ONCE = (16, 8, 4, 1)
"""Rows of a block; what eight and four leave comes one by one."""

Scaling = Sequence[tuple[Any, Any, int]]
"""Of the group, or of each of its halves: scale and offset of the weights, and where a cell has the sum of its rows."""


def _in_turn(b: Any, x: Any, weights: Sequence[Any], rows: int, words: int, halves: int) -> list[list[Any]]:
    """int32 sums [rows][halves] of weights and integers of the cells at ``x``."""
    room = _SUMS // rows
    pieces = 2 if halves == 2 or room >= 2 * words or rows == 1 else 1
    by_word = words == 2 and (room >= 2 * pieces or rows == 1)
    length = len(weights) // pieces
    sums: dict[tuple[int, ...], Any] = {}
    for now in [range(words)] if by_word else [[word] for word in range(words)]:
        for i, row, word, piece in product(range(length), range(rows), now, range(pieces)):
            k = piece * length + i
            key = (row, piece, word if by_word else 0)
            total = sums.get(key, constant(0, V_I32))
            if word == 1 and i == 0 and not by_word:
                total = b.shl(total, constant(8, V_I32))
            at = row * CELL + (UPPER, LOWER)[word] + 4 * k
            sums[key] = emit_dot_int8(b, total, weights[k], _fill(b, x, at, I32, V_I32))
    return [_joined(b, sums, row, pieces, by_word, halves) for row in range(rows)]


def _joined(b: Any, sums: dict[tuple[int, ...], Any], row: int, pieces: int, by_word: bool, halves: int) -> list[Any]:
    """The sums of a row: of each half, or of both together; words put together."""
    found = []
    for word in range(2 if by_word else 1):
        parts = [sums[row, piece, word] for piece in range(pieces)]
        found.append(parts if halves == pieces else [b.add(*parts)])
    if not by_word:
        return found[0]
    return [b.add(b.shl(upper, constant(8, V_I32)), lower) for upper, lower in zip(*found, strict=True)]


def _fill(b: Any, address: Any, offset: int, kind: Any, vector: Any) -> Any:
    return splat(b, b.load(pointer(b, b.add(address, I64(offset)), kind), align=1), vector)


def _block(b: Any, x: Any, out: Any, weights: Sequence[Any], rows: int, words: int, scaling: Scaling) -> None:
    """Add the products of ``rows`` rows to their results: sum * step * scale, and offset * sum of the row."""
    for row, sums in enumerate(_in_turn(b, x, weights, rows, words, len(scaling))):
        place = pointer(b, b.add(out, I64(64 * row)), V_F32)
        step, result = _fill(b, x, row * CELL, F32, V_F32), b.load(place, align=1)
        for total, (scale, offset, at) in zip(sums, scaling, strict=True):
            scaled = b.fmul(b.sitofp(total, V_F32), step)
            result = call(b, "llvm.fma.v16f32", V_F32, offset, _fill(b, x, row * CELL + at, F32, V_F32), result)
            result = call(b, "llvm.fma.v16f32", V_F32, scaled, scale, result)
        b.store(result, place, align=1)


def _all_rows(
    b: Any, cells: Any, rows: Any, out: Any, weights: Sequence[Any], words: int, scaling: Scaling, sizes: Sequence[int]
) -> None:
    """Blocks of the first size as long as there are so many rows, then of the next."""
    x, at, left = (cgutils.alloca_once_value(b, value) for value in (cells, out, rows))
    for size in sizes:
        with cgutils.for_range(b, b.udiv(b.load(left), I64(size))):
            first, place = emit_in_register(b, b.load(x)), emit_in_register(b, b.load(at))
            _block(b, first, place, weights, size, words, scaling)
            b.store(b.add(first, I64(size * CELL)), x)
            b.store(b.add(place, I64(size * 64)), at)
        b.store(b.urem(b.load(left), I64(size)), left)


def _products(words: int, halves: int) -> Any:
    sizes = [size for size in _AT_ONCE if size == 1 or size <= _SUMS // halves]
    sums = (SUM,) if halves == 1 else (FIRST_SUM, SECOND_SUM)

    def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        weights, scaling, cells, rows, out = values
        weights, scaling = cgutils.unpack_tuple(b, weights), cgutils.unpack_tuple(b, scaling)
        each = list(zip(scaling[::2], scaling[1::2], sums, strict=True))
        _all_rows(b, cells, rows, out, weights, words, each, sizes)
        return context.get_dummy_value()

    vectors, scalings = types.UniTuple(int32x16, 8), types.UniTuple(float32x16, 2 * halves)
    signature = types.void(vectors, scalings, *[types.int64] * 3)
    return intrinsic(lambda context, weights, scaling, cells, rows, out: (signature, generate))


add_bytes, add_words = _products(1, 1), _products(2, 1)
"""(eight vectors of unsigned bytes, (scale, offset), cells, rows, out): to ``rows`` rows [16] of float32 at ``out`` add
scale * integers * bytes + offset * sum of the activations, with one word of them or both. A vector holds four inner
elements of 16 rows of the matrix."""
add_bytes_in_halves, add_words_in_halves = _products(1, 2), _products(2, 2)
"""The same with scale and offset of each half of the group: (scale, offset, scale, offset)."""
