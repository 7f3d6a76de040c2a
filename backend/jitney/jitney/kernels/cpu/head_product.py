"""The products of latent attention that each head has for itself, as a Numba kernel.

Heads stand side by side in a vector, 16 of them, a *lane group*. So a product is element by
element, and needs no sum over lanes::

    out[token, group, o] = sum over k of x[token, group, k] * weight[group, o, k]

where each of these is a vector: x and out in float32, the weight in the dtype of the model. If the
heads are no whole lane groups, the lanes behind them have weights of 0.

Loops: items of some outputs of a group, tokens (four at a time), outputs, k. So a weight is read
from memory once for all tokens of a step.

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
    """``count`` is in tokens. Strides are in bytes."""

    groups: int
    """Lane groups."""
    outputs: int
    """A multiple of OUTPUTS_PER_ITEM."""
    inputs: int
    """Numbers of k."""
    x: int
    x_stride: int
    """From token to token."""
    x_group_stride: int
    """From lane group to lane group."""
    weight: int
    """Address of [groups, outputs, inputs, 16 lanes]."""
    out: int
    out_stride: int
    """From token to token."""
    heads: int
    """0: the result is vectors, [groups, outputs, 16 lanes] of a token. Else it is rows of so many
    heads, [heads, outputs], in the dtype of the model."""


read_head_product = reader(HeadProductCall)


@inner
def store_outputs(tag, call, spare, token, group, output, value):
    """One output of 16 heads. At ``spare`` is memory for a vector."""
    out = call.out + token * call.out_stride
    if call.heads == 0:
        store(out + (group * call.outputs + output) * VECTOR_BYTES, value)
        return
    store(spare, value)
    first = group * LANES
    for head in range(first, min(first + LANES, call.heads)):
        place = (head * call.outputs + output) * element_bytes(tag)
        store_one(tag, out + place, load_f32(spare + (head - first) * F32_BYTES))


@inner
def four_tokens(tag, call, spare, token, group, output, weight):
    """One output of four tokens."""
    x0 = call.x + token * call.x_stride + group * call.x_group_stride
    x1 = x0 + call.x_stride
    x2 = x1 + call.x_stride
    x3 = x2 + call.x_stride
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
    store_outputs(tag, call, spare, token, group, output, a0)
    store_outputs(tag, call, spare, token + 1, group, output, a1)
    store_outputs(tag, call, spare, token + 2, group, output, a2)
    store_outputs(tag, call, spare, token + 3, group, output, a3)


@inner
def four_outputs(tag, call, spare, token, group, output, weight):
    """Four outputs of one token. Each is summed up in the same order as by :func:`four_tokens`."""
    x = call.x + token * call.x_stride + group * call.x_group_stride
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
    store_outputs(tag, call, spare, token, group, output, a0)
    store_outputs(tag, call, spare, token, group, output + 1, a1)
    store_outputs(tag, call, spare, token, group, output + 2, a2)
    store_outputs(tag, call, spare, token, group, output + 3, a3)


@inner
def head_product_item(tag, call, spare, group, first):
    """OUTPUTS_PER_ITEM outputs of all tokens, from output ``first`` on."""
    output_bytes = call.inputs * LANES * element_bytes(tag)
    weight = call.weight + (group * call.outputs + first) * output_bytes
    token = 0
    while token + 4 <= call.count:
        for i in range(OUTPUTS_PER_ITEM):
            four_tokens(tag, call, spare, token, group, first + i, weight + i * output_bytes)
        token += 4
    while token < call.count:
        for i in range(0, OUTPUTS_PER_ITEM, 4):
            four_outputs(tag, call, spare, token, group, first + i, weight + i * output_bytes)
        token += 1


@inner
def head_product_body(tag, arguments):
    """See the module."""
    call = read_head_product(arguments)
    spare = vector_on_stack()
    items_per_group = call.outputs // OUTPUTS_PER_ITEM
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.groups * items_per_group:
            return
        group = item // items_per_group
        first = item % items_per_group * OUTPUTS_PER_ITEM
        head_product_item(tag, call, spare, group, first)
