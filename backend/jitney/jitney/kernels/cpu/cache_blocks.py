"""Where the groups of a sequence are: blocks of the paged cache, seen as groups of 16 tokens.

A block has ``block_size`` tokens, a whole number of groups, of all KV heads::

    block 0                                            block 1
    | head 0: group, group, .. | head 1: group, .. |   | head 0: ..

Tokens are written to their slots; and for the products of an item the addresses of its groups are
listed, so that these need not know of blocks.

Called by ``attention_kernel``; :func:`write_body` is a kernel of its own.
"""

import numpy as np

from jitney.kernels.cpu.attention_records import (
    LIST_MARGIN,
    SPAN_GROUPS,
    WRITE_TOKENS,
    read_call,
)
from jitney.kernels.cpu.cache_groups import (
    GROUP_TOKENS,
    PREFETCH_GROUPS,
    copy_last_values,
    group_bytes,
    pack_key,
    pack_value,
    round_vector,
)
from jitney.kernels.cpu.simd import (
    fetch_add,
    has_scales,
    inner,
    load_i32,
    load_i64,
    second_bytes,
    store_i64,
)


@inner
def write_token(tag, cache_tag, call, t, kv_head):
    """Put K and V of flattened token ``t`` into its slot."""
    slot = load_i64(call.slots + 8 * t)
    block = slot // call.block_size
    offset = slot % call.block_size
    lane = offset % GROUP_TOKENS
    # Of all tokens of all heads, in the cache's order.
    index = (block * call.kv_heads + kv_head) * call.block_size + offset
    group_offset = index // GROUP_TOKENS * group_bytes(cache_tag, call.padded)
    keys = call.key_cache + group_offset
    values = call.value_cache + group_offset
    key = call.key + t * call.key_token_stride + kv_head * call.key_head_stride
    value = call.value + t * call.value_token_stride + kv_head * call.value_head_stride
    head_size = call.head_size
    padded = call.padded
    if has_scales(cache_tag):
        round_vector(
            tag, key, head_size, padded, group=keys, lane=lane, first=lane, step=GROUP_TOKENS
        )
        round_vector(
            tag, value, head_size, padded, group=values, lane=lane, first=lane * padded, step=1
        )
    else:
        pack_key(tag, key, head_size, padded, group=keys, lane=lane)
        pack_value(tag, value, head_size, padded, group=values, lane=lane)


@inner
def write_body(tag, cache_tag, arguments):
    """Write the new K and V; an item is WRITE_TOKENS tokens of one KV head."""
    call = read_call(arguments)
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        kv_head = item % call.kv_heads
        first = item // call.kv_heads * WRITE_TOKENS
        for t in range(first, min(first + WRITE_TOKENS, call.tokens)):
            write_token(tag, cache_tag, call, t, kv_head)


@inner
def list_groups(cache_tag, call, row, kv_head, first, limit, keys, values):
    """List the addresses of the K and V groups of positions [first, limit) of a row.

    ``first`` is a multiple of 16, ``keys`` and ``values`` the addresses of two int64 lists. Returns
    the number of groups.
    """
    # Where the current block's number is in the block table.
    block_at = call.table + (row * call.table_width + first // call.block_size) * 4
    size = group_bytes(cache_tag, call.padded)
    head_bytes = call.block_size // GROUP_TOKENS * size
    block_bytes = call.kv_heads * head_bytes
    # Bytes from the head's first group in the block to the current one.
    inside = first % call.block_size // GROUP_TOKENS * size
    count = -(-(limit - first) // GROUP_TOKENS)
    for g in range(count):
        block = np.int64(load_i32(block_at))
        at = block * block_bytes + kv_head * head_bytes + inside
        store_i64(keys + 8 * g, call.key_cache + at)
        store_i64(values + 8 * g, call.value_cache + at)
        inside += size
        if inside == head_bytes:
            inside = 0
            block_at += 4
    return count


@inner
def find_groups(cache_tag, call, entry, kv_head, upcoming, upcoming_head, scratch):
    """List the groups of an entry of the plan, and after them the first ones of ``upcoming``, which
    this thread computes next.

    What follows the groups in use is prefetched; it must be readable, and is not used.

    The last V group is replaced by a copy with zeros for the slots beyond the last key. Such a slot
    may hold a NaN, and a weight of zero times NaN is NaN. K needs no such care: the score of such a
    slot is hidden. Nor do bytes, which are all finite: only their scales may be NaN, and
    ``read_scales`` sets those of V to 0.
    """
    keys = scratch.key_groups
    values = scratch.value_groups
    n = list_groups(
        cache_tag,
        call,
        entry.row,
        kv_head,
        first=entry.keys_begin,
        limit=entry.keys_end,
        keys=keys,
        values=values,
    )
    last_tokens = (entry.keys_end - entry.keys_begin) % GROUP_TOKENS
    if last_tokens != 0 and not has_scales(cache_tag):
        where = values + 8 * (n - 1)
        source = load_i64(where)
        copy_last_values(cache_tag, source, call.padded, last_tokens, scratch.last_values)
        store_i64(where, scratch.last_values)
    begin = upcoming.keys_begin
    end = min(upcoming.keys_end, begin + PREFETCH_GROUPS * GROUP_TOKENS)
    more = list_groups(
        cache_tag,
        call,
        upcoming.row,
        upcoming_head,
        first=begin,
        limit=end,
        keys=keys + 8 * n,
        values=values + 8 * n,
    )
    # Fill up the margin with an address that can be read: that of the next entry's first group.
    for g in range(n + more, n + LIST_MARGIN):
        store_i64(keys + 8 * g, load_i64(keys + 8 * n))
        store_i64(values + 8 * g, load_i64(values + 8 * n))


@inner
def list_wide_groups(product_tag, padded, scratch):
    """List the addresses of a thread's widened groups, and behind them, as a margin that can be
    read, the first one's."""
    size = GROUP_TOKENS * padded * second_bytes(product_tag)
    for g in range(SPAN_GROUPS + LIST_MARGIN):
        offset = g * size if g < SPAN_GROUPS else 0
        store_i64(scratch.wide_key_groups + 8 * g, scratch.wide_keys + offset)
        store_i64(scratch.wide_value_groups + 8 * g, scratch.wide_values + offset)
