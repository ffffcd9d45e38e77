"""A whole step of many rows as one compiled call: prefill, at the speed of arithmetic.

A team walks all layers (``team``). Every operator is a phase whose items are taken from a counter: row tiles to
quantise, groups of panels to unpack and multiply with all rows of a block, tiles of queries to attend. All but
attention runs by blocks of 512 rows, so that what passes from one operator to the next stays in cache. The first rows
of a step may be single rows of other sequences (decodes beside a chunk): they share every product and attend by
``row_attention``.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from biphase.engine.kernels.activations import cells_bytes
from biphase.engine.kernels.chunks import Chunk, Heads, Rows, attention_items, query_tile
from biphase.engine.kernels.few_rows_step import (
    attend_rows,
    embed,
    merge_head,
)
from biphase.engine.kernels.flash import attention_scratch_bytes, call_attend
from biphase.engine.kernels.gemm import (
    ADD,
    BIASES_AT,
    COLUMN_AT,
    GEMM_SCRATCH,
    GLU,
    HEADER,
    STORE,
    TILES,
    VALID_AT,
    Output,
    call_multiply,
    put_biases,
    unpacked_bytes,
)
from biphase.engine.kernels.image import (
    ADDRESS,
    COLUMN,
    DOWN,
    FIRST,
    GATE_UP,
    INNER,
    KIND,
    MATRICES,
    PANELS,
    QKV,
    VALID,
    Floats,
    O,
    reserve,
)
from biphase.engine.kernels.int8_attention import takes_int8
from biphase.engine.kernels.rotation import rotate_and_store, rotation_of
from biphase.engine.kernels.row_attention import attend_scratch_bytes, part_bytes
from biphase.engine.kernels.row_blocks import multiply_packed, quantize_row, takes
from biphase.engine.kernels.row_tiles import (
    TILE_ROWS,
    Quantized,
    Source,
    inner_blocks,
    inner_groups,
    quantize_tile,
    row_scratch_bytes,
)
from biphase.engine.kernels.team import barrier, next_item
from biphase.engine.kernels.tiles import TILE_BYTES, configure_tiles, release_tiles, whole_tiles
from biphase.engine.kernels.unpack import call_unpack, panel_bytes
from biphase.engine.kernels.vectors import load_f32, put_i64, store_f32

Ints32 = NDArray[np.int32]
Ints = NDArray[np.int64]

ROW_BLOCK = 512
"""Rows that pass through a layer's products together: a multiple of 32."""
_GROUP_BYTES = 384 * 1024
"""Unpacked panels that meet a block's rows together: they stay in a second-level cache beside those rows."""
_ROTATED_ROWS = 4
"""Rows of an item of rotation: so few that sixteen rows still keep four threads busy."""


class ManyRowsStep(NamedTuple):
    """Rows of one step: the single rows first, then the rows of the chunks.

    ``chunks`` [chunks, 3] are (first row, rows, past), their block tables the rows of ``chunk_tables``. ``tables``,
    ``items`` and ``first_items`` are as in ``RowsStep``, for the single rows alone. ``sampled`` names rows for logits,
    in rising order.
    """

    tokens: Ints32
    positions: Ints32
    slots: Ints
    tables: Ints32
    items: Ints32
    first_items: Ints32
    chunks: Ints
    chunk_tables: Ints32
    sampled: Ints32


class ManyRowsWork(NamedTuple):
    """Buffers: ``residual`` [rows, hidden], ``qkv`` [rows, ...], ``gated`` [512, intermediate], ``logits``; bytes.

    There may be more rows than the step has. ``tiles`` and ``scales`` hold one block's activations in integers,
    ``parts`` what ``row_attention`` merges, ``scratch`` [threads, ...] each member's own.
    """

    residual: Floats
    qkv: Floats
    gated: Floats
    logits: Floats
    tiles: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    parts: NDArray[np.uint8]
    scratch: NDArray[np.uint8]
    tile_config: NDArray[np.uint8]


class _Member(NamedTuple):
    """What every phase needs of its thread."""

    team: int
    threads: int
    words: int
    scratch: int


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def many_rows_step(
    team: Any, threads: Any, words: Any, shape: Any, image: Any, k: Any, v: Any, step: Any, work: Any
) -> None:
    """Run ``step``; logits of the sampled rows are in ``work.logits`` afterwards.

    ``k`` and ``v`` are the whole caches [layers, blocks, G, bytes of a cell], as ``cells`` has it.
    """
    for number in prange(threads):
        member = _Member(team, threads, words, _address(work.scratch[number]))
        _run_member(member, shape, image, k, v, step, work)


@njit(nogil=True, cache=True, inline="always")
def _address(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@njit(nogil=True, cache=True, error_model="numpy")
def _run_member(member: Any, shape: Any, image: Any, k: Any, v: Any, step: Any, work: Any) -> None:
    if TILES:
        configure_tiles(_address(work.tile_config))
    embed(member.team, shape, image, step, work)
    barrier(member.team, member.threads)
    for layer in range(shape.layers):
        for begin in range(0, len(step.tokens), ROW_BLOCK):
            rows = _rows_of(begin, step)
            _project_qkv(member, layer, begin, rows, shape, image, work)
            _rotate_and_store(member, layer, begin, rows, shape, image, k[layer], v[layer], step, work)
        _attend_all(member, shape, k[layer], v[layer], step, work)
        for begin in range(0, len(step.tokens), ROW_BLOCK):
            rows = _rows_of(begin, step)
            _project_out(member, layer, begin, rows, shape, image, work)
            _feed_forward(member, layer, begin, rows, shape, image, work)
    _project_head(member, shape, image, step, work)
    if TILES:
        release_tiles()


@njit(nogil=True, cache=True, error_model="numpy")
def _rows_of(begin: Any, step: Any) -> Any:
    """Of the block that begins there."""
    return min(ROW_BLOCK, len(step.tokens) - begin)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(member: Any, source: Any, rows: Any, image: Any, number: Any, work: Any) -> Any:
    """A phase: a block's rows as integers, in the form in which matrix ``number`` is multiplied."""
    x = Quantized(_address(work.tiles), _address(work.scales), image.matrices[number, INNER], member.words)
    item = next_item(member.team)
    if takes(image, number):
        while item < rows:
            quantize_row(source, item, rows, x, member.scratch)
            item = next_item(member.team)
    else:
        while item * TILE_ROWS < rows:
            quantize_tile(source, rows, item, x, member.scratch)
            item = next_item(member.team)
    barrier(member.team, member.threads)
    return x


@njit(nogil=True, cache=True, error_model="numpy")
def _group_size(panels: Any, threads: Any, inner: Any) -> Any:
    """Panels of an item: even, since gate and up come in pairs; three items a thread where there are enough."""
    fits = _GROUP_BYTES // unpacked_bytes(inner)
    shared = panels // (3 * threads)
    return max(2, min(fits, shared) // 2 * 2)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply(member: Any, x: Any, image: Any, number: Any, biases: Any, out: Any) -> None:
    """A phase: all rows of a block with matrix ``number``."""
    if takes(image, number):
        _multiply_packed(member, x, image, number, biases, out)
    else:
        _multiply_unpacked(member, x, image, number, biases, out)
    barrier(member.team, member.threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_packed(member: Any, x: Any, image: Any, number: Any, biases: Any, out: Any) -> None:
    matrix = image.matrices[number]
    group = _group_size(matrix[PANELS], member.threads, x.inner)
    first = next_item(member.team) * group
    while first < matrix[PANELS]:
        last = min(first + group, matrix[PANELS])
        begin, end = matrix[FIRST] + first, matrix[FIRST] + last
        multiply_packed(member.team, x, image, begin, end, biases, out, member.scratch)
        first = next_item(member.team) * group


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_unpacked(member: Any, x: Any, image: Any, number: Any, biases: Any, out: Any) -> None:
    matrix, size = image.matrices[number], unpacked_bytes(x.inner)
    tiles = (out.rows + TILE_ROWS - 1) // TILE_ROWS
    group = _group_size(matrix[PANELS], member.threads, x.inner)
    first = next_item(member.team) * group
    while first < matrix[PANELS]:
        count = min(group, matrix[PANELS] - first)
        for p in range(count):
            panel = image.panels[matrix[FIRST] + first + p]
            _unpack(member.team, panel, x.inner, biases, member.scratch + p * size)
        call_multiply(member.team, (x, 0, tiles, member.scratch, count, out, member.scratch + group * size))
        first = next_item(member.team) * group


@njit(nogil=True, cache=True, error_model="numpy")
def _unpack(team: Any, panel: Any, inner: Any, biases: Any, out: Any) -> None:
    """A panel with its header, as ``gemm`` takes it."""
    kind, address, column, valid = panel[KIND], panel[ADDRESS], panel[COLUMN], panel[VALID]
    store_f32(out, load_f32(address + panel_bytes(kind, inner)))
    put_biases(biases, column, out + BIASES_AT)
    put_i64(out + COLUMN_AT, column)
    put_i64(out + VALID_AT, valid)
    call_unpack(team, (kind, address, inner, out + HEADER))


@njit(nogil=True, cache=True, error_model="numpy")
def _project_qkv(member: Any, layer: Any, begin: Any, rows: Any, shape: Any, image: Any, work: Any) -> None:
    source = Source(
        _address(work.residual[begin]), work.residual.strides[0], _address(image.norms[2 * layer]), shape.eps
    )
    x = _quantize(member, source, rows, image, MATRICES * layer + QKV, work)
    out = Output(STORE, _address(work.qkv[begin]), work.qkv.strides[0], rows)
    biases = image.biases[layer] if len(image.biases) else image.norms[0][:0]
    _multiply(member, x, image, MATRICES * layer + QKV, biases, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _rotate_and_store(
    member: Any, layer: Any, begin: Any, rows: Any, shape: Any, image: Any, k: Any, v: Any, step: Any, work: Any
) -> None:
    """A phase whose items are a few rows: queries rotate in place, keys and values go to the cache."""
    end = begin + rows
    turn = rotation_of(layer, shape, image, k, v)
    first = begin + next_item(member.team) * _ROTATED_ROWS
    while first < end:
        for row in range(first, min(first + _ROTATED_ROWS, end)):
            position, slot = step.positions[row], step.slots[row]
            qkv = _address(work.qkv) + row * work.qkv.strides[0]
            for head in range(shape.heads + 2 * shape.kv_heads):
                rotate_and_store(turn, head, position, slot, shape, qkv)
        first = begin + next_item(member.team) * _ROTATED_ROWS
    barrier(member.team, member.threads)


@njit(nogil=True, cache=True, error_model="numpy")
def heads_of(shape: Any, words: Any) -> Any:
    """The attention of a model beside activations of so many words."""
    int8_products = int(takes_int8(words))
    return Heads(shape.heads, shape.kv_heads, shape.dim, shape.window, shape.int8_kv, int8_products)


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_all(member: Any, shape: Any, k: Any, v: Any, step: Any, work: Any) -> None:
    """Phases: the chunks; the single rows; the merge of the parts of those."""
    heads = heads_of(shape, member.words)
    if len(step.chunks):
        _attend_chunks(member, heads, k, v, step, work)
    singles = len(step.first_items) - 1
    if singles > 0:
        attend_rows(member.team, member.threads, shape, k, v, step, work, member.scratch)
        barrier(member.team, member.threads)
        item = next_item(member.team)
        while item < singles * shape.heads:
            row, head = item // shape.heads, item % shape.heads
            merge_head(row, head, shape, step, work, _address(work.qkv[row, head * shape.dim :]))
            item = next_item(member.team)
        barrier(member.team, member.threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _chunk(step: Any, number: Any) -> Any:
    begin, rows, past = step.chunks[number]
    return Chunk(begin, rows, past, _address(step.chunk_tables[number]))


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_chunks(member: Any, heads: Any, k: Any, v: Any, step: Any, work: Any) -> None:
    """Results take the place of the queries: an item is the only one that reads its own."""
    rows = Rows(_address(work.qkv), work.qkv.strides[0])
    item, before = next_item(member.team), 0
    for number in range(len(step.chunks)):
        chunk = _chunk(step, number)
        tile = query_tile(chunk, heads, member.threads)
        items = attention_items(chunk, heads, tile)
        while item - before < items:
            here = (rows, heads, chunk, tile, item - before, _address(k), _address(v), rows, member.scratch)
            call_attend(member.team, here)
            item = next_item(member.team)
        before += items
    barrier(member.team, member.threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _project_out(member: Any, layer: Any, begin: Any, rows: Any, shape: Any, image: Any, work: Any) -> None:
    source = Source(_address(work.qkv[begin]), work.qkv.strides[0], 0, 0.0)
    x = _quantize(member, source, rows, image, MATRICES * layer + O, work)
    _add_product(member, x, image, MATRICES * layer + O, begin, rows, work)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_product(member: Any, x: Any, image: Any, number: Any, begin: Any, rows: Any, work: Any) -> None:
    out = Output(ADD, _address(work.residual[begin]), work.residual.strides[0], rows)
    _multiply(member, x, image, number, image.norms[0][:0], out)


@njit(nogil=True, cache=True, error_model="numpy")
def _feed_forward(member: Any, layer: Any, begin: Any, rows: Any, shape: Any, image: Any, work: Any) -> None:
    norm = _address(image.norms[2 * layer + 1])
    source = Source(_address(work.residual[begin]), work.residual.strides[0], norm, shape.eps)
    x = _quantize(member, source, rows, image, MATRICES * layer + GATE_UP, work)
    out = Output(GLU, _address(work.gated), work.gated.strides[0], rows)
    _multiply(member, x, image, MATRICES * layer + GATE_UP, image.norms[0][:0], out)
    gated = Source(_address(work.gated), work.gated.strides[0], 0, 0.0)
    x = _quantize(member, gated, rows, image, MATRICES * layer + DOWN, work)
    _add_product(member, x, image, MATRICES * layer + DOWN, begin, rows, work)


@njit(nogil=True, cache=True, error_model="numpy")
def _project_head(member: Any, shape: Any, image: Any, step: Any, work: Any) -> None:
    """Logits of the sampled rows, which first move to the front of the residual."""
    if next_item(member.team) == 0:
        for index in range(len(step.sampled)):
            if step.sampled[index] != index:
                work.residual[index] = work.residual[step.sampled[index]]
    barrier(member.team, member.threads)
    norm = _address(image.norms[2 * shape.layers])
    for begin in range(0, len(step.sampled), ROW_BLOCK):
        rows = min(ROW_BLOCK, len(step.sampled) - begin)
        source = Source(_address(work.residual[begin]), work.residual.strides[0], norm, shape.eps)
        x = _quantize(member, source, rows, image, MATRICES * shape.layers, work)
        out = Output(STORE, _address(work.logits[begin]), work.logits.strides[0], rows)
        _multiply(member, x, image, MATRICES * shape.layers, image.norms[0][:0], out)


def new_work(shape: Any, threads: int, words: int, rows: int, items: int) -> ManyRowsWork:
    """Buffers for steps of up to ``rows`` rows, and ``items`` of single rows."""
    block = min(ROW_BLOCK, -(-rows // TILE_ROWS) * TILE_ROWS)
    inner = max(shape.hidden, shape.intermediate, shape.heads * shape.dim)
    tiles, blocks = block // TILE_ROWS, int(inner_blocks(inner))
    cells = 0 if TILES else block * int(cells_bytes(inner))
    part = int(part_bytes(shape.heads // shape.kv_heads, shape.dim)) * shape.kv_heads
    return ManyRowsWork(
        residual=_floats(rows, shape.hidden),
        qkv=_floats(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim),
        gated=_floats(block, shape.intermediate),
        logits=np.zeros((0, shape.vocab), dtype=np.float32),
        tiles=reserve(max(tiles * int(inner_groups(inner)) * words * TILE_BYTES, cells)),
        scales=reserve(tiles * blocks * TILE_ROWS * 4),
        parts=reserve(max(items * part, 1)),
        scratch=_rows_of_bytes(threads, _scratch_bytes(shape, threads, inner)),
        tile_config=whole_tiles(),
    )


def _floats(rows: int, columns: int) -> Floats:
    """[rows, columns], one cache line further apart than a power of two, where all rows would meet in one set.

    At least two: one alone would be contiguous, and of another type to numba.
    """
    rows = max(rows, 2)
    buffer = reserve(rows * (columns // 16 + 2) * 64).view(np.float32)
    return buffer.reshape(rows, -1)[:, :columns]


def _rows_of_bytes(rows: int, size: int) -> NDArray[np.uint8]:
    return reserve(rows * -(-size // 4096) * 4096).reshape(rows, -1)


def _scratch_bytes(shape: Any, threads: int, inner: int) -> int:
    size = int(unpacked_bytes(inner))
    products = max(_GROUP_BYTES, 2 * size) + GEMM_SCRATCH
    heads = Heads(shape.heads, shape.kv_heads, shape.dim, shape.window)
    singles = int(attend_scratch_bytes(shape.heads, shape.dim))
    return max(products, int(attention_scratch_bytes(heads)), singles, int(row_scratch_bytes(inner)))
