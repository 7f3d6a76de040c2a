"""Vectors of 16 float32 lanes and raw memory, as functions that Numba code calls.

A vector is a value of the Numba type ``vector``; ``+ - * /`` work on it lane by lane. Addresses are
plain integers (``intp``); nothing is bounds-checked.

*Tags* say which elements a kernel is compiled for. A tag is a value that is never looked at: Numba
compiles a function anew for each *type* of its arguments, so each tag makes a kernel of its own. A
function that emits LLVM code gets the type itself, and compares it with F32_TYPE and so on::

    tag    its type    elements of a cache    left in a product    right in a product
    F32    float32     float32                float32              float32
    BF16   uint16      bfloat16               bfloat16             bfloat16
    WIDE   uint32      -                      float32              bfloat16
    I8     int8        int8                   bytes, 0 to 255      int8
    I4     int16       -                      int8                 4 bits, 0 to 15

F32 and I8 have the type of their elements. For what the others stand for Numba has no type: these
tags have types that are used for nothing else. ``element_bytes`` reads an element's size from the
tag's type: so that of BF16 has two bytes, and that of WIDE four.

Called by all kernels of this folder.
"""

import operator
from typing import Any, NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.extending import overload

from jitney.kernels.cpu.emit import (
    LANES,
    TAG,
    VECTOR_BYTES,
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
"""Decorates a function that only compiled code calls (a call from Python would crash). It has no
wrapper for Python, which would have to be compiled, too."""
inlined = njit(inline="always", **_NO_WRAPPERS)
"""Decorates a part of one larger function, which was moved out of it for the reader: Numba puts its
statements back there, and compiles no function of its own."""

# --------------------------------------------------------------------------- tags

F32 = np.float32(0)
BF16 = np.uint16(0)
I8 = np.int8(0)
I4 = np.int16(0)
WIDE = np.uint32(0)

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
    """Bytes of one element of a cache, or of what a model computes in, as a constant."""
    return constant(i64, tag.bitwidth // 8)


left_bytes = element_bytes
"""Bytes of one element of a product's left factor, as a constant. For F32, BF16 and WIDE."""


@emitted(types.int64, TAG)
def right_bytes(builder, tag):
    """Bytes of one element of a product's right factor, as a constant. For F32, BF16 and WIDE."""
    return constant(i64, 4 if tag == F32_TYPE else 2)


@emitted(types.boolean, TAG)
def is_i8(builder, tag):
    """Whether the tag is I8, as a constant."""
    return ir.Constant(ir.IntType(1), tag == I8_TYPE)


@emitted(types.boolean, TAG)
def is_i4(builder, tag):
    """Whether the tag is I4, as a constant."""
    return ir.Constant(ir.IntType(1), tag == I4_TYPE)


has_scales = is_i8
"""Whether a cache of the tag's type has scales, as a constant: that of bytes has."""


# --------------------------------------------------------------------------- memory


def _access(numba_type, llvm_type) -> tuple[Any, Any]:
    """Two Numba functions: one loads a value from an address, one stores it there. The address
    need not be aligned."""

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
    """Copy one element from address ``source`` to address ``target``, as bits."""
    bits = ir.IntType(tag.bitwidth)
    read = pointer(builder, source, bits)
    written = pointer(builder, target, bits)
    builder.store(builder.load(read, align=1), written, align=1)


@emitted(types.int64, types.intp)
def fetch_add(builder, address):
    """Add 1 to the int64 at ``address``; returns what it was. No two threads get the same."""
    where = pointer(builder, address, i64)
    return builder.atomic_rmw("add", where, constant(i64, 1), "seq_cst")


prefetch = emitted(types.void, types.intp)(prefetch_line)


def memory_on_stack(size: int) -> Any:
    """A Numba function that returns the address of so many bytes on the stack of its caller."""

    @emitted(types.int64)
    def reserve(builder):
        return stack_memory(builder, size)

    return reserve


@emitted(types.int64)
def vector_on_stack(builder):
    """The address of memory for one vector, on the stack of the function that calls this."""
    return stack_memory(builder, VECTOR_BYTES)


# --------------------------------------------------------------------------- elements as float32


class _Types(NamedTuple):
    """LLVM's types of one number, or of 16 numbers side by side."""

    f32: Any
    i32: Any
    i16: Any
    i8: Any


def _element_access(numba_type, to: _Types) -> tuple[Any, Any]:
    """Two Numba functions, for one element or for 16: the types ``to`` say for how many.

    - ``load`` gives an element of the tag's type as float32.
    - ``store`` rounds a float32 to an element of the tag's type, ties to even, and stores that. For
      I8 the number must be from -128 to 127; for a NaN any byte is stored.

    The tag is F32, BF16 or I8. ``store`` also takes WIDE, and stores float32. Nothing loads by that
    tag."""
    is_vector = to.f32 is f32x
    rint = "llvm.rint.v16f32" if is_vector else "llvm.rint.f32"

    @emitted(numba_type, TAG, types.intp)
    def load(builder, tag, address):
        if tag == F32_TYPE:
            return builder.load(pointer(builder, address, to.f32), align=4)
        if tag == I8_TYPE:
            byte = builder.load(pointer(builder, address, to.i8), align=1)
            return builder.sitofp(builder.sext(byte, to.i32), to.f32)
        # BF16.
        half = builder.load(pointer(builder, address, to.i16), align=2)
        return widen_low(builder, builder.zext(half, to.i32))

    @emitted(types.void, TAG, types.intp, numba_type)
    def store(builder, tag, address, value):
        # Also for a vector the alignment is that of one element: no more is known of its address.
        align = 4
        if tag == BF16_TYPE:
            align = 2
            if is_vector and host_has("avx512bf16"):
                value = builder.fptrunc(value, ir.VectorType(bf16, LANES))
            else:
                value = round_to_bf16(builder, value)
        elif tag == I8_TYPE:
            align = 1
            whole = call_llvm(builder, rint, to.f32, [value])
            value = builder.fptosi(whole, to.i8)
        builder.store(value, pointer(builder, address, value.type), align=align)

    return load, store


_TYPES_OF_16 = _Types(f32=f32x, i32=i32x, i16=i16x, i8=i8x)
_TYPES_OF_1 = _Types(f32=f32, i32=i32, i16=i16, i8=i8)
load_as, store_as = _element_access(vector, _TYPES_OF_16)
load_one, store_one = _element_access(types.float32, _TYPES_OF_1)


@emitted(vector, TAG, vector)
def rounded_as(builder, tag, value):
    """Each lane as it would be after :data:`store_as` and :data:`load_as`. The tag is F32 or
    BF16."""
    if tag == F32_TYPE:
        return value
    if host_has("avx512bf16"):
        halves = builder.fptrunc(value, ir.VectorType(bf16, LANES))
        bits = builder.bitcast(halves, i16x)
    else:
        bits = round_to_bf16(builder, value)
    return widen_low(builder, builder.zext(bits, i32x))


@emitted(types.void, types.intp, vector, vector)
def store_pairs(builder, address, low, high):
    """Store 16 units of two bfloat16 each: a lane of ``low``, then the same lane of ``high``.

    Both are float32 whose lower 16 bits are 0: the upper 16 are the same number as bfloat16."""
    low_bits = builder.bitcast(low, i32x)
    high_bits = builder.bitcast(high, i32x)
    pairs = builder.or_(builder.lshr(low_bits, constant(i32x, 16)), high_bits)
    store_vector(builder, pairs, address)


@emitted(vector, types.intp, types.intp)
def load_difference(builder, address, other):
    """16 int32 at ``address`` minus 16 at ``other``, as float32."""
    a = load_vector(builder, address)
    b = load_vector(builder, other)
    return builder.sitofp(builder.sub(a, b), f32x)


@emitted(vector, types.intp, types.int64)
def load_signed(builder, address, index):
    """Of each of 16 units of four int8, the one with this ``index``, as float32."""
    units = load_vector(builder, address)
    # Move the byte to the top of its unit, then down to the bottom: that copies its sign to all
    # bits above.
    bits_below = builder.mul(index, constant(i64, 8))
    bits_above = builder.sub(constant(i64, 24), bits_below)
    moved = builder.shl(units, broadcast(builder, builder.trunc(bits_above, i32)))
    return builder.sitofp(builder.ashr(moved, constant(i32x, 24)), f32x)


@emitted(types.void, types.intp, vector)
def store_bytes(builder, address, value):
    """Round each lane, of -128 to 127, to nearest even, add 128, and store it as a byte without a
    sign. For a NaN any byte is stored."""
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
    """The larger lane of ``a`` and ``b``. Where either is NaN, it is that of ``b``: so a NaN of
    ``a`` is lost, and a NaN of ``b`` is kept."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitted(vector, vector, types.int64, types.int64, types.float32)
def keep_between(builder, value, first, end, other):
    """Lanes [first, end) of ``value``, and the float32 ``other`` in all other lanes."""
    lanes = ir.Constant(i32x, list(range(LANES)))
    firsts = broadcast(builder, builder.trunc(first, i32))
    ends = broadcast(builder, builder.trunc(end, i32))
    inside = builder.and_(
        builder.icmp_signed(">=", lanes, firsts),
        builder.icmp_signed("<", lanes, ends),
    )
    return builder.select(inside, value, broadcast(builder, other))


@emitted(vector, vector, vector, vector, vector)
def seen(builder, score, key, first, last):
    """Lanes of ``score`` whose key is from ``first`` to ``last``, and -2e30 in all other lanes."""
    inside = builder.and_(
        builder.fcmp_ordered(">=", key, first),
        builder.fcmp_ordered("<=", key, last),
    )
    return builder.select(inside, score, constant(f32x, -2e30))


@emitted(vector, vector, vector)
def with_sign_of(builder, value, sign):
    """The lanes of ``value`` with the signs of those of ``sign``."""
    return call_llvm(builder, "llvm.copysign.v16f32", f32x, [value, sign])


@emitted(vector, vector)
def swap_neighbours(builder, value):
    """Lanes 1, 0, 3, 2, ... of ``value``."""
    lanes = [lane ^ 1 for lane in range(LANES)]
    return builder.shuffle_vector(value, value, ir.Constant(i32x, lanes))


@emitted(vector, vector)
def negate_even_lanes(builder, value):
    """Lanes 0, 2, 4, ... of ``value`` with the other sign."""
    signs = ir.Constant(f32x, [1.0 if lane % 2 else -1.0 for lane in range(LANES)])
    return builder.fmul(value, signs)


@emitted(vector, vector, types.float32, types.float32)
def keep_below(builder, value, limit, other):
    """The lanes of ``value`` that are smaller than ``limit``, and ``other`` in all other lanes."""
    is_below = builder.fcmp_ordered("<", value, broadcast(builder, limit))
    return builder.select(is_below, value, broadcast(builder, other))


@emitted(types.float32, vector)
def lane_sum(builder, value):
    """The sum of the lanes, pairwise."""
    start = ir.Constant(f32, -0.0)  # -0.0 + x is x for every x; 0.0 + -0.0 would be 0.0
    name = "llvm.vector.reduce.fadd.v16f32"
    return call_llvm(builder, name, f32, [start, value], fastmath=("reassoc",))


@emitted(types.float32, vector)
def lane_max(builder, value):
    """The largest lane; none is NaN. (LLVM's own reduction cares for NaN, and compares 15 times
    where this compares 4 times.)"""
    width = LANES
    while width > 1:
        # Compare lane i with lane i + width; lanes from ``width`` on are not read again.
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
    """Each lane rounded to a whole number, ties to even."""
    return call_llvm(builder, "llvm.rint.v16f32", f32x, [value])


@emitted(vector, vector, vector)
def _times_power_of_two(builder, value, power):
    """value * 2**power, for whole powers up to 127. Where the power is below -126, the result is 0,
    or with AVX-512 the exact value. NaN where the value is NaN; then the power may be NaN, too."""
    if host_has("avx512f"):
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        all_lanes = ir.Constant(i16, -1)  # a mask: one bit for each lane
        current_rounding = constant(i32, 4)  # as in Intel's intrinsics: _MM_FROUND_CUR_DIRECTION
        operands = [value, power, value, all_lanes, current_rounding]
        return call_llvm(builder, name, f32x, operands)
    least = constant(f32x, -126.0)
    # A NaN is neither above the least power nor below it. So for a NaN the factor is that of the
    # least power, and ``value`` times it is NaN.
    is_above = builder.fcmp_ordered(">", power, least)
    is_below = builder.fcmp_ordered("<", power, least)
    whole = builder.fptosi(builder.select(is_above, power, least), i32x)
    # A float32 whose exponent bits hold power + 127 is 2**power.
    biased = builder.add(whole, constant(i32x, 127))
    factor = builder.bitcast(builder.shl(biased, constant(i32x, 23)), f32x)
    return builder.select(is_below, constant(f32x, 0.0), builder.fmul(value, factor))


@inlined
def exp2(x):
    """2**x for x from -126 to 127, within 2 units in the last place. For a smaller x, a number from
    0 to 2**-126; for -1000 and less, and for -inf, exactly 0. For NaN, NaN.

    2**x = 2**n * 2**f with n whole and |f| <= 1/2. The second factor is a polynomial, fitted to the
    least relative error over that interval, which is 2e-9.
    """
    # 2**-1000 is 0, as 2**-inf is. But with x = -inf, x - n would be -inf + inf, a NaN. (The order
    # matters: ``larger`` keeps a NaN of x.)
    x = larger(splat(np.float32(-1000.0)), x)
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
    """1 / (1 + e**-x). For NaN, NaN."""
    # For very negative x, e**-x would be infinite; it is 2**126 at most, and the result 2**-126.
    # (Here, too, the order keeps a NaN.)
    limit = splat(np.float32(-126.0))
    power = splat(ZERO) - larger(limit, x * splat(LOG2_E))
    return splat(ONE) / (splat(ONE) + exp2(power))


@inner
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)
