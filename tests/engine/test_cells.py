"""Cells of the cache against numpy: what is stored, and what is loaded of it, in float16 and int8."""

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

from biphase.engine.kernels.cells import cell_bytes, load_keys, load_values, store_key, store_value
from biphase.engine.kernels.vectors import store_f32

FORMATS = pytest.mark.parametrize("int8", [False, True], ids=["float16", "int8"])
DIMS = pytest.mark.parametrize("dim", [16, 64, 80])


@njit
def _write(keys, values, k_cell, v_cell, dim, int8):
    for token in range(16):
        store_key(keys + 4 * dim * token, k_cell, token, dim, int8)
        store_value(values + 4 * dim * token, v_cell, token, dim, int8)


@njit
def _read(k_cell, v_cell, dim, scaled, keys, values):
    for d in range(dim):
        store_f32(keys + 64 * d, load_keys(k_cell, d, dim, scaled))
    for token in range(16):
        for d in range(0, dim, 16):
            store_f32(values + 4 * (dim * token + d), load_values(v_cell, token, d, dim, scaled))


def written(keys: np.ndarray, values: np.ndarray, int8: bool) -> tuple[np.ndarray, np.ndarray]:
    """Cells of 16 keys and of 16 values [16, D], with a byte on either side that must stay."""
    dim = keys.shape[1]
    cells = [np.full(cell_bytes(dim, int8) + 2, 0xA5, np.uint8) for _ in range(2)]
    _write(*(a.ctypes.data for a in (keys, values)), *(cell.ctypes.data + 1 for cell in cells), dim, int8)
    for cell in cells:
        assert cell[0] == cell[-1] == 0xA5
    return cells[0][1:-1].copy(), cells[1][1:-1].copy()


def read(k_cell: np.ndarray, v_cell: np.ndarray, dim: int, int8: bool) -> tuple[np.ndarray, np.ndarray]:
    keys, values = np.empty((dim, 16), np.float32), np.empty((16, dim), np.float32)
    addresses = (a.ctypes.data for a in (k_cell, v_cell))
    _read(*addresses, dim, 1 if int8 else None, keys.ctypes.data, values.ctypes.data)
    return keys.T, values


def vectors(dim: int) -> list[np.ndarray]:
    """Keys and values, of tokens whose magnitudes differ by 10 to the eighth; one is all zeros, one next to that."""
    rng = np.random.default_rng(dim)
    pair = [rng.normal(size=(16, dim)) * 10.0 ** rng.uniform(-4, 4, (16, 1)) for _ in range(2)]
    for array in pair:
        array[3], array[5] = 0, 1e-39
    return [array.astype(np.float32) for array in pair]


@DIMS
def test_float16_cells(dim: int) -> None:
    keys, values = vectors(dim)
    k_cell, v_cell = written(keys, values, False)
    np.testing.assert_array_equal(k_cell.view(np.float16).reshape(dim, 16), keys.T.astype(np.float16))
    np.testing.assert_array_equal(v_cell.view(np.float16).reshape(16, dim), values.astype(np.float16))


@DIMS
def test_int8_cells(dim: int) -> None:
    """127 is the largest magnitude of a token's vector, and its float32 scale stands behind the numbers."""
    keys, values = vectors(dim)
    cells = written(keys, values, True)
    for cell, source, numbers in (
        (cells[0], keys, cells[0][: 16 * dim].view(np.int8).reshape(dim, 16).T),
        (cells[1], values, cells[1][: 16 * dim].view(np.int8).reshape(16, dim)),
    ):
        largest = np.abs(source).max(1)
        scales = cell[16 * dim :].view(np.float32)
        np.testing.assert_array_equal(scales, largest / np.float32(127))
        there = largest > 1e-36
        exact = source[there].astype(np.float64) / largest[there, None] * 127
        assert np.abs(numbers[there] - exact).max() <= 0.5 + 1e-4
        assert (np.abs(numbers[there].astype(int)).max(1) == 127).all()
        assert not numbers[~there].any()


@FORMATS
@DIMS
def test_what_is_loaded_is_what_the_cells_say(dim: int, int8: bool) -> None:
    cells = written(*vectors(dim), int8)
    keys, values = read(*cells, dim, int8)
    if int8:
        numbers = [cell[: 16 * dim].view(np.int8).astype(np.float32) for cell in cells]
        scales = [cell[16 * dim :].view(np.float32) for cell in cells]
        np.testing.assert_array_equal(keys, (numbers[0].reshape(dim, 16) * scales[0]).T)
        np.testing.assert_array_equal(values, numbers[1].reshape(16, dim) * scales[1][:, None])
    else:
        np.testing.assert_array_equal(keys, cells[0].view(np.float16).reshape(dim, 16).T)
        np.testing.assert_array_equal(values, cells[1].view(np.float16).reshape(16, dim))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 20, 79])
def test_what_is_not_a_number_spoils_its_own_token_alone(wrong: float, place: int) -> None:
    keys, values = vectors(80)
    expected = read(*written(keys, values, True), 80, True)
    keys[7, place] = values[7, place] = wrong
    for got, before in zip(read(*written(keys, values, True), 80, True), expected, strict=True):
        assert not np.isfinite(got[7]).any()
        np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(before, 7, 0))
