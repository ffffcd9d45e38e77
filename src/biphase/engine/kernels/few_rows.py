"""A panel times few rows of activations: the product of decode, bound by reading the panel once.

The vectors of one group of inner elements are unpacked into registers and used for every row, so that each byte of
weights is read from memory once a step whatever the number of rows. Bytes and nibbles are multiplied as they are by the
integers of the activations (``activations.quantize``) and scaled once a group; floats are multiplied in float32. The
sum over groups is in order, so a row's result does not depend on the other rows.
"""

from typing import Any

import numpy as np
from numba import njit, types

from biphase.engine.kernels.activations import CELL, floats_of, groups_of
from biphase.engine.kernels.out_of_line import Kernel, out_of_line
from biphase.engine.kernels.row_products import (
    add_bytes,
    add_bytes_in_halves,
    add_words,
    add_words_in_halves,
)
from biphase.engine.kernels.unpack import (
    AHEAD,
    BF16,
    F16,
    INT8,
    Q4,
    Q4_K,
    Q4_K_BLOCK,
    Q6_K,
    Q6_K_BLOCK,
    Q6_K_GROUP,
    Q8,
    load_six_bits,
    panel_bytes,
    steps_of_q4_k,
    steps_of_q6_k,
)
from biphase.engine.kernels.vectors import (
    fill_f32,
    fill_i32,
    fma,
    high_bf16,
    in_register,
    load_f16,
    load_f32,
    load_fill_f32,
    load_i32,
    low_bf16,
    prefetch,
    shift_right,
    store_f32,
)


@njit(nogil=True, cache=True)
def multiply_panel(kind: Any, panel: Any, inner: Any, records: Any, rows: Any, words: Any, out: Any) -> None:
    """``out`` [rows][16] float32 = rows of activations times the 16 rows of a panel."""
    for row in range(rows):
        store_f32(out + 64 * row, fill_f32(np.float32(0)))
    if kind == Q4:
        _nibbles(panel, inner, records, rows, words, out)
    elif kind == Q4_K:
        _nibbles_of_blocks(panel, inner, records, rows, words, out)
    elif kind in (Q8, INT8):
        _bytes(kind == INT8, panel, inner, records, rows, words, out)
    elif kind == Q6_K:
        _six_bits(panel, inner, records, rows, words, out)
    else:
        _floats(kind, panel, inner, records, rows, out)


call_product = out_of_line(Kernel.PRODUCT, multiply_panel, *[types.int64] * 7)
"""``multiply_panel`` by its address: (team, its arguments)."""


@njit(nogil=True, cache=True, inline="always")
def _add(weights: Any, scaling: Any, cells: Any, rows: Any, words: Any, out: Any) -> None:
    if words == 2:
        add_words(weights, scaling, cells, rows, out)
    else:
        add_bytes(weights, scaling, cells, rows, out)


@njit(nogil=True, cache=True)
def _nibbles(panel: Any, inner: Any, records: Any, rows: Any, words: Any, out: Any) -> None:
    for group in range(inner // 32):
        at = panel + group * 320
        for line in range(0, 320, 64):
            prefetch(at + AHEAD + line)
        scale, offset = load_f16(at + 256), load_f16(at + 288)
        _add_nibbles(at, scale, offset, records + group * rows * CELL, rows, words, out)


@njit(nogil=True, cache=True)
def _nibbles_of_blocks(panel: Any, inner: Any, records: Any, rows: Any, words: Any, out: Any) -> None:
    for block in range(inner // 256):
        at = panel + block * Q4_K_BLOCK
        for group in range(8):
            scale, offset = steps_of_q4_k(at, group)
            cells = records + (8 * block + group) * rows * CELL
            _add_nibbles(at + 256 * group, scale, offset, cells, rows, words, out)


@njit(nogil=True, cache=True, inline="always")
def _add_nibbles(at: Any, scale: Any, offset: Any, cells: Any, rows: Any, words: Any, out: Any) -> None:
    mask = fill_i32(0x0F0F0F0F)
    p, q, r, s = load_i32(at), load_i32(at + 64), load_i32(at + 128), load_i32(at + 192)
    a, b, c, d = p & mask, q & mask, r & mask, s & mask
    e, f, g, h = shift_right(p, 4) & mask, shift_right(q, 4) & mask, shift_right(r, 4) & mask, shift_right(s, 4) & mask
    _add((a, b, c, d, e, f, g, h), (scale, offset), cells, rows, words, out)


@njit(nogil=True, cache=True)
def _bytes(by_row: Any, panel: Any, inner: Any, records: Any, rows: Any, words: Any, out: Any) -> None:
    """q + 128 is the unsigned operand, so the offset is -128 times the scale."""
    size = 512 if by_row else 544
    for group in range(groups_of(inner)):
        at = panel + group * size
        for line in range(0, size, 64):
            prefetch(at + AHEAD + line)
        a, b, c, d = load_i32(at), load_i32(at + 64), load_i32(at + 128), load_i32(at + 192)
        e, f, g, h = load_i32(at + 256), load_i32(at + 320), load_i32(at + 384), load_i32(at + 448)
        scale = fill_f32(np.float32(1)) if by_row else load_f16(at + 512)
        offset = scale * fill_f32(np.float32(-128))
        _add((a, b, c, d, e, f, g, h), (scale, offset), records + group * rows * CELL, rows, words, out)
    if by_row:
        scale = load_f32(panel + panel_bytes(INT8, inner) - 64)
        for row in range(rows):
            store_f32(out + 64 * row, load_f32(out + 64 * row) * scale)


@njit(nogil=True, cache=True)
def _six_bits(panel: Any, inner: Any, records: Any, rows: Any, words: Any, out: Any) -> None:
    """q + 32 is the unsigned operand, and each half of a group has a scale of its own."""
    minus = fill_f32(np.float32(-32))
    for block in range(inner // 256):
        base = panel + block * Q6_K_BLOCK
        for group in range(8):
            first, second = steps_of_q6_k(base, group)
            weights = load_six_bits(base + Q6_K_GROUP * group)
            scaling, cells = (first, first * minus, second, second * minus), records + (8 * block + group) * rows * CELL
            if words == 2:
                add_words_in_halves(weights, scaling, cells, rows, out)
            else:
                add_bytes_in_halves(weights, scaling, cells, rows, out)


@njit(nogil=True, cache=True, inline="always")
def _pair(kind: Any, panel: Any, pair: Any) -> Any:
    """Inner elements 2 pair and 2 pair + 1 of an unquantised panel, as float32."""
    if kind == BF16:
        both = load_i32(panel + 64 * pair)
        return low_bf16(both), high_bf16(both)
    if kind == F16:
        return load_f16(panel + 64 * pair), load_f16(panel + 64 * pair + 32)
    return load_f32(panel + 128 * pair), load_f32(panel + 128 * pair + 64)


@njit(nogil=True, cache=True)
def _floats(kind: Any, panel: Any, inner: Any, records: Any, rows: Any, out: Any) -> None:
    bytes_of_pair = panel_bytes(kind, 2)
    for octet in range(inner // 8):
        for line in range(0, 4 * bytes_of_pair, 64):
            prefetch(panel + 4 * octet * bytes_of_pair + AHEAD + line)
        a, b = _pair(kind, panel, 4 * octet)
        c, d = _pair(kind, panel, 4 * octet + 1)
        e, f = _pair(kind, panel, 4 * octet + 2)
        g, h = _pair(kind, panel, 4 * octet + 3)
        for row in range(rows):
            x = in_register(floats_of(records, row, rows, inner) + 32 * octet)
            even = fma(a, load_fill_f32(x), load_f32(out + 64 * row))
            odd = b * load_fill_f32(x + 4)
            even, odd = fma(c, load_fill_f32(x + 8), even), fma(d, load_fill_f32(x + 12), odd)
            even, odd = fma(e, load_fill_f32(x + 16), even), fma(f, load_fill_f32(x + 20), odd)
            even, odd = fma(g, load_fill_f32(x + 24), even), fma(h, load_fill_f32(x + 28), odd)
            store_f32(out + 64 * row, even + odd)
    for k in range(inner // 8 * 8, inner):
        first, second = _pair(kind, panel, k >> 1) if k + 1 < inner or kind == BF16 else _last(kind, panel, k)
        weight = second if k & 1 else first
        for row in range(rows):
            x = floats_of(records, row, rows, inner) + 4 * k
            store_f32(out + 64 * row, fma(weight, load_fill_f32(x), load_f32(out + 64 * row)))


@njit(nogil=True, cache=True, inline="always")
def _last(kind: Any, panel: Any, k: Any) -> Any:
    """The last element of an odd number, which has no partner to read."""
    last = load_f16(panel + 32 * k) if kind == F16 else load_f32(panel + 64 * k)
    return last, last
