"""Products of pairs of elements, for kernels over latents: ``total + left . right`` in each of 16
lanes. A *pair* is two neighbours among what is summed up: two inputs, or two keys.

As elsewhere (``dot``), left is what a kernel has made, and right is what it streams from memory.
``product`` is the tag of the products, ``element`` that of the model::

    product    element    left: 16 lanes of a pair            right: a pair
    F32        F32        two vectors of float32              two float32
    BF16       BF16       one vector of units of two bfloat16   a unit of two bfloat16
    WIDE       BF16       two vectors of float32              a unit of two bfloat16

Called by ``head_product`` and ``latent_kernel``.
"""

import llvmlite.ir as ir
from numba import types

from jitney.kernels.cpu.dot import multiply_units
from jitney.kernels.cpu.emit import (
    F32_BYTES,
    LANES,
    TAG,
    UNIT_BYTES,
    VECTOR_BYTES,
    constant,
    emitted,
    f32,
    f32x,
    i16x,
    i32,
    i32x,
    i64,
    load_broadcast,
    load_vector,
    offset_by,
    pointer,
    store_vector,
    vector,
)
from jitney.kernels.cpu.simd import BF16_TYPE, F32_TYPE


@emitted(types.int64, TAG)
def left_pair_bytes(builder, product):
    """Bytes of 16 lanes of a pair on the left, as a constant."""
    return constant(i64, VECTOR_BYTES if product == BF16_TYPE else 2 * VECTOR_BYTES)


@emitted(types.int64, TAG)
def lane_pair_bytes(builder, product):
    """The same on the right, where each lane has its own pair, as a constant."""
    return constant(i64, 2 * VECTOR_BYTES if product == F32_TYPE else VECTOR_BYTES)


@emitted(types.int64, TAG)
def pair_bytes(builder, product):
    """Bytes of a pair on the right that is the same in all lanes, as a constant."""
    return constant(i64, 2 * F32_BYTES if product == F32_TYPE else UNIT_BYTES)


@emitted(types.boolean, TAG)
def is_packed(builder, product):
    """Whether 16 lanes of a pair are one vector of units on the left, as a constant."""
    return ir.Constant(ir.IntType(1), product == BF16_TYPE)


@emitted(types.void, TAG, types.intp, types.intp, types.intp)
def interleave(builder, element, even, odd, out):
    """16 pairs of an element at ``even`` and one at ``odd``, written to ``out``."""
    bits = i32x if element == F32_TYPE else i16x
    first = builder.load(pointer(builder, even, bits), align=2)
    second = builder.load(pointer(builder, odd, bits), align=2)
    order = [place for lane in range(LANES) for place in (lane, LANES + lane)]
    mask = ir.Constant(ir.VectorType(i32, 2 * LANES), order)
    both = builder.shuffle_vector(first, second, mask)
    builder.store(both, pointer(builder, out, both.type), align=2)


def packed(builder, low, high):
    """IR: units of two bfloat16, as int32, of float32 whose lower 16 bits are 0."""
    low_bits = builder.lshr(builder.bitcast(low, i32x), constant(i32x, 16))
    return builder.or_(low_bits, builder.bitcast(high, i32x))


@emitted(types.void, TAG, types.intp, vector, vector)
def store_left(builder, product, address, low, high):
    """Store 16 lanes of a pair. For BF16 they are rounded already (``rounded_as``)."""
    if product == BF16_TYPE:
        store_vector(builder, packed(builder, low, high), address)
        return
    store_vector(builder, low, address)
    store_vector(builder, high, offset_by(builder, address, VECTOR_BYTES))


def _multiply(builder, product, total, left, right):
    """IR: total + left . right, of lists of vectors: one of int32, or two of float32."""
    if product == F32_TYPE:
        for factor, other in zip(left, right, strict=True):
            total = multiply_units(builder, product, total, [factor], other)
        return total
    (units,) = right
    return multiply_units(builder, product, total, left, units)


def _load_left(builder, product, address):
    """IR: the vectors of 16 lanes of a pair."""
    first = load_vector(builder, address)
    if product == BF16_TYPE:
        return [first]
    return [first, load_vector(builder, offset_by(builder, address, VECTOR_BYTES))]


def _broadcast_pair(builder, product, address):
    """IR: the pair at ``address`` in all lanes."""
    if product == F32_TYPE:
        second = offset_by(builder, address, F32_BYTES)
        return [load_broadcast(builder, address, f32), load_broadcast(builder, second, f32)]
    return [load_broadcast(builder, address, i32)]


@emitted(vector, TAG, vector, types.intp, types.intp)
def add_pair(builder, product, total, left, right):
    """total + left . right, with the pair at address ``right`` in all lanes."""
    factors = _load_left(builder, product, left)
    return _multiply(builder, product, total, factors, _broadcast_pair(builder, product, right))


@emitted(vector, TAG, vector, types.intp, types.intp)
def add_lane_pairs(builder, product, total, left, right):
    """total + left . right, where each lane has its own pair."""
    others = [load_vector(builder, right)]
    if product == F32_TYPE:
        others.append(load_vector(builder, offset_by(builder, right, VECTOR_BYTES)))
    return _multiply(builder, product, total, _load_left(builder, product, left), others)


@emitted(vector, TAG, vector, vector)
def first_factor(builder, product, low, high):
    """What :func:`add_factors` takes as ``first``: for BF16 both, as bits of a vector."""
    if product == BF16_TYPE:
        return builder.bitcast(packed(builder, low, high), f32x)
    return low


@emitted(vector, TAG, vector, vector, vector, types.intp)
def add_factors(builder, product, total, first, second, right):
    """As :func:`add_pair`, with left in registers. BF16 does not look at ``second``."""
    factors = [builder.bitcast(first, i32x)]
    if product != BF16_TYPE:
        factors.append(builder.bitcast(second, i32x))
    return _multiply(builder, product, total, factors, _broadcast_pair(builder, product, right))
