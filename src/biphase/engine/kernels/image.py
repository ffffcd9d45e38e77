"""A model as compiled programs read it: tables of numbers over packed buffers.

A program is one compiled call that walks all layers, so it cannot be given objects. It gets the named tuples below:
the shape, the image of the weights, the cache, what this step runs, and buffers to work in.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from biphase.engine.config import ModelConfig
from biphase.engine.kernels.panels import PanelMatrix
from biphase.engine.kernels.unpack import BF16
from biphase.engine.kernels.vectors import LANES

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

QKV, O, GATE_UP, DOWN = range(4)  # noqa: E741  the field's name of the output projection
MATRICES = 4
"""Matrices of a layer in the table; after those of all layers come the head and the embedding."""
FIRST, PANELS, INNER, COLUMNS, INTEGERS = range(5)
"""Columns of the table of matrices: first panel, panels, inner size, output columns, 1 where no panel is of floats."""
ADDRESS, KIND, COLUMN, VALID = range(4)
"""Columns of the table of panels: address, kind, first output column, output columns that are there (1 to 16)."""


class Shape(NamedTuple):
    """Sizes in elements and the ``window`` in tokens, as in ``ModelConfig``, and whether the cache is of int8."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocab: int
    eps: float
    window: int
    int8_kv: int = 0


class Image(NamedTuple):
    """``norms`` [2 layers + 1, hidden]; ``biases`` [layers, (H + 2 G) D] and ``qk_norms`` [layers, 2, D] may be empty.

    ``cos`` and ``sin`` are [positions, D / 2]. Everything is float32 but the two tables, which are int64.
    """

    matrices: Ints
    panels: Ints
    norms: Floats
    biases: Floats
    qk_norms: Floats
    cos: Floats
    sin: Floats


@dataclass(frozen=True, slots=True)
class PackedModel:
    """An image and what keeps its memory alive."""

    shape: Shape
    image: Image
    weights: NDArray[np.uint8]


def shape_of(config: ModelConfig) -> Shape:
    return Shape(
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        config.norm_eps,
        config.sliding_window,
    )


@dataclass(frozen=True, slots=True)
class Placed:
    """A packed matrix whose rows are the output columns ``column`` and on of a larger one."""

    matrix: PanelMatrix
    column: int = 0


def place(matrices: Sequence[Sequence[Placed]]) -> tuple[Ints, Ints, NDArray[np.uint8]]:
    """Copy packed matrices into one buffer. Returns the tables of matrices and panels, and the buffer.

    Each entry is one matrix made of parts; two parts of equal size (gate and up) are interleaved panel by panel.
    """
    order = [_order(parts) for parts in matrices]
    total = sum(part.matrix.data.nbytes for parts in matrices for part in parts)
    weights, at = reserve(total), 0
    table = np.zeros((len(matrices), 5), dtype=np.int64)
    rows: list[tuple[int, int, int, int]] = []
    for number, panels in enumerate(order):
        integers = all(part.matrix.kind < BF16 for part in matrices[number])
        table[number] = (len(rows), len(panels), panels[0][0].matrix.inner, _columns(matrices[number]), integers)
        for part, index in panels:
            data = part.matrix.data[index]
            weights[at : at + len(data)] = data
            valid = min(LANES, part.matrix.rows - LANES * index)
            rows.append((weights.ctypes.data + at, part.matrix.kind, part.column + LANES * index, valid))
            at += len(data)
    return table, np.array(rows, dtype=np.int64), weights


def _columns(parts: Sequence[Placed]) -> int:
    return max(part.column + part.matrix.rows for part in parts)


def _order(parts: Sequence[Placed]) -> list[tuple[Placed, int]]:
    if len(parts) == 2:
        gate, up = parts
        return [(part, index) for index in range(len(gate.matrix.data)) for part in (gate, up)]
    return [(part, index) for part in parts for index in range(len(part.matrix.data))]


def reserve(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes, in huge pages where the system has them: a walk over 100 MB in pages of 4 KB misses the TLB."""
    # Private: the anonymous memory that Python shares by default is a file to Linux, and gets no huge pages.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    buffer = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(buffer, dtype=np.uint8)
