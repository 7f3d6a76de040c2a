"""Vectors of 16 float32 lanes and raw memory, as functions that Numba code calls.

A vector is a value of the Numba type ``vector``; ``+ - * /`` work on it lane by lane. Addresses are
plain integers (``intp``); nothing is bounds-checked.

Element types are told apart at compile time by the *type* of a tag value: F32, BF16, I8, I4 or
WIDE. Each tag makes a kernel of its own. A function that emits LLVM code gets that type itself, and
compares it with F32_TYPE and so on.

Called by all kernels of this folder.
"""

import operator
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.extending import overload

from jitney.kernels.cpu.emit import (
    LANES,
    TAG,
    bf16,
    broadcast,
    call_llvm,
    constant,
    emitted,
    f32,
    f32x,
    fused_multiply_add,
    host_has,
    i8,
    i8x,
    i16,
    i16x,
    i32,
    i32x,
    i64,
    load_vector,
    offset_by,
    pointer,
    prefetch_line,
    round_to_bf16,
    stack_memory,
    store_vector,
    vector,
    widen_low,
)

_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner = njit(**_NO_WRAPPERS)
"""Decorates what only compiled code calls (a call from Python would crash): the wrappers for Python
take a fifth of the time to compile."""
inlined = njit(inline="always", **_NO_WRAPPERS)
"""Decorates a step of one larger function, which then costs no call: Numba puts its statements
there."""

# --------------------------------------------------------------------------- tags

F32 = np.float32(0)
BF16 = np.uint16(0)
I8 = np.int8(0)
"""For a cache of bytes, and for products of bytes, four to a unit."""
I4 = np.int16(0)
"""For products of bytes and nibbles, four to a unit."""
WIDE = np.uint32(0)
"""For products whose second factor is bfloat16, and whose first one has been widened to float32."""

F32_TYPE = types.float32
BF16_TYPE = types.uint16
I8_TYPE = types.int8
I4_TYPE = types.int16
WIDE_TYPE = types.uint32

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LOG2_E = np.float32(1.4426950408889634)


@emitted(types.int64, TAG)
def element_bytes(builder, tag):
    """Bytes of one element of the tag's type, as a constant."""
    return constant(i64, tag.bitwidth // 8)


@emitted(types.int64, TAG)
def second_bytes(builder, tag):
    """Bytes of one element of a product's second factor: F32 has float32, BF16 and WIDE have
    bfloat16. (The elements of the first factor have ``element_bytes``.)"""
    return constant(i64, 4 if tag == F32_TYPE else 2)


@emitted(types.boolean, TAG)
def has_scales(builder, tag):
    """Whether a cache of the tag's type has scales, as a constant."""
    return ir.Constant(ir.IntType(1), tag == I8_TYPE)


# --------------------------------------------------------------------------- memory


def _access(numba_type, llvm_type) -> tuple[Any, Any]:
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
_, store_byte = _access(types.uint8, i8)
load, store = _access(vector, f32x)


@emitted(types.void, TAG, types.intp, types.intp)
def copy_element(builder, tag, source, target):
    """One element, as bits."""
    bits = ir.IntType(tag.bitwidth)
    read = pointer(builder, source, bits)
    written = pointer(builder, target, bits)
    builder.store(builder.load(read, align=1), written, align=1)


@emitted(types.int64, types.intp)
def fetch_add(builder, address):
    """Add 1 to the int64 at ``address``, in one order for all threads; returns what it was."""
    where = pointer(builder, address, i64)
    return builder.atomic_rmw("add", where, constant(i64, 1), "seq_cst")


prefetch = emitted(types.void, types.intp)(prefetch_line)


@emitted(types.int64)
def vector_on_stack(builder):
    """The address of memory for one vector. It lives as long as the function that asks."""
    return stack_memory(builder, 4 * LANES)


# --------------------------------------------------------------------------- elements as float32


def _element_access(numba_type, *, f32_type, i32_type, i16_type, i8_type) -> tuple[Any, Any]:
    """As :func:`_access`, for elements in memory of the tag's type, which is F32, BF16 or I8, and
    float32 in registers: 16 elements at once, or one. What is stored is rounded to nearest even.

    The last four arguments are LLVM's types of 16 numbers, or of one.
    """
    is_vector = f32_type is f32x
    rint = "llvm.rint.v16f32" if is_vector else "llvm.rint.f32"

    @emitted(numba_type, TAG, types.intp)
    def load(builder, tag, address):
        if tag == F32_TYPE:
            return builder.load(pointer(builder, address, f32_type), align=4)
        if tag == I8_TYPE:
            byte = builder.load(pointer(builder, address, i8_type), align=1)
            return builder.sitofp(builder.sext(byte, i32_type), f32_type)
        # BF16.
        half = builder.load(pointer(builder, address, i16_type), align=2)
        return widen_low(builder, builder.zext(half, i32_type))

    @emitted(types.void, TAG, types.intp, numba_type)
    def store(builder, tag, address, value):
        # F32 (and WIDE) is stored as it is.
        if tag == BF16_TYPE and is_vector and host_has("avx512bf16"):
            value = builder.fptrunc(value, ir.VectorType(bf16, LANES))
        elif tag == BF16_TYPE:
            value = round_to_bf16(builder, value)
        elif tag == I8_TYPE:
            whole = call_llvm(builder, rint, f32_type, [value])
            value = builder.fptosi(whole, i8_type)
        align = 1 if tag == I8_TYPE else 2
        builder.store(value, pointer(builder, address, value.type), align=align)

    return load, store


load_as, store_as = _element_access(
    vector, f32_type=f32x, i32_type=i32x, i16_type=i16x, i8_type=i8x
)
load_one, store_one = _element_access(
    types.float32, f32_type=f32, i32_type=i32, i16_type=i16, i8_type=i8
)


@emitted(types.void, types.intp, vector, vector)
def store_pairs(builder, address, low, high):
    """Store 16 units of two bfloat16: an element of ``low`` in the lower half, one of ``high`` in
    the upper half. Both hold float32 that are bfloat16 exactly, so their upper halves are all."""
    low_bits = builder.bitcast(low, i32x)
    high_bits = builder.bitcast(high, i32x)
    pairs = builder.or_(builder.lshr(low_bits, constant(i32x, 16)), high_bits)
    store_vector(builder, pairs, address)


@emitted(vector, types.intp, types.intp)
def load_difference(builder, address, other):
    """int32 at ``address`` less those at ``other``, as float32."""
    a = load_vector(builder, address)
    b = load_vector(builder, other)
    return builder.sitofp(builder.sub(a, b), f32x)


@emitted(vector, types.intp, types.int64)
def load_signed(builder, address, index):
    """Byte ``index`` of each of 16 units of int8, as float32."""
    units = load_vector(builder, address)
    # The byte moves to the top of its unit, by 24 - 8 * index bits, and back down with its sign.
    up = offset_by(builder, constant(i64, 24), index, -8)
    moved = builder.shl(units, broadcast(builder, builder.trunc(up, i32)))
    return builder.sitofp(builder.ashr(moved, constant(i32x, 24)), f32x)


@emitted(types.void, types.intp, vector)
def store_bytes(builder, address, value):
    """Lanes of -128 to 127, rounded to nearest even, plus 128, as bytes without a sign."""
    whole = call_llvm(builder, "llvm.rint.v16f32", f32x, [value])
    raised = builder.add(builder.fptosi(whole, i32x), constant(i32x, 128))
    builder.store(builder.trunc(raised, i8x), pointer(builder, address, i8x), align=1)


# --------------------------------------------------------------------------- arithmetic


splat = emitted(vector, types.float32)(broadcast)
fma = emitted(vector, vector, vector, vector)(fused_multiply_add)


def _overload_operator(python_operator, instruction: str) -> None:
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


@emitted(vector, vector, vector)
def larger(builder, a, b):
    """The larger of each pair of lanes; b's where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitted(vector, vector, types.int64, types.int64, types.float32)
def keep_between(builder, value, low, high, other):
    """Lanes low <= i < high of ``value``, and the float32 ``other`` in all else."""
    lanes = ir.Constant(i32x, list(range(LANES)))
    first = broadcast(builder, builder.trunc(low, i32))
    end = broadcast(builder, builder.trunc(high, i32))
    inside = builder.and_(
        builder.icmp_signed(">=", lanes, first),
        builder.icmp_signed("<", lanes, end),
    )
    return builder.select(inside, value, broadcast(builder, other))


@emitted(types.float32, vector)
def lane_sum(builder, value):
    """The sum of the lanes, pairwise."""
    start = ir.Constant(f32, -0.0)
    name = "llvm.vector.reduce.fadd.v16f32"
    return call_llvm(builder, name, f32, [start, value], fastmath=("reassoc",))


@emitted(types.float32, vector)
def lane_max(builder, value):
    """The largest lane; none is NaN. (LLVM's own reduction cares for NaN, and takes 15 steps.)"""
    width = LANES
    while width > 1:
        # The lower half of the lanes with the upper; lanes from ``width`` on are not read again.
        width //= 2
        lanes = [min(lane + width, LANES - 1) for lane in range(LANES)]
        other = builder.shuffle_vector(value, value, ir.Constant(i32x, lanes))
        value = builder.select(builder.fcmp_ordered(">", value, other), value, other)
    return builder.extract_element(value, constant(i32, 0))


@emitted(types.float32, vector)
def first_lane(builder, value):
    """Lane 0."""
    return builder.extract_element(value, constant(i32, 0))


@emitted(vector, vector)
def nearest(builder, value):
    """Whole numbers, to nearest even."""
    return call_llvm(builder, "llvm.rint.v16f32", f32x, [value])


@emitted(vector, vector, vector)
def _times_power_of_two(builder, value, power):
    """value * 2**power for whole powers up to 127; 0 where the power is below -126."""
    if host_has("avx512f"):
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        all_lanes = ir.Constant(i16, -1)
        current_rounding = constant(i32, 4)
        operands = [value, power, value, all_lanes, current_rounding]
        return call_llvm(builder, name, f32x, operands)
    least = constant(f32x, -126.0)
    fits = builder.fcmp_ordered(">=", power, least)
    whole = builder.fptosi(builder.select(fits, power, least), i32x)
    # A float32 whose exponent bits hold power + 127 is 2**power.
    biased = builder.add(whole, constant(i32x, 127))
    two = builder.bitcast(builder.shl(biased, constant(i32x, 23)), f32x)
    return builder.select(fits, builder.fmul(value, two), constant(f32x, 0.0))


@inlined
def exp2(x):
    """2**x for x <= 127, within 2 units in the last place; at most 2**-126 for less, and for -inf.

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
