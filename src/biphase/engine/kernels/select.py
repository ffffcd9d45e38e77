"""Which kernel runs an operator: one table, by what is installed and by the number of rows.

| operator        | few rows (decode)              | many rows (prefill)           | without numba |
|-----------------|--------------------------------|-------------------------------|---------------|
| linear          | torch (oneDNN)                 | torch (oneDNN)                | same          |
| attention       | compiled, keys split           | torch flash kernel            | torch         |
| norm, rope, GLU | compiled                       | compiled                      | torch         |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from biphase.engine.kernels.attention import prefill_attention


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of each operator; the signatures are those of ``reference``."""

    name: str
    add_rms_norm: Callable[..., Any]
    rope_and_store: Callable[..., Any]
    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    silu_mul: Callable[..., Any]


def reference_kernels() -> Kernels:
    """Plain torch throughout."""
    from biphase.engine.kernels import reference as r

    return Kernels("torch", r.add_rms_norm, r.rope_and_store, r.decode_attention, prefill_attention, r.silu_mul)


def compiled_kernels() -> Kernels:
    """numba where it pays. Raises ``ImportError`` where numba is not installed."""
    from biphase.engine.kernels import decode
    from biphase.engine.kernels import elementwise as e

    return Kernels("numba", e.add_rms_norm, e.rope_and_store, decode.decode_attention, prefill_attention, e.silu_mul)


@cache
def select_kernels() -> Kernels:
    """The fastest set that this installation has."""
    try:
        return compiled_kernels()
    except ImportError:
        return reference_kernels()
