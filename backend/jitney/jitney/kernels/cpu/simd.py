"""Vectors of 16 float32 lanes and raw memory for Numba kernels, as LLVM's own vector types.

Numba has no vector type and leaves vectorization to chance; here a lane is explicit, and LLVM maps
16 lanes to what the processor has: one AVX-512 register, two AVX2 ones, four of NEON. Addresses are
plain integers (``intp``); nothing is bounds-checked.

Element types of a cache are told apart at compile time by the *type* of a tag value, F32, BF16 or
I8: bfloat16 is computed in pairs, so that a "unit", what one lane holds in a product, is four bytes
in either case: one float32, or two neighbouring bfloat16. Bytes are widened before a product.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, overload, register_model

_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner = njit(**_NO_WRAPPERS)
"""Decorates what only compiled code calls (a call from Python would crash): the wrappers for Python
take a fifth of the time to compile."""

F32 = np.float32(0)
BF16 = np.uint16(0)
I8 = np.int8(0)
"""Of a cache; and of products of bytes, four to a unit."""
I4 = np.int16(0)
"""Of products of bytes with nibbles: four to a unit."""
WIDE = np.uint32(0)
"""Of products of bfloat16, where one factor has been widened to float32 before."""

ZERO, ONE, LOG2_E = np.float32(0.0), np.float32(1.0), np.float32(1.4426950408889634)

LANES = 16
UNIT_BYTES = 4

i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
f32 = ir.FloatType()
f32x, i32x, i16x, i8x = (ir.VectorType(t, LANES) for t in (f32, i32, i16, i8))


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for. There is one object of it."""

    def _to_string(self) -> str:
        return "bfloat"


bf16 = _BFloat()


class _VectorType(types.Type):
    """Numba's view of ``<16 x float>``."""


vector = _VectorType("f32x16")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, f32x)


def host_has(feature: str) -> bool:
    """Whether the processor that Numba compiles for has ``feature``, by LLVM's name."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def splat_value(builder: Any, scalar: Any) -> Any:
    """IR: ``scalar`` in every lane."""
    base = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(base, scalar, ir.Constant(i32, 0))
    zeros = ir.Constant(i32x, [0] * LANES)
    return builder.shuffle_vector(first, base, zeros)


def pointer(builder: Any, address: Any, to: Any) -> Any:
    """IR: an integer address as a pointer to type ``to``."""
    return builder.inttoptr(address, to.as_pointer())


def prefetch_line(builder: Any, address: Any) -> None:
    """IR: ask for the cache line at ``address``, to be read soon, in the second-level cache."""
    where = pointer(builder, address, i8)
    read, second_level, data = (ir.Constant(i32, n) for n in (0, 2, 1))
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [where, read, second_level, data])


def call_llvm(builder: Any, name: str, result: Any, args: Sequence[Any], **options: Any) -> Any:
    """IR: a call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), args, **options)


def offset_by(builder: Any, address: Any, count: Any, size: Any = 1) -> Any:
    """IR: ``address`` + count * size. These two are numbers or 64-bit values."""
    count, size = (ir.Constant(i64, x) if isinstance(x, int) else x for x in (count, size))
    return builder.add(address, builder.mul(count, size))


TAG = "tag"
"""In :func:`emitted`: an argument that may be any tag. The emitting function gets its type."""


def emitted(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a Numba function of one that emits LLVM code: ``emit(builder, *values)`` -> its value.

    ``result`` and ``arguments`` are Numba's types.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(typingctx, *given):
            kinds = [g if a is TAG else a for a, g in zip(arguments, given, strict=True)]

            def generate(context, builder, signature, values):
                pairs = zip(arguments, kinds, values, strict=True)
                value = emit(builder, *(kind if a is TAG else v for a, kind, v in pairs))
                return context.get_dummy_value() if result is types.void else value

            return result(*kinds), generate

        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        # Numba asks for the names of arguments.
        define.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate


@emitted(types.int64, TAG)
def element_bytes(builder, tag):
    """Bytes of one element of the tag's type, as a constant."""
    return ir.Constant(i64, tag.bitwidth // 8)


@emitted(types.int64, TAG)
def second_bytes(builder, tag):
    """Bytes of one element of a product's second factor, which WIDE does not widen."""
    return ir.Constant(i64, 4 if tag == types.float32 else 2)


@emitted(types.boolean, TAG)
def has_scales(builder, tag):
    """Whether a cache of the tag's type has scales, as a constant."""
    return ir.Constant(ir.IntType(1), tag == types.int8)


# --------------------------------------------------------------------------- memory


def _access(numba_type: Any, llvm_type: Any) -> tuple[Any, Any]:
    """A pair of Numba functions that load and store one value at an address."""

    @emitted(numba_type, types.intp)
    def load(builder, address):
        return builder.load(pointer(builder, address, llvm_type), align=1)

    @emitted(types.void, types.intp, numba_type)
    def store(builder, address, value):
        builder.store(value, pointer(builder, address, llvm_type), align=1)

    return load, store


load_i64, store_i64 = _access(types.int64, i64)
load_i32, store_i32 = _access(types.int32, i32)
load_f32, store_f32 = _access(types.float32, f32)
_, store_byte = _access(types.uint8, ir.IntType(8))
load, store = _access(vector, f32x)


@emitted(types.void, TAG, types.intp, types.intp)
def copy_element(builder, tag, source, target):
    """One element, as bits."""
    source, target = (pointer(builder, x, ir.IntType(tag.bitwidth)) for x in (source, target))
    builder.store(builder.load(source, align=1), target, align=1)


@emitted(types.int64, types.intp)
def fetch_add(builder, address):
    """Add 1 to the int64 at ``address``, in one order for all threads; returns what it was."""
    return builder.atomic_rmw("add", pointer(builder, address, i64), ir.Constant(i64, 1), "seq_cst")


prefetch = emitted(types.void, types.intp)(prefetch_line)


def widen_bf16(builder: Any, bits: Any) -> Any:
    """IR: the lower halves of 32-bit integers, bfloat16, as float32, whose upper halves they are.

    As :func:`round_to_bf16`, for one number or 16 lanes.
    """
    to = f32x if bits.type == i32x else f32
    return builder.bitcast(builder.shl(bits, every(bits.type, 16)), to)


def every(kind: Any, number: float) -> Any:
    """IR: a constant, in every lane if ``kind`` is a vector type."""
    return ir.Constant(kind, [number] * LANES if kind in (f32x, i32x, i16x) else number)


def round_to_bf16(builder: Any, value: Any) -> Any:
    """IR: the upper halves of float32, to nearest even, as int16; a NaN stays one.

    Where the processor has no instruction for it, LLVM would call a function that is not there.
    """
    wide, narrow = (i32x, i16x) if value.type == f32x else (i32, i16)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, every(wide, 16)), every(wide, 1))
    rounded = builder.add(bits, builder.add(odd, every(wide, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, every(wide, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, every(wide, 16)), narrow)


def _element_access(
    numba_type: Any, floats: Any, words: Any, halves: Any, small: Any
) -> tuple[Any, Any]:
    """As :func:`_access`, of elements of the tag's type as float32: 16 of them, or one.

    What is stored is rounded to nearest even.
    """

    @emitted(numba_type, TAG, types.intp)
    def load(builder, tag, address):
        if tag == types.float32:
            return builder.load(pointer(builder, address, floats), align=4)
        if tag == types.int8:
            bits = builder.load(pointer(builder, address, small), align=1)
            return builder.sitofp(builder.sext(bits, words), floats)
        bits = builder.load(pointer(builder, address, halves), align=2)
        return widen_bf16(builder, builder.zext(bits, words))

    @emitted(types.void, TAG, types.intp, numba_type)
    def store(builder, tag, address, value):
        if tag == types.uint16 and floats is f32x and host_has("avx512bf16"):
            value = builder.fptrunc(value, ir.VectorType(bf16, LANES))
        elif tag == types.uint16:
            value = round_to_bf16(builder, value)
        elif tag == types.int8:
            name = "llvm.rint.v16f32" if floats is f32x else "llvm.rint.f32"
            value = builder.fptosi(call_llvm(builder, name, floats, [value]), small)
        align = 1 if tag == types.int8 else 2
        builder.store(value, pointer(builder, address, value.type), align=align)

    return load, store


load_as, store_as = _element_access(vector, f32x, i32x, i16x, i8x)
load_one, store_one = _element_access(types.float32, f32, i32, i16, i8)


@emitted(types.void, types.intp, vector, vector)
def store_pairs(builder, address, low, high):
    """Pairs of float32 that are bfloat16 numbers, exactly, as such."""
    low, high = (builder.bitcast(each, i32x) for each in (low, high))
    pairs = builder.or_(builder.lshr(low, every(i32x, 16)), high)
    builder.store(pairs, pointer(builder, address, i32x), align=4)


# --------------------------------------------------------------------------- arithmetic


splat = emitted(vector, types.float32)(splat_value)


def _overload_operator(python_operator: Any, instruction: str) -> None:
    @emitted(vector, vector, vector)
    def op(builder, a, b):
        return getattr(builder, instruction)(a, b)

    @overload(python_operator, inline="always")
    def choose(a, b):
        if a is vector and b is vector:
            return lambda a, b: op(a, b)
        return None


_overload_operator(operator.add, "fadd")
_overload_operator(operator.sub, "fsub")
_overload_operator(operator.mul, "fmul")
_overload_operator(operator.truediv, "fdiv")


@emitted(vector, vector, vector, vector)
def fma(builder, a, b, c):
    """a * b + c, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", f32x, [a, b, c])


@emitted(vector, vector, vector)
def larger(builder, a, b):
    """The larger of each pair of lanes; b's where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitted(vector, vector, types.int64, types.int64, types.float32)
def keep_between(builder, value, low, high, other):
    """Lanes low <= i < high of ``value``, and the float32 ``other`` in all else."""
    lanes = ir.Constant(i32x, list(range(LANES)))
    low, high = (splat_value(builder, builder.trunc(bound, i32)) for bound in (low, high))
    inside = builder.and_(
        builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
    )
    return builder.select(inside, value, splat_value(builder, other))


@emitted(vector, types.intp, types.intp)
def load_difference(builder, address, other):
    """int32 at ``address`` less those at ``other``, as float32."""
    a, b = (builder.load(pointer(builder, x, i32x), align=4) for x in (address, other))
    return builder.sitofp(builder.sub(a, b), f32x)


@emitted(vector, types.intp, types.int64)
def load_signed(builder, address, index):
    """Byte ``index`` of each of 16 units of int8, as float32."""
    units = builder.load(pointer(builder, address, i32x), align=4)
    up = offset_by(builder, ir.Constant(i64, 24), index, -8)
    moved = builder.shl(units, splat_value(builder, builder.trunc(up, i32)))
    return builder.sitofp(builder.ashr(moved, every(i32x, 24)), f32x)


@emitted(types.void, types.intp, vector)
def store_bytes(builder, address, value):
    """Lanes of -128 to 127, rounded to nearest even, plus 128, as bytes without a sign."""
    nearest = call_llvm(builder, "llvm.rint.v16f32", f32x, [value])
    whole = builder.add(builder.fptosi(nearest, i32x), every(i32x, 128))
    builder.store(builder.trunc(whole, i8x), pointer(builder, address, i8x), align=1)


@emitted(types.float32, vector)
def lane_sum(builder, value):
    """The sum of the lanes, pairwise."""
    args = [ir.Constant(f32, -0.0), value]
    return call_llvm(builder, "llvm.vector.reduce.fadd.v16f32", f32, args, fastmath=("reassoc",))


@emitted(types.float32, vector)
def lane_max(builder, value):
    """The largest lane; none is NaN. (LLVM's own reduction minds NaN, in 15 steps one by one.)"""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [min(lane + width, LANES - 1) for lane in range(LANES)]
        other = builder.shuffle_vector(value, value, ir.Constant(i32x, lanes))
        value = builder.select(builder.fcmp_ordered(">", value, other), value, other)
    return builder.extract_element(value, ir.Constant(i32, 0))


@emitted(types.float32, vector)
def first_lane(builder, value):
    """Lane 0."""
    return builder.extract_element(value, ir.Constant(i32, 0))


@emitted(vector, vector)
def nearest(builder, value):
    """Whole numbers, to nearest even."""
    return call_llvm(builder, "llvm.rint.v16f32", f32x, [value])


@emitted(vector, vector, vector)
def _times_power_of_two(builder, value, power):
    """value * 2**power for whole powers up to 127; 0 where the power is below -126."""
    if host_has("avx512f"):
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        mask, rounding = ir.Constant(i16, -1), ir.Constant(i32, 4)
        return call_llvm(builder, name, f32x, [value, power, value, mask, rounding])
    least = every(f32x, -126.0)
    fits = builder.fcmp_ordered(">=", power, least)
    whole = builder.fptosi(builder.select(fits, power, least), i32x)
    # A float32 whose exponent bits hold power + 127 is 2**power.
    biased = builder.add(whole, every(i32x, 127))
    two = builder.bitcast(builder.shl(biased, every(i32x, 23)), f32x)
    return builder.select(fits, builder.fmul(value, two), every(f32x, 0.0))


@njit(inline="always")
def exp2(x):
    """2**x for x <= 127, within 2 units in the last place; next to 0 below 2**-126 and at -inf.

    2**x = 2**n * 2**f with n whole and |f| <= 1/2; the second factor is a polynomial fitted to
    least relative error over that interval, which is 2e-9.
    """
    x = larger(x, splat(np.float32(-1000.0)))  # so that -inf - -inf does not arise
    n = nearest(x)
    f = x - n
    p = splat(np.float32(0.0001535335904918611))
    p = fma(p, f, splat(np.float32(0.0013398875016719103)))
    p = fma(p, f, splat(np.float32(0.00961843691766262)))
    p = fma(p, f, splat(np.float32(0.055503323674201965)))
    p = fma(p, f, splat(np.float32(0.24022647738456726)))
    p = fma(p, f, splat(np.float32(0.6931471824645996)))
    p = fma(p, f, splat(ONE))
    return _times_power_of_two(p, n)


@inner
def sigmoid(x):
    """1 / (1 + e**-x)."""
    limit = splat(np.float32(-126.0))  # 2**126 is finite, and its inverse is 0 in any sum with 1
    power = splat(ZERO) - larger(x * splat(LOG2_E), limit)
    return splat(ONE) / (splat(ONE) + exp2(power))
