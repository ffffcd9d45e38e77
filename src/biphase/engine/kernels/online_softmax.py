"""Softmax of one block of scores after another (Milakov and Gimelshein 2018), for 16 rows and 64 keys at a time.

A row tile's state lies together: sums [D / 16 tiles][16 rows] of float32, ``levels`` [16], by what these last shrank
the sums [16], and the normalisers [16 rows][16 lanes]. Scores, four tiles, are logarithms of base 2. A level is what
is subtracted from the scores of its row: a score that the row has had, and no other is more than 8 above it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from biphase.engine.kernels.chunks import KEYS
from biphase.engine.kernels.tiles import TILE_BYTES
from biphase.engine.kernels.vectors import (
    I64,
    V_F32,
    V_I32,
    call,
    constant,
    fill_f32,
    float32x16,
    load_f32,
    load_fill_f32,
    max_f32,
    operation,
    pointer,
    store_f32,
)

RESCALE_ABOVE = 8.0
"""How far above its level a score may be: 2**8 is far from float32's end, and a sum's precision does not depend on it.
Dao's FlashAttention-4 so seldom has to bring sums to a new level."""
NEVER = np.float32(-1e30)
"""A score that a mask sets: finite, so that a block without any visible key gives no NaN."""


@njit(nogil=True, cache=True, error_model="numpy")
def query_scale(dim: Any) -> Any:
    """What queries are multiplied with for scores that are logarithms of base 2."""
    return np.float32(1.4426950408889634) / np.sqrt(np.float32(dim))


@njit(nogil=True, cache=True, error_model="numpy")
def reset(sums: Any, levels: Any) -> None:
    """A row tile that has seen nothing yet."""
    for at in range(sums, levels + 64 + 64 + 1024, 64):
        store_f32(at, fill_f32(0))
    store_f32(levels, fill_f32(NEVER))


@njit(nogil=True, cache=True, error_model="numpy")
def prepare_masks(masks: Any) -> None:
    """16 lanes of NEVER, 16 of 0, 16 of NEVER: any mask of a range is 16 lanes from somewhere in it."""
    store_f32(masks, fill_f32(NEVER))
    store_f32(masks + 64, fill_f32(0))
    store_f32(masks + 128, fill_f32(NEVER))


_hide = operation(
    float32x16,
    [float32x16] * 2,
    lambda b, score, hidden: b.select(b.fcmp_ordered("<", hidden, constant(0)), constant(float(NEVER)), score),
)
"""``NEVER`` where ``hidden`` is below 0, whatever the score was: also where it is not finite."""


@njit(nogil=True, cache=True, error_model="numpy")
def mask(scores: Any, rows: Any, position: Any, window: Any, masks: Any) -> None:
    """Hide what row i, at ``position + i`` counted from the block's first key, does not see."""
    for i in range(rows):
        after = position + i + 1
        before = after - window if window else 0
        for tile in range(KEYS // 16):
            at = scores + tile * TILE_BYTES + 64 * i
            seen = min(max(after - tile * 16, 0), 16)
            gone = min(max(before - tile * 16, 0), 16)
            hidden = load_f32(masks + 4 * (32 - seen)) + load_f32(masks + 4 * (16 - gone))
            store_f32(at, _hide(load_f32(at), hidden))


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _emit_row_maxima(b: Any, scores: Any) -> Any:
    """Maxima of 16 rows of four tiles, lane i that of row i: pairs of rows are folded into each other's free lanes."""
    rows = []
    for row in range(16):
        tiles = [b.load(pointer(b, b.add(scores, I64(64 * row + TILE_BYTES * t)), V_F32), align=1) for t in range(4)]
        rows.append(_larger(b, _larger(b, tiles[0], tiles[1]), _larger(b, tiles[2], tiles[3])))
    for bit in (8, 4, 2, 1):
        own = ir.Constant(V_I32, [lane + (16 if lane & bit else 0) for lane in range(16)])
        other = ir.Constant(V_I32, [(lane ^ bit) + (16 if lane & bit else 0) for lane in range(16)])
        pairs = zip(rows[:bit], rows[bit:], strict=True)
        rows = [_larger(b, b.shuffle_vector(x, y, own), b.shuffle_vector(x, y, other)) for x, y in pairs]
    return rows[0]


row_maxima = operation(float32x16, [types.int64], _emit_row_maxima)
"""Of 16 rows of four tiles at an address."""


def _emit_power2(b: Any, x: Any) -> Any:
    """2**x up to 2**126, and 0 from -127 down: minimax of degree 5 on +-0.5, relative error 1.1e-7 to -126, 1 at 0.

    Hidden keys so count exactly nothing, and a row that has seen only those starts from exactly nothing.
    Adding 1.5 * 2**23 rounds x to an integer n and leaves n in the low bits, from where it is shifted to the exponent.
    """
    lowest = constant(-127.0)
    x = b.select(b.fcmp_unordered(">", x, lowest), x, lowest)
    shifted = b.fadd(x, constant(12582912.0))
    r = b.fsub(x, b.fsub(shifted, constant(12582912.0)))
    p = constant(0.001326472731307149)
    for c in (0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0):
        p = call(b, "llvm.fma.v16f32", V_F32, p, r, constant(c))
    exponent = b.shl(b.bitcast(shifted, V_I32), constant(23, V_I32))
    return b.bitcast(b.add(b.bitcast(p, V_I32), exponent), V_F32)


power2 = operation(float32x16, [float32x16], _emit_power2)
"""2**x; 0 from -127 down; NaN stays NaN."""


@njit(nogil=True, cache=True, inline="always")
def exponentials(scores: Any, level: Any) -> Any:
    """2**(score - level) of a row's 64 keys, whose scores lie in four tiles."""
    a, b = load_f32(scores), load_f32(scores + TILE_BYTES)
    c, d = load_f32(scores + 2 * TILE_BYTES), load_f32(scores + 3 * TILE_BYTES)
    return power2(a - level), power2(b - level), power2(c - level), power2(d - level)


_level = operation(
    float32x16,
    [float32x16] * 2,
    lambda b, level, top: b.select(b.fcmp_ordered(">", b.fsub(top, level), constant(RESCALE_ABOVE)), top, level),
)
"""The level of each row: its own, or ``top`` where that lies more than ``RESCALE_ABOVE`` above."""


@njit(nogil=True, cache=True, error_model="numpy")
def raise_levels(scores: Any, levels: Any, sums: Any) -> None:
    """Bring the levels of rows near the scores of a block, and the sums to them."""
    before = load_f32(levels)
    top = _level(before, row_maxima(scores))
    if max_f32(top - before) == 0:
        return
    store_f32(levels, top)
    store_f32(levels + 64, power2(before - top))
    for i in range(16):
        shrink, normalizer = load_fill_f32(levels + 64 + 4 * i), levels + 128 + 64 * i
        store_f32(normalizer, load_f32(normalizer) * shrink)
        for tile in range(sums + 64 * i, levels, TILE_BYTES):
            store_f32(tile, load_f32(tile) * shrink)
