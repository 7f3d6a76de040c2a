"""Attention over latents (``execution.latents``) in the absorbed form, as Numba kernels.

Heads stand side by side in vectors of 16, *lane groups* (``head_product``): a key is one latent for
all heads, so a score of 16 heads is a sum of products of one number of the latent and a vector of
the queries. The softmax is online, eight keys at a time, in the order of the keys.

:func:`enter_body` writes the new latents to the cache and turns the queries; then a head product
makes the first part of the queries meet latents; :func:`attend_latents_body` attends.

Called by ``latent_layer``.
"""

import numpy as np

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, I64_BYTES, LANES, VECTOR_BYTES
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ZERO,
    copy_element,
    element_bytes,
    exp2,
    fetch_add,
    fma,
    inner,
    larger,
    load,
    load_as,
    load_f32,
    load_i32,
    load_i64,
    load_one,
    memory_on_stack,
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
"""Below every score: that of a key that no query sees."""

stack_of_keys = memory_on_stack(KEYS * MOST_LATENT * F32_BYTES)


@record
class LatentCall(KernelCall):
    """The arguments of both kernels; ``count`` is in tokens of the step. Strides are in bytes, from
    token to token."""

    heads: int
    groups: int
    """Lane groups: heads / 16, rounded up."""
    rank: int
    key_size: int
    """Of the part of a query that meets latents by a product."""
    rotary_size: int
    scale: float
    """What scores are multiplied by."""
    window: int
    """How many keys a token sees. 0: all up to its own."""
    query: int
    """Address of [tokens, heads, key size + rotary size], rotated."""
    query_stride: int
    latent: int
    """Address of the new latents, [tokens, rank + rotary size]."""
    latent_stride: int
    turned: int
    """Address of float32 [tokens, groups, key size + rotary size, 16 lanes]: the queries, times
    ``scale`` and log2(e)."""
    absorbed: int
    """Address of float32 [tokens, groups, rank, 16 lanes]: their first part as it meets latents."""
    mixed: int
    """Address of float32 [tokens, groups, rank, 16 lanes]: the result."""
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
def turn_query(tag, call, token):
    """The queries of a token, head by head, as vectors of heads."""
    size = element_bytes(tag)
    head_size = call.key_size + call.rotary_size
    query = call.query + token * call.query_stride
    out = call.turned + token * call.groups * head_size * VECTOR_BYTES
    factor = call.scale * LOG2_E
    for group in range(call.groups):
        first = group * LANES
        last = min(call.heads - first, LANES)
        for i in range(head_size):
            for lane in range(last):
                value = load_one(tag, query + ((first + lane) * head_size + i) * size)
                store_f32(out + lane * F32_BYTES, value * factor)
            for lane in range(last, LANES):
                store_f32(out + lane * F32_BYTES, ZERO)
            out += VECTOR_BYTES


@inner
def enter_body(tag, arguments):
    """Writes the latents of the step's tokens to the cache, and turns their queries."""
    call = read_latents(arguments)
    size = element_bytes(tag)
    while True:
        token = fetch_add(arguments)  # the counter is the first field
        if token >= call.count:
            return
        kept = call.cache + load_i64(call.slots + token * I64_BYTES) * call.padded * size
        latent = call.latent + token * call.latent_stride
        for i in range(call.rank + call.rotary_size):
            copy_element(tag, latent + i * size, kept + i * size)
        turn_query(tag, call, token)


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
def seen(score, number, count):
    """The score of key ``number`` of ``count``; below every other if there is no such key."""
    return score if number < count else splat(_LEAST)


@inner
def attend_token(tag, call, token, group, keys):
    """One token, 16 heads. At ``keys`` is memory for KEYS latents in float32."""
    head_size = call.key_size + call.rotary_size
    in_step = token * call.groups + group
    absorbed = call.absorbed + in_step * call.rank * VECTOR_BYTES
    rotary = call.turned + (in_step * head_size + call.key_size) * VECTOR_BYTES
    out = call.mixed + in_step * call.rank * VECTOR_BYTES
    for i in range(call.rank):
        store(out + i * VECTOR_BYTES, splat(ZERO))
    last = load_i64(call.indices + token * I64_BYTES)
    row = load_i64(call.row_of_token + token * I64_BYTES)
    key_bytes = call.padded * F32_BYTES
    most = splat(_LEAST)
    total = splat(ZERO)
    first = np.int64(0)
    if call.window != 0:
        first = max(first, last + 1 - call.window)
    while first <= last:
        count = min(last + 1 - first, KEYS)
        widen_keys(tag, call, row, first, count, keys)
        zero = splat(ZERO)
        s = (zero, zero, zero, zero, zero, zero, zero, zero)
        s = add_products(absorbed, call.rank, keys, key_bytes, s)
        rotary_keys = keys + call.rank * F32_BYTES
        s = add_products(rotary, call.rotary_size, rotary_keys, key_bytes, s)
        s0 = s[0]
        s1 = seen(s[1], 1, count)
        s2 = seen(s[2], 2, count)
        s3 = seen(s[3], 3, count)
        s4 = seen(s[4], 4, count)
        s5 = seen(s[5], 5, count)
        s6 = seen(s[6], 6, count)
        s7 = seen(s[7], 7, count)
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
        total = total * factor + ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))
        p = (p0, p1, p2, p3, p4, p5, p6, p7)
        mix_keys(out, call.rank, keys, key_bytes, factor, p)
        first += KEYS
    for i in range(call.rank):
        store(out + i * VECTOR_BYTES, load(out + i * VECTOR_BYTES) / total)


@inner
def attend_latents_body(tag, arguments):
    """Causal attention over the block table of each token's row."""
    call = read_latents(arguments)
    keys = stack_of_keys()
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.count * call.groups:
            return
        attend_token(tag, call, item // call.groups, item % call.groups, keys)
