"""IR: products of units, which are four bytes: ``total + left . right`` in each of 16 lanes.

A unit of ``left`` times a unit of ``right`` is the sum of the products of their elements. What the
elements are, and which instructions multiply them, depends on the tag's type (``simd``)::

    tag    left unit              right unit             instructions
    F32    1 float32              1 float32              one FMA
    BF16   2 bfloat16             2 bfloat16             AVX-512 BF16: one. Else both are widened to
                                                         float32: two FMA (*)
    WIDE   2 float32 (8 bytes)    2 bfloat16             right is widened to float32: two FMA
    I8     4 bytes, 0 to 255      4 bytes, -128 to 127   VNNI: one. Else both are widened to 16
                                                         bits: two products of int16
    I4     4 bytes, -127 to 127   4 bytes, 0 to 15       VNNI: one. Else one, with sums of 16 bits

    (*) only adapters come here: for all other products the host then picks WIDE
        (``must_widen_bf16``)

The sums of I8 and I4 are int32, and exact: those of I8 up to MOST_BYTE_INPUTS inputs, those of I4
because they are over a few inputs, which share a scale.

Called by ``micro_kernel``, and for weights of 4 bits by ``four_bit_vectors``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

MOST_BYTE_INPUTS = (2**31 - 1) // (255 * 128)
"""Products of I8 that an int32 can add up, if each is as large as can be: 65,793."""
_I16_PAIRS = ir.VectorType(i16, 2 * LANES)
"""A vector as 32 numbers of 16 bits."""


def multiply_units(builder, tag, total, left_parts: Sequence[Any], right):
    """IR: total + left . right per lane.

    ``right`` is a vector of 16 units, given as int32. So is ``left``, the only one of
    ``left_parts``; with WIDE these are two vectors: the first elements of 16 units as float32, and
    the second ones.

    ``total`` and the result are vectors of float32, whatever the tag. The sums of I8 are int32: the
    lanes hold their bits.
    """
    if tag == WIDE_TYPE:
        low_left, high_left = [builder.bitcast(part, f32x) for part in left_parts]
        return _multiply_floats(builder, total, low_left, high_left, right)
    (left,) = left_parts
    if tag == I8_TYPE:
        exact = builder.bitcast(total, i32x)
        exact = multiply_bytes(builder, exact, unsigned=left, signed=right)
        return builder.bitcast(exact, f32x)
    if tag == BF16_TYPE and host_has("avx512bf16"):
        return _multiply_bf16(builder, total, left, right)
    if tag == BF16_TYPE:
        low_left = widen_low(builder, left)
        high_left = widen_high(builder, left)
        return _multiply_floats(builder, total, low_left, high_left, right)
    # F32.
    float_left = builder.bitcast(left, f32x)
    float_right = builder.bitcast(right, f32x)
    return fused_multiply_add(builder, float_left, float_right, total)


def _multiply_floats(builder, total, low_left, high_left, right):
    """IR: total + low left * low right + high left * high right; ``right`` is widened here."""
    total = fused_multiply_add(builder, low_left, widen_low(builder, right), total)
    return fused_multiply_add(builder, high_left, widen_high(builder, right), total)


def _multiply_bf16(builder, total, left, right):
    """IR: both products of a unit by one instruction."""
    pairs = ir.VectorType(bf16, 2 * LANES)
    operands = [total, builder.bitcast(left, pairs), builder.bitcast(right, pairs)]
    return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x, operands)


# --------------------------------------------------------------------------- bytes


@dataclass(frozen=True)
class _Instruction:
    """A product of whole registers, by LLVM's name behind "llvm.x86."."""

    name: str
    registers: int
    """How many registers 16 lanes take: one of 512 bits, or two of 256."""
    factor: Any
    """The type of an element of both factors."""
    result: Any
    """That of an element of what it computes."""


# What VNNI adds up in 32 bits: four products of bytes. LLVM has one name for the instruction of 256
# bits, whether AVX-VNNI or AVX-512 brings it.
_DOT_BYTES_512 = _Instruction("avx512.vpdpbusd.512", 1, factor=i8, result=i32)
_DOT_BYTES_256 = _Instruction("avx512.vpdpbusd.256", 2, factor=i8, result=i32)
# Products of int16, two neighbours added up in 32 bits.
_ADD_I16_PAIRS_512 = _Instruction("avx512.pmaddw.d.512", 1, factor=i16, result=i32)
_ADD_I16_PAIRS_256 = _Instruction("avx2.pmadd.wd", 2, factor=i16, result=i32)
# Products of an unsigned and a signed byte, two neighbours added up in 16 bits.
_ADD_BYTE_PAIRS_512 = _Instruction("avx512.pmaddubs.w.512", 1, factor=i8, result=i16)
_ADD_BYTE_PAIRS_256 = _Instruction("avx2.pmadd.ub.sw", 2, factor=i8, result=i16)


def multiply_bytes(builder, total, unsigned, signed):
    """IR: total + unsigned . signed per lane, exactly. All are vectors of int32. A lane of
    ``unsigned`` or ``signed`` holds four bytes."""
    if host_has("avx512vnni"):
        return _emit(builder, _DOT_BYTES_512, unsigned, signed, total)
    if host_has("avxvnni"):
        return _emit(builder, _DOT_BYTES_256, unsigned, signed, total)
    # Two products of bytes, 255 * 127 each, do not fit into the 16 bits in which the instruction
    # for bytes adds them up. So both factors are widened to int16: first their even bytes, then
    # their odd ones.
    eight = constant(_I16_PAIRS, 8)
    low_byte = constant(_I16_PAIRS, 255)
    unsigned = builder.bitcast(unsigned, _I16_PAIRS)
    signed = builder.bitcast(signed, _I16_PAIRS)
    even_unsigned = builder.and_(unsigned, low_byte)
    even_signed = builder.ashr(builder.shl(signed, eight), eight)
    odd_unsigned = builder.lshr(unsigned, eight)
    odd_signed = builder.ashr(signed, eight)
    of_even = _emit(builder, _i16_instruction(), even_unsigned, even_signed)
    total = builder.add(total, of_even)
    of_odd = _emit(builder, _i16_instruction(), odd_unsigned, odd_signed)
    return builder.add(total, of_odd)


def multiply_nibbles(builder, run_sum, nibbles, signed):
    """IR: run_sum + nibbles . signed per lane, exactly. ``nibbles`` holds four bytes of 0 to 15 in
    each lane, ``signed`` four of -127 to 127.

    A *run* is up to eight calls, whose products may be summed up in 16 bits. ``run_sum`` begins as
    0. Where the processor has no instruction that adds up in 32 bits, it is two sums of 16 bits in
    each lane. So at the end of the run :func:`add_run` must add it to a sum of 32 bits.
    """
    if multiplies_bytes():
        return multiply_bytes(builder, run_sum, unsigned=nibbles, signed=signed)
    # A call adds two products to each 16 bits; eight calls fit: 8 * 2 * 15 * 127 = 30,480.
    instruction = _ADD_BYTE_PAIRS_512 if host_has("avx512bw") else _ADD_BYTE_PAIRS_256
    product = _emit(builder, instruction, nibbles, signed)
    sum_of_16_bits = builder.add(
        builder.bitcast(run_sum, _I16_PAIRS),
        builder.bitcast(product, _I16_PAIRS),
    )
    return builder.bitcast(sum_of_16_bits, i32x)


def add_run(builder, total, run_sum):
    """IR: total + run_sum, as int32. ``run_sum`` is that of :func:`multiply_nibbles`."""
    if not multiplies_bytes():
        # Add the two sums of 16 bits in each lane: a product with (1, 1).
        ones = constant(i32x, 0x10001)
        run_sum = _emit(builder, _i16_instruction(), run_sum, ones)
    return builder.add(total, run_sum)


def _i16_instruction() -> _Instruction:
    """Products of int16, on the widest registers that the processor has for it."""
    return _ADD_I16_PAIRS_512 if host_has("avx512bw") else _ADD_I16_PAIRS_256


def _emit(builder, instruction: _Instruction, first, second, total=None):
    """IR: the instruction for all 16 lanes of two vectors, once for each register that they take.

    ``total`` is what it adds to, if it is one that adds. The result is a vector of int32, whatever
    elements it has.
    """
    lanes = LANES // instruction.registers
    register = ir.VectorType(i32, lanes)
    factor_type = ir.VectorType(instruction.factor, lanes * 32 // instruction.factor.width)
    result_type = ir.VectorType(instruction.result, lanes * 32 // instruction.result.width)
    results = []
    for number in range(instruction.registers):
        operands = [
            builder.bitcast(_part_of(builder, first, number, lanes), factor_type),
            builder.bitcast(_part_of(builder, second, number, lanes), factor_type),
        ]
        if total is not None:
            operands.insert(0, _part_of(builder, total, number, lanes))
        result = call_llvm(builder, f"llvm.x86.{instruction.name}", result_type, operands)
        results.append(builder.bitcast(result, register))
    if instruction.registers == 1:
        return results[0]
    all_lanes = ir.Constant(i32x, list(range(LANES)))
    return builder.shuffle_vector(*results, all_lanes)


def _part_of(builder, vector, number: int, lanes: int):
    """IR: register ``number`` of a vector, ``lanes`` of its lanes, as int32."""
    units = builder.bitcast(vector, i32x)
    begin = number * lanes
    of_register = ir.Constant(ir.VectorType(i32, lanes), list(range(begin, begin + lanes)))
    return builder.shuffle_vector(units, units, of_register)
