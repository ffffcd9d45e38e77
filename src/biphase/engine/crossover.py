"""The row count from which the many-row program is faster: the engine's own crossover, measured where it runs."""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from numba import get_num_threads

from biphase.engine.compiled import MOST_FEW_ROWS, CompiledModel
from biphase.engine.kernels import sources_digest, user_cache
from biphase.engine.kernels.features import features
from biphase.engine.rows import DecodeRows, Rows

COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
REPEATS = 5
"""Of which the shortest counts: what else runs on the machine only adds."""


def settle(model: CompiledModel) -> None:
    """Set the model's crossover, from this machine's earlier measurement of this shape or by a new one.

    The cache must be free: its first blocks are written.
    """
    kept = user_cache() / "crossover" / f"{_key(model)}.json"
    model.crossover = _read(kept) or _write(kept, measure(model))


def measure(model: CompiledModel) -> int:
    """The smallest count of rows from which on the many-row program was no slower; one above the most if none."""
    found = MOST_FEW_ROWS + 1
    for count in reversed(COUNTS):
        if count > model.cache.k.shape[1] * model.block_size:
            continue
        if _seconds(model, count, few=True) < _seconds(model, count, few=False):
            break
        found = count
    return found


def _seconds(model: CompiledModel, count: int, few: bool) -> float:
    """A decode step of ``count`` sequences, all with one block."""
    places = np.arange(count)
    rows = Rows(np.ones(count, dtype=np.int64), places, places)
    decodes = DecodeRows(np.zeros((count, 1), dtype=np.int32), (places + 1).astype(np.int32))
    model.crossover = count + 1 if few else 0
    return min(timed(lambda: model.decode(rows, decodes)) for _ in range(REPEATS))


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = perf_counter()
    run()
    return perf_counter() - began


def _key(model: CompiledModel) -> str:
    what = (sources_digest(), model.packed.shape, model.packed.weights.nbytes, model.words, get_num_threads())
    machine = (platform.node(), platform.processor(), str(features()))
    return hashlib.blake2b(repr((what, machine)).encode(), digest_size=8).hexdigest()


def _read(kept: Path) -> int | None:
    try:
        crossover = json.loads(kept.read_text())["crossover_rows"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return crossover if crossover in (*COUNTS, MOST_FEW_ROWS + 1) else None


def _write(kept: Path, crossover: int) -> int:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"crossover_rows": crossover}))
        partial.replace(kept)
    except OSError:  # a home that cannot be written costs this measurement at each start
        pass
    return crossover
