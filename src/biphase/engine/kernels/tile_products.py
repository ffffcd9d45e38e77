"""Products of a tile of 16 rows with four of 16 columns, for attention: bfloat16 words by AMX, float32 by vectors."""

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from biphase.engine.kernels.chunks import TILES, count_of
from biphase.engine.kernels.features import features
from biphase.engine.kernels.tiles import TILE_BYTES, clear_tile, load_tile, multiply_bf16, store_tile
from biphase.engine.kernels.vectors import F32, I64, V_F32, call, fill_f32, pointer, splat, store_f32

PAIR = 2 * TILE_BYTES
"""A tile of upper words and one of lower, or 32 x 16 numbers in float32."""
_VECTOR_ROWS = 4 if features().int8_dot else 1
"""Rows whose sums stay in registers: 4 x 4 of 32, or what half-width registers hold."""


@njit(nogil=True, cache=True, error_model="numpy")
def multiply(left: Any, present: Any, steps: Any, right: Any, column: Any, step: Any, out: Any, add: Any) -> None:
    """The ``present`` rows (``count_of``) of a tile with four tiles of columns.

    Columns are ``column`` bytes apart, inner tiles ``step``. Rows up to the next multiple of what the processor takes
    at once are computed too. Four float32 tiles at ``out``, which are added to where ``add``.
    """
    if TILES:
        _multiply_tiles(left, steps, right, column, step, out, add)
        return
    for row in range(0, 64 * count_of(present), 64 * _VECTOR_ROWS):
        if not add:
            for at in range(out + row, out + row + 64 * _VECTOR_ROWS, 64):
                for tile in range(0, 4 * TILE_BYTES, TILE_BYTES):
                    store_f32(at + tile, fill_f32(0))
        _multiply_vectors(left + row, steps, right, column, step, out + row)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_tiles(left: Any, steps: Any, right: Any, column: Any, step: Any, out: Any, add: Any) -> None:
    _begin_sums(out, add)
    for _ in range(steps):
        load_tile(4, left, 64)
        load_tile(5, left + TILE_BYTES, 64)
        _multiply_column(0, right)
        _multiply_column(1, right + column)
        _multiply_column(2, right + 2 * column)
        _multiply_column(3, right + 3 * column)
        left, right = left + PAIR, right + step
    store_tile(0, out, 64)
    store_tile(1, out + TILE_BYTES, 64)
    store_tile(2, out + 2 * TILE_BYTES, 64)
    store_tile(3, out + 3 * TILE_BYTES, 64)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _multiply_column(tile: Any, right: Any) -> None:
    load_tile(6, right, 64)
    load_tile(7, right + TILE_BYTES, 64)
    multiply_bf16(tile, 4, 6)
    multiply_bf16(tile, 5, 6)
    multiply_bf16(tile, 4, 7)


@njit(nogil=True, cache=True, error_model="numpy")
def _begin_sums(out: Any, add: Any) -> None:
    if add:
        load_tile(0, out, 64)
        load_tile(1, out + TILE_BYTES, 64)
        load_tile(2, out + 2 * TILE_BYTES, 64)
        load_tile(3, out + 3 * TILE_BYTES, 64)
    else:
        clear_tile(0)
        clear_tile(1)
        clear_tile(2)
        clear_tile(3)


def _emit_products(b: Any, left: Any, right: list[Any], sums: list[list[Any]]) -> None:
    """One inner element of each row with those of four columns."""
    weights = [b.load(pointer(b, at, V_F32), align=1) for at in right]
    for row, totals in enumerate(sums):
        value = splat(b, b.load(pointer(b, b.add(left, I64(64 * row)), F32), align=1), V_F32)
        for total, weight in zip(totals, weights, strict=True):
            b.store(call(b, "llvm.fma.v16f32", V_F32, value, weight, b.load(total)), total)


def _generate_vectors(context: Any, b: Any, signature: Any, values: Any) -> Any:
    left, steps, right, column, step, out = values
    places = [[b.add(out, I64(64 * row + TILE_BYTES * c)) for c in range(4)] for row in range(_VECTOR_ROWS)]
    sums = [[cgutils.alloca_once(b, V_F32) for _ in places_of_row] for places_of_row in places]
    pairs = [pair for at, total in zip(places, sums, strict=True) for pair in zip(at, total, strict=True)]
    for place, total in pairs:
        b.store(b.load(pointer(b, place, V_F32), align=1), total)
    with cgutils.for_range(b, steps) as inner, cgutils.for_range(b, I64(2)) as half:
        tile = b.mul(half.index, I64(TILE_BYTES))
        from_left = b.add(left, b.add(b.mul(inner.index, I64(PAIR)), tile))
        from_right = b.add(right, b.add(b.mul(inner.index, step), tile))
        with cgutils.for_range(b, I64(16)) as one:
            at = b.add(from_right, b.mul(one.index, I64(64)))
            columns = [b.add(at, b.mul(column, I64(c))) for c in range(4)]
            _emit_products(b, b.add(from_left, b.mul(one.index, I64(4))), columns, sums)
    for place, total in pairs:
        b.store(b.load(total), pointer(b, place, V_F32), align=1)
    return context.get_dummy_value()


@intrinsic
def _multiply_vectors(typing_context: Any, left: Any, steps: Any, right: Any, column: Any, step: Any, out: Any) -> Any:
    """As ``_multiply`` for ``_VECTOR_ROWS`` rows, always adding; the sums stay in registers."""
    return types.void(*[types.int64] * 6), _generate_vectors
