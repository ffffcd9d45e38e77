"""One model with its scheduler: requests in, tokens out, a step at a time. Knows no text and no HTTP."""

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from biphase.engine import kv_cache
from biphase.engine.config import ModelConfig
from biphase.engine.loading import load
from biphase.engine.messages import Output, Ready, Step, Submit
from biphase.engine.model import Model
from biphase.engine.options import EngineOptions
from biphase.engine.runner import PhaseSeconds, Runner
from biphase.errors import BadInput
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.request import FinishReason, Request, SamplingParams
from biphase.scheduling.scheduler import Outcome, Scheduler

BLOCK_SIZE = 16
"""Tokens per KV block, as in vLLM: small enough to waste half a block a sequence, long enough to read in one run."""
DEFAULT_KV_BYTES = 4e9
"""The pool when nothing is asked, and never more than a quarter of the free memory; it is touched only as it fills."""


class Engine:
    """The three-line loop over a ``Scheduler`` and a ``Runner``."""

    def __init__(self, model: Model, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.runner = Runner(model)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, message: Submit) -> None:
        """Queue a request; ``ValueError`` says why one can never run."""
        m = message
        request = Request(m.id, m.prompt, m.max_tokens, m.stop_ids, m.sampling, perf_counter(), m.priority)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self) -> Step:
        """Run one step and report it."""
        now = perf_counter()
        plan = self.scheduler.plan(now)
        result = self.runner.run(plan)
        outcomes = self.scheduler.commit(plan, result, perf_counter())
        if not self.scheduler.has_work:
            self.scheduler.check()
        decodes = len(plan.decode)
        return self._report(
            [_output(outcome) for outcome in outcomes], perf_counter() - now, plan.num_tokens - decodes, decodes
        )

    def refuse(self, request_id: str, reason: str) -> Step:
        """A step that ran nothing and tells one client why its request never will."""
        return self._report([Output(request_id, (), FinishReason.ERROR, reason)], 0.0, 0, 0)

    def _report(self, outputs: list[Output], seconds: float, prefill_tokens: int, decode_tokens: int) -> Step:
        return Step(
            outputs=tuple(outputs),
            seconds=seconds,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=self.scheduler.kv_usage,
        )


def _output(outcome: Outcome) -> Output:
    tokens = () if outcome.token is None else (outcome.token,)
    return Output(outcome.request.id, tokens, outcome.finish_reason, outcome.error)


def build(options: EngineOptions, progress: Callable[[str], None] = lambda _: None) -> tuple[Engine, Ready]:
    """Load a model and make its engine ready: kernels compiled, KV pool reserved, limits settled."""
    started = perf_counter()
    set_threads(options.threads)
    progress(f"loading {options.model}")
    model_config, weights = load(options.model, options.dtype, options.random_weights)
    dtype = weights.embedding.dtype
    config = _limits(options, model_config, dtype.itemsize)
    cache = kv_cache.allocate(model_config, config.num_blocks, BLOCK_SIZE, dtype)
    engine = Engine(Model(model_config, weights, cache), config)
    progress("compiling kernels (kept for the next start)")
    warm_up(engine)
    ready = Ready(
        max_model_len=config.max_request_tokens,
        vocab_size=model_config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        num_blocks=config.num_blocks,
        block_size=BLOCK_SIZE,
        load_seconds=perf_counter() - started,
    )
    return engine, ready


def warm_up(engine: Engine) -> None:
    """Run a short prompt and a decode, so that no request waits for a kernel to compile."""
    length = min(8, engine.scheduler.config.max_request_tokens - 2)
    if length < 2:
        return
    engine.scheduler.add(Request("warm-up", tuple(range(length)), 2, sampling=SamplingParams(temperature=0)))
    while engine.has_work:
        engine.step()
    engine.runner.seconds = PhaseSeconds()


def set_threads(threads: int | None) -> None:
    """Give torch and numba the same threads: those asked for, or the processors this process may run on."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = threads or available
    if count > available:
        raise BadInput(f"{count} threads were asked for and this process may use {available} processors")
    torch.set_num_threads(count)
    try:
        import numba
    except ImportError:
        return
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


def _limits(options: EngineOptions, model: ModelConfig, element_bytes: int) -> SchedulerConfig:
    max_len = options.max_model_len or model.max_position
    if max_len > model.max_position:
        raise BadInput(f"max_model_len {max_len} exceeds the {model.max_position} positions of the model")
    block_bytes = model.kv_bytes_per_token(element_bytes) * BLOCK_SIZE
    num_blocks = int(_kv_bytes(options) // block_bytes)
    # More than every sequence at full length can never be used.
    num_blocks = min(num_blocks, -(-max_len // BLOCK_SIZE) * options.max_num_seqs)
    if num_blocks < 1:
        raise BadInput(f"a KV cache of {options.kv_cache_gb} GB holds no block; one is {block_bytes / 1e9:.3g} GB")
    try:
        return SchedulerConfig(num_blocks, max_len, BLOCK_SIZE, options.max_num_batched_tokens, options.max_num_seqs)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _kv_bytes(options: EngineOptions) -> float:
    if options.kv_cache_gb is not None:
        return options.kv_cache_gb * 1e9
    return min(DEFAULT_KV_BYTES, _available_bytes() / 4)


def _available_bytes() -> float:
    """Memory to be had without swapping: Linux counts the page cache that it would give up; elsewhere assume enough."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 * DEFAULT_KV_BYTES
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
