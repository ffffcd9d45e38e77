"""Products of many rows, to the bit against the same integers in numpy, in every form that a processor may need."""

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from biphase.engine.kernels.gemm import (
    GEMM_SCRATCH,
    HEADER,
    TILES,
    Mode,
    Output,
    multiply_panels,
    unpacked_bytes,
)
from biphase.engine.kernels.row_tiles import BLOCK, Quantized, Source, quantize_tile, row_scratch_bytes
from biphase.engine.kernels.tiles import configure_tiles, release_tiles, whole_tiles
from tests.engine.forms import inside_a_form, run_tests_in

CONFIG = whole_tiles()


@njit(nogil=True)
def _quantize(source, rows, x, scratch):
    for tile in range((rows + 15) // 16):
        quantize_tile(source, rows, tile, x, scratch)


@njit(nogil=True)
def _multiply(config, x, tiles, panels, count, out, scratch):
    if TILES:
        configure_tiles(config)
    multiply_panels(x, 0, tiles, panels, count, out, scratch)
    if TILES:
        release_tiles()


def quantized(x, words, norm=None, epsilon=0.0):
    """Rows quantised by the kernel: the record of addresses and the arrays that it points to."""
    rows, inner = x.shape
    tiles, groups, blocks = -(-rows // 16), -(-inner // 64), -(-inner // BLOCK)
    bytes_ = np.full((tiles, groups, words, 16, 64), 99, np.uint8)
    scales = np.full((tiles, blocks, 16), 99, np.float32)
    record = Quantized(bytes_.ctypes.data, scales.ctypes.data, inner, words)
    scratch = np.empty(row_scratch_bytes(inner), np.uint8)
    source = Source(x.ctypes.data, x.strides[0], 0 if norm is None else norm.ctypes.data, epsilon)
    _quantize(source, rows, record, scratch.ctypes.data)
    return record, (bytes_, scales)


def blocks_of(inner):
    """Where each block begins and ends: as few as hold 384 each, equal in units of 64."""
    blocks = -(-inner // 384)
    size = -(-inner // (64 * blocks)) * 64
    return [slice(begin, min(begin + size, inner)) for begin in range(0, inner, size)]


def integers(x, top):
    """Integers [rows, inner] and one step for each row."""
    largest = np.abs(x).max(-1, keepdims=True)
    inverse = np.divide(np.float32(top), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(x * inverse).astype(np.int64), largest / np.float32(top)


def expected(x, high, low, steps, words):
    """float32 [rows, columns], by the definition: integer sums of each block, then three roundings."""
    total = np.zeros((len(x), len(high)), np.float32)
    for index, part in enumerate(blocks_of(x.shape[1])):
        q, step = integers(x[:, part], 32512 if words == 2 else 127)
        upper = (q + 128) >> 8 if words == 2 else q
        lower = q - 256 * upper
        wh, wl = high[:, part].T, low[:, part].T
        second = upper @ wl + (lower @ wh if words == 2 else 0)
        scale = step * np.float32(256 if words == 2 else 1)
        value = (256 * (upper @ wh) + second).astype(np.float32) * (steps * scale)
        total = value if index == 0 else total + value
    return total


def unpacked(high, low, steps, bias, columns):
    """Unpacked panels of a matrix of int8 words [columns, inner], as the engine's unpacking writes them."""
    count, inner = -(-len(high) // 16), high.shape[1]
    panels = np.zeros((count, unpacked_bytes(inner)), np.uint8)
    for p in range(count):
        valid = min(16, len(high) - 16 * p)
        rows = slice(16 * p, 16 * p + valid)
        header = np.zeros(HEADER, np.uint8)
        header[: 4 * valid] = steps[rows].view(np.uint8)
        header[64 : 64 + 4 * valid] = bias[rows].view(np.uint8)
        header[128:144] = np.array([columns[p], valid], np.int64).view(np.uint8)
        words = np.zeros((2, 16, -(-inner // 64) * 64), np.int8)
        words[0, :valid, :inner], words[1, :valid, :inner] = high[rows], low[rows]
        tiles = words.reshape(2, 16, -1, 16, 4).transpose(2, 0, 3, 1, 4)  # group, word, four, column, byte
        panels[p] = np.concatenate([header, np.ascontiguousarray(tiles).view(np.uint8).ravel()])
    return panels


def problem(rng, rows, inner, columns):
    scale = np.exp(rng.normal(size=(rows, 1)))
    x = (rng.normal(size=(rows, inner)) * scale).astype(np.float32)
    high = rng.integers(-127, 128, (columns, inner), np.int8)
    low = rng.integers(-128, 128, (columns, inner), np.int8)
    steps = rng.uniform(1e-6, 1e-4, columns).astype(np.float32)
    return x, high, low, steps, rng.normal(size=columns).astype(np.float32)


def multiply(x, panels, out, mode, words):
    record, kept = quantized(x, words)
    target = Output(int(mode), out.ctypes.data, out.strides[0], len(x))
    scratch = np.empty(GEMM_SCRATCH, np.uint8)
    tiles = -(-len(x) // 16)
    _multiply(CONFIG.ctypes.data, record, tiles, panels.ctypes.data, len(panels), target, scratch.ctypes.data)
    del kept


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    inner=st.integers(1, 200) | st.sampled_from([384, 385, 576, 768, 769, 1000, 1536]),
    columns=st.integers(1, 60),
    words=st.sampled_from([1, 2]),
    mode=st.sampled_from([Mode.STORE, Mode.ADD]),
    seed=st.integers(0, 99),
)
def test_products_equal_numpy_to_the_bit(rows, inner, columns, words, mode, seed):
    rng = np.random.default_rng(seed)
    x, high, low, steps, bias = problem(rng, rows, inner, columns)
    panels = unpacked(high, low, steps, bias, range(0, columns, 16))
    out = rng.normal(size=(rows, columns + 3)).astype(np.float32)
    before = out.copy()
    multiply(x, panels, out, mode, words)
    want = expected(x, high, low, steps, words) + bias
    np.testing.assert_array_equal(out[:, :columns], want + before[:, :columns] if mode is Mode.ADD else want)
    np.testing.assert_array_equal(out[:, columns:], before[:, columns:])


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 400, 575])
def test_one_value_that_is_not_finite_is_seen_in_all_results_of_its_row_and_in_no_other(words, poison, place):
    rng = np.random.default_rng(place)
    x, high, low, steps, bias = problem(rng, 20, 576, 16)
    panels, out = unpacked(high, low, steps, bias, [0]), np.zeros((20, 16), np.float32)
    x[5, place] = poison
    multiply(x, panels, out, Mode.STORE, words)
    assert not np.isfinite(out[5]).any()
    others = np.delete(np.arange(20), 5)
    np.testing.assert_array_equal(out[others], expected(x[others], high, low, steps, words) + bias)


@pytest.mark.parametrize("words", [1, 2])
def test_gate_and_up(words):
    rng = np.random.default_rng(7)
    x, high, low, steps, _ = problem(rng, 37, 576, 80)
    steps *= np.float32(1e-3)  # gates of a few units
    zero = np.zeros(80, np.float32)
    order = np.arange(80).reshape(2, 5, 8)  # 40 gates then 40 ups: panels of 16, 16 and 8 of each, in turn
    gate, up = order.reshape(2, 40)
    parts = [side[begin : begin + 16] for begin in (0, 16, 32) for side in (gate, up)]
    columns = (0, 0, 16, 16, 32, 32)
    each = [unpacked(high[p], low[p], steps[p], zero[p], [c]) for p, c in zip(parts, columns, strict=True)]
    panels = np.concatenate(each)
    out = np.zeros((37, 40), np.float32)
    multiply(x, panels, out, Mode.GLU, words)
    product = expected(x, high, low, steps, words).astype(np.float64)
    g, u = product[:, :40], product[:, 40:]
    np.testing.assert_allclose(out, g / (1 + np.exp(-g)) * u, rtol=2e-6, atol=1e-30)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(3)
    x, high, low, steps, bias = problem(rng, 50, 1536, 48)
    panels = unpacked(high, low, steps, bias, range(0, 48, 16))
    together = np.zeros((50, 48), np.float32)
    multiply(x, panels, together, Mode.STORE, 2)
    for begin, end in ((0, 1), (1, 18), (18, 50)):
        alone = np.zeros((end - begin, 48), np.float32)
        multiply(np.ascontiguousarray(x[begin:end]), panels, alone, Mode.STORE, 2)
        np.testing.assert_array_equal(alone, together[begin:end])


@pytest.mark.parametrize("inner", [64, 100, 576, 1540])
def test_normalised_rows(inner):
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(21, inner)) * 30).astype(np.float32)
    norm = rng.normal(size=inner).astype(np.float32)
    _, (bytes_, scales) = quantized(x, 2, norm, 1e-5)
    signed = (bytes_ ^ (0 if TILES else 128)).view(np.int8).astype(np.int64)
    words = signed.transpose(2, 0, 3, 1, 4).reshape(2, -1, bytes_.shape[1] * 64)
    values = (256 * words[0] + words[1])[:, :inner].astype(np.float64)
    for index, part in enumerate(blocks_of(inner)):
        values[:, part] *= scales[:, index].reshape(-1, 1) / 256
    exact = x.astype(np.float64)
    exact *= norm / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    largest = np.abs(exact).max(-1, keepdims=True)
    assert (np.abs(values[:21] - exact) <= largest / 32512 * 0.51).all()
    assert not values[21:].any()


def test_a_row_of_zeros():
    x, high, low, steps, bias = problem(np.random.default_rng(1), 3, 64, 16)
    x[1] = 0
    out = np.zeros((3, 16), np.float32)
    multiply(x, unpacked(high, low, steps, bias, [0]), out, Mode.STORE, 2)
    np.testing.assert_array_equal(out[1], bias)


@pytest.mark.forms
@pytest.mark.skipif(inside_a_form, reason="already inside another form")
@pytest.mark.parametrize("form", ["portable", "VNNI"])
def test_other_forms(form, tmp_path):
    run_tests_in(form, __file__, tmp_path)
