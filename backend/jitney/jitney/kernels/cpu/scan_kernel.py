"""The recurrence of Mamba 2 (https://arxiv.org/abs/2405.21060), as a Numba kernel, one token after
the other.

The state of a head is S, float32 [head size, state size]. With the token's x [head size] of the
head, its B and C [state size], which a group of heads shares, and its time step dt::

    S = exp(dt * rate) * S + dt * x B^T
    result = S C + skip * x

where ``dt = softplus(the layer's number for the token and head + bias)``.

Loops: items of one head of a row, tokens, lines of S, vectors of 16 of its columns.

Called by ``state_layer``.
"""

import math

import numpy as np

from jitney.kernels.cpu.compiled import reader, record
from jitney.kernels.cpu.delta_kernel import softplus
from jitney.kernels.cpu.emit import F32_BYTES, LANES
from jitney.kernels.cpu.simd import (
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
    lane_sum,
    load,
    load_as,
    load_f32,
    load_one,
    memory_on_stack,
    splat,
    store,
    store_one,
)
from jitney.kernels.cpu.state_records import ROW_BYTES, StateCall, read_row

MOST_STATE_SIZE = 256

stack_of_state = memory_on_stack(MOST_STATE_SIZE * F32_BYTES)


@record
class ScanCall(StateCall):
    """``x`` is [tokens, all heads, B of all groups, C of all groups]; the result is [tokens, heads,
    head size]."""

    heads: int
    head_size: int
    groups: int
    state_size: int
    """A multiple of 16, at most MOST_STATE_SIZE."""
    steps: int
    """Address of the first token's numbers for the time step, [heads]."""
    steps_stride: int
    """From token to token."""
    rates: int
    """Address of float32 [heads]."""
    biases: int
    """Address of float32 [heads]."""
    skips: int
    """Address of float32 [heads]."""


read_scan = reader(ScanCall)


@inner
def widen(tag, source, count, out):
    """``count`` elements as float32."""
    for i in range(0, count, LANES):
        store(out + i * F32_BYTES, load_as(tag, source + i * element_bytes(tag)))


@inner
def scan_token(tag, call, state, x, b, c, decay, step, skip, out):
    """One token of one head."""
    size = element_bytes(tag)
    line = state
    for i in range(call.head_size):
        value = load_one(tag, x + i * size)
        added = splat(value * step)
        total = splat(ZERO)
        for n in range(0, call.state_size * F32_BYTES, LANES * F32_BYTES):
            new = fma(added, load(b + n), load(line + n) * decay)
            store(line + n, new)
            total = fma(new, load(c + n), total)
        store_one(tag, out + i * size, lane_sum(total) + skip * value)
        line += call.state_size * F32_BYTES


@inner
def scan_head(tag, call, row, head, b, c):
    """All tokens of a row, of one head. At ``b`` and ``c`` there is memory for one of each."""
    size = element_bytes(tag)
    head_bytes = call.head_size * call.state_size * F32_BYTES
    state = call.state + row.slot * call.slot_stride + head * head_bytes
    if row.is_new != 0:
        for i in range(0, head_bytes, LANES * F32_BYTES):
            store(state + i, splat(ZERO))
    inner_bytes = call.heads * call.head_size * size
    group_bytes = call.state_size * size
    b_offset = inner_bytes + head // (call.heads // call.groups) * group_bytes
    c_offset = b_offset + call.groups * group_bytes
    head_offset = head * call.head_size * size
    rate = load_f32(call.rates + head * F32_BYTES)
    bias = load_f32(call.biases + head * F32_BYTES)
    skip = load_f32(call.skips + head * F32_BYTES)
    for token in range(row.first, row.first + row.num_tokens):
        x = call.x + token * call.x_stride
        widen(tag, x + b_offset, call.state_size, b)
        widen(tag, x + c_offset, call.state_size, c)
        step = softplus(load_one(tag, call.steps + token * call.steps_stride + head * size) + bias)
        decay = splat(np.float32(math.exp(rate * step)))
        out = call.out + token * call.out_stride + head_offset
        scan_token(tag, call, state, x + head_offset, b, c, decay, step, skip, out)


@inner
def scan_body(tag, arguments):
    """See the module."""
    call = read_scan(arguments)
    b = stack_of_state()
    c = stack_of_state()
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.count:
            return
        row = read_row(call.rows + item // call.items_per_row * ROW_BYTES)
        scan_head(tag, call, row, item % call.items_per_row, b, c)
