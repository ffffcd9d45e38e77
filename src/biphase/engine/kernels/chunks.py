"""A chunk of rows over paged keys and values: what it is, and how its attention is cut into items.

An item is a tile of queries and one key/value head, whose query heads are worked on together, so that they share its
keys. Key blocks of 64 are taken in turn, each against every row tile of the item (16 queries of one head).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from biphase.engine.kernels.cells import cell_bytes
from biphase.engine.kernels.features import features
from biphase.engine.kernels.vectors import get_i32, prefetch

TILES = features().tiles
PAGE = 16
"""Tokens of a block of the cache."""
KEYS = 64
"""Keys that are taken together: four tiles of scores."""
_LEAST_ROWS = 16 if TILES else 8
"""Rows that an item's queries come in multiples of: AMX takes no less time for fewer than 16."""
_CONVERSION = 32 if TILES else 3
"""Queries of one head with which a converted block could be used in the time that its conversion takes."""


class Heads(NamedTuple):
    """The attention of a model: ``window`` is the count of tokens that a row sees, itself included; 0 is all.

    ``int8_kv`` says what the cache is of, ``int8_products`` that ``int8_attention`` takes the products.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    int8_kv: int = 0
    int8_products: int = 0


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


@njit(nogil=True, cache=True, inline="always")
def count_of(rows: Any) -> Any:
    """Rows of a row tile: ``None`` is 16, a type of its own to numba, so that loops over a whole tile are unrolled."""
    if rows is None:
        return 16
    return rows


@njit(nogil=True, cache=True, error_model="numpy")
def prefetch_block(k: Any, v: Any, shape: Any, chunk: Any, head: Any, block: Any) -> None:
    """Prefetch the pages of a key block: they lie anywhere, and no processor guesses where the next one is."""
    end = min(block * KEYS + KEYS, chunk.past + chunk.rows)
    for token in range(block * KEYS, end, PAGE):
        page = page_of(chunk, shape, head, token)
        for line in range(page, page + cell_bytes(shape.head_dim, shape.int8_kv), 64):
            prefetch(k + line)
            prefetch(v + line)


@njit(nogil=True, cache=True, error_model="numpy")
def page_of(chunk: Any, shape: Any, head: Any, token: Any) -> Any:
    """Byte offset of a token's page of one head in a layer's keys (or values)."""
    page = np.int64(get_i32(chunk.table + token // PAGE * 4))
    return (page * shape.kv_heads + head) * cell_bytes(shape.head_dim, shape.int8_kv)


@njit(nogil=True, cache=True, error_model="numpy")
def most_queries(shape: Any) -> Any:
    """Queries of an item: 18 row tiles of all heads of a group; converting a block for them costs at most a tenth."""
    return max(16, 288 // (shape.heads // shape.kv_heads) // 16 * 16)


@njit(nogil=True, cache=True, error_model="numpy")
def query_tile(chunk: Any, shape: Any, threads: Any) -> Any:
    """Queries of an item of a chunk: the most, or so many fewer that the threads end together where items are few."""
    most = most_queries(shape)
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
