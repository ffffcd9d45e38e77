"""A whole step of few rows as one compiled call: decode, at the speed of memory.

A team walks all layers. Between barriers every member takes panels (or rows, or runs of keys) from a counter; what is
small (norms, integers of activations, the merge of attention's parts) each member makes for itself, which takes less
time than another barrier. Rows may belong to one sequence or to many: each has its own position and block table, and
all keys and values of a layer are in the cache before any row attends. A row's result does not depend on the others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from biphase.engine.kernels.activations import normed_record, normed_records, plain_records, record_bytes, silu_mul
from biphase.engine.kernels.cells import cell_bytes
from biphase.engine.kernels.few_rows import call_product
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
)
from biphase.engine.kernels.rotation import rotate_and_store, rotation_of
from biphase.engine.kernels.row_attention import Past, attend_scratch_bytes, call_attend, merge, part_bytes
from biphase.engine.kernels.team import Seat, barrier, next_item, next_of_part
from biphase.engine.kernels.unpack import read_row
from biphase.engine.kernels.vectors import (
    get_f32,
    load_f32,
    store_f32,
)

Ints32 = NDArray[np.int32]

RUNS_OF_A_MEMBER = 4
"""Runs of keys for each thread from which on an item takes all KV heads: the last one then ends little after others."""


class RowsStep(NamedTuple):
    """Rows of one step. ``items`` [n, 3] are (row, first block, last block) of attention, grouped by row.

    ``tables`` [rows, blocks] holds the block ids of each row's sequence; ``first_items`` [rows + 1] says where a row's
    items begin; ``sampled`` names the rows whose logits are wanted.
    """

    tokens: Ints32
    positions: Ints32
    slots: NDArray[np.int64]
    tables: Ints32
    items: Ints32
    first_items: Ints32
    sampled: Ints32


Program = Callable[..., None]
"""(team, threads, words, shape, image, k, v, step, work)"""


class Work(NamedTuple):
    """Buffers of a step: float32 [rows, ...], ``parts`` of attention, and bytes for each member of the team."""

    residual: Floats
    qkv: Floats
    gated: Floats
    parts: NDArray[np.uint8]
    logits: Floats
    scratch: NDArray[np.uint8]


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def few_rows_step(
    team: Any, threads: Any, words: Any, shape: Any, image: Any, k: Any, v: Any, step: Any, work: Any
) -> None:
    """Run ``step``; logits of the sampled rows are in ``work.logits`` afterwards.

    ``k`` and ``v`` are the whole caches [layers, blocks, G, bytes of a cell], as ``cells`` has it.
    """
    for member in prange(threads):
        # as int64: the loop's own index is unsigned in one of numba's passes, and everything would compile twice
        _member(np.int64(member), team, threads, words, shape, image, k, v, step, work)


@njit(nogil=True, cache=True, error_model="numpy")
def _member(
    member: Any, team: Any, threads: Any, words: Any, shape: Any, image: Any, k: Any, v: Any, step: Any, work: Any
) -> None:
    scratch, seat = work.scratch[member].ctypes.data, Seat(team, threads, member)
    embed(team, shape, image, step, work)
    barrier(team, threads)
    for layer in range(shape.layers):
        _project_qkv(seat, layer, words, shape, image, step, work, scratch)
        barrier(team, threads)
        _rotate_and_store(team, layer, shape, image, k[layer], v[layer], step, work)
        barrier(team, threads)
        attend_rows(team, threads, shape, k[layer], v[layer], step, work, scratch)
        barrier(team, threads)
        _project_out(seat, layer, words, shape, image, step, work, scratch)
        barrier(team, threads)
        _gate_up(seat, layer, words, shape, image, step, work, scratch)
        barrier(team, threads)
        _down(seat, layer, words, shape, image, step, work, scratch)
        barrier(team, threads)
    _project_head(seat, words, shape, image, step, work, scratch)
    barrier(team, threads)  # which leaves the team's counters at rest for the next program


@njit(nogil=True, cache=True, error_model="numpy")
def embed(team: Any, shape: Any, image: Any, step: Any, work: Any) -> None:
    matrix = image.matrices[MATRICES * shape.layers + 1]
    row = next_item(team)
    while row < len(step.tokens):
        token = step.tokens[row]
        panel = image.panels[matrix[FIRST] + token // 16]
        read_row(panel[KIND], panel[ADDRESS], matrix[INNER], token % 16, work.residual[row].ctypes.data)
        row = next_item(team)


@njit(nogil=True, cache=True, error_model="numpy")
def _project_qkv(seat: Any, layer: Any, words: Any, shape: Any, image: Any, step: Any, work: Any, scratch: Any) -> None:
    rows = len(step.tokens)
    matrix = image.matrices[MATRICES * layer + QKV]
    norm = image.norms[2 * layer].ctypes.data
    out = _records(scratch, rows, matrix)
    normed_records(work.residual.ctypes.data, rows, norm, shape.hidden, np.float32(shape.eps), words, scratch)
    item = next_of_part(seat, matrix[PANELS])
    while item < matrix[PANELS]:
        panel = image.panels[matrix[FIRST] + item]
        call_product(seat.team, (panel[KIND], panel[ADDRESS], matrix[INNER], scratch, rows, words, out))
        for row in range(rows):
            target = work.qkv[row, panel[COLUMN] : panel[COLUMN] + panel[VALID]]
            if len(image.biases):
                _put_with_bias(out + 64 * row, image.biases[layer, panel[COLUMN] :], target)
            else:
                _put(out + 64 * row, target)
        item = next_of_part(seat, matrix[PANELS])


@njit(nogil=True, cache=True, inline="always")
def _records(scratch: Any, rows: Any, matrix: Any) -> Any:
    """The address after the records of ``rows`` rows of this matrix's inputs: there a panel's results go."""
    return scratch + rows * record_bytes(matrix[INNER])


@njit(nogil=True, cache=True, error_model="numpy")
def _put(source: Any, target: Any) -> None:
    if len(target) == 16:
        store_f32(target.ctypes.data, load_f32(source))
    else:
        for lane in range(len(target)):
            target[lane] = get_f32(source + 4 * lane)


@njit(nogil=True, cache=True, error_model="numpy")
def _put_with_bias(source: Any, bias: Any, target: Any) -> None:
    for lane in range(len(target)):
        target[lane] = get_f32(source + 4 * lane) + bias[lane]


@njit(nogil=True, cache=True, error_model="numpy")
def _add(source: Any, target: Any) -> None:
    if len(target) == 16:
        store_f32(target.ctypes.data, load_f32(target.ctypes.data) + load_f32(source))
    else:
        for lane in range(len(target)):
            target[lane] += get_f32(source + 4 * lane)


@njit(nogil=True, cache=True, error_model="numpy")
def _rotate_and_store(team: Any, layer: Any, shape: Any, image: Any, k: Any, v: Any, step: Any, work: Any) -> None:
    """Items are (row, head): queries rotate in place, keys and values go to the cache."""
    heads = shape.heads + 2 * shape.kv_heads
    turn = rotation_of(layer, shape, image, k, v)
    item = next_item(team)
    while item < len(step.tokens) * heads:
        row, head = item // heads, item % heads
        qkv = work.qkv.ctypes.data + row * work.qkv.strides[0]
        rotate_and_store(turn, head, step.positions[row], step.slots[row], shape, qkv)
        item = next_item(team)


@njit(nogil=True, cache=True, error_model="numpy")
def attend_rows(team: Any, threads: Any, shape: Any, k: Any, v: Any, step: Any, work: Any, scratch: Any) -> None:
    """Items of all KV heads, or of one where there are too few rows and runs for all threads."""
    group = shape.heads // shape.kv_heads
    head_bytes = cell_bytes(shape.dim, shape.int8_kv)
    size = part_bytes(group, shape.dim)
    scale = np.float32(1 / np.sqrt(shape.dim))
    cuts = 1 if len(step.items) >= RUNS_OF_A_MEMBER * threads else shape.kv_heads
    heads = shape.kv_heads // cuts
    item = next_item(team)
    while item < len(step.items) * cuts:
        (row, first, last), kv_head = step.items[item // cuts], item % cuts * heads
        past = Past(
            k.ctypes.data + kv_head * head_bytes,
            v.ctypes.data + kv_head * head_bytes,
            head_bytes,
            shape.kv_heads * head_bytes,
            step.tables[row].ctypes.data,
            step.positions[row] + 1 - shape.window if shape.window else 0,
            step.positions[row] + 1,
            shape.int8_kv,
        )
        queries = work.qkv[row, kv_head * group * shape.dim :].ctypes.data
        part = work.parts.ctypes.data + (item // cuts * shape.kv_heads + kv_head) * size
        call_attend(team, (queries, heads, group, shape.dim, scale, past, first, last, scratch, part))
        item = next_item(team)


@njit(nogil=True, cache=True, error_model="numpy")
def merge_head(row: Any, head: Any, shape: Any, step: Any, work: Any, out: Any) -> None:
    """The result [D] of one head of a row from its parts, at the address ``out``."""
    group = shape.heads // shape.kv_heads
    size, width = part_bytes(group, shape.dim), 4 * (shape.dim + 16)
    first, count = step.first_items[row], step.first_items[row + 1] - step.first_items[row]
    part = work.parts.ctypes.data + (first * shape.kv_heads + head // group) * size + head % group * width
    merge(part, count, shape.kv_heads * size, shape.dim, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _project_out(seat: Any, layer: Any, words: Any, shape: Any, image: Any, step: Any, work: Any, scratch: Any) -> None:
    rows, inner = len(step.tokens), shape.heads * shape.dim
    matrix = image.matrices[MATRICES * layer + O]
    out = _records(scratch, rows, matrix)
    merged = out + 64 * rows
    for row in range(rows):
        for head in range(shape.heads):
            merge_head(row, head, shape, step, work, merged + 4 * shape.dim * (row * shape.heads + head))
    plain_records(merged, rows, inner, 4 * inner, words, scratch)
    _multiply_and_add(seat, image, matrix, rows, words, work, scratch, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_and_add(
    seat: Any, image: Any, matrix: Any, rows: Any, words: Any, work: Any, scratch: Any, out: Any
) -> None:
    item = next_of_part(seat, matrix[PANELS])
    while item < matrix[PANELS]:
        panel = image.panels[matrix[FIRST] + item]
        call_product(seat.team, (panel[KIND], panel[ADDRESS], matrix[INNER], scratch, rows, words, out))
        for row in range(rows):
            _add(out + 64 * row, work.residual[row, panel[COLUMN] : panel[COLUMN] + panel[VALID]])
        item = next_of_part(seat, matrix[PANELS])


@njit(nogil=True, cache=True, error_model="numpy")
def _gate_up(seat: Any, layer: Any, words: Any, shape: Any, image: Any, step: Any, work: Any, scratch: Any) -> None:
    """Items are a panel of the gate and its neighbour of up, so that SwiGLU needs no pass of its own."""
    rows = len(step.tokens)
    matrix = image.matrices[MATRICES * layer + GATE_UP]
    norm = image.norms[2 * layer + 1].ctypes.data
    gate = _records(scratch, rows, matrix)
    up = gate + 64 * rows
    normed_records(work.residual.ctypes.data, rows, norm, shape.hidden, np.float32(shape.eps), words, scratch)
    item = next_of_part(seat, matrix[PANELS] // 2)
    while item < matrix[PANELS] // 2:
        for half in range(2):
            panel = image.panels[matrix[FIRST] + 2 * item + half]
            at = up if half else gate
            call_product(seat.team, (panel[KIND], panel[ADDRESS], matrix[INNER], scratch, rows, words, at))
        panel = image.panels[matrix[FIRST] + 2 * item]
        for row in range(rows):
            store_f32(gate + 64 * row, silu_mul(load_f32(gate + 64 * row), load_f32(up + 64 * row)))
            _put(gate + 64 * row, work.gated[row, panel[COLUMN] : panel[COLUMN] + panel[VALID]])
        item = next_of_part(seat, matrix[PANELS] // 2)


@njit(nogil=True, cache=True, error_model="numpy")
def _down(seat: Any, layer: Any, words: Any, shape: Any, image: Any, step: Any, work: Any, scratch: Any) -> None:
    rows = len(step.tokens)
    matrix = image.matrices[MATRICES * layer + DOWN]
    out = _records(scratch, rows, matrix)
    plain_records(work.gated.ctypes.data, rows, shape.intermediate, work.gated.strides[0], words, scratch)
    _multiply_and_add(seat, image, matrix, rows, words, work, scratch, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _project_head(seat: Any, words: Any, shape: Any, image: Any, step: Any, work: Any, scratch: Any) -> None:
    rows = len(step.sampled)
    if rows == 0:
        return
    matrix = image.matrices[MATRICES * shape.layers]
    norm = image.norms[2 * shape.layers].ctypes.data
    for index in range(rows):
        x = work.residual[step.sampled[index]].ctypes.data
        normed_record(x, index, rows, norm, shape.hidden, np.float32(shape.eps), words, scratch)
    out = _records(scratch, rows, matrix)
    item = next_of_part(seat, matrix[PANELS])
    while item < matrix[PANELS]:
        panel = image.panels[matrix[FIRST] + item]
        call_product(seat.team, (panel[KIND], panel[ADDRESS], matrix[INNER], scratch, rows, words, out))
        for row in range(rows):
            _put(out + 64 * row, work.logits[row, panel[COLUMN] : panel[COLUMN] + panel[VALID]])
        item = next_of_part(seat, matrix[PANELS])


def scratch_bytes(shape: Any, rows: int) -> int:
    """What one member needs for a step of ``rows`` rows."""
    inner = max(shape.hidden, shape.intermediate, shape.heads * shape.dim)
    records = rows * (int(record_bytes(inner)) + 128 + 4 * shape.heads * shape.dim)
    return int(max(records, attend_scratch_bytes(shape.heads, shape.dim))) + 4096


def new_work(shape: Any, threads: int, rows: int, parts: int) -> Work:
    """Buffers for a step of ``rows`` rows whose attention leaves ``parts`` bytes."""
    return Work(
        residual=np.zeros((rows, shape.hidden), dtype=np.float32),
        qkv=np.zeros((rows, (shape.heads + 2 * shape.kv_heads) * shape.dim), dtype=np.float32),
        gated=np.zeros((rows, shape.intermediate), dtype=np.float32),
        parts=np.zeros(parts, dtype=np.uint8),
        logits=np.zeros((0, shape.vocab), dtype=np.float32),
        scratch=np.zeros((threads, scratch_bytes(shape, rows)), dtype=np.uint8),
    )
