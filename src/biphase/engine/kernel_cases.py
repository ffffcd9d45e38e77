"""What ``biphase kernels`` times: whole steps through each program, and each operator over all layers by itself.

A decode step has as many sequences as rows, each with one block of keys and values: the path of the weights. A prefill
step is one prompt from its first token, whose last row is sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import get_num_threads

from biphase.engine import kernel_work
from biphase.engine.compiled import CompiledModel, row_items
from biphase.engine.kernels import alone
from biphase.engine.kernels import few_rows_step as few
from biphase.engine.kernels import many_rows_step as many
from biphase.engine.kernels.cells import BLOCK
from biphase.engine.kernels.image import COLUMNS, INNER, MATRICES, Floats
from biphase.engine.kernels.out_of_line import addresses
from biphase.engine.kernels.row_attention import part_bytes
from biphase.engine.kernels.select import Program, choose_program
from biphase.engine.kernels.team import new_team
from biphase.engine.kernels.vectors import LANES
from biphase.engine.rows import DecodeRows, PrefillChunk, Rows
from biphase.roofline.kernel_rates import Subject, Work

SINGLE_ROWS = ((1, 256), (1, 1024), (1, 4096), (8, 512))
"""Sequences that decode, and the tokens that each sees."""
CHUNKS = ((64, 0), (512, 0), (512, 3584))
"""Rows of a chunk, and the tokens before it."""
BOTH = "both"
FEWEST_MANY_ROWS = 2
"""An array of one row has another type to numba, so the many-row program would compile once more for it."""


@dataclass(frozen=True)
class Case:
    """``run`` does ``work`` once."""

    subject: Subject
    work: Work
    run: Callable[[], object]


def num_blocks(rows: Sequence[int]) -> int:
    """Blocks of the cache that the cases need."""
    tokens = [count * context for count, context in SINGLE_ROWS] + [count + past for count, past in CHUNKS]
    return max(*rows, -(-max(tokens) // BLOCK))


def all_cases(model: CompiledModel, rows: Sequence[int]) -> list[Case]:
    """For these row counts; ``model.crossover`` says which program is chosen."""
    longest = model.config.max_position
    makers = [_decode_step, _prefill_step, _layers, _head]
    found = [
        make(model, count, program)
        for make in makers
        for count in rows
        for program in Program
        if (program is Program.FEW or count >= FEWEST_MANY_ROWS)
        and (make is not _prefill_step or (count <= longest and _may_run_a_chunk(model, program)))
    ]
    found += [_single_rows(model, count, context) for count, context in SINGLE_ROWS if context <= longest]
    return found + [_chunk(model, count, past) for count, past in CHUNKS if count + past <= longest]


def _may_run_a_chunk(model: CompiledModel, program: Program) -> bool:
    """Attention in int8 has the many-row program alone."""
    return program is Program.MANY or not model.int8_attention


def _subject(
    model: CompiledModel, operator: str, rows: int, program: Program, context: int | None = None, int8: bool = False
) -> Subject:
    chosen = choose_program(rows, model.crossover, int8) is program
    return Subject(operator, program, rows, context, chosen)


def _forced(model: CompiledModel, rows: int, program: Program) -> CompiledModel:
    """The same weights and cache, with buffers of its own, in which ``rows`` rows run through ``program``."""
    forced = CompiledModel(model.config, model.packed, model.cache, model.words)
    forced.crossover = rows + 1 if program is Program.FEW else 0
    return forced


def _matrices(model: CompiledModel) -> tuple[range, range]:
    """Of all layers, and the head."""
    layers = MATRICES * model.packed.shape.layers
    return range(layers), range(layers, layers + 1)


def _decode_step(model: CompiledModel, rows: int, program: Program) -> Case:
    sequences = np.arange(rows)
    places = Rows(np.ones_like(sequences), np.full_like(sequences, BLOCK - 1), BLOCK * sequences + BLOCK - 1)
    decodes = DecodeRows(sequences[:, None].astype(np.int32), np.full(rows, BLOCK, dtype=np.int32))
    forced, shape = _forced(model, rows, program), model.packed.shape
    layers, head = _matrices(model)
    work = kernel_work.products(model.packed, range(layers.start, head.stop), rows, model.words, program)
    work += kernel_work.single_rows(shape, [BLOCK] * rows)
    return Case(_subject(model, "decode step", rows, program, BLOCK), work, lambda: forced.decode(places, decodes))


def _prefill_step(model: CompiledModel, rows: int, program: Program) -> Case:
    positions = np.arange(rows)
    places = Rows(np.ones_like(positions), positions, positions)
    chunks = [PrefillChunk(0, rows, 0, np.arange(-(-rows // BLOCK)), samples=True)]
    forced, shape = _forced(model, rows, program), model.packed.shape
    layers, head = _matrices(model)
    work = kernel_work.products(model.packed, layers, rows, model.words, program)
    work += kernel_work.products(model.packed, head, 1, model.words, program)
    few_rows = program is Program.FEW
    work += (
        kernel_work.chunk_as_single_rows(shape, rows) if few_rows else kernel_work.chunk(shape, rows, 0, model.words)
    )
    subject = _subject(model, "prefill step", rows, program, rows, model.int8_attention)
    return Case(subject, work, lambda: forced.prefill(places, chunks))


def _layers(model: CompiledModel, rows: int, program: Program) -> Case:
    return _products(model, "layers' products", _matrices(model)[0], rows, program)


def _head(model: CompiledModel, rows: int, program: Program) -> Case:
    return _products(model, "head", _matrices(model)[1], rows, program)


def _products(model: CompiledModel, operator: str, matrices: range, rows: int, program: Program) -> Case:
    image, shape, words = model.packed.image, model.packed.shape, model.words
    own = image.matrices[matrices.start : matrices.stop]
    threads = get_num_threads()
    team, x = new_team(threads, addresses()), _random(rows, int(own[:, INNER].max()))
    out = np.zeros((rows, int(own[:, COLUMNS].max()) + LANES), dtype=np.float32)
    arguments: tuple[Any, ...] = (threads, words, image, matrices.start, matrices.stop, x, out)
    if program is Program.FEW:
        kernel = alone.few_row_products
        arguments += (few.new_work(shape, threads, rows, 0).scratch,)
    else:
        kernel = alone.many_row_products
        arguments += (many.new_work(shape, threads, words, rows, 1),)
    work = kernel_work.products(model.packed, matrices, rows, words, program)
    return Case(_subject(model, operator, rows, program), work, lambda: kernel(team.ctypes.data, *arguments))


def _single_rows(model: CompiledModel, count: int, context: int) -> Case:
    shape, threads = model.packed.shape, get_num_threads()
    team = new_team(threads, addresses())
    positions = np.full(count, context - 1, dtype=np.int32)
    items, first_items = row_items(positions, shape.window)
    tables = np.arange(count * -(-context // BLOCK), dtype=np.int32).reshape(count, -1)
    unused = np.zeros(count, dtype=np.int32)
    step = few.RowsStep(unused, positions, unused.astype(np.int64), tables, items, first_items, unused)
    part = int(part_bytes(shape.heads // shape.kv_heads, shape.dim)) * shape.kv_heads
    work = few.new_work(shape, threads, count, len(items) * part)
    work.qkv[:] = _random(*work.qkv.shape)
    arguments = (threads, shape, model.cache.k, model.cache.v, step, work)
    return Case(
        Subject("decode attention", BOTH, count, context),
        kernel_work.single_rows(shape, [context] * count),
        lambda: alone.single_row_attention(team.ctypes.data, *arguments),
    )


def _chunk(model: CompiledModel, rows: int, past: int) -> Case:
    shape, threads = model.packed.shape, get_num_threads()
    team = new_team(threads, addresses())
    work = many.new_work(shape, threads, model.words, rows, 1)
    work.qkv[:] = _random(*work.qkv.shape)
    table = np.arange(-(-(past + rows) // BLOCK), dtype=np.int32)
    arguments = (threads, model.words, shape, model.cache.k, model.cache.v, past, table, work)
    return Case(
        Subject("chunk attention", Program.MANY, rows, past + rows),
        kernel_work.chunk(shape, rows, past, model.words),
        lambda: alone.chunk_attention(team.ctypes.data, *arguments),
    )


def _random(rows: int, columns: int) -> Floats:
    return np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
