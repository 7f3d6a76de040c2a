"""IR: products of units, which are four bytes: ``acc + a . b`` in each of 16 lanes.

What a unit holds, and what multiplies it, depends on the type that ``tag`` has (``simd``)::

    F32    | float32                   |   one FMA
    BF16   | low, high bfloat16        |   one instruction, or both widened to float32: two FMA
    WIDE   | b: low, high bfloat16     |   b widened to float32, a is so already: two FMA
    I8     | b0 | b1 | b2 | b3  bytes  |   VNNI, or both widened to 16 bits: two instructions
    I4     | b0 | b1 | b2 | b3  0..15  |   VNNI, or sums of 16 bits that follow later

Called by ``micro_kernel``, and for weights of 4 bits by ``four_bit_kernel``.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types

from jitney.kernels.cpu.emit import (
    LANES,
    bf16,
    call_llvm,
    constant,
    f32x,
    fused_multiply_add,
    high_halves,
    host_has,
    i8,
    i16,
    i32,
    i32x,
    widen_high,
    widen_low,
)
from jitney.kernels.cpu.processor import multiplies_bytes

_PAIRS_16 = ir.VectorType(i16, 2 * LANES)
"""A vector as 32 numbers of 16 bits."""


def multiply_units(builder, tag, acc, units: Sequence[Any], b):
    """IR: acc + a . b per lane.

    a, the only one of ``units``, and b are vectors of 16 units as int32. Of bytes, those of a are
    unsigned and those of b signed, and the float32 lanes of acc hold the bits of int32. WIDE has
    two units of a: the low elements and the high ones, as float32.
    """
    if tag == types.uint32:
        return _multiply_widened(builder, acc, units, b)
    (a,) = units
    if tag == types.int8:
        total = multiply_bytes(builder, builder.bitcast(acc, i32x), a, b)
        return builder.bitcast(total, f32x)
    if tag == types.uint16 and host_has("avx512bf16"):
        return _multiply_bf16(builder, acc, a, b)
    if tag == types.uint16:
        # The low elements here; the high ones below, where they are float32 without a shift.
        low_a = widen_low(builder, a)
        low_b = widen_low(builder, b)
        acc = fused_multiply_add(builder, low_a, low_b, acc)
        a = high_halves(builder, a)
        b = high_halves(builder, b)
    last_a = builder.bitcast(a, f32x)
    last_b = builder.bitcast(b, f32x)
    return fused_multiply_add(builder, last_a, last_b, acc)


def _multiply_widened(builder, acc, units: Sequence[Any], b):
    """IR: acc + low a * low b + high a * high b; those of a are float32 already."""
    low_b = widen_low(builder, b)
    high_b = widen_high(builder, b)
    for unit, half in zip(units, (low_b, high_b), strict=True):
        acc = fused_multiply_add(builder, builder.bitcast(unit, f32x), half, acc)
    return acc


def _multiply_bf16(builder, acc, a, b):
    """IR: both products of a unit by one instruction."""
    pairs = ir.VectorType(bf16, 2 * LANES)
    operands = [acc, builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
    return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x, operands)


# --------------------------------------------------------------------------- bytes


def multiply_bytes(builder, acc, a, b):
    """IR: acc + a . b per lane, exactly; all are vectors of int32. The bytes of a are unsigned."""
    if host_has("avx512vnni"):
        return _in_registers(builder, "avx512.vpdpbusd.512", i32, [acc, a, b])
    if host_has("avxvnni"):
        return _in_registers(builder, "avx512.vpdpbusd.256", i32, [acc, a, b])
    # As int16 the even bytes of both, then the odd ones: an instruction multiplies them and adds
    # two products. (That for bytes would add them in int16, where they do not fit.)
    eight = constant(_PAIRS_16, 8)
    low_byte = constant(_PAIRS_16, 255)
    a = builder.bitcast(a, _PAIRS_16)
    b = builder.bitcast(b, _PAIRS_16)
    even_a = builder.and_(a, low_byte)
    even_b = builder.ashr(builder.shl(b, eight), eight)
    odd_a = builder.lshr(a, eight)
    odd_b = builder.ashr(b, eight)
    for factors in ([even_a, even_b], [odd_a, odd_b]):
        products = _in_registers(builder, _multiply_and_add_pairs(), i16, factors)
        acc = builder.add(acc, products)
    return acc


def multiply_nibbles(builder, narrow, a, b):
    """IR: narrow + a . b per lane, exactly. a has bytes from 0 to 15, and b signed ones.

    ``narrow`` is for :func:`add_nibbles`, which must follow after eight calls of this.
    """
    if multiplies_bytes():
        return multiply_bytes(builder, narrow, a, b)
    # Eight sums of two products of 15 and 127 fit into 16 bits.
    name = "avx512.pmaddubs.w.512" if host_has("avx512bw") else "avx2.pmadd.ub.sw"
    product = _in_registers(builder, name, i8, [a, b], result=i16)
    total = builder.add(
        builder.bitcast(narrow, _PAIRS_16),
        builder.bitcast(product, _PAIRS_16),
    )
    return builder.bitcast(total, i32x)


def add_nibbles(builder, total, narrow):
    """IR: int32 total + narrow, of which the latter is made by :func:`multiply_nibbles`."""
    if not multiplies_bytes():
        # Two sums of 16 bits to one of 32: a product with (1, 1).
        ones = constant(i32x, 0x10001)
        narrow = _in_registers(builder, _multiply_and_add_pairs(), i16, [narrow, ones])
    return builder.add(total, narrow)


def _multiply_and_add_pairs() -> str:
    """The instruction that multiplies int16 and adds neighbouring products up in 32 bits."""
    return "avx512.pmaddw.d.512" if host_has("avx512bw") else "avx2.pmadd.wd"


def _in_registers(builder, name: str, element, values: Sequence[Any], *, result=i32):
    """IR: an instruction on whole registers, of 256 bits or 512 as its ``name`` says, for all
    lanes.

    The last two ``values`` are of ``element``, and any other of int32. The ``result`` has elements
    of this type, and is given as int32.
    """
    registers = 1 if name.endswith("512") else 2
    lanes = LANES // registers
    source = ir.VectorType(element, lanes * 32 // element.width)
    target = ir.VectorType(result, lanes * 32 // result.width)
    done = []
    for number in range(registers):
        first = number * lanes
        chosen = ir.Constant(ir.VectorType(i32, lanes), list(range(first, first + lanes)))
        units = [builder.bitcast(value, i32x) for value in values]
        operands = [builder.shuffle_vector(each, each, chosen) for each in units]
        operands[-2:] = [builder.bitcast(each, source) for each in operands[-2:]]
        value = call_llvm(builder, f"llvm.x86.{name}", target, operands)
        done.append(builder.bitcast(value, ir.VectorType(i32, lanes)))
    if registers == 1:
        return done[0]
    all_lanes = ir.Constant(i32x, list(range(LANES)))
    return builder.shuffle_vector(*done, all_lanes)
