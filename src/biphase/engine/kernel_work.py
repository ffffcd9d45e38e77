"""Bytes and operations of the compiled kernels, counted from the packed model that they read.

A multiply-add of the model is 2 operations. A kernel takes several short products for one: of int8, where weights or
activations, or queries and keys, are two bytes each, and of bfloat16 in attention; the term below rounding is dropped,
which leaves 3 of 4.
Norms, softmax and what else is not a product count nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from biphase.engine.kernels import row_blocks
from biphase.engine.kernels.cells import BLOCK, block_bytes
from biphase.engine.kernels.features import features
from biphase.engine.kernels.image import ADDRESS, FIRST, INNER, KIND, PANELS, VALID, PackedModel, Shape
from biphase.engine.kernels.int8_attention import takes_int8
from biphase.engine.kernels.many_rows_step import ROW_BLOCK
from biphase.engine.kernels.panels import Kind
from biphase.engine.kernels.roofs import Unit
from biphase.engine.kernels.select import Program
from biphase.roofline.kernel_rates import Work

WORD_PRODUCTS = 3
"""Of two words each: upper by upper, and both mixed ones."""
FLOATS = (Kind.BF16, Kind.F16, Kind.F32)


def products(packed: PackedModel, matrices: range, rows: int, words: int, program: Program) -> Work:
    """``rows`` rows with these matrices of the table; ``words`` of the activations as in ``CompiledModel``.

    Few rows meet a panel together; many rows meet it in blocks of 512.
    """
    reads = 1 if program is Program.FEW else -(-rows // ROW_BLOCK)
    sizes, total = panel_sizes(packed), Work()
    for number in matrices:
        matrix = packed.image.matrices[number]
        own = slice(matrix[FIRST], matrix[FIRST] + matrix[PANELS])
        panels = packed.image.panels[own]
        each = 2 * rows * int(matrix[INNER]) * panels[:, VALID]
        as_packed = program is Program.FEW or row_blocks.takes(packed.image, number)
        machine = _few_machine(panels[:, KIND], each, words) if as_packed else _many_machine(each, words)
        total += Work(reads * int(sizes[own].sum()), int(each.sum()), machine)
    return total


def panel_sizes(packed: PackedModel) -> NDArray[np.int64]:
    """Bytes of each panel: they lie one behind the other."""
    end = packed.weights.ctypes.data + packed.weights.nbytes
    return np.diff(packed.image.panels[:, ADDRESS], append=end)


def _few_machine(kinds: NDArray[np.int64], each: NDArray[np.int64], words: int) -> dict[str, int]:
    """Weights of a byte or less with each byte of the activations; floats as they are."""
    floats = np.isin(kinds, FLOATS)
    found = {Unit.INT8_DOT: words * int(each[~floats].sum()), Unit.FLOAT32: int(each[floats].sum())}
    return {unit.label: operations for unit, operations in found.items() if operations}


def _many_machine(each: NDArray[np.int64], words: int) -> dict[str, int]:
    """Weights are two bytes here: four products less the lowest, or two."""
    unit = Unit.INT8_TILES if features().tiles else Unit.INT8_DOT
    return {unit.label: (WORD_PRODUCTS if words == 2 else 2) * int(each.sum())}


def single_rows(shape: Shape, contexts: Sequence[int]) -> Work:
    """Attention of one row of each of several sequences to all tokens of its own that it sees, in every layer."""
    seen = sum(_seen(shape, context) for context in contexts)
    operations = _attention_operations(shape, seen)
    return Work(_cache_bytes(shape, seen), operations, {Unit.FLOAT32.label: operations})


def chunk(shape: Shape, rows: int, past: int, words: int = 2) -> Work:
    """Causal attention of ``rows`` rows of one sequence after ``past`` tokens in every layer; no masked pair counts."""
    operations = _attention_operations(shape, _pairs(shape, rows, past))
    machine = {Unit.BF16_TILES.label: WORD_PRODUCTS * operations}
    if not features().tiles:
        machine = {Unit.FLOAT32.label: operations}
    if takes_int8(words):  # scores are half of the operations
        machine = {Unit.INT8_DOT.label: (WORD_PRODUCTS + 1) * operations // 2}
    read = rows + _seen(shape, past + 1) - 1
    return Work(_cache_bytes(shape, read), operations, machine)


def chunk_as_single_rows(shape: Shape, rows: int) -> Work:
    """The same from the first token on, by the few-row program: each row for itself."""
    operations = _attention_operations(shape, _pairs(shape, rows, 0))
    return Work(_cache_bytes(shape, rows), operations, {Unit.FLOAT32.label: operations})


def _pairs(shape: Shape, rows: int, past: int) -> int:
    return sum(_seen(shape, context) for context in range(past + 1, past + rows + 1))


def _seen(shape: Shape, context: int) -> int:
    """Tokens that the last of ``context`` sees, itself included."""
    return min(context, shape.window or context)


def _attention_operations(shape: Shape, pairs: int) -> int:
    """A score and a weighted value of ``pairs`` of query and key: 2 multiply-adds a dimension and head."""
    return 4 * shape.layers * shape.heads * shape.dim * pairs


def _cache_bytes(shape: Shape, tokens: int) -> int:
    return block_bytes(shape.layers, shape.kv_heads, shape.dim, shape.int8_kv) // BLOCK * tokens
