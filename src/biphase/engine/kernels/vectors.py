"""Vectors of sixteen 32-bit lanes as values inside compiled kernels, with the dot products that inference lives from.

numba has scalars and arrays; these intrinsics add ``float32x16`` and ``int32x16``, one 512-bit register each, through
LLVM IR. Memory is named by address (int64, from ``array.ctypes.data``), so that a kernel can walk one packed buffer of
several formats; whoever passes an address keeps its array alive. Nothing is aligned by assumption.

Operations are generic IR, which LLVM splits for narrower registers. A few have an instruction of their own where
``features`` says so, and arithmetic of the same meaning elsewhere: equal to the bit, but for the order of the two
additions of ``dot_bf16``.
"""

import operator
import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from biphase.engine.kernels.features import features

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16 = _BFloat()
V_I32, V_F32 = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


class Vector(types.Type):  # type: ignore[misc]
    """The numba type of one register."""

    def __init__(self, name: str, llvm: ir.VectorType) -> None:
        self.llvm = llvm
        super().__init__(name)


int32x16 = Vector("int32x16", V_I32)
float32x16 = Vector("float32x16", V_F32)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


Emit = Callable[..., Any]
"""(builder, arguments as LLVM values) -> the result's LLVM value, or None"""


def operation(result: Any, arguments: Sequence[Any], emit: Emit) -> Any:
    """A numba function of these types whose body is what ``emit`` builds; scalars are converted as Python would."""

    def typed(*given: Any) -> Any:
        if any(isinstance(a, Vector) and g != a for g, a in zip(given, arguments, strict=True)):
            return None

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = emit(builder, *values)
            return context.get_dummy_value() if made is None else made

        return result(*arguments), generate

    return intrinsic(with_parameters(len(arguments), typed))


def with_parameters(count: int, typed: Callable[..., Any]) -> Callable[..., Any]:
    """``typed`` as a function of the typing context and ``count`` named parameters: numba takes no ``*args`` here."""
    forms: tuple[Callable[..., Any], ...] = (
        lambda context: typed(),
        lambda context, a: typed(a),
        lambda context, a, b: typed(a, b),
        lambda context, a, b, c: typed(a, b, c),
    )
    return forms[count]


def constant(value: Any, kind: ir.VectorType = V_F32) -> ir.Constant:
    """``value`` in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call the LLVM function ``name``, declared from its arguments."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def splat(builder: Any, scalar: Any, kind: ir.VectorType) -> Any:
    """The LLVM value with ``scalar`` in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, nothing, constant(0, ir.VectorType(I32, kind.count)))


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to ``kind``."""
    return builder.inttoptr(address, kind.as_pointer())


def emit_in_register(b: Any, address: Any) -> Any:
    return b.call(ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0", side_effect=False), [address])


in_register = operation(types.int64, [types.int64], emit_in_register)
"""The address in a register of its own, whatever sum it is: of which sum, the compiler does not learn.

Intel's cores issue an operation on memory as one micro-operation where its address is a register and a constant, and
as two where it is a sum of registers (Optimization Reference Manual, "micro-fusion", on indexed addressing). Where the
other hyper-thread of a core is somebody else's, half of the slots are left, and it is they that run out.
"""


def _load(result: Any, stored: Any, convert: Emit = lambda _, value: value) -> Any:
    return operation(result, [types.int64], lambda b, address: convert(b, b.load(pointer(b, address, stored), align=1)))


def _store(argument: Any, stored: Any, convert: Emit = lambda _, value: value) -> Any:
    def emit(b: Any, address: Any, value: Any) -> None:
        b.store(convert(b, value), pointer(b, address, stored), align=1)

    return operation(types.void, [types.int64, argument], emit)


# Loads and stores: sixteen elements that lie together, widened to 32 bits.
load_i32 = _load(int32x16, V_I32)
load_f32 = _load(float32x16, V_F32)
load_f16 = _load(float32x16, ir.VectorType(F16, LANES), lambda b, v: b.fpext(v, V_F32))
store_i32 = _store(int32x16, V_I32)
store_f32 = _store(float32x16, V_F32)
store_f16 = _store(float32x16, ir.VectorType(F16, LANES), lambda b, v: b.fptrunc(v, ir.VectorType(F16, LANES)))
load_i8 = _load(int32x16, ir.VectorType(I8, LANES), lambda b, v: b.sext(v, V_I32))
store_i8 = _store(int32x16, ir.VectorType(I8, LANES), lambda b, v: b.trunc(v, ir.VectorType(I8, LANES)))
"""The low byte of each lane."""

# One element in every lane.
fill_i32 = operation(int32x16, [types.int32], lambda b, x: splat(b, x, V_I32))
fill_f32 = operation(float32x16, [types.float32], lambda b, x: splat(b, x, V_F32))
load_fill_i32 = _load(int32x16, I32, lambda b, x: splat(b, x, V_I32))
load_fill_f32 = _load(float32x16, F32, lambda b, x: splat(b, x, V_F32))

# Single elements.
get_f32 = _load(types.float32, F32)
get_f16 = _load(types.float32, F16, lambda b, v: b.fpext(v, F32))
get_u8 = _load(types.uint8, I8)
get_i32 = _load(types.int32, I32)
get_i64 = _load(types.int64, I64)
put_f32 = _store(types.float32, F32)
put_f16 = _store(types.float32, F16, lambda b, v: b.fptrunc(v, F16))
put_i8 = _store(types.int32, I8, lambda b, v: b.trunc(v, I8))
"""The low byte."""
put_i32 = _store(types.int32, I32)
put_i64 = _store(types.int64, I64)

# Arithmetic. No fast-math: results do not depend on what LLVM finds nearby, and NaN stays NaN.
fma = operation(float32x16, [float32x16] * 3, lambda b, x, y, z: call(b, "llvm.fma.v16f32", V_F32, x, y, z))
"""x * y + z, rounded once."""
absolute = operation(float32x16, [float32x16], lambda b, x: call(b, "llvm.fabs.v16f32", V_F32, x))
greater = operation(float32x16, [float32x16] * 2, lambda b, x, y: b.select(b.fcmp_unordered(">", x, y), x, y))
"""The larger of each lane; x where either is NaN."""
to_float = operation(float32x16, [int32x16], lambda b, x: b.sitofp(x, V_F32))
bits_as_float = operation(float32x16, [int32x16], lambda b, x: b.bitcast(x, V_F32))
float_as_bits = operation(int32x16, [float32x16], lambda b, x: b.bitcast(x, V_I32))


def _to_int(b: Any, x: Any) -> Any:
    if features().int8_dot:  # one instruction, which LLVM does not find
        kept, whole, rounding = constant(0, V_I32), ir.Constant(I16, -1), ir.Constant(I32, 4)  # as the mode says
        return call(b, "llvm.x86.avx512.mask.cvtps2dq.512", V_I32, x, kept, whole, rounding)
    return b.fptosi(call(b, "llvm.rint.v16f32", V_F32, x), V_I32)


to_int = operation(int32x16, [float32x16], _to_int)
"""To the nearest integer, ties to even. A NaN gives any integer."""


def _shift(emit: Callable[[Any, Any, Any], Any]) -> Any:
    return operation(int32x16, [int32x16, types.int32], lambda b, x, n: emit(b, x, splat(b, n, V_I32)))


shift_left = _shift(lambda b, x, n: b.shl(x, n))
shift_right = _shift(lambda b, x, n: b.lshr(x, n))
"""Zeros come in from the left."""
shift_right_signed = _shift(lambda b, x, n: b.ashr(x, n))


# Halves: each lane as two 16-bit integers.
V_I16 = ir.VectorType(I16, 2 * LANES)


def _halves(emit: Emit) -> Any:
    def whole(b: Any, x: Any, y: Any) -> Any:
        return b.bitcast(emit(b, b.bitcast(x, V_I16), b.bitcast(y, V_I16)), V_I32)

    return operation(int32x16, [int32x16] * 2, whole)


def _multiply_halves(b: Any, x: Any, y: Any) -> Any:
    if features().int8_dot:  # no processor has these and lacks AVX512-BW
        return call(b, "llvm.x86.avx512.pmul.hr.sw.512", V_I16, x, y)
    wide = ir.VectorType(I32, 2 * LANES)
    fourteen, one = constant(14, wide), constant(1, wide)
    product = b.lshr(b.mul(b.sext(x, wide), b.sext(y, wide)), fourteen)
    return b.trunc(b.lshr(b.add(product, one), one), V_I16)


def _multiply_high(b: Any, x: Any, y: Any) -> Any:
    wide = ir.VectorType(I32, 2 * LANES)
    product = b.mul(b.zext(x, wide), b.zext(y, wide))
    return b.trunc(b.lshr(product, constant(16, wide)), V_I16)


add_halves = _halves(lambda b, x, y: b.add(x, y))
"""Sums of the halves, modulo 2**16."""
multiply_halves = _halves(_multiply_halves)
"""x y / 2**15 of signed halves, rounded to nearest, ties up."""
multiply_high = _halves(_multiply_high)
"""x y / 2**16 of unsigned halves, rounded down."""


# Across the lanes. A sum in LLVM's order of halves, the same on every machine.
def _sum(b: Any, x: Any) -> Any:
    for width in (8, 4, 2, 1):
        swapped = ir.Constant(ir.VectorType(I32, LANES), [(i + width) % LANES for i in range(LANES)])
        x = b.fadd(x, b.shuffle_vector(x, x, swapped))
    return b.extract_element(x, ir.Constant(I32, 0))


sum_f32 = operation(types.float32, [float32x16], _sum)
max_f32 = operation(types.float32, [float32x16], lambda b, x: call(b, "llvm.vector.reduce.fmax.v16f32", F32, x))


def _larger_magnitude(b: Any, x: Any, y: Any) -> Any:
    """Without their signs, floats are in the order of their bits, and NaN is above all."""
    x, y = (b.and_(b.bitcast(v, V_I32), constant(0x7FFFFFFF, V_I32)) for v in (x, y))
    return b.bitcast(b.select(b.icmp_unsigned(">", x, y), x, y), V_F32)


def _largest_magnitude(b: Any, x: Any, y: Any) -> Any:
    larger = b.bitcast(_larger_magnitude(b, x, y), V_I32)
    return b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, larger), F32)


larger_magnitude = operation(float32x16, [float32x16] * 2, _larger_magnitude)
"""The larger absolute value of each lane; NaN where one of them is."""
largest_magnitude = operation(types.float32, [float32x16] * 2, _largest_magnitude)
"""The largest absolute value in two vectors; NaN where one of them is."""
sum_i32 = operation(types.int32, [int32x16], lambda b, x: call(b, "llvm.vector.reduce.add.v16i32", I32, x))


def _exp(b: Any, x: Any) -> Any:
    """As ``scalars.exp``: n ln2 + r with ln2 in two parts, e**r by its Taylor polynomial to r**7, 2**n by its bits."""
    x = b.select(b.fcmp_ordered("<", x, constant(-87.0)), constant(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, constant(88.0)), constant(88.0), x)
    n = call(b, "llvm.rint.v16f32", V_F32, b.fmul(x, constant(1.4426950408889634)))
    r = call(b, "llvm.fma.v16f32", V_F32, n, constant(-0.693359375), x)
    r = call(b, "llvm.fma.v16f32", V_F32, n, constant(2.12194440e-4), r)
    p = constant(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        p = call(b, "llvm.fma.v16f32", V_F32, p, r, constant(1 / factorial))
    exponent = b.shl(b.add(b.fptosi(n, V_I32), constant(127, V_I32)), constant(23, V_I32))
    return b.fmul(p, b.bitcast(exponent, V_F32))


exp = operation(float32x16, [float32x16], _exp)
"""e**x for x <= 88, relative error below 3e-7; about 1e-38 below -87; NaN stays NaN."""


# Dot products: a lane holds four bytes or two bfloat16, and adds their products to the accumulator's lane.
def emit_dot_int8(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    if features().int8_dot:
        bytes_ = ir.VectorType(I8, 64)
        operands = (b.bitcast(unsigned, bytes_), b.bitcast(signed, bytes_))
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V_I32, total, *operands)
    for byte in range(4):
        left = b.and_(b.lshr(unsigned, constant(8 * byte, V_I32)), constant(255, V_I32))
        right = b.ashr(b.shl(signed, constant(24 - 8 * byte, V_I32)), constant(24, V_I32))
        total = b.add(total, b.mul(left, right))
    return total


dot_int8 = operation(int32x16, [int32x16] * 3, emit_dot_int8)
"""total + four products of unsigned by signed bytes, lane by lane."""


def _dot_bf16(b: Any, total: Any, left: Any, right: Any) -> Any:
    if features().bf16_dot:
        pairs = ir.VectorType(BF16, 32)
        operands = (b.bitcast(left, pairs), b.bitcast(right, pairs))
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, total, *operands)
    for half in (_low_half, _high_half):
        total = call(b, "llvm.fma.v16f32", V_F32, half(b, left), half(b, right), total)
    return total


def _low_half(b: Any, pairs: Any) -> Any:
    return b.bitcast(b.shl(pairs, constant(16, V_I32)), V_F32)


def _high_half(b: Any, pairs: Any) -> Any:
    return b.bitcast(b.and_(pairs, constant(-65536, V_I32)), V_F32)


dot_bf16 = operation(float32x16, [float32x16, int32x16, int32x16], _dot_bf16)
"""total + two products of bfloat16, lane by lane."""
low_bf16 = operation(float32x16, [int32x16], _low_half)
high_bf16 = operation(float32x16, [int32x16], _high_half)


def _round_bf16(b: Any, x: Any) -> Any:
    """The float32 bits of x rounded to the nearest bfloat16, ties to even, in the upper half; NaN is not kept."""
    bits = b.bitcast(x, V_I32)
    odd = b.and_(b.lshr(bits, constant(16, V_I32)), constant(1, V_I32))
    return b.add(b.add(bits, constant(0x7FFF, V_I32)), odd)


def _pack_bf16(b: Any, low: Any, high: Any) -> Any:
    upper = b.and_(_round_bf16(b, high), constant(-65536, V_I32))
    return b.or_(b.lshr(_round_bf16(b, low), constant(16, V_I32)), upper)


pack_bf16 = operation(int32x16, [float32x16] * 2, _pack_bf16)
"""Two vectors rounded to bfloat16, the first in the low halves of the lanes."""


# Between threads.
add_atomic = operation(
    types.int64,
    [types.int64] * 2,
    lambda b, address, value: b.atomic_rmw("add", pointer(b, address, I64), value, "acq_rel"),
)
"""Add to the int64 at an address; the value before."""
get_atomic = operation(
    types.int64, [types.int64], lambda b, address: b.load_atomic(pointer(b, address, I64), "acquire", 8)
)


def _pause(b: Any) -> None:
    if platform.machine() in ("x86_64", "AMD64"):
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


pause = operation(types.void, [], _pause)
"""Tell the processor that this thread spins; nothing where there is no such hint."""


def _prefetch(b: Any, address: Any) -> None:
    read, nearest, data = (ir.Constant(I32, n) for n in (0, 3, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address, I8), read, nearest, data)


prefetch = operation(types.void, [types.int64], _prefetch)
"""Ask for the cache line at an address, into the first level; an address of nothing does no harm."""


# + - * & | ^ on vectors.
_OPERATORS: dict[Any, dict[Vector, str]] = {
    operator.add: {float32x16: "fadd", int32x16: "add"},
    operator.sub: {float32x16: "fsub", int32x16: "sub"},
    operator.mul: {float32x16: "fmul", int32x16: "mul"},
    operator.truediv: {float32x16: "fdiv"},
    operator.and_: {int32x16: "and_"},
    operator.or_: {int32x16: "or_"},
    operator.xor: {int32x16: "xor"},
}


def _register(symbol: Any, by_type: dict[Vector, str]) -> None:
    emitters = {
        vector: operation(vector, [vector] * 2, lambda b, x, y, name=name: getattr(b, name)(x, y))
        for vector, name in by_type.items()
    }

    # numba compares the parameters with those of the implementation, annotations included: hence none.
    @overload(symbol, inline="always")
    def choose(left, right):  # type: ignore[no-untyped-def]
        emitter = emitters.get(left) if left == right else None
        return None if emitter is None else lambda left, right: emitter(left, right)  # noqa: PLW0108  numba wants a function


for _symbol, _by_type in _OPERATORS.items():
    _register(_symbol, _by_type)
