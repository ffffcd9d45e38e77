"""Products of many rows of activations with unpacked panels of weights, in integers.

Both sides are words of eight bits (``row_tiles``): x = 256 xu + xl and w = 256 wu + wl, so that x w = 65536 xu wu +
256 (xu wl + xl wu), the last term being below the rounding of either side. Two int32 sums a block, ``first`` = xu wu
and ``second`` = the mixed terms, are exact, so a result depends neither on the rows beside it nor on the kernel that
took it. With one word of x they are x wu and x wl. Either way the product is (256 first + second) times the scale of
the row and the step of the column.

AMX takes two tiles of rows against one panel at a time, with all eight tile registers; without it, vectors take eight
rows.

An unpacked panel is ``HEADER`` bytes (16 steps and 16 biases in float32, then first column and number of valid columns
in int64) and, for each 64 inner elements, the tiles of its upper and of its lower bytes in the layout of ``tiles``.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from biphase.engine.kernels.activations import silu_mul
from biphase.engine.kernels.features import features
from biphase.engine.kernels.out_of_line import Kernel, integers, out_of_line
from biphase.engine.kernels.row_tiles import (
    TILE_ROWS,
    Quantized,
    block_groups,
    inner_blocks,
    inner_groups,
    tile_bytes,
)
from biphase.engine.kernels.tiles import TILE_BYTES, clear_tile, load_tile, multiply_int8, store_tile
from biphase.engine.kernels.vectors import (
    I32,
    I64,
    V_I32,
    dot_int8,
    emit_dot_int8,
    fill_f32,
    fill_i32,
    fma,
    get_f32,
    get_i64,
    load_f32,
    load_fill_f32,
    load_i32,
    pointer,
    put_f32,
    splat,
    store_f32,
    store_i32,
    to_float,
)

HEADER = 192
BIASES_AT, COLUMN_AT, VALID_AT = 64, 128, 136
"""Byte offsets in the header."""
TILES = features().tiles
_VECTOR_ROWS = 8 if features().int8_dot else 2
"""Rows whose sums stay in registers: 2 x 8 of 32, or what half-width registers hold."""

_PRODUCTS, _PANEL = 0, 4 * TILE_BYTES
"""In the scratch of a thread: four tiles of int32 sums, then two of float32 results for each of two panels."""
GEMM_SCRATCH = 8 * TILE_BYTES


class Mode(IntEnum):
    """What becomes of a product: stored with the bias, added to what is there, or silu(gate) * up of two panels."""

    STORE = 0
    ADD = 1
    GLU = 2


STORE, ADD, GLU = (int(mode) for mode in Mode)


class Output(NamedTuple):
    """Where products go: float32 rows at ``address``, ``stride`` bytes apart, of which ``rows`` exist."""

    mode: int
    address: int
    stride: int
    rows: int


@njit(nogil=True, cache=True, error_model="numpy")
def unpacked_bytes(inner: Any) -> Any:
    """Bytes of one unpacked panel."""
    return HEADER + inner_groups(inner) * 2 * TILE_BYTES


@njit(nogil=True, cache=True, error_model="numpy")
def multiply_panels(x: Any, first: Any, tiles: Any, panels: Any, count: Any, out: Any, scratch: Any) -> None:
    """Row tiles ``first`` to ``first + tiles - 1`` of ``x`` with ``count`` unpacked panels at ``panels``, into ``out``.

    ``GLU`` takes gate and up panels in turn, and the column of the gate. Panels stay in the second-level cache while a
    pair of row tiles, in the first, meets them all.
    """
    size = unpacked_bytes(x.inner)
    for tile in range(first, first + tiles, 2):
        present = min(2, first + tiles - tile)
        rows = min(present * TILE_ROWS, out.rows - tile * TILE_ROWS)
        for p in range(count):
            panel, odd = panels + p * size, p % 2
            values = scratch + _PANEL + odd * 2 * TILE_BYTES
            _multiply_panel(x, tile, present, panel, values, scratch + _PRODUCTS)
            if out.mode == GLU:
                if odd:
                    silu_multiply(scratch + _PANEL, values, rows)
                    _store_panel(scratch + _PANEL, tile * TILE_ROWS, rows, panel - size, out)
            else:
                _store_panel(values, tile * TILE_ROWS, rows, panel, out)


call_multiply = out_of_line(
    Kernel.UNPACKED_PRODUCT,
    multiply_panels,
    integers(Quantized),
    *[types.int64] * 4,
    integers(Output),
    types.int64,
)
"""``multiply_panels`` by its address: (team, its arguments)."""


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_panel(x: Any, tile: Any, present: Any, panel: Any, values: Any, products: Any) -> None:
    """``present`` (1 or 2) row tiles with one panel: float32 [16 ``present``, 16] at ``values``."""
    blocks, groups, each = inner_blocks(x.inner), inner_groups(x.inner), block_groups(x.inner)
    rows = x.tiles + tile * tile_bytes(x)
    steps = load_f32(panel)
    for block in range(blocks):
        begin, end = block * each, min((block + 1) * each, groups)
        left, right = rows + begin * x.words * TILE_BYTES, panel + HEADER + begin * 2 * TILE_BYTES
        if TILES:
            _tile_products(left, left + tile_bytes(x), present, x.words, right, end - begin, products)
        else:
            _vector_products(left, left + tile_bytes(x), present, x.words, right, end - begin, products)
        for t in range(present):
            scales = x.scales + ((tile + t) * blocks + block) * TILE_ROWS * 4
            _scale_tile(products + t * 2 * TILE_BYTES, scales, steps, values + t * TILE_BYTES, block > 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_tile(products: Any, scales: Any, steps: Any, values: Any, add: Any) -> None:
    """Sums of one row tile to float32, stored or added to ``values``."""
    for row in range(TILE_ROWS):
        first = to_float(load_i32(products + 64 * row))
        second = to_float(load_i32(products + TILE_BYTES + 64 * row))
        value = fma(first, fill_f32(256), second) * (steps * load_fill_f32(scales + 4 * row))
        if add:
            value = value + load_f32(values + 64 * row)
        store_f32(values + 64 * row, value)


@njit(nogil=True, cache=True, error_model="numpy")
def silu_multiply(gate: Any, up: Any, rows: Any) -> None:
    """silu(gate) * up of ``rows`` rows of 16 in the place of gate."""
    for at in range(0, 64 * rows, 64):
        store_f32(gate + at, silu_mul(load_f32(gate + at), load_f32(up + at)))


@njit(nogil=True, cache=True, error_model="numpy")
def _store_panel(values: Any, row: Any, rows: Any, panel: Any, out: Any) -> None:
    """As ``store_rows`` for an unpacked panel."""
    bias, column, valid = load_f32(panel + BIASES_AT), get_i64(panel + COLUMN_AT), get_i64(panel + VALID_AT)
    store_rows(values, row, rows, bias, column, valid, out)


@njit(nogil=True, cache=True, error_model="numpy")
def store_rows(values: Any, row: Any, rows: Any, bias: Any, column: Any, valid: Any, out: Any) -> None:
    """``rows`` rows of 16 results to rows ``row`` and on of the output, in ``valid`` columns from ``column`` on."""
    target = out.address + row * out.stride + column * 4
    for i in range(rows):
        value = load_f32(values + 64 * i) + bias
        if valid == TILE_ROWS:
            if out.mode == ADD:
                value = value + load_f32(target)
            store_f32(target, value)
        else:
            store_f32(values + 64 * i, value)
            _store_few(values + 64 * i, target, valid, out.mode == ADD)
        target += out.stride


@njit(nogil=True, cache=True, error_model="numpy")
def put_biases(biases: Any, column: Any, address: Any) -> None:
    """The biases of 16 columns from ``column`` on, zeros where there are none."""
    for lane in range(16):
        put_f32(address + 4 * lane, biases[column + lane] if column + lane < len(biases) else np.float32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def _store_few(values: Any, target: Any, valid: Any, add: Any) -> None:
    for i in range(valid):
        before = get_f32(target + 4 * i) if add else np.float32(0)
        put_f32(target + 4 * i, get_f32(values + 4 * i) + before)


@njit(nogil=True, cache=True, error_model="numpy")
def _tile_products(left: Any, left2: Any, present: Any, words: Any, right: Any, groups: Any, out: Any) -> None:
    """The two sums of each row tile, by AMX. Tiles 0 to 3 are the sums, 4 and 5 the weights, 6 and 7 the rows."""
    _clear_sums()
    if words == 1:
        _tile_products_of_bytes(left, left2, present, right, groups)
    elif present == 2:
        _tile_products_of_words(left, left2, right, groups)
    else:
        _single_tile_products(left, right, groups)
    store_tile(0, out, 64)
    store_tile(1, out + TILE_BYTES, 64)
    store_tile(2, out + 2 * TILE_BYTES, 64)
    if present == 2:
        store_tile(3, out + 3 * TILE_BYTES, 64)
    elif words == 2:
        for at in range(out + TILE_BYTES, out + 2 * TILE_BYTES, 64):
            store_i32(at, load_i32(at) + load_i32(at + TILE_BYTES))


@njit(nogil=True, cache=True, error_model="numpy")
def _clear_sums() -> None:
    clear_tile(0)
    clear_tile(1)
    clear_tile(2)
    clear_tile(3)


@njit(nogil=True, cache=True, error_model="numpy")
def _tile_products_of_words(left: Any, left2: Any, right: Any, groups: Any) -> None:
    for group in range(groups):
        at = group * 2 * TILE_BYTES
        load_tile(4, right + at, 64)
        load_tile(5, right + at + TILE_BYTES, 64)
        load_tile(6, left + at, 64)
        load_tile(7, left2 + at, 64)
        multiply_int8(0, 6, 4)
        multiply_int8(1, 6, 5)
        multiply_int8(2, 7, 4)
        multiply_int8(3, 7, 5)
        load_tile(6, left + at + TILE_BYTES, 64)
        load_tile(7, left2 + at + TILE_BYTES, 64)
        multiply_int8(1, 6, 4)
        multiply_int8(3, 7, 4)


@njit(nogil=True, cache=True, error_model="numpy")
def _single_tile_products(left: Any, right: Any, groups: Any) -> None:
    """The mixed terms in two sums, tiles 1 and 2: one product waits 52 cycles for the one before it in its sum."""
    for group in range(groups):
        at = group * 2 * TILE_BYTES
        load_tile(4, right + at, 64)
        load_tile(5, right + at + TILE_BYTES, 64)
        load_tile(6, left + at, 64)
        load_tile(7, left + at + TILE_BYTES, 64)
        multiply_int8(0, 6, 4)
        multiply_int8(1, 6, 5)
        multiply_int8(2, 7, 4)


@njit(nogil=True, cache=True, error_model="numpy")
def _tile_products_of_bytes(left: Any, left2: Any, present: Any, right: Any, groups: Any) -> None:
    for group in range(groups):
        load_tile(4, right + group * 2 * TILE_BYTES, 64)
        load_tile(5, right + group * 2 * TILE_BYTES + TILE_BYTES, 64)
        load_tile(6, left + group * TILE_BYTES, 64)
        multiply_int8(0, 6, 4)
        multiply_int8(1, 6, 5)
        if present == 2:
            load_tile(7, left2 + group * TILE_BYTES, 64)
            multiply_int8(2, 7, 4)
            multiply_int8(3, 7, 5)


@njit(nogil=True, cache=True, error_model="numpy")
def _vector_products(left: Any, left2: Any, present: Any, words: Any, right: Any, groups: Any, out: Any) -> None:
    """The same sums by vectors. Activations have 128 added, so the sums start at -128 times those of the weights."""
    high, low = _minus_offset(right, groups)
    if words == 2:
        low = low + high
    for tile in range(present):
        rows = left if tile == 0 else left2
        for row in range(0, TILE_ROWS, _VECTOR_ROWS):
            sums = out + tile * 2 * TILE_BYTES + row * 64
            for i in range(_VECTOR_ROWS):
                store_i32(sums + 64 * i, high)
                store_i32(sums + TILE_BYTES + 64 * i, low)
            if words == 2:
                _add_word_products(rows + row * 64, right, groups, sums)
            else:
                _add_byte_products(rows + row * 64, right, groups, sums)


@njit(nogil=True, cache=True, error_model="numpy")
def _minus_offset(right: Any, groups: Any) -> Any:
    """-128 times the sum of each column's bytes: of the high ones, of the low ones."""
    high, low = fill_i32(0), fill_i32(0)
    offset = fill_i32(np.int32(-0x7F7F7F80))  # 128 in each byte
    for at in range(right, right + groups * 2 * TILE_BYTES, 2 * TILE_BYTES):
        for row in range(0, TILE_BYTES, 64):
            high = dot_int8(high, offset, load_i32(at + row))
            low = dot_int8(low, offset, load_i32(at + TILE_BYTES + row))
    return fill_i32(0) - high, fill_i32(0) - low


def _add_products(words: int) -> Any:
    """(rows, weights, groups, sums): add to the two sums of each of ``_VECTOR_ROWS`` rows, which stay in registers."""

    def step(b: Any, left: Any, right: Any, sums: list[tuple[Any, Any]]) -> None:
        high, low = (b.load(pointer(b, b.add(right, I64(at)), V_I32), align=1) for at in (0, TILE_BYTES))
        for row, (first, second) in enumerate(sums):
            for word, products in enumerate((((first, high), (second, low)), ((second, high),))[:words]):
                at = b.add(left, I64(row * 64 + word * TILE_BYTES))
                x = splat(b, b.load(pointer(b, at, I32), align=1), V_I32)
                for total, weights in products:
                    b.store(emit_dot_int8(b, b.load(total), x, weights), total)

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        left, right, groups, out = values
        places = [(b.add(out, I64(64 * row)), b.add(out, I64(TILE_BYTES + 64 * row))) for row in range(_VECTOR_ROWS)]
        sums = [tuple(cgutils.alloca_once(b, V_I32) for _ in pair) for pair in places]
        _move(b, places, sums, lambda b, place, total: b.store(b.load(pointer(b, place, V_I32), align=1), total))
        with cgutils.for_range(b, groups) as group, cgutils.for_range(b, I64(TILE_ROWS)) as four:
            from_row = b.add(b.mul(group.index, I64(words * TILE_BYTES)), b.mul(four.index, I64(4)))
            from_panel = b.add(b.mul(group.index, I64(2 * TILE_BYTES)), b.mul(four.index, I64(64)))
            step(b, b.add(left, from_row), b.add(right, from_panel), sums)
        _move(b, places, sums, lambda b, place, total: b.store(b.load(total), pointer(b, place, V_I32), align=1))
        return context.get_dummy_value()

    return intrinsic(lambda context, left, right, groups, out: (types.void(*[types.int64] * 4), generate))


def _move(b: ir.IRBuilder, places: Any, sums: Any, one: Any) -> None:
    for place_pair, sum_pair in zip(places, sums, strict=True):
        for place, total in zip(place_pair, sum_pair, strict=True):
            one(b, place, total)


_add_word_products = _add_products(2)
_add_byte_products = _add_products(1)
