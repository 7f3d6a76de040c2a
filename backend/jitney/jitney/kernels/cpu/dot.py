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

from jitney.kernels.cpu.emit import (
    LANES,
    bf16,
    call_llvm,
    constant,
    f32x,
    fused_multiply_add,
    host_has,
    i8,
    i16,
    i32,
    i32x,
    widen_high,
    widen_low,
)
from jitney.kernels.cpu.processor import multiplies_bytes
from jitney.kernels.cpu.simd import BF16_TYPE, I8_TYPE, WIDE_TYPE

_PAIRS_16 = ir.VectorType(i16, 2 * LANES)
"""A vector as 32 numbers of 16 bits."""


def multiply_units(builder, tag, acc, a_units: Sequence[Any], b):
    """IR: acc + a . b per lane.

    ``b`` is a vector of 16 units as int32, and so is the one element of ``a_units``. With WIDE,
    ``a_units`` has two elements: the low elements of 16 units and the high ones, as float32.

    Of bytes, those of a are unsigned and those of b signed, and the float32 lanes of acc hold the
    bits of int32.
    """
    if tag == WIDE_TYPE:
        low_a, high_a = [builder.bitcast(unit, f32x) for unit in a_units]
        return _multiply_floats(builder, acc, low_a, high_a, b)
    (a,) = a_units
    if tag == I8_TYPE:
        total = multiply_bytes(builder, builder.bitcast(acc, i32x), a, b)
        return builder.bitcast(total, f32x)
    if tag == BF16_TYPE and host_has("avx512bf16"):
        return _multiply_bf16(builder, acc, a, b)
    if tag == BF16_TYPE:
        low_a = widen_low(builder, a)
        high_a = widen_high(builder, a)
        return _multiply_floats(builder, acc, low_a, high_a, b)
    float_a = builder.bitcast(a, f32x)
    float_b = builder.bitcast(b, f32x)
    return fused_multiply_add(builder, float_a, float_b, acc)


def _multiply_floats(builder, acc, low_a, high_a, b):
    """IR: acc + low a * low b + high a * high b, with b widened from bfloat16."""
    acc = fused_multiply_add(builder, low_a, widen_low(builder, b), acc)
    return fused_multiply_add(builder, high_a, widen_high(builder, b), acc)


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
        # LLVM has one name for it, whether AVX or AVX-512 brings the instruction.
        return _in_registers(builder, "avx512.vpdpbusd.256", i32, [acc, a, b])
    # The even bytes of both as int16, then the odd ones. For int16 there is an instruction that
    # multiplies and adds two products in 32 bits; the one for bytes adds them in 16, too few here.
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

    ``narrow`` begins as 0 and has sums of 32 bits, or of 16 where the processor has no instruction
    for more. So after at most eight calls :func:`add_nibbles` must add it to a sum of 32 bits.
    """
    if multiplies_bytes():
        return multiply_bytes(builder, narrow, a, b)
    # Eight sums of two products fit into 16 bits: 8 * 2 * 15 * 127 = 30,480.
    name = "avx512.pmaddubs.w.512" if host_has("avx512bw") else "avx2.pmadd.ub.sw"
    product = _in_registers(builder, name, i8, [a, b], result=i16)
    total = builder.add(
        builder.bitcast(narrow, _PAIRS_16),
        builder.bitcast(product, _PAIRS_16),
    )
    return builder.bitcast(total, i32x)


def add_nibbles(builder, total, narrow):
    """IR: int32 total + narrow, which :func:`multiply_nibbles` has made."""
    if not multiplies_bytes():
        # Two sums of 16 bits to one of 32: a product with (1, 1).
        ones = constant(i32x, 0x10001)
        narrow = _in_registers(builder, _multiply_and_add_pairs(), i16, [narrow, ones])
    return builder.add(total, narrow)


def _multiply_and_add_pairs() -> str:
    """The instruction that multiplies int16 and adds neighbouring products up in 32 bits."""
    return "avx512.pmaddw.d.512" if host_has("avx512bw") else "avx2.pmadd.wd"


def _in_registers(builder, name: str, element, values: Sequence[Any], *, result=i32):
    """IR: an instruction on whole registers, done for all lanes: once if its ``name`` ends in 512,
    for the bits of a register, and else twice.

    The last two of ``values`` are its factors, with elements of the type ``element``; one before
    them is the int32 that it adds to. What it gives has elements of the type ``result``, and is
    returned as int32.
    """
    registers = 1 if name.endswith("512") else 2
    lanes = LANES // registers
    factor_type = ir.VectorType(element, lanes * 32 // element.width)
    result_type = ir.VectorType(result, lanes * 32 // result.width)
    parts = []
    for number in range(registers):
        first = number * lanes
        own_lanes = ir.Constant(ir.VectorType(i32, lanes), list(range(first, first + lanes)))
        operands = []
        for value in values:
            units = builder.bitcast(value, i32x)
            operands.append(builder.shuffle_vector(units, units, own_lanes))
        *added, a, b = operands
        factors = [builder.bitcast(a, factor_type), builder.bitcast(b, factor_type)]
        part = call_llvm(builder, f"llvm.x86.{name}", result_type, [*added, *factors])
        parts.append(builder.bitcast(part, ir.VectorType(i32, lanes)))
    if registers == 1:
        return parts[0]
    all_lanes = ir.Constant(i32x, list(range(LANES)))
    return builder.shuffle_vector(*parts, all_lanes)
