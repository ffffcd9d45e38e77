"""Times the compiled kernels of a model in turn with bare loops on the same threads, which are the roofs.

Every visit to a case first runs the loops and reads the weights once, so that threads are awake and caches hold what
they hold in a step, then the case once. All cases are visited before any is visited again; the first round does not
count. So times and roofs are medians over the same minutes, and a machine whose speed drifts does not part them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

import numpy as np
from numba import get_num_threads

from biphase.engine import crossover
from biphase.engine.bare_loops import BareLoops
from biphase.engine.build import COMPILING, keep_to_members_at_once, kernels_are_compiled, set_threads, threads_of
from biphase.engine.compiled import CompiledModel, PagedCache
from biphase.engine.crossover import timed
from biphase.engine.kernel_cases import Case, all_cases, num_blocks
from biphase.engine.kernels.cells import BLOCK
from biphase.engine.kernels.features import features
from biphase.engine.kernels.select import selection
from biphase.engine.options import EngineOptions
from biphase.engine.packed_loading import load_packed
from biphase.engine.sources import resolve
from biphase.errors import BadInput, RunFailed
from biphase.roofline.calibration import busy_seconds, foreign_cores, hardware_name
from biphase.roofline.kernel_rates import KernelReport, kernel_rate


class Display(Protocol):
    """Shows what is going on, and how far it is."""

    def status(self, text: str) -> None: ...

    def step(self, done: int, total: int, text: str) -> None: ...


def load_model(options: EngineOptions, rows: Sequence[int], say: Callable[[str], None] = print) -> CompiledModel:
    """The model with a cache that is full of numbers, and its crossover settled. ``BadInput`` where torch runs it."""
    set_threads(threads_of(options))
    keep_to_members_at_once(options, say)
    packed = load_packed(options)
    if packed is None:
        raise BadInput(
            f"{options.model} with --dtype {options.dtype} runs in torch here, and biphase kernels times the compiled "
            "programs: they need numba, --dtype auto or int8, and a head size that is a multiple of 16"
        )
    config, image = packed
    cache = PagedCache(config, num_blocks(rows), options.kv_cache_dtype == "int8")
    model = CompiledModel(config, image, cache, 1 if options.activations == "int8" else 2)
    crossover.settle(model)
    fill(model.cache)
    return model


def fill(cache: PagedCache) -> None:
    """Random keys and values: untouched pages would all be one page of zeros in memory, and reading them free."""
    generator = np.random.default_rng(0)
    for array in (cache.k, cache.v):
        cells = array.shape[1:]
        if cache.int8:
            layer = generator.integers(0, 256, cells, dtype=np.uint8)
            layer[..., -4 * BLOCK :] = np.full(BLOCK, 0.02, dtype=np.float32).view(np.uint8)
        else:
            numbers = generator.standard_normal((*cells[:-1], cells[-1] // 2), dtype=np.float32)
            layer = numbers.astype(np.float16).view(np.uint8)
        array[:] = layer


def time_kernels(options: EngineOptions, rows: Sequence[int], repeats: int, shown: Display) -> KernelReport:
    """Times of all cases at these row counts, with progress. Ctrl-C in a round that counts gives what there is."""
    started = time.perf_counter()
    resolve(options.model)  # what is not there is said before anything else is
    shown.status(f"loading {options.model}{'' if kernels_are_compiled() else f'; {COMPILING}'}")
    try:
        model = load_model(options, rows, shown.status)
        cases = all_cases(model, rows)
        loops = BareLoops(model.packed.weights)
        timing, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        samples, whole = visit(cases, loops, repeats, shown)
    except MemoryError as error:
        raise RunFailed(f"no memory for {max(rows)} rows of this model; give fewer: --rows") from error
    roofs = loops.roofs()
    return KernelReport(
        model=options.model,
        dtype=options.dtype,
        activations=options.activations,
        kv_cache_dtype="int8" if model.cache.int8 else "float16",
        hardware=hardware_name(on_cuda=False),
        threads=get_num_threads(),
        features=str(features()),
        weight_bytes=model.packed.weights.nbytes,
        repeats=repeats,
        seconds=time.perf_counter() - started,
        foreign_cores=foreign_cores(busy, own, timing),
        crossover_rows=model.crossover,
        selection=tuple(asdict(line) for line in selection(features())),
        roofs=roofs,
        rates=tuple(kernel_rate(c.subject, c.work, s, roofs) for c, s in zip(cases, samples, strict=True) if s),
        interrupted=not whole,
    )


def visit(cases: Sequence[Case], loops: BareLoops, repeats: int, shown: Display) -> tuple[list[list[float]], bool]:
    """Milliseconds of each case, one a round, and whether all rounds were made: Ctrl-C ends them."""
    samples: list[list[float]] = [[] for _ in cases]
    try:
        for number in range(repeats + 1):
            if number == 1:
                loops.forget()
            for done, case in enumerate(cases):
                subject = case.subject
                what = f"{subject.operator}, {subject.program}, {subject.rows} rows"
                shown.step(number * len(cases) + done, (repeats + 1) * len(cases), what)
                loops.run()
                seconds = timed(case.run)
                samples[done] += [1e3 * seconds] if number else []
    except KeyboardInterrupt:
        if not any(samples):
            raise  # the round that does not count had not ended
        return samples, False
    return samples, True
