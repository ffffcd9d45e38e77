"""Attention of single query rows over the paged KV cache: decode, and the last pieces of a prompt.

An item is (row, KV heads, run of blocks). The query heads of a KV head share every key and value that it reads (GQA),
and the KV heads of a block lie side by side, so that an item of all heads reads memory in order; few rows are cut by
heads too, to keep all threads busy. A long context is cut into runs, so that rows of unequal length balance themselves;
``merge`` joins the runs by their maxima and sums (Dao et al. 2023, Flash-Decoding). How heads are shared out does not
change a bit of the result; how a context is cut depends on its length and the window alone.

With the keys of a block's tokens side by side for each dimension (see ``cells``), a vector holds the scores of a whole
block and no product needs a sum across lanes.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from biphase.engine.kernels.cells import BLOCK, load_numbers, number_bytes
from biphase.engine.kernels.out_of_line import Kernel, integers, out_of_line
from biphase.engine.kernels.vectors import (
    exp,
    fill_f32,
    fma,
    get_f32,
    get_i32,
    greater,
    in_register,
    load_f32,
    load_fill_f32,
    max_f32,
    prefetch,
    put_f32,
    store_f32,
    sum_f32,
)

RUN = 16
"""Blocks whose scores are computed before their values are added: 256 tokens, whose keys and values stay in cache."""
AHEAD = 3
"""Cells (a block's keys or values of one head) between the one that is computed and the one that is asked for."""
LOWEST = np.float32(-1e30)
"""The score of a token that is not there: exp(LOWEST - anything real) is below 2e-38, and of no weight beside 1."""


class Past(NamedTuple):
    """What an item reads: the addresses of a layer's keys and values, of its first KV head in block 0.

    ``table`` is the address of the sequence's int32 block ids; tokens before ``start`` (which may be negative) and from
    ``length`` on are not seen.
    """

    keys: Any
    values: Any
    head_bytes: Any
    block_bytes: Any
    table: Any
    start: Any
    length: Any
    int8: Any


@njit(nogil=True, cache=True, inline="always")
def part_bytes(group: Any, dim: Any) -> Any:
    """One KV head of an item: for each query head D sums, the maximum and the sum of weights (a vector's room)."""
    return group * (dim + 16) * 4


@njit(nogil=True, cache=True, inline="always")
def attend_scratch_bytes(heads: Any, dim: Any) -> Any:
    """Scaled queries of all ``heads`` and their scores of a run."""
    return heads * (dim + BLOCK * RUN) * 4


@njit(nogil=True, cache=True)
def attend(
    queries: Any,
    heads: Any,
    group: Any,
    dim: Any,
    scale: Any,
    past: Any,
    first: Any,
    last: Any,
    scratch: Any,
    part: Any,
) -> None:
    """One item: ``heads`` KV heads side by side, whose ``queries`` [heads, group, D] are float32.

    Blocks ``first`` to ``last`` of ``past``'s table are read. Writes ``part`` [heads, group, D + 16].
    """
    width = 4 * (dim + 16)
    for v in range(heads * group * dim // 16):
        store_f32(scratch + 64 * v, load_f32(queries + 64 * v) * fill_f32(scale))
    for g in range(heads * group):
        for v in range(dim // 16 + 1):
            store_f32(part + g * width + 64 * v, fill_f32(np.float32(0)))
        put_f32(part + g * width + 4 * dim, LOWEST)
    scores = scratch + heads * group * dim * 4
    for begin in range(first, last, RUN):
        end = min(begin + RUN, last)
        _score_run(scratch, heads, group, dim, past, begin, end, scores)
        for g in range(heads * group):
            _weigh(scores + 64 * RUN * g, end - begin, part + g * width, dim)
        _add_run(scores, heads, group, dim, past, begin, end, last, part)


call_attend = out_of_line(
    Kernel.ROW_ATTENTION, attend, *[types.int64] * 4, types.float32, integers(Past), *[types.int64] * 4
)
"""``attend`` by its address: (team, its arguments)."""


@njit(nogil=True, cache=True)
def _score_run(queries: Any, heads: Any, group: Any, dim: Any, past: Any, begin: Any, end: Any, scores: Any) -> None:
    """Scores of a run, those of a query head RUN vectors after those of the one before."""
    cells = (end - begin) * heads
    for cell in range(cells):
        block, head = cell // heads, cell % heads
        if cell + AHEAD < cells:
            ahead = _cell(past.keys, past, heads, begin, cell + AHEAD)
        else:
            ahead = _cell(past.values, past, heads, begin, min(cell + AHEAD - cells, cells - 1))
        here = _cell(past.keys, past, heads, begin, cell)
        at, own = scores + 64 * (RUN * group * head + block), queries + 4 * group * dim * head
        seen = past.length - BLOCK * (begin + block)
        if past.int8:
            _score(own, group, dim, here, 1, ahead, seen, at)
        else:
            _score(own, group, dim, here, None, ahead, seen, at)
        _hide(at, group, 0, min(past.start - BLOCK * (begin + block), BLOCK))


@njit(nogil=True, cache=True)
def _add_run(
    weights: Any, heads: Any, group: Any, dim: Any, past: Any, begin: Any, end: Any, last: Any, state: Any
) -> None:
    cells, left = (end - begin) * heads, (last - begin) * heads
    for cell in range(cells):
        block, head = cell // heads, cell % heads
        base = past.values if cell + AHEAD < cells else past.keys
        ahead = _cell(base, past, heads, begin, min(cell + AHEAD, left - 1))
        here = _cell(past.values, past, heads, begin, cell)
        at = weights + 64 * (RUN * group * head + block)
        seen = past.length - BLOCK * (begin + block)
        own = state + 4 * (dim + 16) * group * head
        if past.int8:
            _add_values(at, group, dim, here, 1, ahead, seen, own)
        else:
            _add_values(at, group, dim, here, None, ahead, seen, own)


@njit(nogil=True, cache=True, inline="always")
def _cell(base: Any, past: Any, heads: Any, begin: Any, cell: Any) -> Any:
    """The address of a cell, counted from block ``begin`` of the table, the heads of a block in turn."""
    block = np.int64(get_i32(past.table + 4 * (begin + cell // heads)))
    return base + block * past.block_bytes + cell % heads * past.head_bytes


@njit(nogil=True, cache=True)
def _score(queries: Any, group: Any, dim: Any, keys: Any, scaled: Any, ahead: Any, seen: Any, scores: Any) -> None:
    """Scores of one cell's tokens, ``seen`` of which count; those of query head g lie RUN vectors after those of g - 1.

    The cell at ``ahead`` is asked for meanwhile: blocks lie anywhere, and no processor guesses where the next one is.
    """
    size = BLOCK * number_bytes(scaled)
    for g in range(group):
        store_f32(scores + 64 * RUN * g, fill_f32(np.float32(0)))
    for d in range(0, dim, 8):
        at = keys + size * d
        for line in range(0, 8 * size, 64):
            prefetch(ahead + size * d + line)
        k0, k1 = load_numbers(at, scaled), load_numbers(at + size, scaled)
        k2, k3 = load_numbers(at + 2 * size, scaled), load_numbers(at + 3 * size, scaled)
        k4, k5 = load_numbers(at + 4 * size, scaled), load_numbers(at + 5 * size, scaled)
        k6, k7 = load_numbers(at + 6 * size, scaled), load_numbers(at + 7 * size, scaled)
        for g in range(group):
            q, out = in_register(queries + 4 * (g * dim + d)), scores + 64 * RUN * g
            even = fma(k0, load_fill_f32(q), load_f32(out))
            odd = k1 * load_fill_f32(q + 4)
            even, odd = fma(k2, load_fill_f32(q + 8), even), fma(k3, load_fill_f32(q + 12), odd)
            even, odd = fma(k4, load_fill_f32(q + 16), even), fma(k5, load_fill_f32(q + 20), odd)
            even, odd = fma(k6, load_fill_f32(q + 24), even), fma(k7, load_fill_f32(q + 28), odd)
            store_f32(out, even + odd)
    if scaled is not None:
        prefetch(ahead + size * dim)
        _scale(scores, group, keys + size * dim)
    _hide(scores, group, max(seen, 0), BLOCK)


@njit(nogil=True, cache=True, inline="always")
def _hide(scores: Any, group: Any, begin: Any, end: Any) -> None:
    """Tokens ``begin`` to ``end - 1`` of a cell, if there are any."""
    if begin < end:
        for g in range(group):
            for t in range(begin, end):
                put_f32(scores + 64 * RUN * g + 4 * t, LOWEST)


@njit(nogil=True, cache=True)
def _scale(scores: Any, group: Any, scales: Any) -> None:
    """Scores, or weights, of one cell's tokens times the tokens' scales."""
    for g in range(group):
        at = scores + 64 * RUN * g
        store_f32(at, load_f32(at) * load_f32(scales))


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
def _add_values(
    weights: Any, group: Any, dim: Any, values: Any, scaled: Any, ahead: Any, seen: Any, state: Any
) -> None:
    """Add a cell's values, and ask for those at ``ahead``.

    Tokens after the end have weight 0; what their slots hold is not read. Those before a window's start are read, and
    weigh next to nothing.
    """
    size = BLOCK * number_bytes(scaled)
    row, width = number_bytes(scaled) * dim, 4 * (dim + 16)
    whole = min(seen, BLOCK) // 8 * 8
    if scaled is not None:
        prefetch(ahead + size * dim)
        _scale(weights, group, values + size * dim)
    for v in range(dim // 16):
        at = values + size * v
        for line in range(BLOCK * size * v, BLOCK * size * (v + 1), 64):
            prefetch(ahead + line)
        for t in range(0, whole, 8):
            x = at + row * t
            v0, v1 = load_numbers(x, scaled), load_numbers(x + row, scaled)
            v2, v3 = load_numbers(x + 2 * row, scaled), load_numbers(x + 3 * row, scaled)
            v4, v5 = load_numbers(x + 4 * row, scaled), load_numbers(x + 5 * row, scaled)
            v6, v7 = load_numbers(x + 6 * row, scaled), load_numbers(x + 7 * row, scaled)
            for g in range(group):
                p, out = in_register(weights + 64 * RUN * g + 4 * t), state + g * width + 64 * v
                even = fma(v0, load_fill_f32(p), load_f32(out))
                odd = v1 * load_fill_f32(p + 4)
                even, odd = fma(v2, load_fill_f32(p + 8), even), fma(v3, load_fill_f32(p + 12), odd)
                even, odd = fma(v4, load_fill_f32(p + 16), even), fma(v5, load_fill_f32(p + 20), odd)
                even, odd = fma(v6, load_fill_f32(p + 24), even), fma(v7, load_fill_f32(p + 28), odd)
                store_f32(out, even + odd)
        for t in range(whole, min(seen, BLOCK)):
            value = load_numbers(at + row * t, scaled)
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
