# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Vectors of 16 float32 lanes and raw memory for Numba kernels, as LLVM's own vector types.

Numba has no vector type and leaves vectorization to chance; here a lane is explicit, and LLVM maps
16 lanes to what the processor has: one AVX-512 register, two AVX2 ones, four of NEON. Addresses are
plain integers (``intp``); nothing is bounds-checked.

Element types of a cache are told apart at compile time by the *type* of a tag value, one of F32,
BF16 and F16: a two-byte element type is computed in pairs, so that a "unit", what one lane holds in
a product, is four bytes in every case: one float32, or two neighbouring two-byte elements.
"""

import operator
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
F16 = np.int16(0)

LANES = 16
UNIT_BYTES = 4

EXP2_COEFFICIENTS = (
    0.0001535335904918611,
    0.0013398875016719103,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
)
"""Of f**6 to f**1 in 2**f for |f| <= 1/2; with 1 they fit it to a relative 2e-9."""

i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
f32, f16 = ir.FloatType(), ir.HalfType()
f32x, i32x, i16x = (ir.VectorType(t, LANES) for t in (f32, i32, i16))


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


bf16 = _BFloat()
_HALF_TYPES = {types.uint16: bf16, types.int16: f16}


class _VectorType(types.Type):
    """Numba's view of ``<16 x float>``."""

    def __init__(self) -> None:
        super().__init__("f32x16")


vector = _VectorType()


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
    where = pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [where.type, i32, i32, i32])
    hint = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
    read, second_level, data = (ir.Constant(i32, n) for n in (0, 2, 1))
    builder.call(hint, [where, read, second_level, data])


def call_llvm(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """IR: a call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), args)


@intrinsic
def element_bytes(typingctx, tag):
    """Bytes of one element of the tag's type, as a constant."""

    def emit(context, builder, signature, args):
        return ir.Constant(i64, tag.bitwidth // 8)

    return types.int64(tag), emit


# --------------------------------------------------------------------------- memory


def _scalar_access(numba_type: Any, llvm_type: Any) -> tuple[Any, Any]:
    """A pair of intrinsics that load and store one scalar at an address."""

    @intrinsic
    def load(typingctx, address):
        def emit(context, builder, signature, args):
            return builder.load(pointer(builder, args[0], llvm_type), align=1)

        return numba_type(types.intp), emit

    @intrinsic
    def store(typingctx, address, value):
        def emit(context, builder, signature, args):
            builder.store(args[1], pointer(builder, args[0], llvm_type), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), emit

    return load, store


load_i64, store_i64 = _scalar_access(types.int64, i64)
load_i32, store_i32 = _scalar_access(types.int32, i32)
load_u16, store_u16 = _scalar_access(types.uint16, i16)
load_f32, store_f32 = _scalar_access(types.float32, f32)


@intrinsic
def fetch_add(typingctx, address):
    """Add 1 to the int64 at ``address``, in one order for all threads; returns what it was."""

    def emit(context, builder, signature, args):
        where = pointer(builder, args[0], i64)
        return builder.atomic_rmw("add", where, ir.Constant(i64, 1), "seq_cst")

    return types.int64(types.intp), emit


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at ``address``, to be read soon, in the second-level cache."""

    def emit(context, builder, signature, args):
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), emit


@intrinsic
def load(typingctx, address):
    """16 float32 from ``address``."""

    def emit(context, builder, signature, args):
        return builder.load(pointer(builder, args[0], f32x), align=4)

    return vector(types.intp), emit


@intrinsic
def store(typingctx, address, value):
    """16 float32 to ``address``."""

    def emit(context, builder, signature, args):
        builder.store(args[1], pointer(builder, args[0], f32x), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), emit


def _round_to_bf16(builder: Any, value: Any) -> Any:
    """IR: the upper halves of float32, to nearest even, as int16; a NaN stays one.

    Where the processor has no instruction for it, LLVM would call a function that is not there.
    """

    def every(number: int) -> Any:
        return ir.Constant(i32x, [number] * LANES)

    bits = builder.bitcast(value, i32x)
    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, every(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, every(16)), i16x)


@intrinsic
def store_as(typingctx, tag, address, value):
    """16 elements of the tag's type to ``address``, rounded to nearest even."""

    def emit(context, builder, signature, args):
        out = args[2]
        if tag == types.uint16 and not host_has("avx512bf16"):
            out = _round_to_bf16(builder, out)
        elif tag != types.float32:
            out = builder.fptrunc(out, ir.VectorType(_HALF_TYPES[tag], LANES))
        builder.store(out, pointer(builder, args[1], out.type), align=2)
        return context.get_dummy_value()

    return types.void(tag, types.intp, vector), emit


# --------------------------------------------------------------------------- arithmetic


@intrinsic
def splat(typingctx, value):
    """A float32 in every lane."""

    def emit(context, builder, signature, args):
        return splat_value(builder, args[0])

    return vector(types.float32), emit


def _binary(name: str) -> Any:
    @intrinsic
    def op(typingctx, a, b):
        def emit(context, builder, signature, args):
            return getattr(builder, name)(args[0], args[1])

        return vector(vector, vector), emit

    return op


def _overload_operator(python_operator: Any, op: Any) -> None:
    @overload(python_operator, inline="always")
    def choose(a, b):
        if a is vector and b is vector:
            return lambda a, b: op(a, b)
        return None


_overload_operator(operator.add, _binary("fadd"))
_overload_operator(operator.sub, _binary("fsub"))
_overload_operator(operator.mul, _binary("fmul"))
_overload_operator(operator.truediv, _binary("fdiv"))


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def emit(context, builder, signature, args):
        return call_llvm(builder, "llvm.fma.v16f32", f32x, list(args))

    return vector(vector, vector, vector), emit


@intrinsic
def larger(typingctx, a, b):
    """The larger of each pair of lanes; b's where either is NaN."""

    def emit(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return vector(vector, vector), emit


@intrinsic
def keep_between(typingctx, value, low, high, other):
    """Lanes low <= i < high of ``value``, and the float32 ``other`` in all else."""

    def emit(context, builder, signature, args):
        lanes = ir.Constant(i32x, list(range(LANES)))
        low, high = (splat_value(builder, builder.trunc(a, i32)) for a in args[1:3])
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
        )
        return builder.select(inside, args[0], splat_value(builder, args[3]))

    return vector(vector, types.int64, types.int64, types.float32), emit


@intrinsic
def lane_sum(typingctx, value):
    """The sum of the lanes, pairwise."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(f32, [f32, f32x])
        reduce = builder.module.declare_intrinsic("llvm.vector.reduce.fadd.v16f32", fnty=kind)
        return builder.call(reduce, [ir.Constant(f32, -0.0), args[0]], fastmath=("reassoc",))

    return types.float32(vector), emit


@intrinsic
def lane_max(typingctx, value):
    """The largest lane. NaN lanes are passed over unless all are NaN."""

    def emit(context, builder, signature, args):
        return call_llvm(builder, "llvm.vector.reduce.fmax.v16f32", f32, list(args))

    return types.float32(vector), emit


@intrinsic
def _nearest(typingctx, value):
    def emit(context, builder, signature, args):
        return call_llvm(builder, "llvm.rint.v16f32", f32x, list(args))

    return vector(vector), emit


@intrinsic
def _times_power_of_two(typingctx, value, power):
    """value * 2**power for whole powers up to 127; 0 where the power is below -126."""

    def emit(context, builder, signature, args):
        if host_has("avx512f"):
            name = "llvm.x86.avx512.mask.scalef.ps.512"
            every, rounding = ir.Constant(i16, -1), ir.Constant(i32, 4)
            return call_llvm(builder, name, f32x, [*args, args[0], every, rounding])
        least = splat_value(builder, ir.Constant(f32, -126.0))
        fits = builder.fcmp_ordered(">=", args[1], least)
        whole = builder.fptosi(builder.select(fits, args[1], least), i32x)
        # A float32 whose exponent bits hold power + 127 is 2**power.
        biased = builder.add(whole, ir.Constant(i32x, [127] * LANES))
        two = builder.bitcast(builder.shl(biased, ir.Constant(i32x, [23] * LANES)), f32x)
        return builder.select(fits, builder.fmul(args[0], two), ir.Constant(f32x, [0.0] * LANES))

    return vector(vector, vector), emit


@njit(inline="always")
def exp2(x):
    """2**x for x <= 127, within 2 units in the last place; next to 0 below 2**-126 and at -inf.

    2**x = 2**n * 2**f with n whole and |f| <= 1/2; the second factor is a polynomial fitted to
    least relative error over that interval.
    """
    x = larger(x, splat(np.float32(-1000.0)))  # so that -inf - -inf does not arise
    n = _nearest(x)
    f = x - n
    p = splat(np.float32(EXP2_COEFFICIENTS[0]))
    p = fma(p, f, splat(np.float32(EXP2_COEFFICIENTS[1])))
    p = fma(p, f, splat(np.float32(EXP2_COEFFICIENTS[2])))
    p = fma(p, f, splat(np.float32(EXP2_COEFFICIENTS[3])))
    p = fma(p, f, splat(np.float32(EXP2_COEFFICIENTS[4])))
    p = fma(p, f, splat(np.float32(EXP2_COEFFICIENTS[5])))
    p = fma(p, f, splat(np.float32(1.0)))
    return _times_power_of_two(p, n)
