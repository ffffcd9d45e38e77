"""The bare loops do all that their rates count; the table of selection names the form for the processor."""

import numpy as np
import pytest

pytest.importorskip("numba")

from biphase.engine.bare_loops import BareLoops, units
from biphase.engine.kernels import roofs
from biphase.engine.kernels.features import Features, features
from biphase.engine.kernels.roofs import Unit
from biphase.engine.kernels.select import selection
from biphase.engine.kernels.team import new_team
from biphase.engine.kernels.tiles import whole_tiles

THREADS = 2
SUMS = 4096
"""Where a loop's sums begin, in bytes."""


def test_reading_reads_each_byte_once() -> None:
    """The sums of all threads are those of the buffer's int32, lane by lane, modulo 2^32."""
    buffer = np.random.default_rng(0).integers(-(2**31), 2**31, 16 * 40_000, dtype=np.int32)
    scratch, team = roofs.new_scratch(THREADS), new_team(THREADS)
    roofs.read(team.ctypes.data, THREADS, buffer.ctypes.data, buffer.nbytes, scratch)
    got = scratch[:, SUMS : SUMS + 64].copy().view(np.uint32).sum(0, dtype=np.uint32)
    np.testing.assert_array_equal(got, buffer.view(np.uint32).reshape(-1, 16).sum(0, dtype=np.uint32))


@pytest.mark.parametrize("unit", [Unit.FLOAT32, Unit.INT8_DOT, Unit.BF16_DOT])
def test_a_loop_of_vectors_repeats_as_often_as_it_says(unit: Unit) -> None:
    """Sums of ones: each round adds as many as a lane holds products, half the operations that are counted for it."""
    one = {Unit.FLOAT32: np.float32(1).tobytes(), Unit.INT8_DOT: bytes([1] * 4), Unit.BF16_DOT: b"\x80\x3f" * 2}[unit]
    scratch = roofs.new_scratch(THREADS)
    scratch[:, :SUMS] = np.frombuffer(one * (SUMS // 4), dtype=np.uint8)
    roofs.repeat(int(unit), THREADS, 1000, whole_tiles(), scratch)
    sums = scratch[:, SUMS:].copy().view(np.int32 if unit is Unit.INT8_DOT else np.float32)
    assert sums.sum() * 2 == THREADS * 1000 * roofs.OPERATIONS[unit]


@pytest.mark.skipif(not features().tiles, reason="the processor has no tiles")
@pytest.mark.parametrize("unit", [Unit.INT8_TILES, Unit.BF16_TILES])
def test_a_loop_of_tiles_repeats_as_often_as_it_says(unit: Unit) -> None:
    one = bytes([1]) if unit is Unit.INT8_TILES else b"\x80\x3f"
    scratch = roofs.new_scratch(THREADS)
    scratch[:, :SUMS] = np.frombuffer(one * (SUMS // len(one)), dtype=np.uint8)
    roofs.repeat(int(unit), THREADS, 10, whole_tiles(), scratch)
    sums = scratch[:, SUMS:].copy().view(np.int32 if unit is Unit.INT8_TILES else np.float32)
    assert sums.sum() * 2 == THREADS * 10 * roofs.OPERATIONS[unit]


def test_roofs_are_those_of_the_units_here_and_the_best_is_not_below_the_median() -> None:
    loops = BareLoops(np.ones(1 << 20, dtype=np.uint8))
    loops.run()
    loops.forget()
    loops.run()
    loops.run()
    found = loops.roofs()
    assert list(found.gop_per_s) == [unit.label for unit in units()]
    for roof in (found.read_gb_per_s, *found.gop_per_s.values()):
        assert 0 < roof.median <= roof.best


@pytest.mark.parametrize(
    ("found", "product", "attention"),
    [
        (Features(), "int8 portable", "fp32"),
        (Features(int8_dot=True), "int8 VNNI", "fp32"),
        (Features(int8_dot=True, bf16_dot=True), "int8 VNNI", "fp32"),
        (Features(int8_dot=True, bf16_dot=True, tiles=True), "int8 AMX", "bf16 AMX"),
    ],
    ids=str,
)
def test_the_table_names_the_form_for_the_processor(found: Features, product: str, attention: str) -> None:
    linear, _, chunk, _ = selection(found)
    assert product in linear.many_rows
    assert attention in chunk.many_rows
    assert ("VNNI" in linear.few_rows) == found.int8_dot
