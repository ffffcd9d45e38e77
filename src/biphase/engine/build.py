"""From options to an engine that is ready: model loaded, kernels compiled, KV pool reserved, limits settled."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from biphase.engine.config import ModelConfig
from biphase.engine.engine import Engine
from biphase.engine.kernels import can_compile, forget_compiled_code
from biphase.engine.messages import Ready
from biphase.engine.options import EngineOptions
from biphase.engine.packed_loading import check_choices, load_packed
from biphase.engine.rows import TwoPhaseModel
from biphase.engine.trace import Trace
from biphase.errors import BadInput, BiphaseError
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.step_time import StepTimeLaw

if TYPE_CHECKING:
    from biphase.engine.kernels.image import PackedModel

COMPILING = "compiling kernels (up to three minutes; kept for the next start where its folder can be written)"
T = TypeVar("T")
BLOCK_SIZE = 16
"""Tokens per KV block, as in vLLM: small enough to waste half a block a sequence, long enough to read in one run."""
_OPTIONS = re.compile(r"\b(max_num_seqs|max_num_batched_tokens|itl_budget_ms|max_queued_requests|max_queued_tokens)\b")
"""Limits as the scheduler calls them, each of which a user gives as an option."""
DEFAULT_KV_BYTES = 4e9
"""The pool when nothing is asked, and never more than a quarter of the free memory; it is touched only as it fills."""


def build(options: EngineOptions, progress: Callable[[str], None] = lambda _: None) -> tuple[Engine, Ready]:
    """Load a model and make its engine ready: kernels compiled, KV pool reserved, limits settled."""
    started = perf_counter()
    check_choices(options)
    set_threads(threads_of(options))
    progress(f"loading {options.model}")
    trace = Trace(Path(options.trace)) if options.trace else None
    engine, dtypes = unless_damaged(lambda: _ready_engine(options, trace, progress), progress)
    model, config = engine.runner.model, engine.scheduler.config
    ready = Ready(
        max_model_len=config.max_request_tokens,
        vocab_size=model.config.vocab_size,
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        num_blocks=config.num_blocks,
        block_size=BLOCK_SIZE,
        crossover_rows=getattr(model, "crossover", None),
        load_seconds=perf_counter() - started,
    )
    return engine, ready


def unless_damaged(run: Callable[[], T], say: Callable[[str], None]) -> T:
    """``run``, and once more without the compiled code that was kept, if that may be why it failed.

    A full disk or a power loss leaves files of no or half length, and reading those raises anything.
    """
    try:
        return run()
    except (MemoryError, BiphaseError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error) or not forget_compiled_code():
            raise
    say("the kernels that were kept may be damaged, and are made anew")
    return run()


def _ready_engine(
    options: EngineOptions, trace: Trace | None, say: Callable[[str], None]
) -> tuple[Engine, tuple[str, str]]:
    """The engine, warm, and the types of weights and cache."""
    model, config, dtypes = _model(options, say)
    engine = Engine(model, config, trace)
    say(COMPILING if hasattr(model, "crossover") and not kernels_are_compiled() else "warming up")
    warm_up(engine)
    return engine, dtypes


def _model(
    options: EngineOptions, say: Callable[[str], None]
) -> tuple[TwoPhaseModel, SchedulerConfig, tuple[str, str]]:
    """The model with its cache, its limits, and the types of weights and cache."""
    packed = load_packed(options)
    return _torch_model(options) if packed is None else _compiled_model(options, say, *packed)


def _compiled_model(
    options: EngineOptions, say: Callable[[str], None], shape: ModelConfig, packed: "PackedModel"
) -> tuple[TwoPhaseModel, SchedulerConfig, tuple[str, str]]:
    from biphase.engine.compiled import CompiledModel, PagedCache
    from biphase.engine.kernels.cells import block_bytes
    from biphase.engine.registries import load_registries

    load_registries()
    keep_to_members_at_once(options, say)
    int8_kv = options.kv_cache_dtype == "int8"
    config = _limits(options, shape, block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, int8_kv))
    words = 1 if options.activations == "int8" else 2
    model = CompiledModel(shape, packed, PagedCache(shape, config.num_blocks, int8_kv), words)
    return model, config, ("native" if options.dtype == "auto" else "int8", "int8" if int8_kv else "float16")


def keep_to_members_at_once(options: EngineOptions, say: Callable[[str], None]) -> None:
    """A program whose members do not all run would wait for the others for ever."""
    import numba

    from biphase.engine.kernels.team import members_at_once

    if (options.threads or 0) > (most := numba.config.NUMBA_NUM_THREADS):
        raise BadInput(f"--threads {options.threads}: NUMBA_NUM_THREADS is {most}; unset it, or ask for no more")
    asked = numba.get_num_threads()
    if (found := members_at_once(asked)) < asked:
        say(f"only {found} of {asked} threads run at once (OMP_THREAD_LIMIT, OMP_DYNAMIC?), so steps take {found}")
        numba.set_num_threads(found)


def _torch_model(options: EngineOptions) -> tuple[TwoPhaseModel, SchedulerConfig, tuple[str, str]]:
    import torch

    from biphase.engine import kv_cache
    from biphase.engine.loading import load
    from biphase.engine.model import Model

    torch.set_num_threads(threads_of(options))
    shape, weights = load(options.model, options.dtype, options.random_weights)
    dtype = weights.embedding.dtype
    within = shape.sliding_window or shape.max_position  # torch's attention has no window
    reach = replace(shape, max_position=within)
    config = _limits(options, reach, shape.kv_bytes_per_token(dtype.itemsize) * BLOCK_SIZE)
    cache = kv_cache.allocate(shape, config.num_blocks, BLOCK_SIZE, dtype)
    return Model(shape, weights, cache), config, (str(dtype).removeprefix("torch."),) * 2


def warm_up(engine: Engine) -> None:
    """Compile the kernels, so that no request waits for them, and where an ITL budget is set measure its first law."""
    config = engine.scheduler.config
    first: list[Group] = [[(min(40, config.max_request_tokens - 2), 2)] * 2]
    engine.measure(first)
    settle(engine.runner.model)
    if config.itl_budget_ms is not None:
        seen = engine.measure(_possible(WHOLE_PROMPTS * 2, config))  # the first touch of memory must not count alone
        for tokens in CHUNKS_OF_LAW:
            seen += engine.measure(_possible(BESIDE_DECODES, config), tokens)
        engine.start_from(StepTimeLaw(seen))


def settle(model: TwoPhaseModel) -> None:
    """Let a model that has two programs find from how many rows on the second is faster."""
    if hasattr(model, "crossover"):  # not isinstance: the compiled model cannot be imported without numba
        from biphase.engine import crossover
        from biphase.engine.compiled import CompiledModel

        assert isinstance(model, CompiledModel)
        crossover.settle(model)


def kernels_are_compiled() -> bool:
    """Whether numba's cache holds both programs and what they call, compiled from these very files for this processor.

    The same version installed in another folder has its own: numba keeps code by the path of its source.
    """
    from biphase.engine.kernels import out_of_line
    from biphase.engine.kernels.few_rows_step import few_rows_step
    from biphase.engine.kernels.many_rows_step import many_rows_step

    folder = Path(few_rows_step.stats.cache_path)
    return all(_is_kept(function, folder) for function in (few_rows_step, many_rows_step, *out_of_line.functions()))


def _is_kept(function: Callable[..., Any], folder: Path) -> bool:
    """Index and code, either of which a copy or a clean-up may have lost."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    return all(any(folder.glob(f"{name}-*.{kind}")) for kind in ("nbi", "nbc"))


def compile_kernels() -> None:
    """Run both programs once on a model of a few rows."""
    from biphase.engine.compiled import CompiledModel, PagedCache
    from biphase.engine.packing import pack
    from biphase.engine.safetensors_files import RandomSource

    config = ModelConfig("llama", 32, 32, 1, 2, 1, 16, 32, 64, 1e-5, 1e4)
    engine_config = SchedulerConfig(4, 64, BLOCK_SIZE, 64, 2)
    packed = pack(config, RandomSource(config, "a tiny model"))
    warm_up(Engine(CompiledModel(config, packed, PagedCache(config, 4)), engine_config))


Group = list[tuple[int, int]]
"""Requests that arrive together: prompt and output tokens of each."""
WHOLE_PROMPTS: list[Group] = [[(16, 4)], [(256, 4)], [(1024, 4)], [(48, 6)] * 4]
BESIDE_DECODES: list[Group] = [[*[(48, 24)] * 4, (512, 1)], [(1024, 24), (512, 1)]]
"""A prompt in chunks beside short streams and beside a long one, itself in chunks before."""
CHUNKS_OF_LAW = (64, 256)
"""Tokens of a step with chunks. All together tell the nine coefficients of the step-time law apart; they take about two
seconds for a model of 100 million parameters."""


def _possible(groups: list[Group], config: SchedulerConfig) -> list[Group]:
    """The groups as far as the limits allow: fewer requests, shorter prompts."""
    room = config.max_request_tokens
    return [
        [(min(prompt, room - output), output) for prompt, output in group[-config.max_num_seqs :] if output < room]
        for group in groups
    ]


def threads_of(options: EngineOptions) -> int:
    """Those asked for, or as many as the processors that this process may run on."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = options.threads or available
    if count > available:
        raise BadInput(f"--threads {count}: expected 1 to {available}, the processors that this process may use")
    return count


def set_threads(count: int) -> None:
    """Let numba's kernels run on so many threads, where numba is installed; torch's are set where torch runs."""
    if can_compile():
        import numba

        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


def _limits(options: EngineOptions, model: ModelConfig, block_bytes: int) -> SchedulerConfig:
    max_len = options.max_model_len or model.max_position
    if max_len > model.max_position:
        raise BadInput(f"--max-model-len {max_len}: expected at most {model.max_position}, the positions of the model")
    num_blocks = int(_kv_bytes(options) // block_bytes)
    # More than every sequence at full length can never be used.
    num_blocks = min(num_blocks, -(-max_len // BLOCK_SIZE) * options.max_num_seqs)
    if num_blocks < 1:
        raise BadInput(
            f"a KV cache of {_kv_bytes(options) / 1e9:.3g} GB holds no block of {BLOCK_SIZE} tokens, which takes "
            f"{block_bytes / 1e9:.3g} GB; give more: --kv-cache-gb"
        )
    try:
        return SchedulerConfig(
            num_blocks,
            max_len,
            BLOCK_SIZE,
            options.max_num_batched_tokens,
            options.max_num_seqs,
            options.itl_budget_ms,
            options.chunked_prefill,
            options.prefix_caching,
            options.max_queued_requests,
            options.max_queued_tokens,
        )
    except ValueError as error:
        raise BadInput(_OPTIONS.sub(lambda name: f"--{name[0].replace('_', '-')}", str(error))) from error


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
