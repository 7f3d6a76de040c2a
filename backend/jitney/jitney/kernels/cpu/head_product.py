"""The products of latent attention that each head has for itself, as a Numba kernel.

A *lane* is a token of the step and one of its heads. A vector has one number of 16 lanes that
follow each other, a *lane group*. Each token has ``lanes`` of them: as many as heads or, behind
these, a few without meaning, whose numbers are 0. So a product is lane by lane, and needs no sum
over a vector::

    out[group, o] = sum over k of x[group, k] * weight[pattern, o, k]

Which heads a group has repeats after some groups: with 12 heads, groups 0, 3, 6, ... are alike. So
there is a weight for each of these *patterns*. The k are summed up in pairs (``pair_products``).

Loops: items of some outputs of a pattern, its groups (four at a time), outputs (two at a time),
pairs of k. So a weight is read from memory once for all tokens of a step.

Called by ``latent_layer``.
"""

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, LANES, ceil_div
from jitney.kernels.cpu.pair_products import (
    add_lane_pairs,
    lane_pair_bytes,
    left_pair_bytes,
    store_left,
)
from jitney.kernels.cpu.simd import (
    ZERO,
    element_bytes,
    fetch_add,
    inner,
    load_f32,
    rounded_as,
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
    outputs: int
    """A multiple of OUTPUTS_PER_ITEM."""
    pairs: int
    """Of k."""
    x: int
    x_stride: int
    """Bytes from lane group to lane group."""
    weight: int
    """Address of [patterns, outputs, pairs, 16 lanes]."""
    out: int
    to_rows: int
    """0: the result is left pairs, [groups, pairs of outputs, 16 lanes]. 1: it is rows, [tokens,
    heads, outputs], in the dtype of the model."""

    # Of a step.
    lanes: int
    """Of each token."""
    patterns: int


read_head_product = reader(HeadProductCall)


@inner
def store_row(tag, call, spare, group, output, value):
    """One output of a lane group, in rows. At ``spare`` is memory for a vector."""
    store(spare, value)
    token = group * LANES // call.lanes
    head = group * LANES % call.lanes
    for lane in range(LANES):
        if head < call.heads and token < call.count:
            place = ((token * call.heads + head) * call.outputs + output) * element_bytes(tag)
            store_one(tag, call.out + place, load_f32(spare + lane * F32_BYTES))
        # A division for each lane would take longer than the product.
        head += 1
        if head == call.lanes:
            head = 0
            token += 1


@inner
def store_outputs(tag, product, call, spare, group, output, low, high):
    """Outputs ``output`` and ``output + 1`` of a lane group."""
    if call.to_rows != 0:
        store_row(tag, call, spare, group, output, low)
        store_row(tag, call, spare, group, output + 1, high)
        return
    pair = (group * call.outputs + output) // 2
    out = call.out + pair * left_pair_bytes(product)
    store_left(product, out, rounded_as(tag, low), rounded_as(tag, high))


@inner
def four_groups(tag, product, call, spare, group, output, weight):
    """Two outputs of four groups of a pattern."""
    step = call.patterns * call.x_stride
    x0 = call.x + group * call.x_stride
    x1 = x0 + step
    x2 = x1 + step
    x3 = x2 + step
    other = weight + call.pairs * lane_pair_bytes(product)
    a0 = splat(ZERO)
    a1 = splat(ZERO)
    a2 = splat(ZERO)
    a3 = splat(ZERO)
    b0 = splat(ZERO)
    b1 = splat(ZERO)
    b2 = splat(ZERO)
    b3 = splat(ZERO)
    for k in range(call.pairs):
        w = weight + k * lane_pair_bytes(product)
        v = other + k * lane_pair_bytes(product)
        offset = k * left_pair_bytes(product)
        a0 = add_lane_pairs(product, a0, x0 + offset, w)
        b0 = add_lane_pairs(product, b0, x0 + offset, v)
        a1 = add_lane_pairs(product, a1, x1 + offset, w)
        b1 = add_lane_pairs(product, b1, x1 + offset, v)
        a2 = add_lane_pairs(product, a2, x2 + offset, w)
        b2 = add_lane_pairs(product, b2, x2 + offset, v)
        a3 = add_lane_pairs(product, a3, x3 + offset, w)
        b3 = add_lane_pairs(product, b3, x3 + offset, v)
    store_outputs(tag, product, call, spare, group, output, a0, b0)
    store_outputs(tag, product, call, spare, group + call.patterns, output, a1, b1)
    store_outputs(tag, product, call, spare, group + 2 * call.patterns, output, a2, b2)
    store_outputs(tag, product, call, spare, group + 3 * call.patterns, output, a3, b3)


@inner
def four_outputs(tag, product, call, spare, group, output, weight):
    """Four outputs of one group. Each is summed up in the same order as by :func:`four_groups`."""
    x = call.x + group * call.x_stride
    output_bytes = call.pairs * lane_pair_bytes(product)
    a0 = splat(ZERO)
    a1 = splat(ZERO)
    a2 = splat(ZERO)
    a3 = splat(ZERO)
    for k in range(call.pairs):
        place = weight + k * lane_pair_bytes(product)
        left = x + k * left_pair_bytes(product)
        a0 = add_lane_pairs(product, a0, left, place)
        a1 = add_lane_pairs(product, a1, left, place + output_bytes)
        a2 = add_lane_pairs(product, a2, left, place + 2 * output_bytes)
        a3 = add_lane_pairs(product, a3, left, place + 3 * output_bytes)
    store_outputs(tag, product, call, spare, group, output, a0, a1)
    store_outputs(tag, product, call, spare, group, output + 2, a2, a3)


@inner
def head_product_item(tag, product, call, spare, pattern, first):
    """OUTPUTS_PER_ITEM outputs of all groups of a pattern, from output ``first`` on."""
    output_bytes = call.pairs * lane_pair_bytes(product)
    weight = call.weight + (pattern * call.outputs + first) * output_bytes
    groups = ceil_div(call.count * call.lanes, LANES)
    group = pattern
    while group + 3 * call.patterns < groups:
        for i in range(0, OUTPUTS_PER_ITEM, 2):
            own = weight + i * output_bytes
            four_groups(tag, product, call, spare, group, first + i, own)
        group += 4 * call.patterns
    while group < groups:
        for i in range(0, OUTPUTS_PER_ITEM, 4):
            own = weight + i * output_bytes
            four_outputs(tag, product, call, spare, group, first + i, own)
        group += call.patterns


@inner
def head_product_body(tag, product, arguments):
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
        head_product_item(tag, product, call, spare, pattern, first)
