"""The most that this processor gives to what kernels are made of, with all threads of a team and nothing else to do.

Two kinds of loops: one reads bytes of memory once, as a step reads its weights; the others repeat one operation on
registers, on several sums side by side, which hides its latency. Where a processor lacks an instruction the loop takes
the portable form of the operation, as the kernels do.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from biphase.engine.kernels.features import features
from biphase.engine.kernels.team import barrier, next_item
from biphase.engine.kernels.tiles import (
    TILE_BYTES,
    clear_tile,
    configure_tiles,
    load_tile,
    multiply_bf16,
    multiply_int8,
    release_tiles,
    store_tile,
)
from biphase.engine.kernels.vectors import (
    I64,
    LANES,
    V_F32,
    V_I32,
    _dot_bf16,
    call,
    emit_dot_int8,
    fill_i32,
    load_i32,
    pointer,
    prefetch,
    store_i32,
)

TILES = features().tiles
RUN = 64 * 1024
"""Bytes that a thread reads before it takes the next run."""
_OPERANDS = 4 * TILE_BYTES
"""Bytes that a loop multiplies; its sums go behind them."""


class Unit(IntEnum):
    """An operation; values are what the compiled loop branches on."""

    FLOAT32 = 0
    INT8_DOT = 1
    BF16_DOT = 2
    INT8_TILES = 3
    BF16_TILES = 4

    @property
    def label(self) -> str:
        """As in ``int8 dot``."""
        return self.name.lower().replace("_", " ")


FLOAT32, INT8_DOT, BF16_DOT, INT8_TILES, BF16_TILES = (int(unit) for unit in Unit)
_SUMS = 12 if features().int8_dot else 4
"""Vectors that a loop adds to: more than are under way, two a cycle for five cycles; or what narrow ones hold."""
_TILES = 4
OPERATIONS = {
    Unit.FLOAT32: _SUMS * LANES * 2,
    Unit.INT8_DOT: _SUMS * LANES * 8,
    Unit.BF16_DOT: _SUMS * LANES * 4,
    Unit.INT8_TILES: _TILES * 16 * 16 * 64 * 2,
    Unit.BF16_TILES: _TILES * 16 * 16 * 32 * 2,
}
"""Multiplications and additions of one round of a loop on one thread."""


def new_scratch(threads: int) -> NDArray[np.uint8]:
    """What each thread multiplies, random bfloat16 from 1 to 2, ordinary as float32 and as int8 too; then its sums."""
    scratch = np.zeros((threads, _OPERANDS + _TILES * TILE_BYTES), dtype=np.uint8)
    operands = 0x3F80 + np.random.default_rng(0).integers(0, 128, (threads, _OPERANDS // 2), dtype=np.uint16)
    scratch[:, :_OPERANDS] = operands.view(np.uint8)
    return scratch


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def read(team: Any, threads: Any, address: Any, size: Any, scratch: Any) -> None:
    """Read ``size`` bytes, whole groups of 256, once; each thread leaves its sum of int32, by lane, in ``scratch``."""
    for member in prange(threads):
        _read(team, threads, address, size, scratch[member].ctypes.data + _OPERANDS)


@njit(nogil=True, cache=True, error_model="numpy")
def _read(team: Any, threads: Any, address: Any, size: Any, out: Any) -> None:
    a, b, c, d = fill_i32(0), fill_i32(0), fill_i32(0), fill_i32(0)
    first = next_item(team) * RUN
    while first < size:
        for at in range(address + first, address + min(first + RUN, size) - 255, 256):
            for line in range(0, 256, 64):
                prefetch(at + 4096 + line)
            a, b = a + load_i32(at), b + load_i32(at + 64)
            c, d = c + load_i32(at + 128), d + load_i32(at + 192)
        first = next_item(team) * RUN
    store_i32(out, (a + b) + (c + d))
    barrier(team, threads)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def repeat(unit: Any, threads: Any, rounds: Any, tile_config: Any, scratch: Any) -> None:
    """``rounds`` rounds of a unit on each thread, whose sums are in ``scratch`` afterwards."""
    for member in prange(threads):
        _repeat(unit, rounds, tile_config.ctypes.data, scratch[member].ctypes.data)


@njit(nogil=True, cache=True, error_model="numpy")
def _repeat(unit: Any, rounds: Any, tile_config: Any, scratch: Any) -> None:
    if unit == FLOAT32:
        _fuse(rounds, scratch)
    elif unit == INT8_DOT:
        _dot_bytes(rounds, scratch)
    elif unit == BF16_DOT:
        _dot_pairs(rounds, scratch)
    elif TILES:
        configure_tiles(tile_config)
        _begin_tiles(scratch)
        if unit == INT8_TILES:
            _multiply_bytes(rounds)
        else:
            _multiply_pairs(rounds)
        _end_tiles(scratch + _OPERANDS)
        release_tiles()


def _loop(total: ir.VectorType, operand: ir.VectorType, emit: Callable[..., Any]) -> Any:
    """(rounds, address): each round one operation on each sum; one operand of a round comes from memory."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        rounds, address = values
        sums = [cgutils.alloca_once_value(b, ir.Constant(total, None)) for _ in range(_SUMS)]
        weights = [b.load(pointer(b, b.add(address, I64(64 * n)), operand), align=1) for n in range(4)]
        with cgutils.for_range(b, rounds) as round_:
            line = b.mul(b.and_(round_.index, I64(7)), I64(64))
            x = b.load(pointer(b, b.add(address, line), operand), align=1)
            for n, total_ in enumerate(sums):
                b.store(emit(b, b.load(total_), x, weights[n % 4]), total_)
        for n, total_ in enumerate(sums):
            b.store(b.load(total_), pointer(b, b.add(address, I64(_OPERANDS + 64 * n)), total), align=1)
        return context.get_dummy_value()

    return intrinsic(lambda context, rounds, address: (types.void(types.int64, types.int64), generate))


_fuse = _loop(V_F32, V_F32, lambda b, total, x, y: call(b, "llvm.fma.v16f32", V_F32, x, y, total))
_dot_bytes = _loop(V_I32, V_I32, emit_dot_int8)
_dot_pairs = _loop(V_F32, V_I32, _dot_bf16)


@njit(nogil=True, cache=True, error_model="numpy")
def _begin_tiles(scratch: Any) -> None:
    clear_tile(0)
    clear_tile(1)
    clear_tile(2)
    clear_tile(3)
    load_tile(4, scratch, 64)
    load_tile(5, scratch + TILE_BYTES, 64)
    load_tile(6, scratch + 2 * TILE_BYTES, 64)
    load_tile(7, scratch + 3 * TILE_BYTES, 64)


@njit(nogil=True, cache=True, error_model="numpy")
def _end_tiles(sums: Any) -> None:
    store_tile(0, sums, 64)
    store_tile(1, sums + TILE_BYTES, 64)
    store_tile(2, sums + 2 * TILE_BYTES, 64)
    store_tile(3, sums + 3 * TILE_BYTES, 64)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_bytes(rounds: Any) -> None:
    for _ in range(rounds):
        multiply_int8(0, 4, 6)
        multiply_int8(1, 4, 7)
        multiply_int8(2, 5, 6)
        multiply_int8(3, 5, 7)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_pairs(rounds: Any) -> None:
    for _ in range(rounds):
        multiply_bf16(0, 4, 6)
        multiply_bf16(1, 4, 7)
        multiply_bf16(2, 5, 6)
        multiply_bf16(3, 5, 7)
