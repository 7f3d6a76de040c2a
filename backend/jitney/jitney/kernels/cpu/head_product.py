"""The products of latent attention that each head has for itself, as a Numba kernel.

A *pair* is a token of the step and one of its heads: pair ``token * heads + head``. Here a vector
has one number of 16 pairs that follow each other, a *lane group*. So a product is element by
element, and needs no sum over lanes::

    out[group, o] = sum over k of x[group, k] * weight[pattern, o, k]

where each of these is a vector: x and out in float32, the weight in the dtype of the model. Which
heads the lanes of a group have repeats after some groups: with 12 heads, groups 0, 3, 6, ... are
alike. So there is a weight for each of these *patterns*. Lanes behind the last pair have no
meaning.

Loops: items of some outputs of a pattern, its groups (four at a time), outputs, k. So a weight is
read from memory once for all tokens of a step.

Called by ``latent_layer``.
"""

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, LANES, VECTOR_BYTES
from jitney.kernels.cpu.simd import (
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
    load,
    load_as,
    load_f32,
    splat,
    store,
    store_one,
    vector_on_stack,
)

OUTPUTS_PER_ITEM = 16
"""A multiple of 4."""


@record
class HeadProductCall(KernelCall):
    """``count`` is in tokens."""

    heads: int
    patterns: int
    outputs: int
    """A multiple of OUTPUTS_PER_ITEM."""
    inputs: int
    """Numbers of k."""
    x: int
    x_stride: int
    """Bytes from lane group to lane group."""
    weight: int
    """Address of [patterns, outputs, inputs, 16 lanes]."""
    out: int
    to_rows: int
    """0: the result is vectors, [groups, outputs, 16 lanes]. 1: it is rows, [pairs, outputs], in
    the dtype of the model."""


read_head_product = reader(HeadProductCall)


@inner
def store_outputs(tag, call, spare, group, output, value):
    """One output of a lane group. At ``spare`` is memory for a vector."""
    if call.to_rows == 0:
        store(call.out + (group * call.outputs + output) * VECTOR_BYTES, value)
        return
    store(spare, value)
    first = group * LANES
    for pair in range(first, min(first + LANES, call.count * call.heads)):
        place = (pair * call.outputs + output) * element_bytes(tag)
        store_one(tag, call.out + place, load_f32(spare + (pair - first) * F32_BYTES))


@inner
def four_groups(tag, call, spare, group, output, weight):
    """One output of four groups of a pattern."""
    step = call.patterns * call.x_stride
    x0 = call.x + group * call.x_stride
    x1 = x0 + step
    x2 = x1 + step
    x3 = x2 + step
    a0 = splat(ZERO)
    a1 = splat(ZERO)
    a2 = splat(ZERO)
    a3 = splat(ZERO)
    for k in range(call.inputs):
        w = load_as(tag, weight)
        weight += LANES * element_bytes(tag)
        offset = k * VECTOR_BYTES
        a0 = fma(load(x0 + offset), w, a0)
        a1 = fma(load(x1 + offset), w, a1)
        a2 = fma(load(x2 + offset), w, a2)
        a3 = fma(load(x3 + offset), w, a3)
    store_outputs(tag, call, spare, group, output, a0)
    store_outputs(tag, call, spare, group + call.patterns, output, a1)
    store_outputs(tag, call, spare, group + 2 * call.patterns, output, a2)
    store_outputs(tag, call, spare, group + 3 * call.patterns, output, a3)


@inner
def four_outputs(tag, call, spare, group, output, weight):
    """Four outputs of one group. Each is summed up in the same order as by :func:`four_groups`."""
    x = call.x + group * call.x_stride
    vector_bytes = LANES * element_bytes(tag)
    output_bytes = call.inputs * vector_bytes
    a0 = splat(ZERO)
    a1 = splat(ZERO)
    a2 = splat(ZERO)
    a3 = splat(ZERO)
    for k in range(call.inputs):
        value = load(x + k * VECTOR_BYTES)
        place = weight + k * vector_bytes
        a0 = fma(value, load_as(tag, place), a0)
        a1 = fma(value, load_as(tag, place + output_bytes), a1)
        a2 = fma(value, load_as(tag, place + 2 * output_bytes), a2)
        a3 = fma(value, load_as(tag, place + 3 * output_bytes), a3)
    store_outputs(tag, call, spare, group, output, a0)
    store_outputs(tag, call, spare, group, output + 1, a1)
    store_outputs(tag, call, spare, group, output + 2, a2)
    store_outputs(tag, call, spare, group, output + 3, a3)


@inner
def head_product_item(tag, call, spare, pattern, first):
    """OUTPUTS_PER_ITEM outputs of all groups of a pattern, from output ``first`` on."""
    output_bytes = call.inputs * LANES * element_bytes(tag)
    weight = call.weight + (pattern * call.outputs + first) * output_bytes
    groups = (call.count * call.heads + LANES - 1) // LANES
    group = pattern
    while group + 3 * call.patterns < groups:
        for i in range(OUTPUTS_PER_ITEM):
            four_groups(tag, call, spare, group, first + i, weight + i * output_bytes)
        group += 4 * call.patterns
    while group < groups:
        for i in range(0, OUTPUTS_PER_ITEM, 4):
            four_outputs(tag, call, spare, group, first + i, weight + i * output_bytes)
        group += call.patterns


@inner
def head_product_body(tag, arguments):
    """See the module."""
    call = read_head_product(arguments)
    spare = vector_on_stack()
    items_per_pattern = call.outputs // OUTPUTS_PER_ITEM
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.patterns * items_per_pattern:
            return
        pattern = item // items_per_pattern
        first = item % items_per_pattern * OUTPUTS_PER_ITEM
        head_product_item(tag, call, spare, pattern, first)
