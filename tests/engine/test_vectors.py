"""Every vector operation against numpy, in the forms of other processors too."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numba import njit, prange

from biphase.engine.kernels import vectors as v
from tests.engine.forms import inside_a_form, run_tests_in

FLOATS = arrays(np.float32, 16, elements=st.floats(-1e4, 1e4, width=32))
INTS = arrays(np.int32, 16, elements=st.integers(-(2**31), 2**31 - 1))
BYTES = arrays(np.uint8, 64, elements=st.integers(0, 255))


def unary(operation, load, store):
    return njit(lambda x, out: store(out, operation(load(x))))


def binary(operation, load, store):
    return njit(lambda x, y, out: store(out, operation(load(x), load(y))))


def applied(function, out, *inputs):
    """``out`` after the kernel has written it."""
    function(*[array.ctypes.data for array in inputs], out.ctypes.data)
    return out


FLOAT, INT = (v.load_f32, v.store_f32), (v.load_i32, v.store_i32)
FLOAT_PAIRS = {
    "add": (binary(njit(lambda a, b: a + b), *FLOAT), np.add),
    "subtract": (binary(njit(lambda a, b: a - b), *FLOAT), np.subtract),
    "multiply": (binary(njit(lambda a, b: a * b), *FLOAT), np.multiply),
    "greater": (binary(v.greater, *FLOAT), np.maximum),
}
INT_PAIRS = {
    "add": (binary(njit(lambda a, b: a + b), *INT), np.add),
    "subtract": (binary(njit(lambda a, b: a - b), *INT), np.subtract),
    "and": (binary(njit(lambda a, b: a & b), *INT), np.bitwise_and),
    "or": (binary(njit(lambda a, b: a | b), *INT), np.bitwise_or),
    "xor": (binary(njit(lambda a, b: a ^ b), *INT), np.bitwise_xor),
}


def test_an_address_in_a_register_is_the_same_address() -> None:
    x = np.arange(48, dtype=np.float32)
    shifted = njit(lambda x, y, out: v.store_f32(out, v.load_f32(v.in_register(x + (y - x) // 2))))
    np.testing.assert_array_equal(applied(shifted, np.empty(16, np.float32), x, x[32:]), x[16:32])


@pytest.mark.parametrize("name", FLOAT_PAIRS)
@given(x=FLOATS, y=FLOATS)
def test_pairs_of_floats(name: str, x: np.ndarray, y: np.ndarray) -> None:
    function, expected = FLOAT_PAIRS[name]
    np.testing.assert_array_equal(applied(function, np.empty(16, np.float32), x, y), expected(x, y))


@pytest.mark.parametrize("name", INT_PAIRS)
@given(x=INTS, y=INTS)
def test_pairs_of_integers(name: str, x: np.ndarray, y: np.ndarray) -> None:
    function, expected = INT_PAIRS[name]
    np.testing.assert_array_equal(applied(function, np.empty(16, np.int32), x, y), expected(x, y))


HIGH = binary(v.multiply_high, *INT)


@given(x=INTS, y=INTS)
def test_the_high_half_of_unsigned_products(x: np.ndarray, y: np.ndarray) -> None:
    got = applied(HIGH, np.empty(16, np.int32), x, y).view(np.uint16)
    wide = x.view(np.uint16).astype(np.uint64) * y.view(np.uint16)
    np.testing.assert_array_equal(got, (wide >> 16).astype(np.uint16))


HALF_PAIRS = {
    "add": (binary(v.add_halves, *INT), lambda x, y: x + y),
    "multiply": (binary(v.multiply_halves, *INT), lambda x, y: np.floor(x * y / 2**15 + 0.5).astype(np.int32)),
}


@pytest.mark.parametrize("name", HALF_PAIRS)
@given(x=INTS, y=INTS)
@example(x=np.full(16, -0x7FFF8000, np.int32), y=np.full(16, -0x7FFF8000, np.int32))  # -32768 squared, twice a lane
def test_pairs_of_halves(name: str, x: np.ndarray, y: np.ndarray) -> None:
    function, expected = HALF_PAIRS[name]
    got = applied(function, np.empty(16, np.int32), x, y).view(np.int16)
    wide = expected(x.view(np.int16).astype(np.int32), y.view(np.int16).astype(np.int32))
    np.testing.assert_array_equal(got, wide.astype(np.int16))


@njit
def _shift(x, bits, out):
    v.store_i32(out, v.shift_left(v.load_i32(x), bits))
    v.store_i32(out + 64, v.shift_right(v.load_i32(x), bits))
    v.store_i32(out + 128, v.shift_right_signed(v.load_i32(x), bits))


@given(x=INTS, bits=st.integers(0, 31))
def test_shifts(x: np.ndarray, bits: int) -> None:
    out = np.empty((3, 16), np.int32)
    _shift(x.ctypes.data, bits, out.ctypes.data)
    np.testing.assert_array_equal(out[0], np.left_shift(x, bits))
    np.testing.assert_array_equal(out[1], np.right_shift(x.view(np.uint32), bits).view(np.int32))
    np.testing.assert_array_equal(out[2], np.right_shift(x, bits))


@njit
def _fused(x, y, z, out):
    v.store_f32(out, v.fma(v.load_f32(x), v.load_f32(y), v.load_f32(z)))


@given(x=FLOATS, y=FLOATS, z=FLOATS)
def test_fma_rounds_once(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
    got = applied(_fused, np.empty(16, np.float32), x, y, z)
    exact = x.astype(np.float64) * y + z  # the product of two float32 is exact in float64
    np.testing.assert_allclose(got, exact, rtol=2.0**-24, atol=1e-40)


CONVERSIONS = {
    "to_float": (unary(v.to_float, v.load_i32, v.store_f32), np.int32, np.float32, lambda x: x.astype(np.float32)),
    "float_as_bits": (
        unary(v.float_as_bits, v.load_f32, v.store_i32),
        np.float32,
        np.int32,
        lambda x: x.view(np.int32),
    ),
    "bits_as_float": (
        unary(v.bits_as_float, v.load_i32, v.store_f32),
        np.int32,
        np.float32,
        lambda x: x.view(np.float32),
    ),
    "to_int": (unary(v.to_int, v.load_f32, v.store_i32), np.float32, np.int32, lambda x: np.rint(x).astype(np.int32)),
    "absolute": (unary(v.absolute, v.load_f32, v.store_f32), np.float32, np.float32, np.abs),
    "load_f16": (
        njit(lambda x, out: v.store_f32(out, v.load_f16(x))),
        np.float16,
        np.float32,
        lambda x: x.astype(np.float32),
    ),
    "store_f16": (
        njit(lambda x, out: v.store_f16(out, v.load_f32(x))),
        np.float32,
        np.float16,
        lambda x: x.astype(np.float16),
    ),
    "store_i8": (njit(lambda x, out: v.store_i8(out, v.load_i32(x))), np.int32, np.int8, lambda x: x.astype(np.int8)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@given(floats=FLOATS, ints=INTS)
def test_conversions(name: str, floats: np.ndarray, ints: np.ndarray) -> None:
    function, source, target, expected = CONVERSIONS[name]
    x = ints if source is np.int32 else floats.astype(source)
    got, wanted = applied(function, np.empty(16, target), x), expected(x)
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))


@njit
def _across(x, y):
    return v.sum_f32(v.load_f32(x)), v.max_f32(v.load_f32(x)), v.sum_i32(v.load_i32(y))


@given(x=FLOATS, y=arrays(np.int32, 16, elements=st.integers(-1000, 1000)))
def test_across_the_lanes(x: np.ndarray, y: np.ndarray) -> None:
    total, largest, count = _across(x.ctypes.data, y.ctypes.data)
    # sixteen terms added in halves: four roundings, each relative to the sum of magnitudes
    assert total == pytest.approx(x.astype(np.float64).sum(), abs=4 * 2.0**-24 * float(np.abs(x).sum()) + 1e-40)
    assert (largest, count) == (x.max(), y.sum())


_magnitude = njit(lambda x, y: v.largest_magnitude(v.load_f32(x), v.load_f32(y)))


@given(x=FLOATS, y=FLOATS, lane=st.integers(0, 31), odd=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_the_largest_magnitude(x: np.ndarray, y: np.ndarray, lane: int, odd: float) -> None:
    both = np.concatenate([x, y])
    assert _magnitude(x.ctypes.data, y.ctypes.data) == np.abs(both).max()
    both[lane] = odd
    found = _magnitude(both[:16].ctypes.data, both[16:].ctypes.data)
    assert np.isnan(found) if np.isnan(odd) else found == np.inf


_exp = unary(v.exp, v.load_f32, v.store_f32)


@given(arrays(np.float32, 16, elements=st.floats(-87, 88, width=32)))
def test_exp(x: np.ndarray) -> None:
    got = applied(_exp, np.empty(16, np.float32), x)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=3e-7)


def test_exp_of_what_has_no_value_or_nearly_none() -> None:
    x = np.array([np.nan, -1e30, -np.inf, 0] * 4, dtype=np.float32)
    got = applied(_exp, np.empty(16, np.float32), x)
    assert np.isnan(got[::4]).all()
    assert (got[1::4] < 1e-37).all()
    assert (got[2::4] < 1e-37).all()
    assert (got[3::4] == 1).all()


@njit
def _dot_int8(total, unsigned, signed, out):
    v.store_i32(out, v.dot_int8(v.load_i32(total), v.load_i32(unsigned), v.load_i32(signed)))


@given(total=arrays(np.int32, 16, elements=st.integers(-(2**30), 2**30)), unsigned=BYTES, signed=BYTES)
def test_dot_int8(total: np.ndarray, unsigned: np.ndarray, signed: np.ndarray) -> None:
    products = unsigned.reshape(16, 4).astype(np.int32) * signed.view(np.int8).reshape(16, 4)
    got = applied(_dot_int8, np.empty(16, np.int32), total, unsigned, signed)
    np.testing.assert_array_equal(got, total + products.sum(1))


@njit
def _dot_bf16(total, low, high, other, out):
    pairs = v.pack_bf16(v.load_f32(low), v.load_f32(high))
    v.store_f32(out, v.dot_bf16(v.load_f32(total), pairs, v.load_i32(other)))
    v.store_f32(out + 64, v.low_bf16(pairs))
    v.store_f32(out + 128, v.high_bf16(pairs))


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as float32; torch's conversion."""
    import torch

    return torch.from_numpy(x).bfloat16().float().numpy()


NORMAL = arrays(np.float32, 16, elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False))
"""The instructions count denormals as zero."""


@given(total=NORMAL, low=NORMAL, high=NORMAL, other=arrays(np.float32, 32, elements=st.floats(-100, 100, width=32)))
def test_dot_bf16(total: np.ndarray, low: np.ndarray, high: np.ndarray, other: np.ndarray) -> None:
    bits = np.ascontiguousarray((rounded(other).view(np.uint32) >> 16).astype(np.uint16))
    out = np.empty((3, 16), np.float32)
    _dot_bf16(*[a.ctypes.data for a in (total, low, high, bits, out)])
    np.testing.assert_array_equal(out[1], rounded(low))
    np.testing.assert_array_equal(out[2], rounded(high))
    pairs = rounded(other).reshape(16, 2).astype(np.float64)
    terms = np.stack([total.astype(np.float64), pairs[:, 0] * rounded(low), pairs[:, 1] * rounded(high)])
    # two additions, each rounded relative to the magnitudes that went in; denormals count as zero in the instruction
    tolerance = 3 * 2.0**-24 * np.abs(terms).sum(0) + 1e-36
    assert (np.abs(out[0] - terms.sum(0)) <= tolerance).all()


@njit
def _elements(at, out):
    v.put_f32(out, v.get_f32(at) + v.get_f16(at + 4))
    v.put_i32(out + 4, v.get_i32(at + 8) + v.get_u8(at + 12))
    v.put_f16(out + 8, v.get_f32(at))
    v.put_i64(out + 16, v.get_i64(at + 16))
    v.store_f32(out + 64, v.fill_f32(2.5) + v.load_fill_f32(at))
    v.store_i32(out + 128, v.fill_i32(-3) + v.load_fill_i32(at + 8))
    v.prefetch(at)
    v.pause()


def test_single_elements() -> None:
    source, out = np.zeros(24, np.uint8), np.zeros(192, np.uint8)
    source[:4].view(np.float32)[0] = 1.5
    source[4:6].view(np.float16)[0] = 0.25
    source[8:12].view(np.int32)[0] = -7
    source[12] = 200
    source[16:].view(np.int64)[0] = 2**40 + 3
    _elements(source.ctypes.data, out.ctypes.data)
    assert out[:4].view(np.float32)[0] == 1.75
    assert out[4:8].view(np.int32)[0] == 193
    assert out[8:10].view(np.float16)[0] == 1.5
    assert out[16:24].view(np.int64)[0] == 2**40 + 3
    assert (out[64:128].view(np.float32) == 4.0).all()
    assert (out[128:].view(np.int32) == -10).all()


@njit(parallel=True)
def _count(at, rounds):
    for _ in prange(rounds):
        v.add_atomic(at, 1)


def test_atomic_additions_are_not_lost() -> None:
    counter = np.zeros(1, np.int64)
    _count(counter.ctypes.data, 100_000)
    assert counter[0] == 100_000


@pytest.mark.timeout(400)  # compiles again
@pytest.mark.skipif(inside_a_form, reason="this is the form")
def test_portable_form_of_what_has_an_instruction_of_its_own(tmp_path: Path) -> None:
    run_tests_in("portable", __file__, tmp_path, only="dot or halves")


@pytest.mark.forms
@pytest.mark.timeout(400)
@pytest.mark.skipif(inside_a_form, reason="this is the form")
def test_portable_form_of_everything(tmp_path: Path) -> None:
    run_tests_in("portable", __file__, tmp_path)
