"""Counted bytes and operations, against a model counted by hand, a loop over pairs, and the cost model."""

import pytest

pytest.importorskip("numba")

from biphase.engine import kernel_work
from biphase.engine.config import ModelConfig
from biphase.engine.kernels.features import features
from biphase.engine.kernels.image import PackedModel
from biphase.engine.kernels.int8_attention import takes_int8
from biphase.engine.kernels.select import Program
from biphase.engine.options import EngineOptions
from biphase.engine.packed_loading import load_packed
from biphase.engine.packing import pack
from biphase.engine.safetensors_files import RandomSource
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel, Slice
from biphase.roofline.hardware import custom_device

# Two layers. Panels of 16 rows: q 2, k 1, v 1, o 2, gate 3, up 3 over 32 inner elements, down 2 over 48, head 3 of
# which the last has 8 rows. A panel of bfloat16 has 32 bytes an inner element and 64 of steps: 1,088 and 1,600.
CONFIG = ModelConfig("llama", 32, 48, 2, 2, 1, 16, 40, 64, 1e-5, 1e4)
LAYERS, HEAD = range(8), range(8, 9)
LAYER_BYTES = 12 * 1088 + 2 * 1600
HEAD_BYTES = 3 * 1088
LAYER_MACS = 64 * 32 + 32 * 32 + 96 * 32 + 32 * 48
HEAD_MACS = 40 * 32
TILES = features().tiles


def packed(int8: bool = False) -> PackedModel:
    return pack(CONFIG, RandomSource(CONFIG, "counted by hand"), int8)


def test_few_rows_read_each_panel_once_and_multiply_floats_as_they_are() -> None:
    work = kernel_work.products(packed(), LAYERS, 5, 2, Program.FEW)
    assert work.read_bytes == 2 * LAYER_BYTES
    assert work.operations == 2 * 5 * 2 * LAYER_MACS
    assert work.machine == {"float32": 2 * 5 * 2 * LAYER_MACS}


@pytest.mark.parametrize(("words", "few", "many"), [(2, 2, 3), (1, 1, 2)])
def test_products_of_bytes(words: int, few: int, many: int) -> None:
    """int8 weights: 16 bytes an inner element, 64 of scales and 64 of steps; for tiles, two bytes with many rows."""
    model = packed(int8=True)
    work = kernel_work.products(model, HEAD, 3, words, Program.FEW)
    assert work.read_bytes == 3 * (32 * 16 + 128)
    assert work.operations == 3 * 2 * HEAD_MACS
    assert work.machine == {"int8 dot": few * work.operations}
    machine = {"int8 tiles": many * work.operations} if TILES else work.machine
    assert kernel_work.products(model, HEAD, 3, words, Program.MANY).machine == machine


@pytest.mark.parametrize(("rows", "reads"), [(2, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)])
def test_many_rows_read_the_panels_again_for_each_block_of_512(rows: int, reads: int) -> None:
    work = kernel_work.products(packed(), range(9), rows, 2, Program.MANY)
    assert work.read_bytes == reads * (2 * LAYER_BYTES + HEAD_BYTES)
    assert work.operations == 2 * rows * (2 * LAYER_MACS + HEAD_MACS)
    assert work.machine == {"int8 tiles" if TILES else "int8 dot": 3 * work.operations}  # of floats, everywhere


def test_attention_of_single_rows() -> None:
    """Two layers, two heads and one KV head of 16: 4 operations a dimension and token, 2 float16 of 2 bytes each."""
    work = kernel_work.single_rows(packed().shape, [7, 100])
    assert work.operations == 2 * 2 * 16 * 4 * 107
    assert work.read_bytes == 2 * 16 * 2 * 2 * 107
    assert work.machine == {"float32": work.operations}


def test_an_int8_cache_is_read_in_bytes_and_scales() -> None:
    """16 numbers of a byte and a scale of four a token, for keys and for values, in two layers."""
    shape = packed().shape._replace(int8_kv=1)
    assert kernel_work.single_rows(shape, [7, 100]).read_bytes == 2 * 2 * (16 + 4) * 107
    assert kernel_work.chunk(shape, 20, 33).read_bytes == 2 * 2 * (16 + 4) * 53


@pytest.mark.parametrize(("rows", "past"), [(1, 0), (5, 0), (20, 33), (9, 2)])
def test_attention_within_a_window_reads_and_counts_what_it_sees(rows: int, past: int) -> None:
    shape, window = packed().shape._replace(window=7), 7
    pairs = [(row, key) for row in range(past, past + rows) for key in range(past + rows) if row - window < key <= row]
    work = kernel_work.chunk(shape, rows, past)
    assert work.operations == 2 * 2 * 16 * 4 * len(pairs)
    assert work.read_bytes == 2 * 16 * 2 * 2 * len({key for _, key in pairs})
    assert kernel_work.single_rows(shape, [3, 100]).operations == 2 * 2 * 16 * 4 * (3 + 7)


@pytest.mark.parametrize(("rows", "past"), [(1, 0), (5, 0), (20, 33)])
def test_attention_of_a_chunk_counts_the_pairs_that_the_mask_leaves(rows: int, past: int) -> None:
    pairs = sum(key <= past + row for row in range(rows) for key in range(past + rows))
    work = kernel_work.chunk(packed().shape, rows, past)
    assert work.operations == 2 * 2 * 16 * 4 * pairs
    assert work.read_bytes == 2 * 16 * 2 * 2 * (past + rows)
    assert work.machine == ({"bf16 tiles": 3 * work.operations} if TILES else {"float32": work.operations})
    narrow = kernel_work.chunk(packed().shape, rows, past, words=1)
    assert narrow.operations == work.operations
    products = {"int8 dot": 2 * work.operations}  # three for each score and one for each value, half and half
    assert narrow.machine == (products if takes_int8(1) else work.machine)
    if not past:
        assert kernel_work.chunk_as_single_rows(packed().shape, rows).operations == work.operations


def test_the_default_model_against_the_cost_model() -> None:
    """Which counts from the file's metadata, norms included; panels have 64 bytes of steps that the file has not."""
    loaded = load_packed(EngineOptions(model="smollm2-135m"))
    assert loaded is not None
    model, architecture = loaded[1], load("smollm2-135m")
    layers, head = range(4 * model.shape.layers), range(4 * model.shape.layers, 4 * model.shape.layers + 1)
    cost = CostModel(architecture, custom_device(1.0, 1.0, 1.0)).step([Slice(new=40, context=24)])
    work = kernel_work.products(model, layers, 40, 2, Program.MANY)
    work += kernel_work.products(model, head, 1, 2, Program.MANY)
    assert work.operations + kernel_work.chunk(model.shape, 40, 24).operations == pytest.approx(cost.flops, rel=1e-12)
    assert work.read_bytes == model.weights.nbytes
    steps = 64 * len(model.image.panels)
    assert work.read_bytes - steps + model.image.norms.nbytes == cost.weight_bytes
