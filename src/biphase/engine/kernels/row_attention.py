"""Attention of single query rows over the paged KV cache: decode, and the last pieces of a prompt.

An item is (row, KV head, run of blocks); its query heads share every key and value that it reads (GQA). A long context
is cut into several items, so that one sequence keeps all threads busy, and rows of unequal length balance themselves;
``merge`` joins the parts by their maxima and sums (Dao et al. 2023, Flash-Decoding).

Cache layout, float16, blocks of 16 tokens: k [blocks, KV heads, D, 16] and v [blocks, KV heads, 16, D]. With the tokens
of one dimension side by side, a vector holds the scores of a whole block and no product needs a sum across lanes.
"""

from typing import Any

import numpy as np
from numba import njit

from biphase.engine.kernels.vectors import (
    exp,
    fill_f32,
    fma,
    get_f32,
    get_i32,
    greater,
    in_register,
    load_f16,
    load_f32,
    load_fill_f32,
    max_f32,
    prefetch,
    put_f32,
    store_f32,
    sum_f32,
)

BLOCK = 16
RUN = 16
"""Blocks whose scores are computed before their values are added: 256 tokens, whose keys and values stay in cache."""
AHEAD = 3
"""Blocks between the one that is computed and the one that is asked for: 6 KB of a head, some 200 ns."""
LOWEST = np.float32(-1e30)
"""The score of a token that is not there; exp(LOWEST - anything real) is 0."""


@njit(nogil=True, cache=True, inline="always")
def part_bytes(group: Any, dim: Any) -> Any:
    """One item's result: for each query head D weighted sums, the maximum and the sum of weights (a vector's room)."""
    return group * (dim + 16) * 4


@njit(nogil=True, cache=True, inline="always")
def attend_scratch_bytes(group: Any, dim: Any) -> Any:
    """Scaled queries and a run's scores."""
    return group * (dim + BLOCK * RUN) * 4


@njit(nogil=True, cache=True)
def attend(
    queries: Any,
    group: Any,
    dim: Any,
    scale: Any,
    keys: Any,
    values: Any,
    block_bytes: Any,
    table: Any,
    first: Any,
    last: Any,
    length: Any,
    scratch: Any,
    part: Any,
) -> None:
    """One item. ``queries`` [group, D] float32; ``keys`` and ``values`` are the addresses of this head in block 0.

    ``table`` is the address of the sequence's int32 block ids, of which blocks ``first`` to ``last`` are read; tokens
    from ``length`` on are not seen. Writes ``part`` [group][D + 16].
    """
    for v in range(group * dim // 16):
        store_f32(scratch + 64 * v, load_f32(queries + 64 * v) * fill_f32(scale))
    width = 4 * (dim + 16)
    for g in range(group):
        for v in range(dim // 16 + 1):
            store_f32(part + g * width + 64 * v, fill_f32(np.float32(0)))
        put_f32(part + g * width + 4 * dim, LOWEST)
    scores = scratch + group * dim * 4
    for begin in range(first, last, RUN):
        end = min(begin + RUN, last)
        for block in range(begin, end):
            at, here = scores + 64 * (block - begin), keys + _block(table, block) * block_bytes
            ahead = here
            if block + AHEAD < 2 * end - begin:
                first_value = block + AHEAD >= end
                index = block + AHEAD - (end - begin) * first_value
                ahead = (values if first_value else keys) + _block(table, index) * block_bytes
            _score(scratch, group, dim, here, ahead, length - BLOCK * block, at)
        for g in range(group):
            _weigh(scores + 64 * RUN * g, end - begin, part + g * width, dim)
        for block in range(begin, end):
            at, here = scores + 64 * (block - begin), values + _block(table, block) * block_bytes
            ahead = here
            if block + AHEAD < last:
                ahead = (values if block + AHEAD < end else keys) + _block(table, block + AHEAD) * block_bytes
            _add_values(at, group, dim, here, ahead, length - BLOCK * block, part)


@njit(nogil=True, cache=True, inline="always")
def _block(table: Any, index: Any) -> Any:
    return np.int64(get_i32(table + 4 * index))


@njit(nogil=True, cache=True)
def _score(queries: Any, group: Any, dim: Any, keys: Any, ahead: Any, seen: Any, scores: Any) -> None:
    """Scores of one block's tokens, ``seen`` of which count; those of head g lie RUN vectors after those of g - 1.

    The block at ``ahead`` is asked for meanwhile: blocks lie anywhere, and no processor guesses where the next one is.
    """
    for g in range(group):
        store_f32(scores + 64 * RUN * g, fill_f32(np.float32(0)))
    for d in range(0, dim, 8):
        at = keys + 32 * d
        for line in range(0, 256, 64):
            prefetch(ahead + 32 * d + line)
        k0, k1, k2, k3 = load_f16(at), load_f16(at + 32), load_f16(at + 64), load_f16(at + 96)
        k4, k5, k6, k7 = load_f16(at + 128), load_f16(at + 160), load_f16(at + 192), load_f16(at + 224)
        for g in range(group):
            q, out = in_register(queries + 4 * (g * dim + d)), scores + 64 * RUN * g
            even = fma(k0, load_fill_f32(q), load_f32(out))
            odd = k1 * load_fill_f32(q + 4)
            even, odd = fma(k2, load_fill_f32(q + 8), even), fma(k3, load_fill_f32(q + 12), odd)
            even, odd = fma(k4, load_fill_f32(q + 16), even), fma(k5, load_fill_f32(q + 20), odd)
            even, odd = fma(k6, load_fill_f32(q + 24), even), fma(k7, load_fill_f32(q + 28), odd)
            store_f32(out, even + odd)
    if seen < BLOCK:
        for g in range(group):
            for t in range(max(seen, 0), BLOCK):
                put_f32(scores + 64 * RUN * g + 4 * t, LOWEST)


@njit(nogil=True, cache=True)
def _weigh(scores: Any, blocks: Any, state: Any, dim: Any) -> None:
    """Scores of a run to weights, and the state of its head rescaled to the new maximum."""
    highest = load_f32(scores)
    for block in range(1, blocks):
        highest = greater(highest, load_f32(scores + 64 * block))
    before = get_f32(state + 4 * dim)
    maximum = max(before, max_f32(highest))
    total = fill_f32(np.float32(0))
    for block in range(blocks):
        weights = exp(load_f32(scores + 64 * block) - fill_f32(maximum))
        store_f32(scores + 64 * block, weights)
        total = total + weights
    rescale = exp(fill_f32(before - maximum))
    for v in range(dim // 16):
        store_f32(state + 64 * v, load_f32(state + 64 * v) * rescale)
    put_f32(state + 4 * dim, maximum)
    put_f32(state + 4 * dim + 4, get_f32(state + 4 * dim + 4) * max_f32(rescale) + sum_f32(total))


@njit(nogil=True, cache=True)
def _add_values(weights: Any, group: Any, dim: Any, values: Any, ahead: Any, seen: Any, state: Any) -> None:
    """Add a block's values, and ask for those at ``ahead``.

    Tokens that are not there have weight 0; what their slots hold is not read.
    """
    row, width = 2 * dim, 4 * (dim + 16)
    whole = min(seen, BLOCK) // 8 * 8
    for v in range(dim // 16):
        at = values + 32 * v
        for line in range(512 * v, 512 * v + 512, 64):
            prefetch(ahead + line)
        for t in range(0, whole, 8):
            x = at + row * t
            v0, v1, v2, v3 = load_f16(x), load_f16(x + row), load_f16(x + 2 * row), load_f16(x + 3 * row)
            v4, v5 = load_f16(x + 4 * row), load_f16(x + 5 * row)
            v6, v7 = load_f16(x + 6 * row), load_f16(x + 7 * row)
            for g in range(group):
                p, out = in_register(weights + 64 * RUN * g + 4 * t), state + g * width + 64 * v
                even = fma(v0, load_fill_f32(p), load_f32(out))
                odd = v1 * load_fill_f32(p + 4)
                even, odd = fma(v2, load_fill_f32(p + 8), even), fma(v3, load_fill_f32(p + 12), odd)
                even, odd = fma(v4, load_fill_f32(p + 16), even), fma(v5, load_fill_f32(p + 20), odd)
                even, odd = fma(v6, load_fill_f32(p + 24), even), fma(v7, load_fill_f32(p + 28), odd)
                store_f32(out, even + odd)
        for t in range(whole, min(seen, BLOCK)):
            value = load_f16(at + row * t)
            for g in range(group):
                out = state + g * width + 64 * v
                store_f32(out, fma(value, load_fill_f32(weights + 64 * RUN * g + 4 * t), load_f32(out)))


@njit(nogil=True, cache=True)
def merge(parts: Any, count: Any, stride: Any, dim: Any, out: Any) -> None:
    """``count`` parts of one head, ``stride`` bytes apart, as the attention's result [D] at ``out``."""
    highest = get_f32(parts + 4 * dim)
    for part in range(1, count):
        highest = max(highest, get_f32(parts + stride * part + 4 * dim))
    total = np.float32(0)
    for part in range(count):
        at = parts + stride * part
        weight = exp(fill_f32(get_f32(at + 4 * dim) - highest))
        total += max_f32(weight) * get_f32(at + 4 * dim + 4)
        for v in range(dim // 16):
            before = load_f32(out + 64 * v) if part else fill_f32(np.float32(0))
            store_f32(out + 64 * v, fma(weight, load_f32(at + 64 * v), before))
    unit = fill_f32(np.float32(1) / total)
    for v in range(dim // 16):
        store_f32(out + 64 * v, load_f32(out + 64 * v) * unit)
