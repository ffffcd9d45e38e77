"""AMX: eight tile registers of 16 rows by 64 bytes, and the products of two of them (Intel SDM vol. 1, chapter 18).

A tile product adds to C [16, 16] the product of A [16, 4k bytes or 2k bfloat16] and B, where B has the layout of the
vector dot products: row r holds, for 16 columns, the four bytes of inner indices 4r to 4r + 3 (or two bfloat16).
Only called where ``features().tiles``. A thread configures its tiles before the first use and releases them after the
last; tile numbers are literals.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from biphase.engine.kernels.vectors import I8, call, operation, pointer, with_parameters

TILE_BYTES = 1024


def whole_tiles() -> NDArray[np.uint8]:
    """The 64 bytes of configuration in which all eight tiles are 16 rows of 64 bytes."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1  # the palette
    config[16:32].view(np.uint16)[:] = 64  # bytes a row
    config[48:56] = 16  # rows
    return config


configure_tiles = operation(
    types.void, [types.int64], lambda b, address: call(b, "llvm.x86.ldtilecfg", ir.VoidType(), pointer(b, address, I8))
)
"""Take the 64 bytes of configuration at an address."""
release_tiles = operation(types.void, [], lambda b: call(b, "llvm.x86.tilerelease", ir.VoidType()))


def _tile_operation(tiles: int, addresses: int, emit: Callable[..., Any]) -> Any:
    """``tiles`` literal tile numbers, then ``addresses`` of int64."""

    def typed(*given: Any) -> Any:
        numbers = [ir.Constant(I8, tile.literal_value) for tile in given[:tiles]]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(builder, *numbers, *values[tiles:])
            return context.get_dummy_value()

        return types.void(*given[:tiles], *[types.int64] * addresses), generate

    return intrinsic(prefer_literal=True)(with_parameters(tiles + addresses, typed))


def _memory(name: str) -> Any:
    def emit(b: Any, tile: Any, address: Any, stride: Any) -> None:
        call(b, name, ir.VoidType(), tile, pointer(b, address, I8), stride)

    return _tile_operation(1, 2, emit)


def _product(name: str) -> Any:
    return _tile_operation(3, 0, lambda b, c, left, right: call(b, name, ir.VoidType(), c, left, right))


load_tile = _memory("llvm.x86.tileloadd64")
"""(tile, address, bytes between rows)"""
store_tile = _memory("llvm.x86.tilestored64")
clear_tile = _tile_operation(1, 0, lambda b, tile: call(b, "llvm.x86.tilezero", ir.VoidType(), tile))
multiply_int8 = _product("llvm.x86.tdpbssd")
"""C (int32) += A (signed bytes) B (signed bytes)"""
multiply_bf16 = _product("llvm.x86.tdpbf16ps")
"""C (float32) += A B, both bfloat16"""
