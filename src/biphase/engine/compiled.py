"""The model as compiled programs: the same three functions as ``model.Model``, in two calls without Python between.

Few rows (decode, and the last few tokens of a prompt) run the few-row program, many rows the many-row one, whichever
phase they belong to; ``crossover`` is the number of rows from which the second is faster on this machine.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import get_num_threads
from numpy.typing import NDArray
from torch import Tensor

from biphase.engine.config import ModelConfig
from biphase.engine.kernels.few_rows_step import RowsStep, Work, few_rows_step, scratch_bytes
from biphase.engine.kernels.image import PackedModel
from biphase.engine.kernels.row_attention import BLOCK, part_bytes
from biphase.engine.kernels.team import new_team
from biphase.engine.model import DecodeRows, PrefillChunk, Rows

MOST_FEW_ROWS = 16
TOKENS_PER_ITEM = 256
"""Keys of one attention item: enough that starting it does not count, few enough to share one sequence out."""


class PagedCache:
    """Keys and values in float16, in blocks of 16 tokens.

    k is [layers, blocks, G, D, 16], v [layers, blocks, G, 16, D], as ``row_attention`` wants them.
    """

    def __init__(self, config: ModelConfig, num_blocks: int) -> None:
        # numpy asks the system for zeroed pages, which it hands out as blocks are first written.
        shape = (config.num_layers, num_blocks, config.num_kv_heads)
        self.k = np.zeros((*shape, config.head_dim, BLOCK), dtype=np.uint16)
        self.v = np.zeros((*shape, BLOCK, config.head_dim), dtype=np.uint16)


class CompiledModel:
    """Packed weights and a paged cache; ``words`` is 2 for exact activations and 1 for int8 ones."""

    def __init__(self, config: ModelConfig, packed: PackedModel, cache: PagedCache, words: int = 2) -> None:
        self.config = config
        self.cache = cache
        self.words = words
        self._packed = packed
        self._team = new_team()
        self._work: dict[tuple[int, int], Work] = {}

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return BLOCK

    def prefill(self, rows: Rows, chunks: list[PrefillChunk]) -> Tensor:
        """Run chunks of prompts together. Returns logits [chunks that sample, vocab] of their last rows."""
        return self._forward(rows, [], chunks)

    def decode(self, rows: Rows, decodes: DecodeRows) -> Tensor:
        """One token of each sequence. Returns logits [N, vocab]."""
        return self._forward(rows, list(decodes.tables.numpy()), [])

    def mixed(self, rows: Rows, decodes: DecodeRows, chunks: list[PrefillChunk]) -> Tensor:
        """Decode rows first, then chunks. Returns logits of the decodes, then of the chunks that sample."""
        return self._forward(rows, list(decodes.tables.numpy()), chunks)

    def _forward(self, rows: Rows, decodes: list[NDArray[np.int32]], chunks: Sequence[PrefillChunk]) -> Tensor:
        tables = list(decodes)
        for chunk in chunks:
            tables += [chunk.blocks.numpy().astype(np.int32)] * (chunk.end - chunk.begin)
        sampled = [*range(len(decodes)), *(chunk.end - 1 for chunk in chunks if chunk.samples)]
        return self._few(rows, tables, sampled)

    def _few(self, rows: Rows, tables: list[NDArray[np.int32]], sampled: list[int]) -> Tensor:
        logits = np.empty((len(sampled), self.config.vocab_size), dtype=np.float32)
        done = 0
        for begin in range(0, len(tables), MOST_FEW_ROWS):
            end = min(begin + MOST_FEW_ROWS, len(tables))
            here = [row - begin for row in sampled if begin <= row < end]
            step = _step(rows, begin, end, tables[begin:end], here)
            work = self._work_for(end - begin, len(step.items))
            few_rows_step(
                self._team.ctypes.data,
                get_num_threads(),
                self.words,
                self._packed.shape,
                self._packed.image,
                self.cache.k,
                self.cache.v,
                step,
                work._replace(logits=logits[done : done + len(here)]),
            )
            done += len(here)
        return torch.from_numpy(logits)

    def _work_for(self, rows: int, items: int) -> Work:
        """Buffers of enough size, kept; ``items`` of attention are rounded up so that they seldom change."""
        key = (rows, 1 << (items - 1).bit_length())
        if key not in self._work:
            self._work = {key: _new_work(self._packed, *key)}
        return self._work[key]


def _new_work(packed: PackedModel, rows: int, items: int) -> Work:
    s = packed.shape
    part = int(part_bytes(s.heads // s.kv_heads, s.dim)) * s.kv_heads
    return Work(
        residual=np.zeros((rows, s.hidden), dtype=np.float32),
        qkv=np.zeros((rows, (s.heads + 2 * s.kv_heads) * s.dim), dtype=np.float32),
        gated=np.zeros((rows, s.intermediate), dtype=np.float32),
        parts=np.zeros(items * part, dtype=np.uint8),
        logits=np.zeros((0, s.vocab), dtype=np.float32),
        scratch=np.zeros((get_num_threads(), scratch_bytes(s, rows)), dtype=np.uint8),
    )


def _step(rows: Rows, begin: int, end: int, tables: list[NDArray[np.int32]], sampled: list[int]) -> RowsStep:
    positions = rows.positions[begin:end].numpy().astype(np.int32)
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    items: list[tuple[int, int, int]] = []
    first_items = [0]
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
        used = int(positions[row]) // BLOCK + 1
        step = TOKENS_PER_ITEM // BLOCK
        items += [(row, first, min(first + step, used)) for first in range(0, used, step)]
        first_items.append(len(items))
    return RowsStep(
        rows.tokens[begin:end].numpy().astype(np.int32),
        positions,
        rows.slots[begin:end].numpy(),
        table,
        np.array(items, dtype=np.int32),
        np.array(first_items, dtype=np.int32),
        np.array(sampled, dtype=np.int32),
    )
