"""Panels as 16-bit integers in two byte words: what the many-row product multiplies, and single rows as float32.

``unpack_panel`` writes, for every 64 inner elements, two tiles of 1,024 bytes, upper words then lower words, both
signed: w = step (256 upper + lower), each tile [16][16 rows of the matrix][4 inner elements]. That is the B operand of
a tile product, and row by row of a vector dot product. Done once for hundreds of rows of activations.
"""

from typing import Any

import numpy as np
from numba import njit, types

from biphase.engine.kernels.out_of_line import Kernel, out_of_line
from biphase.engine.kernels.panels import Kind
from biphase.engine.kernels.scalars import float_of_bits
from biphase.engine.kernels.vectors import (
    absolute,
    add_halves,
    bits_as_float,
    fill_f32,
    fill_i32,
    float_as_bits,
    fma,
    get_f16,
    get_f32,
    get_i32,
    get_u8,
    high_bf16,
    load_f16,
    load_f32,
    load_i8,
    load_i32,
    low_bf16,
    multiply_halves,
    multiply_high,
    prefetch,
    put_f32,
    shift_left,
    shift_right,
    shift_right_signed,
    store_f32,
    store_i32,
    to_float,
    to_int,
)

Q4, Q4_K, Q8, Q6_K, INT8, BF16, F16, F32 = (int(kind) for kind in Kind)
WORDS = 2048
"""Bytes of unpacked weights for 64 inner elements."""
AHEAD = 4096
"""Bytes from the weights in use to what is asked from memory."""

Q4_K_SCALES, Q4_K_MINIMA, Q4_K_D, Q4_K_M, Q4_K_BLOCK = 2048, 2176, 2304, 2336, 2368
"""Where things lie in a block of Q4_K, after its nibbles; its size."""
Q6_K_GROUP, Q6_K_SCALES, Q6_K_D, Q6_K_BLOCK = 384, 3072, 3328, 3392
"""Likewise of Q6_K, after eight groups of 32 elements; first the size of one."""


@njit(nogil=True, cache=True)
def panel_bytes(kind: Any, inner: Any) -> Any:
    """The size of a panel without its steps, which lie at its end."""
    if kind == Q4:
        return inner // 32 * 320
    if kind == Q4_K:
        return inner // 256 * Q4_K_BLOCK
    if kind == Q8:
        return inner // 32 * 544
    if kind == Q6_K:
        return inner // 256 * Q6_K_BLOCK
    if kind == INT8:
        return (inner + 31) // 32 * 512 + 64
    if kind == BF16:
        return (inner + 1) // 2 * 64
    return inner * (32 if kind == F16 else 64)


@njit(nogil=True, cache=True)
def unpack_panel(kind: Any, panel: Any, inner: Any, out: Any) -> None:
    """Write ceil(inner / 64) pairs of tiles at ``out``; what lies beyond ``inner`` is zero."""
    steps = load_f32(panel + panel_bytes(kind, inner))
    units = fill_f32(np.float32(1)) / steps
    for lane in range(16):  # a row of zeros has step 0
        if get_f32(panel + panel_bytes(kind, inner) + 4 * lane) == 0:
            units = _without(units, lane)
    end = (inner + 63) // 64 * 16
    if kind == Q4:
        done = _unpack_q4(panel, inner // 32, units, out)
    elif kind == Q4_K:
        done = _unpack_q4_k(panel, inner // 256, units, out)
    elif kind == Q8:
        done = _unpack_bytes(panel, inner // 32, 8, 544, units, out)
    elif kind == Q6_K:
        done = _unpack_q6_k(panel, inner // 256, units, out)
    elif kind == INT8:
        done = _unpack_bytes(panel, 1, (inner + 31) // 32 * 8, 0, units, out)
    else:
        done = _unpack_floats(kind, panel, inner, units, out)
    for row in range(done, end):
        at = _place(out, row)
        store_i32(at, fill_i32(0))
        store_i32(at + 1024, fill_i32(0))


call_unpack = out_of_line(Kernel.UNPACKING, unpack_panel, *[types.int64] * 4)
"""``unpack_panel`` by its address: (team, its arguments)."""


@njit(nogil=True, cache=True)
def _without(vector: Any, lane: Any) -> Any:
    """The vector with 0 in one lane."""
    store = np.empty(16, dtype=np.float32)
    store_f32(store.ctypes.data, vector)
    store[lane] = 0
    return load_f32(store.ctypes.data)


@njit(nogil=True, cache=True, inline="always")
def _place(out: Any, row: Any) -> Any:
    """The address of tile row ``row`` (four inner elements) in the upper words."""
    return out + (row >> 4) * WORDS + (row & 15) * 64


@njit(nogil=True, cache=True, inline="always")
def _store_words(at: Any, even: Any, odd: Any) -> None:
    """One row of each tile from 16-bit integers with 128 added: elements 0 and 2 in ``even``'s halves, 1 and 3."""
    first, second = fill_i32(0x00FF00FF), fill_i32(-0x00FF0100)
    upper = (shift_right(even, 8) & first) | (odd & second)
    lower = (even & first) | (shift_left(odd, 8) & second)
    store_i32(at, upper)
    store_i32(at + 1024, lower ^ fill_i32(-0x7F7F7F80))


@njit(nogil=True, cache=True, inline="always")
def _in_halves(values: Any) -> Any:
    """Floats rounded to integers, modulo 2**16, in both halves of their lanes."""
    integers = to_int(values)
    return (integers & fill_i32(0xFFFF)) | shift_left(integers, 16)


@njit(nogil=True, cache=True)
def _unpack_q4(panel: Any, groups: Any, units: Any, out: Any) -> Any:
    for group in range(groups):
        at = panel + group * 320
        for line in range(0, 320, 64):
            prefetch(at + AHEAD + line)
        _unpack_nibbles(at, load_f16(at + 256), load_f16(at + 288), units, group, out)
    return groups * 8


@njit(nogil=True, cache=True, inline="always")
def steps_of_q4_k(block: Any, group: Any) -> Any:
    """d and m of one of the eight groups of a block; asks for as much of a later block as it has of this one."""
    for line in range(5 * group, 5 * group + 5):  # of 37
        prefetch(block + AHEAD + 64 * line)
    d = load_f16(block + Q4_K_D) * to_float(load_i8(block + Q4_K_SCALES + 16 * group))
    return d, load_f16(block + Q4_K_M) * to_float(load_i8(block + Q4_K_MINIMA + 16 * group))


@njit(nogil=True, cache=True)
def _unpack_q4_k(panel: Any, blocks: Any, units: Any, out: Any) -> Any:
    for block in range(blocks):
        at = panel + block * Q4_K_BLOCK
        for group in range(8):
            d, m = steps_of_q4_k(at, group)
            _unpack_nibbles(at + 256 * group, d, m, units, 8 * block + group, out)
    return blocks * 64


@njit(nogil=True, cache=True)
def _unpack_nibbles(at: Any, d: Any, m: Any, units: Any, group: Any, out: Any) -> None:
    """q << 12 times 16 d, of which ``multiply_high`` keeps q d, cut; hence half a unit with m.

    The product is unsigned: where d is negative, w = (15 - q) (-d) + (m + 15 d).
    """
    mask = fill_i32(-0x0FFF1000)
    flip = shift_right_signed(float_as_bits(d), 31)
    below = bits_as_float(float_as_bits(d) & flip)
    scale = _in_halves(absolute(d) * units * fill_f32(16))
    offset = _in_halves(fma(fma(below, fill_f32(15), m), units, fill_f32(128.5)))
    for quad in range(4):
        x, place = load_i32(at + 64 * quad) ^ flip, _place(out, group * 8 + quad)
        even = add_halves(multiply_high(shift_left(x, 12) & mask, scale), offset)
        odd = add_halves(multiply_high(shift_left(x, 4) & mask, scale), offset)
        _store_words(place, even, odd)
        even = add_halves(multiply_high(shift_left(x, 8) & mask, scale), offset)
        odd = add_halves(multiply_high(x & mask, scale), offset)
        _store_words(place + 256, even, odd)


@njit(nogil=True, cache=True, inline="always")
def load_six_bits(at: Any) -> Any:
    """q + 32 of a group of 32 of Q6_K: eight vectors of bytes."""
    nibble, pair = fill_i32(0x0F0F0F0F), fill_i32(0x30303030)
    p, q, r, s = load_i32(at), load_i32(at + 64), load_i32(at + 128), load_i32(at + 192)
    x, y = load_i32(at + 256), load_i32(at + 320)
    return (
        (p & nibble) | (shift_left(x, 4) & pair),
        (q & nibble) | (shift_left(x, 2) & pair),
        (r & nibble) | (x & pair),
        (s & nibble) | (shift_right(x, 2) & pair),
        (shift_right(p, 4) & nibble) | (shift_left(y, 4) & pair),
        (shift_right(q, 4) & nibble) | (shift_left(y, 2) & pair),
        (shift_right(r, 4) & nibble) | (y & pair),
        (shift_right(s, 4) & nibble) | (shift_right(y, 2) & pair),
    )


@njit(nogil=True, cache=True, inline="always")
def steps_of_q6_k(block: Any, group: Any) -> Any:
    """d of both halves of one of the eight groups of a block; asks for a part of a later block."""
    for line in range(7 * group, 7 * group + 7):  # of 53
        prefetch(block + AHEAD + 64 * line)
    d, scales = load_f32(block + Q6_K_D), block + Q6_K_SCALES + 32 * group
    return d * to_float(load_i8(scales)), d * to_float(load_i8(scales + 16))


@njit(nogil=True, cache=True)
def _unpack_q6_k(panel: Any, blocks: Any, units: Any, out: Any) -> Any:
    for block in range(blocks):
        at = panel + block * Q6_K_BLOCK
        for group in range(8):
            row = 64 * block + 8 * group
            first, second = steps_of_q6_k(at, group)
            first, second = first * units, second * units
            e0, e1, e2, e3, o0, o1, o2, o3 = load_six_bits(at + Q6_K_GROUP * group)
            _store_integers(e0, 0x20, 6, first, _place(out, row))
            _store_integers(e1, 0x20, 6, first, _place(out, row + 1))
            _store_integers(e2, 0x20, 6, first, _place(out, row + 2))
            _store_integers(e3, 0x20, 6, first, _place(out, row + 3))
            _store_integers(o0, 0x20, 6, second, _place(out, row + 4))
            _store_integers(o1, 0x20, 6, second, _place(out, row + 5))
            _store_integers(o2, 0x20, 6, second, _place(out, row + 6))
            _store_integers(o3, 0x20, 6, second, _place(out, row + 7))
    return blocks * 64


@njit(nogil=True, cache=True)
def _unpack_bytes(panel: Any, groups: Any, quads: Any, stride: Any, units: Any, out: Any) -> Any:
    """Groups of ``quads`` vectors of bytes, then their scales (float16 in groups of 544 bytes)."""
    for group in range(groups):
        at = panel + group * stride
        d = load_f16(at + 64 * quads) if stride == 544 else load_f32(at + 64 * quads)
        for quad in range(quads):
            prefetch(at + AHEAD + 64 * quad)
            _store_integers(load_i32(at + 64 * quad), 0x80, 8, d * units, _place(out, group * quads + quad))
    return groups * quads


@njit(nogil=True, cache=True, inline="always")
def _store_integers(bytes_: Any, offset: Any, bits: Any, unit: Any, place: Any) -> None:
    """``unit`` times integers of ``bits`` bits, which come as bytes with ``offset`` added.

    An integer in the upper ``bits`` bits of a half times 2**(bits - 1) d, of which ``multiply_halves`` keeps q d.
    """
    spare = 8 - bits
    mask, rounding = fill_i32(-0x00FF0100), fill_i32(0x00800080)
    scale = _in_halves(unit * fill_f32(np.float32(1 << (bits - 1))))
    x = shift_left(bytes_ ^ fill_i32(offset * 0x01010101), spare)
    even = add_halves(multiply_halves(shift_left(x, 8) & mask, scale), rounding)
    odd = add_halves(multiply_halves(x & mask, scale), rounding)
    _store_words(place, even, odd)


@njit(nogil=True, cache=True, inline="always")
def _element(kind: Any, panel: Any, k: Any, inner: Any) -> Any:
    """Inner element k of 16 rows of an unquantised panel; zeros beyond the end."""
    if k >= inner:
        return fill_f32(np.float32(0))
    if kind == BF16:
        pair = load_i32(panel + (k >> 1) * 64)
        return high_bf16(pair) if k & 1 else low_bf16(pair)
    return load_f16(panel + 32 * k) if kind == F16 else load_f32(panel + 64 * k)


@njit(nogil=True, cache=True)
def _unpack_floats(kind: Any, panel: Any, inner: Any, units: Any, out: Any) -> Any:
    rows = (inner + 3) // 4
    for row in range(rows):
        w0 = to_int(_element(kind, panel, 4 * row, inner) * units)
        w1 = to_int(_element(kind, panel, 4 * row + 1, inner) * units)
        w2 = to_int(_element(kind, panel, 4 * row + 2, inner) * units)
        w3 = to_int(_element(kind, panel, 4 * row + 3, inner) * units)
        even = (w0 & fill_i32(0xFFFF)) | shift_left(w2, 16)
        odd = (w1 & fill_i32(0xFFFF)) | shift_left(w3, 16)
        offset = fill_i32(0x00800080)
        _store_words(_place(out, row), add_halves(even, offset), add_halves(odd, offset))
    return rows


@njit(nogil=True, cache=True, error_model="numpy")
def read_row(kind: Any, panel: Any, inner: Any, lane: Any, out: Any) -> None:
    """One row of a matrix as float32 [inner]: the embedding of a token."""
    for k in range(inner):
        put_f32(out + 4 * k, _read(kind, panel, inner, lane, k))


@njit(nogil=True, cache=True, inline="always")
def _nibble(at: Any, lane: Any, i: Any) -> Any:
    """Element i of a group of 32."""
    byte = get_u8(at + (i % 16 // 4) * 64 + 4 * lane + i % 4)
    return byte >> 4 if i >= 16 else byte & 15


@njit(nogil=True, cache=True, error_model="numpy")
def _read(kind: Any, panel: Any, inner: Any, lane: Any, k: Any) -> Any:
    if kind == Q4:
        at = panel + k // 32 * 320
        return np.float32(_nibble(at, lane, k % 32)) * get_f16(at + 256 + 2 * lane) + get_f16(at + 288 + 2 * lane)
    if kind == Q4_K:
        at, group = panel + k // 256 * Q4_K_BLOCK, k % 256 // 32
        d = get_f16(at + Q4_K_D + 2 * lane) * np.float32(get_u8(at + Q4_K_SCALES + 16 * group + lane))
        m = get_f16(at + Q4_K_M + 2 * lane) * np.float32(get_u8(at + Q4_K_MINIMA + 16 * group + lane))
        return np.float32(_nibble(at + 256 * group, lane, k % 32)) * d + m
    if kind == Q6_K:
        at, i = panel + k // 256 * Q6_K_BLOCK, k % 32
        here = at + k % 256 // 32 * Q6_K_GROUP
        upper = get_u8(here + 256 + i // 16 * 64 + 4 * lane + i % 4) >> (i % 16 // 4 * 2) & 3
        d = get_f32(at + Q6_K_D + 4 * lane) * np.float32(np.int8(get_u8(at + Q6_K_SCALES + k % 256 // 16 * 16 + lane)))
        return np.float32(np.int32(_nibble(here, lane, i)) + np.int32(upper << 4) - 32) * d
    if kind == BF16:
        pair = get_i32(panel + k // 2 * 64 + 4 * lane)
        return float_of_bits(np.uint32(pair & 0xFFFF0000 if k & 1 else pair << 16))
    if kind == F16:
        return get_f16(panel + 32 * k + 2 * lane)
    if kind == F32:
        return get_f32(panel + 64 * k + 4 * lane)
    group = 32 if kind == Q8 else (inner + 31) // 32 * 32
    at = panel + k // group * (16 * group + (32 if kind == Q8 else 64))
    q = np.float32(np.int32(get_u8(at + k % group // 4 * 64 + 4 * lane + k % 4)) - 128)
    return q * (get_f16(at + 16 * group + 2 * lane) if kind == Q8 else get_f32(at + 16 * group + 4 * lane))
