"""From options to the packed model that compiled programs run. Loads torch only to pack what is not kept packed."""

from pathlib import Path
from typing import TYPE_CHECKING

from biphase.engine.config import ModelConfig
from biphase.engine.kernels import can_compile
from biphase.engine.options import EngineOptions
from biphase.engine.sources import resolve
from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.engine.kernels.image import PackedModel

_COMPILED = ("auto", "int8")
"""The values of ``dtype`` that compiled programs serve; the others run through torch."""


def check_choices(options: EngineOptions) -> None:
    """Raise ``BadInput`` where a lossy choice is one that the dtype has not."""
    if options.dtype not in _COMPILED:
        _refuse_lossy(options, f"--dtype auto or int8, not {options.dtype}")


def load_packed(options: EngineOptions) -> tuple[ModelConfig, "PackedModel"] | None:
    """The model in panels, or None where torch runs it: asked for by ``dtype``, or no numba, or an odd head size."""
    if options.dtype not in _COMPILED:
        return None
    if not can_compile():
        _refuse_without_panels(options, "numba, which is not installed or switched off (NUMBA_DISABLE_JIT)")
        return None
    from biphase.engine import packed_cache

    path = resolve(options.model)
    entry = _entry(path, options)
    return (None if entry is None else packed_cache.read(entry)) or _pack(path, options, entry)


def _entry(path: Path, options: EngineOptions) -> Path | None:
    """Where this model is kept packed; None for one that is not to be kept."""
    from biphase.engine import packed_cache

    if options.random_weights or not options.weight_cache:
        return None
    try:
        return packed_cache.entry(path, options.dtype == "int8")
    except OSError:  # opening the model will say what is wrong
        return None


def _pack(path: Path, options: EngineOptions, entry: Path | None) -> tuple[ModelConfig, "PackedModel"] | None:
    from biphase.engine import packed_cache
    from biphase.engine.loading import open_source
    from biphase.engine.packing import pack

    source = open_source(path, options.random_weights)
    if source.config.head_dim % 16:
        _refuse_without_panels(options, f"a head size that is a multiple of 16, not {source.config.head_dim}")
        return None
    packed = pack(source.config, source, options.dtype == "int8")
    if entry is not None:
        packed_cache.write(entry, source.config, packed)
    return source.config, packed


def _refuse_without_panels(options: EngineOptions, needed: str) -> None:
    if options.dtype == "int8":
        raise BadInput(f"--dtype int8 needs {needed}; take bfloat16 or float32")
    _refuse_lossy(options, needed)


def _refuse_lossy(options: EngineOptions, needed: str) -> None:
    """The choices that only the compiled programs have."""
    chosen = {"activations": options.activations, "kv-cache-dtype": options.kv_cache_dtype}
    lossy = [f"--{name} int8" for name, value in chosen.items() if value == "int8"]
    if lossy:
        raise BadInput(f"{' and '.join(lossy)} need{'s' * (len(lossy) == 1)} {needed}; leave out what is lossy")
