"""Products of many rows where vectors take them: panels as they are packed, with blocks of rows.

Vectors multiply bytes no faster than they multiply bytes and nibbles in groups, so the format of ``few_rows`` costs
them two products for each weight where words of 16 bits (``gemm``) cost three, and the numbers are those of the few-row
program, bit by bit. A block of rows and a few panels at a time: the rows' integers stay in the second-level cache, and
so do the panels until all rows have met them. Panels of floats are left to ``gemm``: its integers beat float32.
"""

from typing import Any

from numba import njit

from biphase.engine.kernels.activations import CELL, cells_bytes, quantize
from biphase.engine.kernels.few_rows import call_product
from biphase.engine.kernels.gemm import GLU, TILES, put_biases, silu_multiply, store_rows
from biphase.engine.kernels.image import ADDRESS, COLUMN, INTEGERS, KIND, VALID
from biphase.engine.kernels.row_tiles import float_row
from biphase.engine.kernels.vectors import load_f32

ROWS = 64
_VALUES = 64 * ROWS
"""Bytes of the results of a panel."""
_BIASES = 2 * _VALUES
"""In the scratch of a thread: results of a gate panel (or any other), of an up panel, then 16 biases."""


@njit(nogil=True, cache=True, error_model="numpy")
def takes(image: Any, number: Any) -> Any:
    """Whether matrix ``number`` is multiplied here."""
    return not TILES and image.matrices[number, INTEGERS] == 1


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_row(source: Any, row: Any, rows: Any, x: Any, floats: Any) -> None:
    """The cells (``activations``) of one of the ``rows`` rows of a ``row_tiles.Source`` in their place at ``x.tiles``.

    ``floats``: scratch for one row of whole groups.
    """
    first = row // ROWS * ROWS
    float_row(source, row, x.inner, floats)
    cell = x.tiles + first * cells_bytes(x.inner) + (row - first) * CELL
    quantize(floats, x.inner, x.words, cell, min(ROWS, rows - first) * CELL)


@njit(nogil=True, cache=True, error_model="numpy")
def multiply_packed(team: Any, x: Any, image: Any, first: Any, last: Any, biases: Any, out: Any, scratch: Any) -> None:
    """All rows of ``x`` with panels ``first`` to ``last - 1`` of the image, into ``out``; modes as in ``gemm``."""
    for begin in range(0, out.rows, ROWS):
        rows, cells = min(ROWS, out.rows - begin), x.tiles + begin * cells_bytes(x.inner)
        for p in range(first, last):
            panel, odd = image.panels[p], (p - first) % 2
            values = scratch + odd * _VALUES
            call_product(team, (panel[KIND], panel[ADDRESS], x.inner, cells, rows, x.words, values))
            column, valid = panel[COLUMN], panel[VALID]
            if out.mode == GLU:
                if odd:
                    silu_multiply(scratch, values, rows)
                    gate = image.panels[p - 1]
                    put_biases(biases, gate[COLUMN], scratch + _BIASES)
                    store_rows(scratch, begin, rows, load_f32(scratch + _BIASES), gate[COLUMN], gate[VALID], out)
            else:
                put_biases(biases, column, scratch + _BIASES)
                store_rows(values, begin, rows, load_f32(scratch + _BIASES), column, valid, out)
