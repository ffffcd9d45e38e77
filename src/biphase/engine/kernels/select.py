"""Which kernel runs an operator: one table, by the number of rows, by what the processor has, by what is installed.

A step of fewer rows than ``crossover`` (measured at load, ``engine.crossover``) runs the few-row program, any other
the many-row one, whichever phase its rows belong to. Without numba, with ``--dtype bfloat16`` or ``float32``, or with
a head size that is no multiple of 16, torch runs all of it. ``selection`` is the table; ``biphase kernels`` prints it.
Loads no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from biphase.engine.kernels import can_compile
from biphase.engine.kernels.features import Features


class Program(StrEnum):
    """The two compiled programs: ``few_rows_step`` and ``many_rows_step``."""

    FEW = "few rows"
    MANY = "many rows"


def choose_program(rows: int, crossover: int, int8_chunk: bool = False) -> Program:
    """Of a step of so many rows.

    ``int8_chunk``: it has a chunk whose attention is taken in int8. The few-row program would take it in float32, and
    the end of a prompt behind a prefix hit would not be what it is cold.
    """
    return Program.FEW if rows < crossover and not int8_chunk else Program.MANY


@dataclass(frozen=True, slots=True)
class Selected:
    """One line of the table: what runs an operator in each program, in the form for this processor, and in torch."""

    operator: str
    few_rows: str
    many_rows: str
    torch: str


def selection(found: Features) -> tuple[Selected, ...]:
    """The table for a processor with these features."""
    dot = "VNNI" if found.int8_dot else "portable"
    int8 = "int8 AMX" if found.tiles else f"int8 {dot}"
    chunk = "bf16 AMX" if found.tiles else "fp32"
    if found.int8_dot and not found.tiles:
        chunk += f"; int8 activations int8 {dot}"
    few_product = f"few_rows.multiply_panel (int8 {dot}; float weights fp32)"
    many_product = f"unpack_panel, gemm.multiply_panels ({int8})"
    if not found.tiles:
        many_product = f"row_blocks.multiply_packed ({int8}); float weights {many_product}"
    single = "row_attention.attend (fp32)"
    return (
        Selected("linear, head", few_product, many_product, "oneDNN"),
        Selected("attention, one row a sequence", single, single, "decode.decode_attention"),
        Selected("attention, chunk", f"{single[:-1]}, row by row)", f"flash.attend ({chunk})", "flash kernel"),
        Selected("norm, rotation, SwiGLU", "in the products' phases (fp32)", "in phases of rows (fp32)", "elementwise"),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The torch path's operators, one implementation of each; the signatures are those of ``reference``."""

    name: str
    add_rms_norm: Callable[..., Any]
    rope_and_store: Callable[..., Any]
    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    silu_mul: Callable[..., Any]


def reference_kernels() -> Kernels:
    """Plain torch throughout."""
    from biphase.engine.kernels import reference as r
    from biphase.engine.kernels.attention import prefill_attention

    return Kernels("torch", r.add_rms_norm, r.rope_and_store, r.decode_attention, prefill_attention, r.silu_mul)


def compiled_kernels() -> Kernels:
    """numba where it pays."""
    from biphase.engine.kernels import decode
    from biphase.engine.kernels import elementwise as e
    from biphase.engine.kernels.attention import prefill_attention

    return Kernels("numba", e.add_rms_norm, e.rope_and_store, decode.decode_attention, prefill_attention, e.silu_mul)


@cache
def select_kernels() -> Kernels:
    """The fastest set that this installation has."""
    return compiled_kernels() if can_compile() else reference_kernels()
