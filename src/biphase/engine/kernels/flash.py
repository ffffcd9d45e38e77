"""Causal attention of a chunk of rows over paged keys and values: tiles, softmax online.

Dao 2023 (FlashAttention-2), by the items of ``chunks``: all row tiles of an item meet a block of keys in the
first-level cache.

With AMX every number is two bfloat16 words, its upper 8 significant bits and the next 8. Keys and values in float16 are
exact so; queries, probabilities and the numbers of an int8 cache keep 16 bits. The product of two lower words is
dropped. The words come in pairs (i, i + 16) of the inner dimension, which is how two vectors interleave at the price of
a shift; the order within a sum of products is free as long as both sides agree. Vectors take the numbers in float32, in
the same places: bfloat16 products are at most twice as fast there (Zen 4; half as fast on Sapphire Rapids), and three
would be needed for one. With ``int8_products`` they take bytes (``int8_attention``).

A row's sums are taken in an order that depends on nothing but its position, wherever the chunk was cut.
"""

from typing import Any

import numpy as np
from numba import njit, types

from biphase.engine.kernels import int8_attention as int8
from biphase.engine.kernels.cells import load_keys, load_values
from biphase.engine.kernels.chunks import (
    KEYS,
    PAGE,
    TILES,
    Chunk,
    Heads,
    Rows,
    count_of,
    most_queries,
    page_of,
    prefetch_block,
)
from biphase.engine.kernels.online_softmax import exponentials, mask, prepare_masks, query_scale, raise_levels, reset
from biphase.engine.kernels.out_of_line import Kernel, integers, out_of_line
from biphase.engine.kernels.tile_products import PAIR, multiply
from biphase.engine.kernels.tiles import TILE_BYTES
from biphase.engine.kernels.vectors import (
    bits_as_float,
    fill_f32,
    fill_i32,
    float_as_bits,
    load_f32,
    load_fill_f32,
    put_i32,
    shift_right,
    store_f32,
    store_i32,
    sum_f32,
)


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
            page = k + page_of(chunk, shape, head, token)
            if shape.int8_kv:
                _convert_keys(page, 1, dim, keys)
            else:
                _convert_keys(page, None, dim, keys)
        if valid < PAGE:
            _forget(keys, _steps(dim), valid)
    for step in range(KEYS // (2 * PAGE)):
        token = block * KEYS + step * 2 * PAGE
        values = out + _key_tiles(dim) + step * (_padded(dim) // 16) * PAIR
        first = v + page_of(chunk, shape, head, token) if token < length else 0
        second = v + page_of(chunk, shape, head, token + PAGE) if token + PAGE < length else 0
        if shape.int8_kv:
            _convert_values(first, second, 1, length - token, dim, values)
        else:
            _convert_values(first, second, None, length - token, dim, values)


@njit(nogil=True, cache=True, error_model="numpy")
def _convert_to_int8(k: Any, v: Any, shape: Any, chunk: Any, head: Any, block: Any, out: Any) -> None:
    """The same as bytes."""
    dim, length = shape.head_dim, chunk.past + chunk.rows
    values, columns = out + _key_tiles(dim), _padded(dim) // 16
    for tile in range(KEYS // PAGE):
        token = block * KEYS + tile * PAGE
        valid = min(length - token, PAGE)
        if valid <= 0:
            int8.forget(out, values, dim, tile, columns)
            continue
        page = page_of(chunk, shape, head, token)
        if shape.int8_kv:
            int8.convert_keys(k + page, 1, dim, valid, tile, out)
            int8.convert_values(v + page, 1, dim, valid, tile, columns, values)
        else:
            int8.convert_keys(k + page, None, dim, valid, tile, out)
            int8.convert_values(v + page, None, dim, valid, tile, columns, values)


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
def _row_tile_bytes(dim: Any) -> Any:
    """Queries [steps] in tiles, sums [16, D], levels [16], their last change [16], normalisers [16, 16]."""
    return _steps(dim) * PAIR + 16 * _padded(dim) * 4 + 64 + 64 + 1024


_MASKS, _SCORES, _PROBABILITIES = 0, 256, 256 + 4 * TILE_BYTES
_ROW_TILES = _PROBABILITIES + 2 * PAIR
"""In the scratch of a thread: masks, scores [4 tiles], probabilities [2 pairs of tiles], then the row tiles."""


@njit(nogil=True, cache=True, error_model="numpy")
def attention_scratch_bytes(shape: Any) -> Any:
    """Scratch of a thread."""
    row_tiles = shape.heads // shape.kv_heads * (most_queries(shape) // 16)
    return _ROW_TILES + row_tiles * _row_tile_bytes(shape.head_dim) + block_bytes(shape.head_dim)


@njit(nogil=True, cache=True, error_model="numpy")
def attend(q: Any, shape: Any, chunk: Any, tile: Any, item: Any, k: Any, v: Any, out: Any, scratch: Any) -> None:
    """Item ``item`` of a chunk in tiles of ``tile`` queries, those that see most keys first.

    ``q`` and ``out`` are float32 [rows of the step, H D]; ``q`` is rotated and not scaled; ``k`` and ``v`` are the
    addresses of the layer's cache. Each block of keys and values becomes tiles in the thread's own cache for the item's
    row tiles: kept for other items, all blocks of a long past would go to memory and back, six times what the cache
    holds of them.
    """
    group, dim = shape.heads // shape.kv_heads, shape.head_dim
    last = (chunk.rows + tile - 1) // tile - 1
    begin, kv_head = (last - item // shape.kv_heads) * tile, item % shape.kv_heads
    end = min(begin + tile, chunk.rows)
    prepare_masks(scratch + _MASKS)
    state, size = scratch + _ROW_TILES, _row_tile_bytes(dim)
    for row in range(begin, end, 16):
        for head in range(kv_head * group, (kv_head + 1) * group):
            if shape.int8_products:
                int8.load_queries(q, dim, chunk.begin + row, min(16, end - row), head, state)
            else:
                _load_queries(q, dim, chunk.begin + row, min(16, end - row), head, state)
            sums = state + _steps(dim) * PAIR
            reset(sums, sums + 64 * _padded(dim))
            state += size
    first = 0
    if shape.window:
        first = max(0, chunk.past + begin - shape.window + 1) // KEYS
    tiles = state  # behind the last row tile
    for block in range(first, (chunk.past + end - 1) // KEYS + 1):
        if shape.int8_products:
            _convert_to_int8(k, v, shape, chunk, kv_head, block, tiles)
        else:
            convert_block(k, v, shape, chunk, kv_head, block, tiles)
        prefetch_block(k, v, shape, chunk, kv_head, block + 1)
        _attend_block(shape, chunk, block, tiles, begin, end, scratch)
    state = scratch + _ROW_TILES
    for row in range(begin, end, 16):
        for head in range(kv_head * group, (kv_head + 1) * group):
            _store_result(state, dim, min(16, end - row), chunk.begin + row, head, out)
            state += size


call_attend = out_of_line(
    Kernel.CHUNK_ATTENTION,
    attend,
    *map(integers, (Rows, Heads, Chunk)),
    *[types.int64] * 4,
    integers(Rows),
    types.int64,
)
"""``attend`` by its address: (team, its arguments)."""


@njit(nogil=True, cache=True, error_model="numpy")
def _load_queries(q: Any, dim: Any, row: Any, rows: Any, head: Any, state: Any) -> None:
    """Queries of one row tile, scaled for powers of 2, in tiles; missing rows are zeros."""
    scale = fill_f32(query_scale(dim))
    for i in range(16):
        at = q.address + (row + i) * q.stride + head * dim * 4
        for step in range(_steps(dim)):
            low, high = fill_f32(0), fill_f32(0)
            if i < rows:
                low = load_f32(at + step * 128) * scale
                if step * 32 + 16 < dim:
                    high = load_f32(at + step * 128 + 64) * scale
            _store_split(low, high, state + step * PAIR + i * 64)


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
    group, size = shape.heads // shape.kv_heads, _row_tile_bytes(shape.head_dim)
    state, key = scratch + _ROW_TILES, block * KEYS
    for row in range(begin, end, 16):
        rows, position = min(16, end - row), chunk.past + row
        top = position + rows - 1
        seen = key <= top and (shape.window == 0 or key + KEYS > position - shape.window + 1)
        masked = key + KEYS - 1 > position or (shape.window > 0 and key <= top - shape.window)
        for _ in range(group):
            if seen and rows == 16:
                _attend_tile(None, shape, state, tiles, scratch, masked, position - key)
            elif seen:
                _attend_tile(rows, shape, state, tiles, scratch, masked, position - key)
            state += size


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_tile(present: Any, shape: Any, state: Any, tiles: Any, scratch: Any, masked: Any, position: Any) -> None:
    """One row tile, whose ``present`` rows begin ``position`` tokens after the block's first key."""
    dim, scores, probabilities = shape.head_dim, scratch + _SCORES, scratch + _PROBABILITIES
    sums, values, columns = state + _steps(dim) * PAIR, tiles + _key_tiles(dim), _padded(dim) // 16
    if shape.int8_products:
        int8.score(state, present, dim, tiles, probabilities, scores)
    else:
        multiply(state, present, _steps(dim), tiles, _steps(dim) * PAIR, PAIR, scores, False)
    if masked:
        mask(scores, count_of(present), position, shape.window, scratch + _MASKS)
    if shape.int8_products:
        int8.softmax(scores, present, values, columns, probabilities, sums)
        int8.add_values(probabilities, present, values, columns, scores, sums)
    else:
        _softmax(scores, present, probabilities, sums, columns)
        _add_values(probabilities, present, values, columns, sums)


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax(scores: Any, present: Any, probabilities: Any, sums: Any, columns: Any) -> None:
    """2**(score - level) of 64 keys for each row; the sums so far are brought to the new levels."""
    levels, rows = sums + columns * TILE_BYTES, count_of(present)
    raise_levels(scores, levels, sums)
    for i in range(rows):
        at, normalizer, level = scores + 64 * i, levels + 128 + 64 * i, load_fill_f32(levels + 4 * i)
        a, b, c, d = exponentials(at, level)
        store_f32(normalizer, load_f32(normalizer) + ((a + b) + (c + d)))
        _store_split(a, b, probabilities + 64 * i)
        _store_split(c, d, probabilities + PAIR + 64 * i)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(probabilities: Any, present: Any, values: Any, columns: Any, sums: Any) -> None:
    for column in range(0, columns, 4):
        from_column, to = values + column * PAIR, sums + column * TILE_BYTES
        multiply(probabilities, present, 2, from_column, PAIR, columns * PAIR, to, True)
