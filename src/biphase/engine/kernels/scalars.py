"""Scalar pieces of the compiled kernels: bfloat16 carried as uint16, and an exponential that LLVM can vectorise.

numba has no bfloat16. Its 16 bits are the upper half of a float32, so widening is a shift and narrowing a rounding to
nearest even, as torch does it. ``widen`` and ``narrow`` compile to nothing for float32 arrays, so that one kernel
serves both dtypes.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """Reinterpret a uint32 as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """Reinterpret a float32 as a uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


def widen(value: Any) -> Any:
    """float32 of a bfloat16 (uint16) or float32 element."""
    raise NotImplementedError("only inside compiled kernels")


def narrow(value: Any, like: Any) -> Any:
    """``value`` (float32) as an element of the array ``like``: rounded to nearest even for bfloat16."""
    raise NotImplementedError("only inside compiled kernels")


# numba compares the parameters of an overload with those of its implementation, annotations included: hence none.
@overload(widen, inline="always")
def _widen(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


@overload(narrow, inline="always")
def _narrow(value, like):  # type: ignore[no-untyped-def]
    if like.dtype == types.uint16:
        return lambda value, like: _round_to_bfloat16(value)
    return lambda value, like: value


@njit(cache=True)
def _round_to_bfloat16(value: Any) -> Any:
    bits = bits_of_float(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@njit(cache=True)
def exp(x: Any) -> Any:
    """e**x for float32 x <= 88, relative error below 2e-7; 0 below -87.

    x = n ln2 + r with |r| <= ln2 / 2 (ln2 split in two so that r is exact), e**r by its Taylor polynomial of degree 7
    (remainder r**8 / 8! < 6e-9), and 2**n written into the exponent bits. No branch and no call: loops over it
    vectorise, which math.exp does not. Compiled without fast-math, which would join the two parts of ln2 again.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.float32(np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5)))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * float_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
