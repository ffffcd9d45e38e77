"""Steps of the many-row program on a small cache, for its tests and its timing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import get_num_threads

from biphase.engine.compiled import PagedCache
from biphase.engine.kernels.cells import BLOCK
from biphase.engine.kernels.image import PackedModel
from biphase.engine.kernels.many_rows_step import ManyRowsStep, ManyRowsWork, many_rows_step, new_work
from biphase.engine.kernels.out_of_line import addresses
from biphase.engine.kernels.team import new_team


@dataclass(frozen=True)
class Part:
    """Tokens of one sequence after ``past`` others; its block table."""

    tokens: Sequence[int]
    past: int
    table: np.ndarray


def step_of(singles: Sequence[Part], chunks: Sequence[Part], sampled: Sequence[int], run: int = 4) -> ManyRowsStep:
    """A step whose single rows attend in items of ``run`` blocks."""
    parts = [*singles, *chunks]
    positions = np.concatenate([part.past + np.arange(len(part.tokens)) for part in parts]).astype(np.int32)
    slots = [
        part.table[p // 16] * 16 + p % 16 for part in parts for p in range(part.past, part.past + len(part.tokens))
    ]
    items, first_items = [], [0]
    for row, part in enumerate(singles):
        used = part.past // BLOCK + 1
        items += [(row, first, min(first + run, used)) for first in range(0, used, run)]
        first_items.append(len(items))
    begins = len(singles) + np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
    table = [(begin, len(chunk.tokens), chunk.past) for begin, chunk in zip(begins, chunks, strict=False)]
    return ManyRowsStep(
        np.concatenate([part.tokens for part in parts]).astype(np.int32),
        positions,
        np.array(slots, np.int64),
        _tables(singles),
        np.array(items, np.int32).reshape(-1, 3),
        np.array(first_items, np.int32),
        np.array(table, np.int64).reshape(-1, 3),
        _tables(chunks),
        np.array(sampled, np.int32),
    )


def _tables(parts: Sequence[Part]) -> np.ndarray:
    tables = np.zeros((len(parts), max([len(part.table) for part in parts], default=0)), np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part.table)] = part.table
    return tables


def work_for(packed: PackedModel, step: ManyRowsStep, words: int) -> ManyRowsWork:
    s = packed.shape
    return new_work(s, get_num_threads(), words, len(step.tokens), len(step.items))


def run_step(
    packed: PackedModel, cache: PagedCache, step: ManyRowsStep, words: int = 2, work: ManyRowsWork | None = None
) -> np.ndarray:
    """Logits of the sampled rows."""
    logits = np.full((len(step.sampled), packed.shape.vocab), np.nan, np.float32)
    work = (work or work_for(packed, step, words))._replace(logits=logits)
    threads = get_num_threads()
    team = new_team(threads, addresses())
    shape = packed.shape._replace(int8_kv=int(cache.int8))
    many_rows_step(team.ctypes.data, threads, words, shape, packed.image, cache.k, cache.v, step, work)
    return logits
