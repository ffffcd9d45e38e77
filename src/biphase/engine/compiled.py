"""The model as compiled programs: the same three functions as ``model.Model``, in one call a step.

Few rows (decode, and the last few tokens of a prompt) run the few-row program, many rows the many-row one, whichever
phase they belong to; from ``crossover`` rows on the second is faster on this machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter

import numpy as np
from numba import config as numba_config
from numba import get_num_threads
from numpy.typing import NDArray

from biphase.engine.config import ModelConfig
from biphase.engine.first_touch import FirstTouch
from biphase.engine.kernels import few_rows_step as few
from biphase.engine.kernels import many_rows_step as many
from biphase.engine.kernels.cells import BLOCK, cell_bytes
from biphase.engine.kernels.image import PackedModel
from biphase.engine.kernels.int8_attention import takes_int8
from biphase.engine.kernels.out_of_line import addresses
from biphase.engine.kernels.row_attention import part_bytes
from biphase.engine.kernels.select import Program, choose_program
from biphase.engine.kernels.team import new_team
from biphase.engine.rows import DecodeRows, Ids32, Logits, PrefillChunk, Rows

MOST_FEW_ROWS = 16
RUN_BLOCKS = 16
"""Blocks of one run of attention, 256 tokens: enough that starting it does not count, few enough to share a context."""
MOST_RUNS = 16
"""Runs of a row, which grow beyond: every thread joins the parts of all, most of which another one has written."""


class PagedCache:
    """Keys and values in blocks of 16 tokens, in float16 or, with ``int8``, in int8 with a scale a token and head.

    ``k`` and ``v`` are bytes [layers, blocks, G, cell]; ``kernels.cells`` says what is in a cell.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, int8: bool = False) -> None:
        self.int8 = int8
        # numpy asks the system for zeroed pages, which it hands out as blocks are first written.
        shape = (config.num_layers, num_blocks, config.num_kv_heads, int(cell_bytes(config.head_dim, int8)))
        self.k, self.v = np.zeros(shape, dtype=np.uint8), np.zeros(shape, dtype=np.uint8)


class CompiledModel:
    """Packed weights and a paged cache; ``words`` is 2 for exact activations and 1 for int8 ones.

    ``int8_attention`` says whether chunks attend by products of int8.
    """

    def __init__(self, config: ModelConfig, packed: PackedModel, cache: PagedCache, words: int = 2) -> None:
        self.config = config
        self.cache = cache
        self.words = words
        self.packed = replace(packed, shape=packed.shape._replace(int8_kv=int(cache.int8)))
        self.int8_attention = bool(takes_int8(words))
        self.crossover = MOST_FEW_ROWS + 1
        self.seconds_for_memory = 0.0
        self._first_touch = FirstTouch((cache.k, cache.v))
        self._few_work: dict[tuple[int, int], few.Work] = {}
        self._many_work: dict[tuple[int, int], many.ManyRowsWork] = {}

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return BLOCK

    def prefill(self, rows: Rows, chunks: list[PrefillChunk]) -> Logits:
        """Run chunks of prompts together. Returns logits [chunks that sample, vocab] of their last rows."""
        return self._forward(rows, [], chunks)

    def decode(self, rows: Rows, decodes: DecodeRows) -> Logits:
        """One token of each sequence. Returns logits [N, vocab]."""
        return self._forward(rows, list(decodes.tables), [])

    def mixed(self, rows: Rows, decodes: DecodeRows, chunks: list[PrefillChunk]) -> Logits:
        """Decode rows first, then chunks. Returns logits of the decodes, then of the chunks that sample."""
        return self._forward(rows, list(decodes.tables), chunks)

    def touch_ahead(self) -> bool:
        """Touch a page of the cache that later steps will use; False when all of them are there."""
        return self._first_touch.ahead()

    def _forward(self, rows: Rows, singles: list[Ids32], chunks: Sequence[PrefillChunk]) -> Logits:
        sampled = [*range(len(singles)), *(chunk.end - 1 for chunk in chunks if chunk.samples)]
        logits = np.empty((len(sampled), self.config.vocab_size), dtype=np.float32)
        started = perf_counter()
        self._first_touch.advance(int(rows.slots.max()) // BLOCK, len(rows.slots))
        self.seconds_for_memory = perf_counter() - started
        if choose_program(len(rows.tokens), self.crossover, self.int8_attention and bool(chunks)) is Program.FEW:
            self._run_few(rows, singles, chunks, sampled, logits)
        else:
            self._run_many(rows, singles, chunks, sampled, logits)
        return logits

    def _run_few(
        self, rows: Rows, singles: list[Ids32], chunks: Sequence[PrefillChunk], sampled: list[int], logits: Logits
    ) -> None:
        tables = list(singles)
        for chunk in chunks:  # every row of a chunk is one of the program's rows
            tables += [chunk.blocks.astype(np.int32)] * (chunk.end - chunk.begin)
        positions = rows.positions.astype(np.int32)
        items, first_items = row_items(positions[: len(tables)], self.config.sliding_window)
        tokens, slots, padded = rows.tokens.astype(np.int32), rows.slots, _padded(tables)
        chosen = np.array(sampled, dtype=np.int32)
        step = few.RowsStep(tokens, positions, slots, padded, items, first_items, chosen)
        work = self._few_work_for(len(tables), len(items))
        self._call(few.few_rows_step, step, work._replace(logits=logits))

    def _run_many(
        self, rows: Rows, singles: list[Ids32], chunks: Sequence[PrefillChunk], sampled: list[int], logits: Logits
    ) -> None:
        positions = rows.positions.astype(np.int32)
        items, first_items = row_items(positions[: len(singles)], self.config.sliding_window)
        step = many.ManyRowsStep(
            rows.tokens.astype(np.int32),
            positions,
            rows.slots,
            _padded(singles),
            items,
            first_items,
            np.array([(c.begin, c.end - c.begin, c.past) for c in chunks], dtype=np.int64).reshape(-1, 3),
            _padded([chunk.blocks for chunk in chunks]),
            np.array(sampled, dtype=np.int32),
        )
        work = self._many_work_for(len(positions), len(items))
        self._call(many.many_rows_step, step, work._replace(logits=logits))

    def _call(self, program: few.Program, step: tuple[object, ...], work: tuple[object, ...]) -> None:
        packed, team = self.packed, self._team.ctypes.data
        program(team, get_num_threads(), self.words, packed.shape, packed.image, self.cache.k, self.cache.v, step, work)

    @cached_property
    def _team(self) -> NDArray[np.int64]:
        """Not before the first step, since its kernels may have to be compiled."""
        return new_team(numba_config.NUMBA_NUM_THREADS, addresses())

    def _few_work_for(self, rows: int, items: int) -> few.Work:
        """Buffers of enough size, kept: sizes are rounded up, so that they seldom change."""
        key = (rows, _rounded(items))
        if key not in self._few_work:
            s = self.packed.shape
            part = int(part_bytes(s.heads // s.kv_heads, s.dim)) * s.kv_heads
            self._few_work = {key: few.new_work(s, get_num_threads(), rows, key[1] * part)}
        return self._few_work[key]

    def _many_work_for(self, rows: int, items: int) -> many.ManyRowsWork:
        key = (_rounded(rows), _rounded(items))
        if key not in self._many_work:
            s = self.packed.shape
            self._many_work = {key: many.new_work(s, get_num_threads(), self.words, *key)}
        return self._many_work[key]


def _rounded(count: int) -> int:
    """The next power of two, and not below 16."""
    return max(16, 1 << (count - 1).bit_length())


def _padded(tables: Sequence[NDArray[np.integer]]) -> Ids32:
    """Block tables of several lengths as one array."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, blocks in enumerate(tables):
        padded[row, : len(blocks)] = blocks
    return padded


def row_items(positions: Ids32, window: int = 0) -> tuple[Ids32, Ids32]:
    """(row, first block, last block) of every run, and where each row's begin; a row's own position alone cuts it.

    With a ``window`` the blocks before it have no run.
    """
    begins = np.maximum(positions + 1 - window, 0) // BLOCK if window else np.zeros_like(positions)
    ends = positions // BLOCK + 1
    blocks = ends - begins
    sizes = RUN_BLOCKS * -(-blocks // (RUN_BLOCKS * MOST_RUNS))
    counts = -(-blocks // sizes)
    first_items = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    row = np.repeat(np.arange(len(positions)), counts)
    first = begins[row] + (np.arange(len(row)) - first_items[row]) * sizes[row]
    last = np.minimum(first + sizes[row], ends[row])
    return np.stack([row, first, last], axis=1).astype(np.int32), first_items
