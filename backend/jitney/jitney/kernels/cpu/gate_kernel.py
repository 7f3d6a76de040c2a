"""Multiplies each token's numbers by the activation of a gate, with an RMS norm before or behind
that, as a Numba kernel::

    NORM_NONE     x * activation(gate)              attention with a gate on its heads
    NORM_FIRST    norm(x) * activation(gate)        the gated delta rule
    NORM_LAST     norm(x * activation(gate))        Mamba 2

The norm is over groups of neighbouring numbers, such as heads.

Loops: items of some tokens, tokens, groups, vectors of 16 numbers.

Called by ``state_layer`` and ``norm_rotary_kernel``.
"""

from functools import lru_cache

import numpy as np
import torch

from jitney.kernels.cpu.attention_kernel import TAGS
from jitney.kernels.cpu.compiled import Kernel, KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, LANES
from jitney.kernels.cpu.simd import (
    ONE,
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
    lane_sum,
    load,
    load_as,
    sigmoid,
    splat,
    store_as,
)

NORM_NONE = 0
NORM_FIRST = 1
NORM_LAST = 2


@record
class GateCall(KernelCall):
    """``count`` is in tokens. Strides are in bytes, from token to token."""

    tokens_per_item: int
    x: int
    x_stride: int
    gate: int
    gate_stride: int
    out: int
    """It may be ``x``, with the same stride."""
    out_stride: int
    groups: int
    group_size: int
    """A multiple of 16."""
    norm: int
    """NORM_NONE, NORM_FIRST or NORM_LAST."""
    scale: int
    """Address of float32 [groups * group_size]: the weights of the norm."""
    epsilon: float
    is_silu: int
    """1: the activation is SiLU; 0: it is the sigmoid function."""


read_gate = reader(GateCall)


@lru_cache
def compiled_gate(dtype: torch.dtype) -> Kernel:
    """Compiled, or loaded from the cache of compiled code, at first use."""
    tag = TAGS[dtype]
    return Kernel(lambda address: gate_body(tag, address))


@inner
def activated(tag, call, gate):
    """The activation of 16 numbers of the gate."""
    value = load_as(tag, gate)
    result = sigmoid(value)
    if call.is_silu != 0:
        result = value * result
    return result


@inner
def gate_group(tag, call, x, gate, out, scale):
    """One group of one token."""
    size = element_bytes(tag)
    factor = ONE
    if call.norm != NORM_NONE:
        squares = splat(ZERO)
        for i in range(0, call.group_size, LANES):
            value = load_as(tag, x + i * size)
            if call.norm == NORM_LAST:
                value = value * activated(tag, call, gate + i * size)
            squares = fma(value, value, squares)
        mean = lane_sum(squares) / np.float32(call.group_size)
        factor = ONE / np.sqrt(mean + call.epsilon)
    for i in range(0, call.group_size, LANES):
        value = load_as(tag, x + i * size) * activated(tag, call, gate + i * size)
        if call.norm != NORM_NONE:
            value = value * splat(factor) * load(scale + i * F32_BYTES)
        store_as(tag, out + i * size, value)


@inner
def gate_body(tag, arguments):
    """See the module."""
    call = read_gate(arguments)
    group_bytes = call.group_size * element_bytes(tag)
    while True:
        first = fetch_add(arguments) * call.tokens_per_item  # the counter is the first field
        if first >= call.count:
            return
        for t in range(first, min(first + call.tokens_per_item, call.count)):
            x = call.x + t * call.x_stride
            gate = call.gate + t * call.gate_stride
            out = call.out + t * call.out_stride
            for g in range(call.groups):
                offset = g * group_bytes
                scale = call.scale + g * call.group_size * F32_BYTES
                gate_group(tag, call, x + offset, gate + offset, out + offset, scale)
