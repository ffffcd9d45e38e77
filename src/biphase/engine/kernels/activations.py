"""Rows of activations for the few-row products: RMS norm, SwiGLU, and their integers in groups of 32.

A row of ``inner`` elements becomes one record: its upper bytes, its lower bytes, then for each group of 32 the step,
the sum of its elements and 128 times the sum of the integers of each half, then the row itself in float32. An element
is step * (256 upper + lower), 16 bits, or step * upper where one word was asked for (``words`` 1: lossy, faster).
The record is private to a thread: every member of a team makes its own, which takes less time than a barrier.
"""

from typing import Any

import numpy as np
from numba import njit

from biphase.engine.kernels.panels import HALF_WORD
from biphase.engine.kernels.vectors import (
    absolute,
    exp,
    fill_f32,
    fill_i32,
    fma,
    get_f32,
    greater,
    load_f32,
    max_f32,
    put_f32,
    put_i32,
    shift_left,
    shift_right_signed,
    store_f32,
    store_i8,
    sum_f32,
    sum_i32,
    to_int,
)

TINY = float(np.finfo(np.float32).tiny)
LARGEST_STEPS = (127.0, float(HALF_WORD))
"""The largest integer of one word and of two."""


@njit(nogil=True, cache=True, inline="always")
def padded(inner: Any) -> Any:
    """The elements of a record: whole groups of 32."""
    return (inner + 31) // 32 * 32


@njit(nogil=True, cache=True, inline="always")
def record_bytes(inner: Any) -> Any:
    """2 bytes of integers and 4 of float32 an element, 16 bytes a group; rounded to a cache line."""
    return (padded(inner) * 6 + padded(inner) // 32 * 16 + 63) // 64 * 64


@njit(nogil=True, cache=True, inline="always")
def floats_of(record: Any, inner: Any) -> Any:
    """The address of the row in float32 inside a record; zeros up to ``padded(inner)``."""
    return record + padded(inner) * 2 + padded(inner) // 32 * 16


@njit(nogil=True, cache=True, inline="always")
def groups_of(record: Any, inner: Any) -> Any:
    """The address of the 16 bytes of each group: step, sum in units of the value, 128 * sums of both halves."""
    return record + padded(inner) * 2


@njit(nogil=True, cache=True)
def quantize(record: Any, inner: Any, words: Any) -> None:
    """Fill the integers of a record from its float32."""
    floats, groups = floats_of(record, inner), groups_of(record, inner)
    lower, largest = record + padded(inner), np.float32(LARGEST_STEPS[words - 1])
    for group in range(padded(inner) // 32):
        a, b = load_f32(floats + 128 * group), load_f32(floats + 128 * group + 64)
        peak = max(max_f32(greater(absolute(a), absolute(b))), np.float32(TINY) * largest)
        unit = fill_f32(largest / peak)
        x, y = to_int(a * unit), to_int(b * unit)
        _store_words(record + 32 * group, lower + 32 * group, x, words)
        _store_words(record + 32 * group + 16, lower + 32 * group + 16, y, words)
        at, first, second = groups + 16 * group, sum_i32(x), sum_i32(y)
        # Integers cannot be NaN, so the step is where one of these elements is not finite: 0 or NaN is added.
        zero = fill_f32(np.float32(0))
        step = peak / largest + sum_f32(a * zero + b * zero)
        put_f32(at, step)
        put_f32(at + 4, np.float32(first + second) * step)
        put_i32(at + 8, 128 * first)
        put_i32(at + 12, 128 * second)


@njit(nogil=True, cache=True, inline="always")
def _store_words(upper: Any, lower: Any, x: Any, words: Any) -> None:
    if words == 1:
        store_i8(upper, x)
    else:
        high = shift_right_signed(x + fill_i32(128), 8)
        store_i8(upper, high)
        store_i8(lower, x - shift_left(high, 8))


@njit(nogil=True, cache=True)
def zero_tail(floats: Any, inner: Any) -> None:
    for k in range(inner, padded(inner)):
        put_f32(floats + 4 * k, np.float32(0))


@njit(nogil=True, cache=True)
def rms_norm(x: Any, weight: Any, inner: Any, eps: Any, out: Any) -> None:
    """out = x / rms(x) * weight, all float32 at addresses. Zhang and Sennrich 2019."""
    total, vectors = fill_f32(np.float32(0)), inner // 16
    for v in range(vectors):
        a = load_f32(x + 64 * v)
        total = fma(a, a, total)
    square = sum_f32(total)
    for k in range(16 * vectors, inner):
        square += get_f32(x + 4 * k) * get_f32(x + 4 * k)
    scale = np.float32(1) / np.sqrt(square / np.float32(inner) + eps)
    for v in range(vectors):
        store_f32(out + 64 * v, load_f32(x + 64 * v) * fill_f32(scale) * load_f32(weight + 64 * v))
    for k in range(16 * vectors, inner):
        put_f32(out + 4 * k, get_f32(x + 4 * k) * scale * get_f32(weight + 4 * k))


@njit(nogil=True, cache=True)
def normed_records(x: Any, rows: Any, weight: Any, inner: Any, eps: Any, words: Any, records: Any) -> None:
    """Records of the RMS norms of ``rows`` rows that lie ``inner`` apart."""
    for row in range(rows):
        record = records + row * record_bytes(inner)
        rms_norm(x + 4 * inner * row, weight, inner, eps, floats_of(record, inner))
        zero_tail(floats_of(record, inner), inner)
        quantize(record, inner, words)


@njit(nogil=True, cache=True)
def plain_records(x: Any, rows: Any, inner: Any, stride: Any, words: Any, records: Any) -> None:
    """Records of rows as they are, ``stride`` bytes apart."""
    for row in range(rows):
        record = records + row * record_bytes(inner)
        floats = floats_of(record, inner)
        for v in range(inner // 16):
            store_f32(floats + 64 * v, load_f32(x + stride * row + 64 * v))
        for k in range(inner // 16 * 16, inner):
            put_f32(floats + 4 * k, get_f32(x + stride * row + 4 * k))
        zero_tail(floats, inner)
        quantize(record, inner, words)


@njit(nogil=True, cache=True, inline="always")
def silu_mul(gate: Any, up: Any) -> Any:
    """silu(gate) * up of two vectors. Shazeer 2020, GLU Variants Improve Transformer (SwiGLU)."""
    one = fill_f32(np.float32(1))
    return gate / (one + exp(fill_f32(np.float32(0)) - gate)) * up
