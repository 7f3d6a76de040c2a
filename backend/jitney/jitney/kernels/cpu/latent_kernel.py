"""Attention over latents (``execution.latents``) in the absorbed form, as Numba kernels.

A key is one latent for all heads. So vectors have one number of 16 lanes, which are tokens and
their heads (``head_product``): a score is a sum of products of pairs of a latent's numbers, the
same in all lanes, and pairs of the queries' (``pair_products``). The softmax is online, eight keys
at a time, in the order of the keys. A lane sees the keys up to its own token, of its own row.

:func:`enter_body` writes the new latents to the cache and turns the queries; then a head product
makes the first part of the queries meet latents; :func:`attend_latents_body` attends.

Called by ``latent_layer``.
"""

import numpy as np

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, I64_BYTES, LANES, VECTOR_BYTES, ceil_div
from jitney.kernels.cpu.pair_products import (
    add_factors,
    add_pair,
    first_factor,
    interleave,
    is_packed,
    left_pair_bytes,
    pair_bytes,
    store_left,
)
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ZERO,
    copy_element,
    element_bytes,
    exp2,
    fetch_add,
    inner,
    lane_max,
    larger,
    load,
    load_i32,
    load_i64,
    load_one,
    memory_on_stack,
    rounded_as,
    seen,
    splat,
    store,
    store_f32,
    store_i32,
)

KEYS = 8
"""Keys that the softmax takes in at once. A block of the cache has a multiple of so many."""
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
    """Address of [tokens, heads, key size + rotary size], rotated."""
    latent: int
    """Address of the new latents, [tokens, rank + rotary size]."""
    latent_stride: int
    """Bytes from token to token."""
    turned: int
    """Address of the queries as left pairs, [groups, (key size + rotary size) / 2, 16 lanes]."""
    absorbed: int
    """The same of their first part as it meets latents, [groups, rank / 2, 16 lanes]."""
    mixed: int
    """Address of float32 [groups, rank, 16 lanes]: the result. At the end it is left pairs, which
    take as much memory or half of it."""
    cache: int
    """Address of the layer's cache, [blocks, block size, padded]."""
    padded: int
    """``rank + rotary size``, rounded up to whole vectors."""

    # Of a step.
    lanes: int
    """Of each token: see ``head_product``."""
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
def turn_lane(tag, product, call, query, out):
    """The query of a lane. If its address is 0, zeros."""
    size = element_bytes(tag)
    for i in range(0, call.key_size + call.rotary_size, 2):
        if is_packed(product):
            # A unit of two bfloat16 as it is.
            store_i32(out, np.int32(0) if query == 0 else load_i32(query + i * size))
        else:
            low = ZERO if query == 0 else load_one(tag, query + i * size)
            high = ZERO if query == 0 else load_one(tag, query + (i + 1) * size)
            store_f32(out, low)
            store_f32(out + VECTOR_BYTES, high)
        out += left_pair_bytes(product)


@inner
def turn_queries(tag, product, call, group):
    """The queries of a lane group."""
    head_size = call.key_size + call.rotary_size
    out = call.turned + group * (head_size // 2) * left_pair_bytes(product)
    for lane in range(LANES):
        token = (group * LANES + lane) // call.lanes
        head = (group * LANES + lane) % call.lanes
        query = np.int64(0)
        if head < call.heads and token < call.count:
            query = call.query + (token * call.heads + head) * head_size * element_bytes(tag)
        turn_lane(tag, product, call, query, out + lane * F32_BYTES)


@inner
def keep_latent(tag, call, token):
    """Write a token's latent to the cache."""
    size = element_bytes(tag)
    kept = call.cache + load_i64(call.slots + token * I64_BYTES) * call.padded * size
    latent = call.latent + token * call.latent_stride
    for i in range(call.rank + call.rotary_size):
        copy_element(tag, latent + i * size, kept + i * size)


@inner
def enter_body(tag, product, arguments):
    """Writes the latents of the step's tokens to the cache, and turns their queries."""
    call = read_latents(arguments)
    groups = ceil_div(call.count * call.lanes, LANES)
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= max(call.count, groups):
            return
        if item < call.count:
            keep_latent(tag, call, item)
        if item < groups:
            turn_queries(tag, product, call, item)


# --------------------------------------------------------------------------- attention


@inner
def interleave_keys(tag, call, kept, count, out):
    """KEYS latents from the address ``kept`` on, as pairs of neighbouring keys, [KEYS / 2, rank].
    Behind ``count`` keys the last one again: what is there in the cache may be no number."""
    size = element_bytes(tag)
    key_bytes = call.padded * size
    for j in range(0, KEYS, 2):
        even = kept + min(j, count - 1) * key_bytes
        odd = kept + min(j + 1, count - 1) * key_bytes
        for i in range(0, call.rank * size, LANES * size):
            interleave(tag, even + i, odd + i, out)
            out += 2 * LANES * size


@inner
def add_products(product, query, pairs, keys, key_bytes, s):
    """s[j] += the product of key j with a vector of queries, over so many pairs."""
    s0, s1, s2, s3, s4, s5, s6, s7 = s
    k0 = keys
    k4 = keys + 4 * key_bytes
    for _ in range(pairs):
        s0 = add_pair(product, s0, query, k0)
        s1 = add_pair(product, s1, query, k0 + key_bytes)
        s2 = add_pair(product, s2, query, k0 + 2 * key_bytes)
        s3 = add_pair(product, s3, query, k0 + 3 * key_bytes)
        s4 = add_pair(product, s4, query, k4)
        s5 = add_pair(product, s5, query, k4 + key_bytes)
        s6 = add_pair(product, s6, query, k4 + 2 * key_bytes)
        s7 = add_pair(product, s7, query, k4 + 3 * key_bytes)
        query += left_pair_bytes(product)
        k0 += pair_bytes(product)
        k4 += pair_bytes(product)
    return s0, s1, s2, s3, s4, s5, s6, s7


@inner
def mix_keys(product, out, rank, keys, factor, p):
    """out = out * factor + the sum of p[j] times latent j. ``keys``: see
    :func:`interleave_keys`."""
    p0, p1, p2, p3, p4, p5, p6, p7 = p
    f0 = first_factor(product, p0, p1)
    f2 = first_factor(product, p2, p3)
    f4 = first_factor(product, p4, p5)
    f6 = first_factor(product, p6, p7)
    row_bytes = rank * pair_bytes(product)
    for i in range(rank):
        pairs = keys + i * pair_bytes(product)
        a = load(out) * factor
        b = splat(ZERO)
        a = add_factors(product, a, f0, p1, pairs)
        b = add_factors(product, b, f2, p3, pairs + row_bytes)
        a = add_factors(product, a, f4, p5, pairs + 2 * row_bytes)
        b = add_factors(product, b, f6, p7, pairs + 3 * row_bytes)
        store(out, a + b)
        out += VECTOR_BYTES


@inner
def attend_row(tag, product, call, group, row, lanes, state, keys):
    """The keys of one row, for the lanes of a group that are of the row.

    ``lanes`` is the address of two vectors, of the first key that each lane sees and of the last
    one. ``state`` is that of two others: the largest score of each lane so far, and the sum of its
    weights. At ``keys`` is memory for KEYS latents. A lane that sees none of eight keys keeps its
    state and its result bit by bit.
    """
    size = element_bytes(tag)
    first_keys = load(lanes)
    last_keys = load(lanes + VECTOR_BYTES)
    head_pairs = (call.key_size + call.rotary_size) // 2
    absorbed = call.absorbed + group * (call.rank // 2) * left_pair_bytes(product)
    rotary = call.turned + (group * head_pairs + call.key_size // 2) * left_pair_bytes(product)
    out = call.mixed + group * call.rank * VECTOR_BYTES
    key_bytes = call.padded * size
    factor_of_scores = splat(call.scale * LOG2_E)
    most = load(state)
    total = load(state + VECTOR_BYTES)
    last = np.int64(lane_max(last_keys))
    # Always from a multiple of KEYS: so a token's sums do not depend on those beside it, and all
    # keys are in one block.
    first = -np.int64(lane_max(splat(ZERO) - first_keys)) // KEYS * KEYS
    while first <= last:
        entry = call.table + (row * call.table_width + first // call.block_size) * _I32_BYTES
        slot = np.int64(load_i32(entry)) * call.block_size + first % call.block_size
        kept = call.cache + slot * key_bytes
        interleave_keys(tag, call, kept, min(last + 1 - first, KEYS), keys)
        zero = splat(ZERO)
        s = (zero, zero, zero, zero, zero, zero, zero, zero)
        s = add_products(product, absorbed, call.rank // 2, kept, key_bytes, s)
        rotary_keys = kept + call.rank * size
        s = add_products(product, rotary, call.rotary_size // 2, rotary_keys, key_bytes, s)
        key = splat(np.float32(first))
        s0 = seen(s[0] * factor_of_scores, key, first_keys, last_keys)
        s1 = seen(s[1] * factor_of_scores, key + splat(np.float32(1)), first_keys, last_keys)
        s2 = seen(s[2] * factor_of_scores, key + splat(np.float32(2)), first_keys, last_keys)
        s3 = seen(s[3] * factor_of_scores, key + splat(np.float32(3)), first_keys, last_keys)
        s4 = seen(s[4] * factor_of_scores, key + splat(np.float32(4)), first_keys, last_keys)
        s5 = seen(s[5] * factor_of_scores, key + splat(np.float32(5)), first_keys, last_keys)
        s6 = seen(s[6] * factor_of_scores, key + splat(np.float32(6)), first_keys, last_keys)
        s7 = seen(s[7] * factor_of_scores, key + splat(np.float32(7)), first_keys, last_keys)
        low = larger(larger(s0, s1), larger(s2, s3))
        high = larger(larger(s4, s5), larger(s6, s7))
        new_most = larger(most, larger(low, high))
        factor = exp2(most - new_most)
        most = new_most
        p0 = rounded_as(tag, exp2(s0 - most))
        p1 = rounded_as(tag, exp2(s1 - most))
        p2 = rounded_as(tag, exp2(s2 - most))
        p3 = rounded_as(tag, exp2(s3 - most))
        p4 = rounded_as(tag, exp2(s4 - most))
        p5 = rounded_as(tag, exp2(s5 - most))
        p6 = rounded_as(tag, exp2(s6 - most))
        p7 = rounded_as(tag, exp2(s7 - most))
        total = total * factor + (((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7)))
        p = (p0, p1, p2, p3, p4, p5, p6, p7)
        mix_keys(product, out, call.rank, keys, factor, p)
        first += KEYS
    store(state, most)
    store(state + VECTOR_BYTES, total)


@inner
def fill_lanes(call, group, row, lanes):
    """Fill in the first and the last key that each lane of a group sees of this row: none, if it is
    of another row. Returns the next row of the group; if there is none, a negative number."""
    next_row = np.int64(-1)
    for lane in range(LANES):
        token = (group * LANES + lane) // call.lanes
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
def attend_group(tag, product, call, group, lanes, state, keys):
    """One lane group, whose tokens may be of several rows."""
    out = call.mixed + group * call.rank * VECTOR_BYTES
    for i in range(call.rank):
        store(out + i * VECTOR_BYTES, splat(ZERO))
    store(state, splat(_LEAST))
    store(state + VECTOR_BYTES, splat(ZERO))
    row = load_i64(call.row_of_token + group * LANES // call.lanes * I64_BYTES)
    while row >= 0:
        next_row = fill_lanes(call, group, row, lanes)
        attend_row(tag, product, call, group, row, lanes, state, keys)
        row = next_row
    # Of lanes behind the last token the sum is 0.
    total = larger(load(state + VECTOR_BYTES), splat(_SMALLEST))
    # A pair takes no more memory than its two vectors: nothing is overwritten before it is read.
    pair = out
    for i in range(0, call.rank * VECTOR_BYTES, 2 * VECTOR_BYTES):
        low = rounded_as(tag, load(out + i) / total)
        high = rounded_as(tag, load(out + i + VECTOR_BYTES) / total)
        store_left(product, pair, low, high)
        pair += left_pair_bytes(product)


@inner
def attend_latents_body(tag, product, arguments):
    """Causal attention over the block table of each token's row."""
    call = read_latents(arguments)
    keys = stack_of_keys()
    lanes = two_vectors_on_stack()
    state = two_vectors_on_stack()
    groups = ceil_div(call.count * call.lanes, LANES)
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= groups:
            return
        attend_group(tag, product, call, item, lanes, state, keys)
