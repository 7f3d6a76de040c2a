"""Where the groups of a sequence are: blocks of the paged cache, seen as groups of 16 tokens.

A block has ``block_size`` tokens, a whole number of groups, of all KV heads. Here with two groups
to a block and two KV heads::

    block 0                                        block 1
    | head 0           | head 1           |        | head 0           | head 1           |
    | group 0, group 1 | group 0, group 1 |        | group 0, group 1 | group 0, group 1 |

Each new token is written to its slot. For an item of the attention kernel the addresses of its
groups are *listed*, those of keys in one list and those of values in another, so that products need
not know of blocks. A list is an array of int64; here of an entry with 100 keys::

    entries 0 to 6      its own groups
    entries 7 to 14     the first groups of the thread's next item: they are prefetched
    entries 15 to 18    other addresses that can be read: what is read there is not used

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
from jitney.kernels.cpu.emit import I64_BYTES
from jitney.kernels.cpu.simd import (
    fetch_add,
    has_scales,
    inner,
    load_i32,
    load_i64,
    second_bytes,
    store_i64,
)

_TABLE_ENTRY_BYTES = 4
"""Bytes of a block's number in the block table."""


# --------------------------------------------------------------------------- writing


@inner
def write_token(tag, cache_tag, call, t, kv_head):
    """Write the key and the value of token ``t`` of the step, for one KV head, to its slot."""
    slot = load_i64(call.slots + t * I64_BYTES)
    block = slot // call.block_size
    offset = slot % call.block_size
    groups_of_head = call.block_size // GROUP_TOKENS
    head_of_cache = block * call.kv_heads + kv_head
    group_of_cache = head_of_cache * groups_of_head + offset // GROUP_TOKENS
    group_offset = group_of_cache * group_bytes(cache_tag, call.padded)
    lane = offset % GROUP_TOKENS
    keys = call.key_cache + group_offset
    values = call.value_cache + group_offset
    key = call.key + t * call.key_token_stride + kv_head * call.key_head_stride
    value = call.value + t * call.value_token_stride + kv_head * call.value_head_stride
    head_size = call.head_size
    padded = call.padded
    if has_scales(cache_tag):
        round_vector(tag, key, head_size, padded, group=keys, lane=lane, is_key=True)
        round_vector(tag, value, head_size, padded, group=values, lane=lane, is_key=False)
    else:
        pack_key(tag, key, head_size, padded, group=keys, lane=lane)
        pack_value(tag, value, head_size, padded, group=values, lane=lane)


@inner
def write_body(tag, cache_tag, arguments):
    """Write the new keys and values. An item is WRITE_TOKENS tokens of one KV head."""
    call = read_call(arguments)
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.count:
            return
        kv_head = item % call.kv_heads
        first = item // call.kv_heads * WRITE_TOKENS
        for t in range(first, min(first + WRITE_TOKENS, call.tokens)):
            write_token(tag, cache_tag, call, t, kv_head)


# --------------------------------------------------------------------------- lists of groups


@inner
def list_groups(cache_tag, call, row, kv_head, first, limit, keys, values):
    """List the groups that hold the keys and values of a row's positions [first, limit).

    ``first`` is a multiple of 16. ``keys`` and ``values`` are the addresses of the two lists.
    Returns the number of groups.
    """
    size = group_bytes(cache_tag, call.padded)
    head_bytes = call.block_size // GROUP_TOKENS * size
    block_bytes = call.kv_heads * head_bytes
    # Where the number of the current block stands in the block table.
    table_entry = row * call.table_width + first // call.block_size
    block_number = call.table + table_entry * _TABLE_ENTRY_BYTES
    # Bytes from the head's first group in the current block to the current group.
    in_head = first % call.block_size // GROUP_TOKENS * size
    count = -(-(limit - first) // GROUP_TOKENS)
    for g in range(count):
        block = np.int64(load_i32(block_number))
        in_cache = block * block_bytes + kv_head * head_bytes + in_head
        store_i64(keys + g * I64_BYTES, call.key_cache + in_cache)
        store_i64(values + g * I64_BYTES, call.value_cache + in_cache)
        in_head += size
        if in_head == head_bytes:
            # The head's next group is the first one in the row's next block.
            in_head = 0
            block_number += _TABLE_ENTRY_BYTES
    return count


@inner
def find_groups(cache_tag, call, entry, kv_head, next_entry, next_head, scratch):
    """List the groups of an entry of the plan for one KV head, and behind them what else is read:
    the first groups of ``next_entry`` for ``next_head``, which this thread computes next, and the
    margin. See the module's docstring."""
    keys = scratch.key_groups
    values = scratch.value_groups
    count = list_groups(
        cache_tag,
        call,
        entry.row,
        kv_head,
        first=entry.keys_begin,
        limit=entry.keys_end,
        keys=keys,
        values=values,
    )
    tokens_of_last = (entry.keys_end - entry.keys_begin) % GROUP_TOKENS
    # The slots behind the last key may hold anything, even NaN. Their weights are 0, but 0 times
    # NaN is NaN: so the last group of values is replaced by a copy with zeros in these slots. Keys
    # need no copy, as the scores of these slots are hidden. Nor do bytes, as none of them is NaN:
    # ``read_scales`` sets the scales of these slots to 0.
    if tokens_of_last != 0 and not has_scales(cache_tag):
        last = values + (count - 1) * I64_BYTES
        source = load_i64(last)
        copy_last_values(cache_tag, source, call.padded, tokens_of_last, scratch.last_values)
        store_i64(last, scratch.last_values)
    next_begin = next_entry.keys_begin
    next_count = list_groups(
        cache_tag,
        call,
        next_entry.row,
        next_head,
        first=next_begin,
        limit=min(next_entry.keys_end, next_begin + PREFETCH_GROUPS * GROUP_TOKENS),
        keys=keys + count * I64_BYTES,
        values=values + count * I64_BYTES,
    )
    # The margin: any address that can be read will do, such as the next entry's first group.
    next_keys = load_i64(keys + count * I64_BYTES)
    next_values = load_i64(values + count * I64_BYTES)
    for g in range(count + next_count, count + LIST_MARGIN):
        store_i64(keys + g * I64_BYTES, next_keys)
        store_i64(values + g * I64_BYTES, next_values)


@inner
def list_wide_groups(product_tag, padded, scratch):
    """List a thread's widened groups, a span of them, and behind them the margin."""
    size = GROUP_TOKENS * padded * second_bytes(product_tag)
    for g in range(SPAN_GROUPS + LIST_MARGIN):
        # The margin is the first group, again and again: it can be read.
        offset = g * size if g < SPAN_GROUPS else 0
        store_i64(scratch.wide_key_groups + g * I64_BYTES, scratch.wide_keys + offset)
        store_i64(scratch.wide_value_groups + g * I64_BYTES, scratch.wide_values + offset)
