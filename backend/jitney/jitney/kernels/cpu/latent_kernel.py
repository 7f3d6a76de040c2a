"""Attention over latents (``execution.latents``) in the absorbed form, as Numba kernels.

A key is one latent for all heads. So vectors have one number of 16 pairs of token and head, a *lane
group* (``head_product``): a score of 16 pairs is a sum of products of one number of the latent and
a vector of the queries. The softmax is online, eight keys at a time, in the order of the keys. A
lane sees the keys up to its own token, of its own row.

:func:`enter_body` writes the new latents to the cache and turns the queries; then a head product
makes the first part of the queries meet latents; :func:`attend_latents_body` attends.

Called by ``latent_layer``.
"""

import numpy as np

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, I64_BYTES, LANES, VECTOR_BYTES, ceil_div
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ZERO,
    copy_element,
    element_bytes,
    exp2,
    fetch_add,
    fma,
    inner,
    lane_max,
    larger,
    load,
    load_as,
    load_f32,
    load_i32,
    load_i64,
    load_one,
    memory_on_stack,
    seen,
    splat,
    store,
    store_f32,
)

KEYS = 8
"""Keys that the softmax takes in at once."""
MOST_LATENT = 1024
"""Numbers of a latent with its rotary part, filled up to whole vectors: at most."""
_I32_BYTES = 4
_LEAST = np.float32(-1e30)
"""Below every score: the largest of a lane that has seen no key."""
_UNSEEN = np.float32(-2e30)
"""The score of a key that a lane does not see. Its weight is 0, also beside _LEAST."""
_NO_KEY = np.float32(1e9)
"""Behind every context."""
_SMALLEST = np.float32(1e-30)

stack_of_keys = memory_on_stack(KEYS * MOST_LATENT * F32_BYTES)
two_vectors_on_stack = memory_on_stack(2 * VECTOR_BYTES)


@record
class LatentCall(KernelCall):
    """The arguments of both kernels; ``count`` is in tokens of the step."""

    heads: int
    rank: int
    key_size: int
    """Of the part of a query that meets latents by a product."""
    rotary_size: int
    scale: float
    """What scores are multiplied by."""
    window: int
    """How many keys a token sees. 0: all up to its own."""
    query: int
    """Address of [pairs, key size + rotary size], rotated."""
    latent: int
    """Address of the new latents, [tokens, rank + rotary size]."""
    latent_stride: int
    """Bytes from token to token."""
    turned: int
    """Address of float32 [groups, key size + rotary size, 16 lanes]: the queries, times ``scale``
    and log2(e)."""
    absorbed: int
    """Address of float32 [groups, rank, 16 lanes]: their first part as it meets latents."""
    mixed: int
    """Address of float32 [groups, rank, 16 lanes]: the result."""
    cache: int
    """Address of the layer's cache, [blocks, block size, padded]."""
    padded: int
    """``rank + rotary size``, rounded up to whole vectors."""

    # Of a step.
    block_size: int
    table: int
    """Address of int32 [R, table_width]: the block table."""
    table_width: int
    slots: int
    """Address of int64 [tokens]: where each new token is written."""
    indices: int
    """Address of int64 [tokens]: which token of its row's context each is."""
    row_of_token: int
    """Address of int64 [tokens]: the row of the block table of each."""


read_latents = reader(LatentCall)


# --------------------------------------------------------------------------- before attention


@inner
def turn_queries(tag, call, group):
    """The queries of a lane group, as vectors of 16 pairs."""
    size = element_bytes(tag)
    head_size = call.key_size + call.rotary_size
    first = group * LANES
    lanes = min(call.count * call.heads - first, LANES)
    query = call.query + first * head_size * size
    out = call.turned + group * head_size * VECTOR_BYTES
    factor = call.scale * LOG2_E
    for i in range(head_size):
        for lane in range(lanes):
            value = load_one(tag, query + (lane * head_size + i) * size)
            store_f32(out + lane * F32_BYTES, value * factor)
        for lane in range(lanes, LANES):
            store_f32(out + lane * F32_BYTES, ZERO)
        out += VECTOR_BYTES


@inner
def keep_latent(tag, call, token):
    """Write a token's latent to the cache."""
    size = element_bytes(tag)
    kept = call.cache + load_i64(call.slots + token * I64_BYTES) * call.padded * size
    latent = call.latent + token * call.latent_stride
    for i in range(call.rank + call.rotary_size):
        copy_element(tag, latent + i * size, kept + i * size)


@inner
def enter_body(tag, arguments):
    """Writes the latents of the step's tokens to the cache, and turns their queries."""
    call = read_latents(arguments)
    groups = ceil_div(call.count * call.heads, LANES)
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= max(call.count, groups):
            return
        if item < call.count:
            keep_latent(tag, call, item)
        if item < groups:
            turn_queries(tag, call, item)


# --------------------------------------------------------------------------- attention


@inner
def widen_keys(tag, call, row, first, count, out):
    """The latents of ``count`` keys of a row's context from ``first`` on, as float32. Behind them
    the last one again, up to KEYS."""
    size = element_bytes(tag)
    for j in range(KEYS):
        index = first + min(j, count - 1)
        entry = call.table + (row * call.table_width + index // call.block_size) * _I32_BYTES
        slot = np.int64(load_i32(entry)) * call.block_size + index % call.block_size
        kept = call.cache + slot * call.padded * size
        for i in range(0, call.padded, LANES):
            store(out, load_as(tag, kept + i * size))
            out += VECTOR_BYTES


@inner
def add_products(query, count, keys, key_bytes, s):
    """s[j] += the product of ``count`` numbers of key j with a vector of queries each."""
    s0, s1, s2, s3, s4, s5, s6, s7 = s
    k0 = keys
    k4 = keys + 4 * key_bytes
    for i in range(count):
        q = load(query + i * VECTOR_BYTES)
        s0 = fma(splat(load_f32(k0)), q, s0)
        s1 = fma(splat(load_f32(k0 + key_bytes)), q, s1)
        s2 = fma(splat(load_f32(k0 + 2 * key_bytes)), q, s2)
        s3 = fma(splat(load_f32(k0 + 3 * key_bytes)), q, s3)
        s4 = fma(splat(load_f32(k4)), q, s4)
        s5 = fma(splat(load_f32(k4 + key_bytes)), q, s5)
        s6 = fma(splat(load_f32(k4 + 2 * key_bytes)), q, s6)
        s7 = fma(splat(load_f32(k4 + 3 * key_bytes)), q, s7)
        k0 += F32_BYTES
        k4 += F32_BYTES
    return s0, s1, s2, s3, s4, s5, s6, s7


@inner
def mix_keys(out, rank, keys, key_bytes, factor, p):
    """out = out * factor + the sum of p[j] times latent j."""
    p0, p1, p2, p3, p4, p5, p6, p7 = p
    k0 = keys
    k4 = keys + 4 * key_bytes
    for _ in range(rank):
        a = load(out) * factor
        b = p4 * splat(load_f32(k4))
        a = fma(splat(load_f32(k0)), p0, a)
        b = fma(splat(load_f32(k4 + key_bytes)), p5, b)
        a = fma(splat(load_f32(k0 + key_bytes)), p1, a)
        b = fma(splat(load_f32(k4 + 2 * key_bytes)), p6, b)
        a = fma(splat(load_f32(k0 + 2 * key_bytes)), p2, a)
        b = fma(splat(load_f32(k4 + 3 * key_bytes)), p7, b)
        a = fma(splat(load_f32(k0 + 3 * key_bytes)), p3, a)
        store(out, a + b)
        out += VECTOR_BYTES
        k0 += F32_BYTES
        k4 += F32_BYTES


@inner
def attend_row(tag, call, group, row, lanes, state, keys):
    """The keys of one row, for the lanes of a group that are of the row.

    ``lanes`` is the address of two vectors, of the first key that each lane sees and of the last
    one. ``state`` is that of two others: the largest score of each lane so far, and the sum of its
    weights. At ``keys`` is memory for KEYS latents in float32. A lane that sees none of eight keys
    keeps its state and its result bit by bit.
    """
    first_keys = load(lanes)
    last_keys = load(lanes + VECTOR_BYTES)
    head_size = call.key_size + call.rotary_size
    absorbed = call.absorbed + group * call.rank * VECTOR_BYTES
    rotary = call.turned + (group * head_size + call.key_size) * VECTOR_BYTES
    out = call.mixed + group * call.rank * VECTOR_BYTES
    key_bytes = call.padded * F32_BYTES
    most = load(state)
    total = load(state + VECTOR_BYTES)
    last = np.int64(lane_max(last_keys))
    # Always from a multiple of KEYS: so a token's sums do not depend on those beside it.
    first = -np.int64(lane_max(splat(ZERO) - first_keys)) // KEYS * KEYS
    while first <= last:
        widen_keys(tag, call, row, first, min(last + 1 - first, KEYS), keys)
        zero = splat(ZERO)
        s = (zero, zero, zero, zero, zero, zero, zero, zero)
        s = add_products(absorbed, call.rank, keys, key_bytes, s)
        rotary_keys = keys + call.rank * F32_BYTES
        s = add_products(rotary, call.rotary_size, rotary_keys, key_bytes, s)
        key = splat(np.float32(first))
        s0 = seen(s[0], key, first_keys, last_keys)
        s1 = seen(s[1], key + splat(np.float32(1)), first_keys, last_keys)
        s2 = seen(s[2], key + splat(np.float32(2)), first_keys, last_keys)
        s3 = seen(s[3], key + splat(np.float32(3)), first_keys, last_keys)
        s4 = seen(s[4], key + splat(np.float32(4)), first_keys, last_keys)
        s5 = seen(s[5], key + splat(np.float32(5)), first_keys, last_keys)
        s6 = seen(s[6], key + splat(np.float32(6)), first_keys, last_keys)
        s7 = seen(s[7], key + splat(np.float32(7)), first_keys, last_keys)
        low = larger(larger(s0, s1), larger(s2, s3))
        high = larger(larger(s4, s5), larger(s6, s7))
        new_most = larger(most, larger(low, high))
        factor = exp2(most - new_most)
        most = new_most
        p0 = exp2(s0 - most)
        p1 = exp2(s1 - most)
        p2 = exp2(s2 - most)
        p3 = exp2(s3 - most)
        p4 = exp2(s4 - most)
        p5 = exp2(s5 - most)
        p6 = exp2(s6 - most)
        p7 = exp2(s7 - most)
        total = total * factor + (((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7)))
        p = (p0, p1, p2, p3, p4, p5, p6, p7)
        mix_keys(out, call.rank, keys, key_bytes, factor, p)
        first += KEYS
    store(state, most)
    store(state + VECTOR_BYTES, total)


@inner
def fill_lanes(call, group, row, lanes):
    """Fill in the first and the last key that each lane of a group sees of this row: none, if it is
    of another row. Returns the next row of the group; if there is none, a negative number."""
    next_row = np.int64(-1)
    for lane in range(LANES):
        token = (group * LANES + lane) // call.heads
        first = np.float32(_NO_KEY)
        last = np.float32(-1)
        if token < call.count:
            row_of_lane = load_i64(call.row_of_token + token * I64_BYTES)
            if row_of_lane == row:
                index = load_i64(call.indices + token * I64_BYTES)
                first = ZERO
                if call.window != 0:
                    first = np.float32(max(0, index + 1 - call.window))
                last = np.float32(index)
            elif row_of_lane > row and next_row < 0:
                next_row = row_of_lane
        store_f32(lanes + lane * F32_BYTES, first)
        store_f32(lanes + VECTOR_BYTES + lane * F32_BYTES, last)
    return next_row


@inner
def attend_group(tag, call, group, lanes, state, keys):
    """One lane group, whose tokens may be of several rows."""
    out = call.mixed + group * call.rank * VECTOR_BYTES
    for i in range(call.rank):
        store(out + i * VECTOR_BYTES, splat(ZERO))
    store(state, splat(_LEAST))
    store(state + VECTOR_BYTES, splat(ZERO))
    row = load_i64(call.row_of_token + group * LANES // call.heads * I64_BYTES)
    while row >= 0:
        next_row = fill_lanes(call, group, row, lanes)
        attend_row(tag, call, group, row, lanes, state, keys)
        row = next_row
    # Of lanes behind the last pair the sum is 0.
    total = larger(load(state + VECTOR_BYTES), splat(_SMALLEST))
    for i in range(call.rank):
        store(out + i * VECTOR_BYTES, load(out + i * VECTOR_BYTES) / total)


@inner
def attend_latents_body(tag, arguments):
    """Causal attention over the block table of each token's row."""
    call = read_latents(arguments)
    keys = stack_of_keys()
    lanes = two_vectors_on_stack()
    state = two_vectors_on_stack()
    groups = ceil_div(call.count * call.heads, LANES)
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= groups:
            return
        attend_group(tag, call, item, lanes, state, keys)
