"""Kernels that are compiled once, by themselves, as C functions; programs call them by their addresses.

numba optimises a function again inside each of its callers, and a program's functions lie eight deep. With the products
and attention inside them all, compiling took 160 s; a call costs a few nanoseconds, once a panel or a tile. The
addresses lie in the team's memory (``team.new_team``), which every phase has: they cannot be constants, since a program
is kept on disk and loaded where its kernels lie elsewhere.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from biphase.engine.kernels.team import KERNELS
from biphase.engine.kernels.vectors import I64, pointer


class Kernel(IntEnum):
    """The place of an address among those of the team."""

    PRODUCT = 0
    ROW_ATTENTION = 1
    CHUNK_ATTENTION = 2
    UNPACKING = 3
    UNPACKED_PRODUCT = 4


_KNOWN: dict[Kernel, tuple[Any, Any]] = {}
"""Python function and signature, as the modules of the kernels declare them."""


def integers(named_tuple: type) -> types.NamedUniTuple:
    """The type of a ``NamedTuple`` of int64."""
    return types.NamedUniTuple(types.int64, len(named_tuple._fields), named_tuple)  # type: ignore[attr-defined]


def out_of_line(kernel: Kernel, function: Any, *arguments: Any) -> Any:
    """``(team, tuple of arguments)``: a call of the njit ``function``, compiled for arguments of these types alone."""
    _KNOWN[kernel] = _named_apart(function.py_func), types.void(*arguments)
    wanted = types.Tuple(arguments)

    def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        team, given = values
        made = _cast(context, b, given, signature.args[1], wanted)
        kind = ir.FunctionType(
            context.get_value_type(types.void), [context.get_value_type(argument) for argument in arguments]
        )
        address = b.load(pointer(b, b.add(team, I64(KERNELS + 8 * kernel)), I64))
        b.call(b.inttoptr(address, kind.as_pointer()), cgutils.unpack_tuple(b, made))
        return context.get_dummy_value()

    return intrinsic(lambda context, team, given: (types.void(types.int64, given), generate))


def _named_apart(function: Any) -> Any:
    """The function under a name of its own: what numba keeps of it must not be that of the njit function."""
    copy = FunctionType(function.__code__, function.__globals__, f"{function.__name__}_out_of_line")
    copy.__module__, copy.__qualname__ = function.__module__, copy.__name__
    return copy


def _cast(context: Any, b: ir.IRBuilder, value: Any, given: Any, wanted: Any) -> Any:
    """Numbers of other widths, or without a sign, inside tuples as well."""
    if not isinstance(wanted, types.BaseTuple):
        return context.cast(b, value, given, wanted)
    parts = zip(cgutils.unpack_tuple(b, value), given, wanted, strict=True)
    return context.make_tuple(b, wanted, [_cast(context, b, *part) for part in parts])


def addresses() -> list[int]:
    """Of all kernels in their places; compiles those that are not kept."""
    return [_compiled(kernel).address for kernel in Kernel]


@cache
def _compiled(kernel: Kernel) -> Any:
    function, signature = _KNOWN[kernel]
    return cfunc(signature, cache=True, error_model="numpy")(function)


def functions() -> list[Callable[..., None]]:
    """In Python, as the modules that are loaded declare them."""
    return [function for function, _ in _KNOWN.values()]
