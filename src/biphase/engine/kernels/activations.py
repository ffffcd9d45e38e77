"""Rows of activations for the few-row products: RMS norm, SwiGLU, and their integers in groups of 32.

A group of a row is one cell: its step, the sum of its elements and that of each half, as their integers say, then its
upper bytes and its lower bytes. An element is step * (256 upper + lower), 16 bits, or step * upper where one word
was asked for (``words`` 1: lossy, faster). The cells of all rows for a group lie together, as a product reads them:
``[groups][rows]``. Records are cells and, after them, the rows themselves in float32. They are private to a thread:
every member of a team makes its own, which takes less time than a barrier.
"""

from typing import Any

import numpy as np
from numba import njit

from biphase.engine.kernels.panels import HALF_WORD
from biphase.engine.kernels.vectors import (
    exp,
    fill_f32,
    fill_i32,
    fma,
    get_f32,
    largest_magnitude,
    load_f32,
    put_f32,
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


CELL = 80
SUM, FIRST_SUM, SECOND_SUM, UPPER, LOWER = 4, 8, 12, 16, 48
"""Where things lie in a cell, after the step."""


@njit(nogil=True, cache=True, inline="always")
def groups_of(inner: Any) -> Any:
    """Groups of 32, the last padded with zeros."""
    return (inner + 31) // 32


@njit(nogil=True, cache=True, inline="always")
def cells_bytes(inner: Any) -> Any:
    """The cells of a row."""
    return groups_of(inner) * CELL


@njit(nogil=True, cache=True, inline="always")
def record_bytes(inner: Any) -> Any:
    """A row's part of records: cells, and 4 bytes an element; rounded to a cache line."""
    return (cells_bytes(inner) + groups_of(inner) * 128 + 63) // 64 * 64


@njit(nogil=True, cache=True, inline="always")
def floats_of(records: Any, row: Any, rows: Any, inner: Any) -> Any:
    """The address of row ``row`` in float32, inside records of ``rows`` rows; zeros fill its last group."""
    return records + rows * cells_bytes(inner) + row * groups_of(inner) * 128


@njit(nogil=True, cache=True, error_model="numpy")
def quantize(floats: Any, inner: Any, words: Any, cell: Any, stride: Any) -> None:
    """The cells of a row of whole groups of float32: the first at ``cell``, ``stride`` bytes apart."""
    largest = np.float32(LARGEST_STEPS[words - 1])
    for group in range(groups_of(inner)):
        a, b = load_f32(floats + 128 * group), load_f32(floats + 128 * group + 64)
        magnitude = largest_magnitude(a, b)
        peak = max(magnitude, np.float32(TINY) * largest)
        # Integers cannot be NaN, so the step is where one of these elements is not finite: 0 or NaN is added.
        step = peak / largest + magnitude * np.float32(0)
        unit = fill_f32(largest / peak)
        x, y = to_int(a * unit), to_int(b * unit)
        at, first, second = cell + group * stride, sum_i32(x), sum_i32(y)
        _store_words(at + UPPER, at + LOWER, x, words)
        _store_words(at + UPPER + 16, at + LOWER + 16, y, words)
        put_f32(at, step)
        put_f32(at + SUM, np.float32(first + second) * step)
        put_f32(at + FIRST_SUM, np.float32(first) * step)
        put_f32(at + SECOND_SUM, np.float32(second) * step)


@njit(nogil=True, cache=True, inline="always")
def _store_words(upper: Any, lower: Any, x: Any, words: Any) -> None:
    if words == 1:
        store_i8(upper, x)
    else:
        store_i8(upper, shift_right_signed(x + fill_i32(128), 8))
        store_i8(lower, x)


@njit(nogil=True, cache=True)
def zero_tail(floats: Any, inner: Any) -> None:
    for k in range(inner, groups_of(inner) * 32):
        put_f32(floats + 4 * k, np.float32(0))


@njit(nogil=True, cache=True)
def copy_row(x: Any, inner: Any, out: Any) -> None:
    """A row of float32 with zeros in its last group."""
    for v in range(inner // 16):
        store_f32(out + 64 * v, load_f32(x + 64 * v))
    for k in range(inner // 16 * 16, inner):
        put_f32(out + 4 * k, get_f32(x + 4 * k))
    zero_tail(out, inner)


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
def normed_record(x: Any, row: Any, rows: Any, weight: Any, inner: Any, eps: Any, words: Any, records: Any) -> None:
    """Row ``row`` of records of ``rows`` rows: the RMS norm of the row at ``x``."""
    floats = floats_of(records, row, rows, inner)
    rms_norm(x, weight, inner, eps, floats)
    zero_tail(floats, inner)
    quantize(floats, inner, words, records + row * CELL, rows * CELL)


@njit(nogil=True, cache=True)
def normed_records(x: Any, rows: Any, weight: Any, inner: Any, eps: Any, words: Any, records: Any) -> None:
    """Records of the RMS norms of ``rows`` rows that lie ``inner`` apart."""
    for row in range(rows):
        normed_record(x + 4 * inner * row, row, rows, weight, inner, eps, words, records)


@njit(nogil=True, cache=True)
def plain_records(x: Any, rows: Any, inner: Any, stride: Any, words: Any, records: Any) -> None:
    """Records of rows as they are, ``stride`` bytes apart."""
    for row in range(rows):
        floats = floats_of(records, row, rows, inner)
        copy_row(x + stride * row, inner, floats)
        quantize(floats, inner, words, records + row * CELL, rows * CELL)


@njit(nogil=True, cache=True, inline="always")
def silu_mul(gate: Any, up: Any) -> Any:
    """silu(gate) * up of two vectors. Shazeer 2020, GLU Variants Improve Transformer (SwiGLU)."""
    one = fill_f32(np.float32(1))
    return gate / (one + exp(fill_f32(np.float32(0)) - gate)) * up
