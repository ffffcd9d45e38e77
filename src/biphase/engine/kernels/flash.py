"""Causal attention of a chunk of rows over paged keys and values: tiles, softmax online.

Dao 2023 (FlashAttention-2), with the query heads of one key/value head worked on together, so that they share its keys.
An item is a tile of queries and one such head; key blocks of 64 are taken in turn, each against every row tile of the
item (16 queries of one head), so that a block is read from the first-level cache.

With AMX every number is two bfloat16 words, its upper 8 significant bits and the next 8. Keys and values in float16 are
exact so; queries, probabilities and the numbers of an int8 cache keep 16 bits. The product of two lower words is
dropped. The words come in pairs (i, i + 16) of the inner dimension, which is how two vectors interleave at the price of
a shift; the order within a sum of products is free as long as both sides agree. Vectors take the numbers in float32, in
the same places: bfloat16 products are at most twice as fast there (Zen 4; half as fast on Sapphire Rapids), and three
would be needed for one.

A row's sums are taken in an order that depends on nothing but its position, wherever the chunk was cut.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types

from biphase.engine.kernels.cells import cell_bytes, load_keys, load_values
from biphase.engine.kernels.tile_products import PAIR, TILES, multiply
from biphase.engine.kernels.tiles import TILE_BYTES
from biphase.engine.kernels.vectors import (
    I64,
    V_F32,
    V_I32,
    bits_as_float,
    call,
    constant,
    fill_f32,
    fill_i32,
    float32x16,
    float_as_bits,
    get_i32,
    greater,
    load_f32,
    load_fill_f32,
    max_f32,
    operation,
    pointer,
    prefetch,
    put_i32,
    shift_right,
    store_f32,
    store_i32,
    sum_f32,
)

PAGE = 16
"""Tokens of a block of the cache."""
KEYS = 64
"""Keys of a block of this kernel: four tiles of scores."""
_LEAST_ROWS = 16 if TILES else 8
"""Rows that an item's queries come in multiples of: AMX takes no less time for fewer than 16."""
_CONVERSION = 32 if TILES else 3
"""Queries of one head with which a converted block could be used in the time that its conversion takes."""
_LOG2_E = 1.4426950408889634
_NEVER = np.float32(-1e30)
"""A score that a mask sets: finite, so that a block without any visible key gives no NaN."""


class Heads(NamedTuple):
    """The attention of a model: ``window`` is the count of tokens that a row sees, itself included; 0 is all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    int8_kv: int = 0


class Chunk(NamedTuple):
    """Rows ``begin`` to ``begin + rows - 1`` of a step: one sequence, after ``past`` tokens, with its block table."""

    begin: int
    rows: int
    past: int
    table: int


class Rows(NamedTuple):
    """float32 rows at an address, ``stride`` bytes apart."""

    address: int
    stride: int


@njit(nogil=True, cache=True, error_model="numpy")
def _steps(dim: Any) -> Any:
    """Tiles of 32 inner elements over the head's dimension."""
    return (dim + 31) // 32


@njit(nogil=True, cache=True, error_model="numpy")
def _padded(dim: Any) -> Any:
    """The head's dimension in whole groups of four tiles of values."""
    return (dim + 63) // 64 * 64


@njit(nogil=True, cache=True, error_model="numpy")
def _key_tiles(dim: Any) -> Any:
    """Bytes of the key tiles of a block, [4 key tiles, steps]; its value tiles [2 key steps, dimension / 16] follow."""
    return 4 * _steps(dim) * PAIR


@njit(nogil=True, cache=True, error_model="numpy")
def block_bytes(dim: Any) -> Any:
    """Bytes of a converted block of 64 keys and values of one head."""
    return _key_tiles(dim) + 2 * (_padded(dim) // 16) * PAIR


@njit(nogil=True, cache=True, error_model="numpy")
def _store_split(low: Any, high: Any, address: Any) -> None:
    """One row of a tile of upper words and of the tile of lower words behind it, both cut, not rounded.

    For vectors: ``low`` in the first tile, ``high`` in the second.
    """
    if not TILES:
        store_f32(address, low)
        store_f32(address + TILE_BYTES, high)
        return
    upper = fill_i32(-65536)
    low_bits, high_bits = float_as_bits(low), float_as_bits(high)
    store_i32(address, shift_right(low_bits, 16) | (high_bits & upper))
    low_rest = float_as_bits(low - bits_as_float(low_bits & upper))
    high_rest = float_as_bits(high - bits_as_float(high_bits & upper))
    store_i32(address + TILE_BYTES, shift_right(low_rest, 16) | (high_rest & upper))


@njit(nogil=True, cache=True, error_model="numpy")
def convert_block(k: Any, v: Any, shape: Any, chunk: Any, head: Any, block: Any, out: Any) -> None:
    """Tiles of key block ``block`` of one kv head from a layer's caches at ``k`` and ``v`` [blocks, G, cell].

    Tokens past the end of the sequence become zeros, whatever the cache holds there.
    """
    dim, length = shape.head_dim, chunk.past + chunk.rows
    for tile in range(KEYS // PAGE):
        token = block * KEYS + tile * PAGE
        valid = min(max(length - token, 0), PAGE)
        keys = out + tile * _steps(dim) * PAIR
        if valid:
            page = k + _page(chunk, shape, head, token)
            if shape.int8_kv:
                _convert_keys(page, 1, dim, keys)
            else:
                _convert_keys(page, None, dim, keys)
        if valid < PAGE:
            _forget(keys, _steps(dim), valid)
    for step in range(KEYS // (2 * PAGE)):
        token = block * KEYS + step * 2 * PAGE
        values = out + _key_tiles(dim) + step * (_padded(dim) // 16) * PAIR
        first = v + _page(chunk, shape, head, token) if token < length else 0
        second = v + _page(chunk, shape, head, token + PAGE) if token + PAGE < length else 0
        if shape.int8_kv:
            _convert_values(first, second, 1, length - token, dim, values)
        else:
            _convert_values(first, second, None, length - token, dim, values)


@njit(nogil=True, cache=True, error_model="numpy")
def _ask_for_block(k: Any, v: Any, shape: Any, chunk: Any, head: Any, block: Any) -> None:
    """Prefetch the pages of a key block: they lie anywhere, and no processor guesses where the next one is."""
    end = min(block * KEYS + KEYS, chunk.past + chunk.rows)
    for token in range(block * KEYS, end, PAGE):
        page = _page(chunk, shape, head, token)
        for line in range(page, page + cell_bytes(shape.head_dim, shape.int8_kv), 64):
            prefetch(k + line)
            prefetch(v + line)


@njit(nogil=True, cache=True, error_model="numpy")
def _page(chunk: Any, shape: Any, head: Any, token: Any) -> Any:
    """Byte offset of a token's page of one head in a layer's keys (or values)."""
    page = np.int64(get_i32(chunk.table + token // PAGE * 4))
    return (page * shape.kv_heads + head) * cell_bytes(shape.head_dim, shape.int8_kv)


@njit(nogil=True, cache=True, error_model="numpy")
def _convert_keys(cell: Any, scaled: Any, dim: Any, out: Any) -> None:
    """Rows of a tile are pairs of dimensions (i, i + 16), lanes are keys."""
    for step in range(_steps(dim)):
        for i in range(16):
            d, high = step * 32 + i, fill_f32(0)
            if step * 32 + 16 < dim:
                high = load_keys(cell, d + 16, dim, scaled)
            _store_split(load_keys(cell, d, dim, scaled), high, out + step * PAIR + i * 64)


@njit(nogil=True, cache=True, error_model="numpy")
def _forget(keys: Any, steps: Any, valid: Any) -> None:
    """Zero the keys from lane ``valid`` on."""
    for row in range(steps * 32):
        for lane in range(valid, PAGE):
            put_i32(keys + row * 64 + lane * 4, 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _convert_values(first: Any, second: Any, scaled: Any, valid: Any, dim: Any, out: Any) -> None:
    """Rows of a tile are pairs of tokens (i, i + 16), lanes are dimensions.

    Of the tokens in the cells ``first`` and ``second``, ``valid`` are there.
    """
    for d in range(0, _padded(dim), 16):
        for i in range(PAGE):
            low, high = fill_f32(0), fill_f32(0)
            if i < valid and d < dim:
                low = load_values(first, i, d, dim, scaled)
            if PAGE + i < valid and d < dim:
                high = load_values(second, i, d, dim, scaled)
            _store_split(low, high, out + d // 16 * PAIR + i * 64)


@njit(nogil=True, cache=True, error_model="numpy")
def _most_queries(shape: Any) -> Any:
    """Queries of an item: 18 row tiles of all heads of a group; converting a block for them costs at most a tenth."""
    return max(16, 288 // (shape.heads // shape.kv_heads) // 16 * 16)


@njit(nogil=True, cache=True, error_model="numpy")
def query_tile(chunk: Any, shape: Any, threads: Any) -> Any:
    """Queries of an item of a chunk: the most, or so many fewer that the threads end together where items are few."""
    most = _most_queries(shape)
    best = most
    if (chunk.rows + most - 1) // most * shape.kv_heads < 4 * threads:
        least = np.int64(1 << 60)
        for tile in range(most, 0, -_LEAST_ROWS):
            items = (chunk.rows + tile - 1) // tile * shape.kv_heads
            each = min(tile, chunk.rows) * shape.heads // shape.kv_heads + _CONVERSION
            cost = (items + threads - 1) // threads * each
            if cost < least:
                best, least = tile, cost
    return best


@njit(nogil=True, cache=True, error_model="numpy")
def attention_items(chunk: Any, shape: Any, tile: Any) -> Any:
    """Items of a chunk: ``kv_heads`` for each tile of queries."""
    return (chunk.rows + tile - 1) // tile * shape.kv_heads


@njit(nogil=True, cache=True, error_model="numpy")
def _row_tile_bytes(dim: Any) -> Any:
    """Queries [steps] in tiles, sums [16, D], maxima [16], their last change [16], normalisers [16, 16]."""
    return _steps(dim) * PAIR + 16 * _padded(dim) * 4 + 64 + 64 + 1024


_MASKS, _SCORES, _PROBABILITIES = 0, 256, 256 + 4 * TILE_BYTES
_ROW_TILES = _PROBABILITIES + 2 * PAIR
"""In the scratch of a thread: masks, scores [4 tiles], probabilities [2 pairs of tiles], then the row tiles."""


@njit(nogil=True, cache=True, error_model="numpy")
def attention_scratch_bytes(shape: Any) -> Any:
    """Scratch of a thread."""
    row_tiles = shape.heads // shape.kv_heads * (_most_queries(shape) // 16)
    return _ROW_TILES + row_tiles * _row_tile_bytes(shape.head_dim) + block_bytes(shape.head_dim)


@njit(nogil=True, cache=True, error_model="numpy")
def attend(q: Any, shape: Any, chunk: Any, tile: Any, item: Any, k: Any, v: Any, out: Any, scratch: Any) -> None:
    """Item ``item`` of a chunk in tiles of ``tile`` queries, those that see most keys first.

    ``q`` and ``out`` are float32 [rows of the step, H D]; ``q`` is rotated and not scaled; ``k`` and ``v`` are the
    addresses of the layer's cache. Each block of keys and values becomes tiles in the thread's own cache for the item's
    row tiles: kept for other items, all blocks of a long past would go to memory and back, six times what the cache
    holds of them.
    """
    group = shape.heads // shape.kv_heads
    last = (chunk.rows + tile - 1) // tile - 1
    begin, kv_head = (last - item // shape.kv_heads) * tile, item % shape.kv_heads
    end = min(begin + tile, chunk.rows)
    _prepare_masks(scratch + _MASKS)
    state, size = scratch + _ROW_TILES, _row_tile_bytes(shape.head_dim)
    for row in range(begin, end, 16):
        for head in range(kv_head * group, (kv_head + 1) * group):
            _load_queries(q, shape.head_dim, chunk.begin + row, min(16, end - row), head, state)
            state += size
    first = 0
    if shape.window:
        first = max(0, chunk.past + begin - shape.window + 1) // KEYS
    tiles = state  # behind the last row tile
    for block in range(first, (chunk.past + end - 1) // KEYS + 1):
        convert_block(k, v, shape, chunk, kv_head, block, tiles)
        _ask_for_block(k, v, shape, chunk, kv_head, block + 1)
        _attend_block(shape, chunk, block, tiles, begin, end, scratch)
    state = scratch + _ROW_TILES
    for row in range(begin, end, 16):
        for head in range(kv_head * group, (kv_head + 1) * group):
            _store_result(state, shape.head_dim, min(16, end - row), chunk.begin + row, head, out)
            state += size


@njit(nogil=True, cache=True, error_model="numpy")
def _prepare_masks(masks: Any) -> None:
    """16 lanes of _NEVER, 16 of 0, 16 of _NEVER: any mask of a range is 16 lanes from somewhere in it."""
    store_f32(masks, fill_f32(_NEVER))
    store_f32(masks + 64, fill_f32(0))
    store_f32(masks + 128, fill_f32(_NEVER))


@njit(nogil=True, cache=True, error_model="numpy")
def _load_queries(q: Any, dim: Any, row: Any, rows: Any, head: Any, state: Any) -> None:
    """Queries of one row tile, scaled for powers of 2, in tiles; missing rows are zeros. Its sums at rest."""
    scale = fill_f32(np.float32(_LOG2_E) / np.sqrt(np.float32(dim)))
    for i in range(16):
        at = q.address + (row + i) * q.stride + head * dim * 4
        for step in range(_steps(dim)):
            low, high = fill_f32(0), fill_f32(0)
            if i < rows:
                low = load_f32(at + step * 128) * scale
                if step * 32 + 16 < dim:
                    high = load_f32(at + step * 128 + 64) * scale
            _store_split(low, high, state + step * PAIR + i * 64)
    sums = state + _steps(dim) * PAIR
    maxima = sums + 64 * _padded(dim)
    for at in range(sums, maxima + 64 + 64 + 1024, 64):
        store_f32(at, fill_f32(0))
    store_f32(maxima, fill_f32(_NEVER))


@njit(nogil=True, cache=True, error_model="numpy")
def _store_result(state: Any, dim: Any, rows: Any, row: Any, head: Any, out: Any) -> None:
    sums = state + _steps(dim) * PAIR
    normalizers = sums + 64 * _padded(dim) + 128
    for i in range(rows):
        inverse = fill_f32(np.float32(1) / sum_f32(load_f32(normalizers + 64 * i)))
        at = out.address + (row + i) * out.stride + head * dim * 4
        for d in range(0, dim, 16):
            store_f32(at + 4 * d, load_f32(sums + d // 16 * TILE_BYTES + 64 * i) * inverse)


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_block(shape: Any, chunk: Any, block: Any, tiles: Any, begin: Any, end: Any, scratch: Any) -> None:
    """All row tiles of an item against one block of keys and values."""
    dim, group, size = shape.head_dim, shape.heads // shape.kv_heads, _row_tile_bytes(shape.head_dim)
    state, key = scratch + _ROW_TILES, block * KEYS
    for row in range(begin, end, 16):
        rows, position = min(16, end - row), chunk.past + row
        top = position + rows - 1
        seen = key <= top and (shape.window == 0 or key + KEYS > position - shape.window + 1)
        masked = key + KEYS - 1 > position or (shape.window > 0 and key <= top - shape.window)
        for _ in range(group):
            if seen:
                scores, probabilities, sums = scratch + _SCORES, scratch + _PROBABILITIES, state + _steps(dim) * PAIR
                multiply(state, rows, _steps(dim), tiles, _steps(dim) * PAIR, PAIR, scores, False)
                if masked:
                    _mask(scores, rows, position - key, shape.window, scratch + _MASKS)
                _softmax(scores, rows, probabilities, sums, _padded(dim))
                _add_values(probabilities, rows, tiles + _key_tiles(dim), _padded(dim) // 16, sums)
            state += size


@njit(nogil=True, cache=True, error_model="numpy")
def _mask(scores: Any, rows: Any, position: Any, window: Any, masks: Any) -> None:
    """Hide what row i, at ``position + i`` counted from the block's first key, does not see."""
    for i in range(rows):
        after = position + i + 1
        before = after - window if window else 0
        for tile in range(KEYS // 16):
            at = scores + tile * TILE_BYTES + 64 * i
            seen = min(max(after - tile * 16, 0), 16)
            gone = min(max(before - tile * 16, 0), 16)
            hidden = load_f32(masks + 4 * (32 - seen)) + load_f32(masks + 4 * (16 - gone))
            store_f32(at, load_f32(at) + hidden)


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


_row_maxima = operation(float32x16, [types.int64], _emit_row_maxima)


def _emit_power2(b: Any, x: Any) -> Any:
    """2**x for x <= 0, and 0 from -127 down: minimax of degree 5 on +-0.5, relative error 1.1e-7 to -126, 1 at 0.

    Hidden keys so count exactly nothing, and a row that has seen only those starts from exactly nothing.
    Adding 1.5 * 2**23 rounds x to an integer n and leaves n in the low bits, from where it is shifted to the exponent.
    """
    x = _larger(b, x, constant(-127.0))
    shifted = b.fadd(x, constant(12582912.0))
    r = b.fsub(x, b.fsub(shifted, constant(12582912.0)))
    p = constant(0.001326472731307149)
    for c in (0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0):
        p = call(b, "llvm.fma.v16f32", V_F32, p, r, constant(c))
    exponent = b.shl(b.bitcast(shifted, V_I32), constant(23, V_I32))
    return b.bitcast(b.add(b.bitcast(p, V_I32), exponent), V_F32)


_power2 = operation(float32x16, [float32x16], _emit_power2)


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax(scores: Any, rows: Any, probabilities: Any, sums: Any, padded: Any) -> None:
    """2**(score - maximum) of 64 keys for ``rows`` rows; the sums so far are brought to the new maxima."""
    maxima = sums + 64 * padded
    _raise_maxima(scores, maxima, sums)
    for i in range(rows):
        at, normalizer, level = scores + 64 * i, maxima + 128 + 64 * i, load_fill_f32(maxima + 4 * i)
        a, b = _power2(load_f32(at) - level), _power2(load_f32(at + TILE_BYTES) - level)
        c, d = _power2(load_f32(at + 2 * TILE_BYTES) - level), _power2(load_f32(at + 3 * TILE_BYTES) - level)
        store_f32(normalizer, load_f32(normalizer) + ((a + b) + (c + d)))
        _store_split(a, b, probabilities + 64 * i)
        _store_split(c, d, probabilities + PAIR + 64 * i)


@njit(nogil=True, cache=True, error_model="numpy")
def _raise_maxima(scores: Any, maxima: Any, sums: Any) -> None:
    before = load_f32(maxima)
    top = greater(before, _row_maxima(scores))
    if max_f32(top - before) == 0:
        return
    store_f32(maxima, top)
    store_f32(maxima + 64, _power2(before - top))
    for i in range(16):
        shrink, normalizer = load_fill_f32(maxima + 64 + 4 * i), maxima + 128 + 64 * i
        store_f32(normalizer, load_f32(normalizer) * shrink)
        for tile in range(sums + 64 * i, maxima, TILE_BYTES):
            store_f32(tile, load_f32(tile) * shrink)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(probabilities: Any, rows: Any, values: Any, columns: Any, sums: Any) -> None:
    for column in range(0, columns, 4):
        multiply(probabilities, rows, 2, values + column * PAIR, PAIR, columns * PAIR, sums + column * TILE_BYTES, True)
