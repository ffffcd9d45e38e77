"""Weights in panels: the file's own numbers without loss, in every kind, and the products of few rows with them."""

from pathlib import Path

import gguf
import numpy as np
import pytest

pytest.importorskip("numba")

from biphase.engine.gguf_blocks import read_blocks
from biphase.engine.kernels.activations import plain_records, record_bytes
from biphase.engine.kernels.few_rows import multiply_panel
from biphase.engine.kernels.panels import HALF_WORD, Kind, PanelMatrix, pack_blocks, pack_values, quantize_rows
from biphase.engine.kernels.unpack import read_row, unpack_panel
from tests.engine.forms import inside_a_form, run_tests_in

K_QUANTS = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}
"""Bytes of a block of 256 and where its float16 scales lie: the gguf library cannot quantise to these."""


def stored(kind: str, rows: int, inner: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes as a file of this kind holds them."""
    if kind not in K_QUANTS:
        return gguf.quants.quantize(
            rng.standard_normal((rows, inner)).astype(np.float32), gguf.GGMLQuantizationType[kind]
        )
    size, scales = K_QUANTS[kind]
    blocks = rng.integers(0, 256, (rows, inner // 256, size), dtype=np.uint8)
    for at in scales:
        values = rng.standard_normal((rows, inner // 256, 1)).astype(np.float16)
        blocks[..., at : at + 2] = values.view(np.uint8)
    return blocks.reshape(rows, -1)


def packed(kind: str, rows: int = 40, inner: int = 512, seed: int = 0) -> tuple[PanelMatrix, np.ndarray]:
    """A matrix in panels and the float32 that it stands for, by gguf's library or by numpy."""
    rng = np.random.default_rng(seed)
    if kind in ("BF16", "F16", "F32", "INT8"):
        values = rng.standard_normal((rows, inner)).astype(np.float32)
        values[min(3, rows - 1)] = 0
        if kind == "INT8":
            d = np.maximum(np.abs(values).max(1, keepdims=True), 1e-37) / np.float32(127)
            return quantize_rows(values), np.rint(values / d) * d
        if kind == "F32":
            return pack_values(values, Kind.F32), values
        if kind == "F16":
            return pack_values(values.astype(np.float16), Kind.F16), values.astype(np.float16).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return pack_values(bits, Kind.BF16), (bits.astype(np.uint32) << 16).view(np.float32)
    raw = stored(kind, rows, inner, rng)
    blocks = read_blocks(raw, kind)
    assert blocks is not None
    return pack_blocks(blocks), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "INT8", "BF16", "F16", "F32")
SHAPES = [(kind, 40, 512) for kind in KINDS] + [(kind, 17, 75) for kind in ("INT8", "BF16", "F16", "F32")]
SHAPES += [("Q4_1", 5, 96), ("Q8_0", 16, 32)]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks_are_the_numbers_of_the_file(kind: str) -> None:
    raw = stored(kind, 24, 512, np.random.default_rng(1))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    blocks = read_blocks(raw, kind)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.dequantized(), expected)
    np.testing.assert_allclose(blocks.largest() >= np.abs(expected).max(1), True)


def test_plain_floats_are_no_blocks() -> None:
    assert read_blocks(np.zeros((2, 64), np.uint8), "F16") is None


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_panels_take_no_more_bytes_than_the_file(kind: str) -> None:
    """Which is what a decode step takes its time for; 3 % are for scales that a file packs in 6 bits, and for lines."""
    matrix, _ = packed(kind, 32, 1024)
    in_file = stored(kind, 32, 1024, np.random.default_rng(0)).nbytes
    assert in_file <= matrix.data.nbytes - 64 * len(matrix.data) <= 1.03 * in_file


@pytest.mark.parametrize(("kind", "rows", "inner"), SHAPES)
def test_single_rows_come_back_to_the_bit(kind: str, rows: int, inner: int) -> None:
    matrix, expected = packed(kind, rows, inner)
    out = np.empty(inner, np.float32)
    for row in range(rows):
        read_row(int(matrix.kind), matrix.data[row // 16].ctypes.data, inner, row % 16, out.ctypes.data)
        np.testing.assert_array_equal(out, expected[row])


UNITS = {"Q8_0": 1.0, "Q6_K": 1.0, "INT8": 1.0, "Q4_0": 1.5, "Q4_1": 1.5, "Q4_K": 1.5}
UNITS |= dict.fromkeys(("BF16", "F16", "F32"), 0.5)
"""Half a unit for the rounding of a float; of q d (scale and product half each); and another half for m."""


@pytest.mark.parametrize(("kind", "rows", "inner"), SHAPES)
def test_unpacked_words_are_sixteen_bit_integers_near_the_weights(kind: str, rows: int, inner: int) -> None:
    matrix, expected = packed(kind, rows, inner)
    tiles = np.full((-(-inner // 64), 2, 16, 16, 4), 99, np.int8)
    for panel, data in enumerate(matrix.data):
        unpack_panel(int(matrix.kind), data.ctypes.data, inner, tiles.ctypes.data)
        words = 256 * tiles[:, 0].astype(np.int32) + tiles[:, 1]
        integers = words.transpose(2, 0, 1, 3).reshape(16, -1)
        assert (integers[:, inner:] == 0).all()
        steps = data[-64:].view(np.float32)[:, None]
        block = expected[16 * panel : 16 * panel + 16]
        error = np.abs(integers[: len(block), :inner] * steps[: len(block)] - block)
        assert (error <= UNITS[kind] * 1.01 * steps[: len(block)] + 1e-30).all()
        assert np.abs(integers).max() <= HALF_WORD + 2


def product(matrix: PanelMatrix, x: np.ndarray, words: int) -> np.ndarray:
    """x times the matrix's rows by the few-row kernel."""
    rows, inner = x.shape
    records = np.zeros(rows * record_bytes(inner), np.uint8)
    plain_records(x.ctypes.data, rows, inner, x.strides[0], words, records.ctypes.data)
    out = np.full((len(matrix.data), rows, 16), 99, np.float32)
    for panel, data in enumerate(matrix.data):
        target = out[panel].ctypes.data
        multiply_panel(int(matrix.kind), data.ctypes.data, inner, records.ctypes.data, rows, words, target)
    return out.transpose(1, 0, 2).reshape(rows, -1)[:, : matrix.rows]


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 13, 16, 33])
@pytest.mark.parametrize(("kind", "rows", "inner"), SHAPES)
def test_few_rows(kind: str, rows: int, inner: int, count: int, words: int) -> None:
    matrix, weights = packed(kind, rows, inner)
    x = np.random.default_rng(count).standard_normal((count, inner)).astype(np.float32)
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    # An element of x is off by half a step of its group of 32, at most its largest / 2 / 127 or / 2 / 32512; floats
    # are multiplied as they are. The rest is float32 sums.
    step = 0.0 if kind in ("BF16", "F16", "F32") else float(np.abs(x).max()) / (127 if words == 1 else HALF_WORD)
    scale = np.abs(weights).sum(1)[None, :]
    error = np.abs(product(matrix, x, words) - expected)
    assert (error <= (0.5 * step + 4e-6 * np.abs(x).max()) * scale + 1e-30).all()


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("rows", [13, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str, rows: int, words: int) -> None:
    matrix, _ = packed(kind)
    x = np.random.default_rng(5).standard_normal((rows, 512)).astype(np.float32)
    together = product(matrix, x, words)
    for row in range(rows):
        np.testing.assert_array_equal(product(matrix, x[row : row + 1], words)[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_in_its_row_alone(kind: str, broken: float) -> None:
    matrix, _ = packed(kind)
    x = np.ones((3, 512), np.float32)
    x[1, 100] = broken
    out = product(matrix, x, 2)
    nonzero = np.flatnonzero(product(matrix, np.ones((1, 512), np.float32), 2)[0])
    assert not np.isfinite(out[1, nonzero]).any()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.forms
@pytest.mark.forms
@pytest.mark.skipif(inside_a_form, reason="this is the form")
def test_portable_form(tmp_path: Path) -> None:
    run_tests_in("portable", __file__, tmp_path)
