"""The gated delta rule (https://arxiv.org/abs/2412.06464), as a Numba kernel, one token after the
other.

The state of a head is S, float32 [key size, value size]. With the token's query, key and value::

    S = decay * S
    delta = beta * (value - S^T key)
    S = S + key delta^T
    result = S^T query

Query and key have the norm 1, and the query is divided by sqrt(key size). Of the layer's two
numbers for each token and head, a and b: ``decay = exp(rate * softplus(a + bias))`` and ``beta =
sigmoid(b)``. Several value heads share a key head.

Loops: items of one head of a row, tokens, columns of S (64 at a time), its lines. S is read twice
for each token: the second time from the second-level cache.

Called by ``state_layer``.
"""

import math

import numpy as np

from jitney.kernels.cpu.compiled import reader, record
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
    load_f32,
    load_one,
    memory_on_stack,
    splat,
    store,
    store_as,
)
from jitney.kernels.cpu.state_records import ROW_BYTES, StateCall, read_row

MOST_KEY_SIZE = 256
_BLOCK = 4 * LANES
"""Columns of S that are computed at once."""
_EPSILON = np.float32(1e-6)
"""Is added to the squares of a query's or key's norm, as in flash-linear-attention."""
_LARGE = np.float32(20.0)
"""From here on softplus(x) is x."""

stack_of_head = memory_on_stack(MOST_KEY_SIZE * F32_BYTES)


@record
class DeltaCall(StateCall):
    """``x`` is [tokens, all query heads, all key heads, all value heads]; the result is [tokens,
    value heads, value size]."""

    key_heads: int
    """Of query and of key."""
    value_heads: int
    key_size: int
    """A multiple of 16, at most MOST_KEY_SIZE."""
    value_size: int
    """A multiple of 16."""
    betas: int
    """Address of the first token's b, [value heads]."""
    gates: int
    """Address of the first token's a, [value heads]."""
    gate_stride: int
    """From token to token, of ``betas`` and ``gates``."""
    rates: int
    """Address of float32 [value heads]."""
    biases: int
    """Address of float32 [value heads]."""


read_delta = reader(DeltaCall)


@inner
def softplus(x):
    """log(1 + e**x)."""
    if x > _LARGE:
        return x
    return np.float32(math.log1p(math.exp(x)))


@inner
def normalise(tag, source, size, factor, out):
    """out = source / its norm * factor, as float32."""
    squares = splat(ZERO)
    for i in range(0, size, LANES):
        value = load_as(tag, source + i * element_bytes(tag))
        squares = fma(value, value, squares)
    scale = splat(factor / np.sqrt(lane_sum(squares) + _EPSILON))
    for i in range(0, size, LANES):
        store(out + i * F32_BYTES, load_as(tag, source + i * element_bytes(tag)) * scale)


@inner
def delta_block(tag, call, state, query, key, value, decay, beta, out):
    """64 columns of S, from the address ``state`` on."""
    vector_bytes = LANES * element_bytes(tag)
    line_bytes = call.value_size * F32_BYTES
    # S^T key
    a0 = splat(ZERO)
    a1 = splat(ZERO)
    a2 = splat(ZERO)
    a3 = splat(ZERO)
    line = state
    for i in range(call.key_size):
        k = splat(load_f32(key + i * F32_BYTES))
        a0 = fma(load(line), k, a0)
        a1 = fma(load(line + 64), k, a1)
        a2 = fma(load(line + 128), k, a2)
        a3 = fma(load(line + 192), k, a3)
        line += line_bytes
    # S is not multiplied by the decay yet.
    d0 = (load_as(tag, value) - a0 * decay) * beta
    d1 = (load_as(tag, value + vector_bytes) - a1 * decay) * beta
    d2 = (load_as(tag, value + 2 * vector_bytes) - a2 * decay) * beta
    d3 = (load_as(tag, value + 3 * vector_bytes) - a3 * decay) * beta
    # S, and S^T query
    a0 = splat(ZERO)
    a1 = splat(ZERO)
    a2 = splat(ZERO)
    a3 = splat(ZERO)
    line = state
    for i in range(call.key_size):
        k = splat(load_f32(key + i * F32_BYTES))
        q = splat(load_f32(query + i * F32_BYTES))
        s0 = fma(k, d0, load(line) * decay)
        s1 = fma(k, d1, load(line + 64) * decay)
        s2 = fma(k, d2, load(line + 128) * decay)
        s3 = fma(k, d3, load(line + 192) * decay)
        store(line, s0)
        store(line + 64, s1)
        store(line + 128, s2)
        store(line + 192, s3)
        a0 = fma(s0, q, a0)
        a1 = fma(s1, q, a1)
        a2 = fma(s2, q, a2)
        a3 = fma(s3, q, a3)
        line += line_bytes
    store_as(tag, out, a0)
    store_as(tag, out + vector_bytes, a1)
    store_as(tag, out + 2 * vector_bytes, a2)
    store_as(tag, out + 3 * vector_bytes, a3)


@inner
def delta_vector(tag, call, state, query, key, value, decay, beta, out):
    """16 columns of S."""
    line_bytes = call.value_size * F32_BYTES
    total = splat(ZERO)
    for i in range(call.key_size):
        total = fma(load(state + i * line_bytes), splat(load_f32(key + i * F32_BYTES)), total)
    delta = (load_as(tag, value) - total * decay) * beta
    total = splat(ZERO)
    for i in range(call.key_size):
        line = state + i * line_bytes
        k = splat(load_f32(key + i * F32_BYTES))
        new = fma(k, delta, load(line) * decay)
        store(line, new)
        total = fma(new, splat(load_f32(query + i * F32_BYTES)), total)
    store_as(tag, out, total)


@inner
def delta_head(tag, call, row, head, query, key):
    """All tokens of a row, of one value head. At ``query`` and ``key`` there is memory for one of
    each."""
    size = element_bytes(tag)
    head_bytes = call.key_size * call.value_size * F32_BYTES
    state = call.state + row.slot * call.slot_stride + head * head_bytes
    if row.is_new != 0:
        for i in range(0, head_bytes, LANES * F32_BYTES):
            store(state + i, splat(ZERO))
    shared = call.value_heads // call.key_heads
    query_offset = head // shared * call.key_size * size
    key_offset = query_offset + call.key_heads * call.key_size * size
    value_offset = (2 * call.key_heads * call.key_size + head * call.value_size) * size
    rate = load_f32(call.rates + head * F32_BYTES)
    bias = load_f32(call.biases + head * F32_BYTES)
    query_factor = ONE / np.sqrt(np.float32(call.key_size))
    for token in range(row.first, row.first + row.num_tokens):
        x = call.x + token * call.x_stride
        normalise(tag, x + query_offset, call.key_size, query_factor, query)
        normalise(tag, x + key_offset, call.key_size, ONE, key)
        gate_offset = token * call.gate_stride + head * size
        a = load_one(tag, call.gates + gate_offset)
        b = load_one(tag, call.betas + gate_offset)
        decay = splat(np.float32(math.exp(rate * softplus(a + bias))))
        beta = splat(ONE / (ONE + np.float32(math.exp(-b))))
        value = x + value_offset
        out = call.out + token * call.out_stride + head * call.value_size * size
        column = 0
        while column + _BLOCK <= call.value_size:
            block = state + column * F32_BYTES
            offset = column * size
            delta_block(tag, call, block, query, key, value + offset, decay, beta, out + offset)
            column += _BLOCK
        while column < call.value_size:
            block = state + column * F32_BYTES
            offset = column * size
            delta_vector(tag, call, block, query, key, value + offset, decay, beta, out + offset)
            column += LANES


@inner
def delta_body(tag, arguments):
    """See the module."""
    call = read_delta(arguments)
    query = stack_of_head()
    key = stack_of_head()
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.count:
            return
        row = read_row(call.rows + item // call.items_per_row * ROW_BYTES)
        delta_head(tag, call, row, item % call.items_per_row, query, key)
