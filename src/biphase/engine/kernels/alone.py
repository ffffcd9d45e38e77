"""Operators of the two programs by themselves, over all layers, for timing: the same inner functions on the same team.

A product includes making integers of its activations, with many rows the unpacking of its weights, SwiGLU behind gate
and up, and the store of its results, over those of the matrix before. Attention includes the merge of its parts.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from biphase.engine.kernels.activations import plain_records, record_bytes
from biphase.engine.kernels.chunks import Chunk, Rows, attention_items, query_tile
from biphase.engine.kernels.few_rows import call_product
from biphase.engine.kernels.few_rows_step import attend_rows, merge_head
from biphase.engine.kernels.flash import call_attend
from biphase.engine.kernels.gemm import GLU, STORE, TILES, Output, silu_multiply, store_rows
from biphase.engine.kernels.image import ADDRESS, COLUMN, FIRST, GATE_UP, INNER, KIND, MATRICES, PANELS, VALID
from biphase.engine.kernels.many_rows_step import ROW_BLOCK, _address, _Member, _multiply, _quantize, heads_of
from biphase.engine.kernels.row_tiles import Source
from biphase.engine.kernels.team import Seat, barrier, next_item, next_of_part
from biphase.engine.kernels.tiles import configure_tiles, release_tiles
from biphase.engine.kernels.vectors import fill_f32


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def few_row_products(
    team: Any, threads: Any, words: Any, image: Any, first: Any, last: Any, x: Any, out: Any, scratch: Any
) -> None:
    """Matrices ``first`` to ``last - 1`` of the table with the rows ``x``, into the rows ``out``.

    ``scratch`` is that of a ``few_rows_step.Work`` for as many rows.
    """
    for member in prange(threads):
        seat = Seat(team, threads, np.int64(member))
        _few_row_products(seat, words, image, first, last, x, out, scratch[member].ctypes.data)


@njit(nogil=True, cache=True, error_model="numpy")
def _few_row_products(seat: Any, words: Any, image: Any, first: Any, last: Any, x: Any, out: Any, scratch: Any) -> None:
    rows, target = len(x), Output(STORE, _address(out), out.strides[0], len(x))
    for number in range(first, last):
        matrix = image.matrices[number]
        inner, paired = matrix[INNER], 2 if number % MATRICES == GATE_UP else 1
        results = scratch + rows * record_bytes(inner)
        plain_records(x.ctypes.data, rows, inner, x.strides[0], words, scratch)
        items = matrix[PANELS] // paired
        item = next_of_part(seat, items)
        while item < items:
            place = matrix[FIRST] + paired * item
            for half in range(paired):
                panel = image.panels[place + half]
                at = results + 64 * rows * half
                call_product(seat.team, (panel[KIND], panel[ADDRESS], inner, scratch, rows, words, at))
            if paired == 2:
                silu_multiply(results, results + 64 * rows, rows)
            panel = image.panels[place]
            store_rows(results, 0, rows, fill_f32(np.float32(0)), panel[COLUMN], panel[VALID], target)
            item = next_of_part(seat, items)
        barrier(seat.team, seat.threads)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def many_row_products(
    team: Any, threads: Any, words: Any, image: Any, first: Any, last: Any, x: Any, out: Any, work: Any
) -> None:
    """The same by the many-row kernels, into the rows ``out``; ``work`` is a ``ManyRowsWork`` for as many rows."""
    for number in prange(threads):
        member = _Member(team, threads, words, _address(work.scratch[number]))
        _many_row_products(member, image, first, last, x, out, work)


@njit(nogil=True, cache=True, error_model="numpy")
def _many_row_products(member: Any, image: Any, first: Any, last: Any, x: Any, out: Any, work: Any) -> None:
    if TILES:
        configure_tiles(work.tile_config.ctypes.data)
    for number in range(first, last):
        for begin in range(0, len(x), ROW_BLOCK):
            rows = min(ROW_BLOCK, len(x) - begin)
            source = Source(_address(x[begin]), x.strides[0], 0, 0.0)
            tiles = _quantize(member, source, rows, image, number, work)
            mode = GLU if number % MATRICES == GATE_UP else STORE
            target = Output(mode, _address(out[begin]), out.strides[0], rows)
            _multiply(member, tiles, image, number, image.norms[0][:0], target)
    if TILES:
        release_tiles()


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def single_row_attention(team: Any, threads: Any, shape: Any, k: Any, v: Any, step: Any, work: Any) -> None:
    """Attention of the rows of ``step``, a ``RowsStep``, in every layer; results take the place of the queries."""
    for member in prange(threads):
        _single_row_attention(team, threads, shape, k, v, step, work, work.scratch[member].ctypes.data)


@njit(nogil=True, cache=True, error_model="numpy")
def _single_row_attention(
    team: Any, threads: Any, shape: Any, k: Any, v: Any, step: Any, work: Any, scratch: Any
) -> None:
    for layer in range(shape.layers):
        attend_rows(team, threads, shape, k[layer], v[layer], step, work, scratch)
        barrier(team, threads)
        item = next_item(team)
        while item < len(step.tokens) * shape.heads:
            row, head = item // shape.heads, item % shape.heads
            merge_head(row, head, shape, step, work, work.qkv[row, head * shape.dim :].ctypes.data)
            item = next_item(team)
        barrier(team, threads)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def chunk_attention(
    team: Any, threads: Any, words: Any, shape: Any, k: Any, v: Any, past: Any, table: Any, work: Any
) -> None:
    """One chunk of all rows of ``work.qkv`` after ``past`` tokens in every layer; results replace the queries."""
    for number in prange(threads):
        _chunk_attention(team, threads, words, shape, k, v, past, table, work, _address(work.scratch[number]))


@njit(nogil=True, cache=True, error_model="numpy")
def _chunk_attention(
    team: Any, threads: Any, words: Any, shape: Any, k: Any, v: Any, past: Any, table: Any, work: Any, scratch: Any
) -> None:
    if TILES:
        configure_tiles(work.tile_config.ctypes.data)
    heads = heads_of(shape, words)
    chunk = Chunk(0, len(work.qkv), past, _address(table))
    rows = Rows(_address(work.qkv), work.qkv.strides[0])
    tile = query_tile(chunk, heads, threads)
    for layer in range(shape.layers):
        keys, values = _address(k[layer]), _address(v[layer])
        item = next_item(team)
        while item < attention_items(chunk, heads, tile):
            call_attend(team, (rows, heads, chunk, tile, item, keys, values, rows, scratch))
            item = next_item(team)
        barrier(team, threads)
    if TILES:
        release_tiles()
