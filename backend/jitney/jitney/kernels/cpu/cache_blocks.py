"""Where the groups of a sequence are: blocks of the paged cache, seen as groups of 16 tokens.

A block has ``block_size`` tokens, a whole number of groups, of all KV heads. Here with two groups
to a block and two KV heads::

    block 0                                        block 1
    | head 0           | head 1           |        | head 0           | head 1           |
    | group 0, group 1 | group 0, group 1 |        | group 0, group 1 | group 0, group 1 |

Each new token is written to its slot. For an item of the attention kernel the addresses of its
groups are *listed*, those of keys in one list and those of values in another, so that products need
not know of blocks. A list is an array of int64; here for an item with 100 keys::

    list[0 to 6]      its own groups
    list[7 to 14]     the first groups of the thread's next item: they are prefetched
    list[15 to 18]    other addresses that can be read: what is read there is not used

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
    round_key,
    round_value,
)
from jitney.kernels.cpu.emit import I64_BYTES, ceil_div
from jitney.kernels.cpu.simd import (
    fetch_add,
    has_scales,
    inlined,
    inner,
    load_i32,
    load_i64,
    right_bytes,
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
    token_in_block = slot % call.block_size
    # In the cache all groups of one head of a block stand side by side; then comes the next head.
    groups_per_head = call.block_size // GROUP_TOKENS
    heads_before = block * call.kv_heads + kv_head
    groups_before = heads_before * groups_per_head + token_in_block // GROUP_TOKENS
    group_offset = groups_before * group_bytes(cache_tag, call.padded)
    lane = token_in_block % GROUP_TOKENS
    keys = call.key_cache + group_offset
    values = call.value_cache + group_offset
    key = call.key + t * call.key_token_stride + kv_head * call.key_head_stride
    value = call.value + t * call.value_token_stride + kv_head * call.value_head_stride
    head_size = call.head_size
    padded = call.padded
    if has_scales(cache_tag):
        round_key(tag, key, head_size, padded, group=keys, lane=lane)
        round_value(tag, value, head_size, padded, group=values, lane=lane)
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
def list_groups(cache_tag, call, batch_row, kv_head, first, end, keys, values):
    """List the groups that hold the keys and values of a batch row's positions [first, end).

    ``first`` is a multiple of 16. ``keys`` and ``values`` are the addresses of the two lists.
    Returns the number of groups.
    """
    size = group_bytes(cache_tag, call.padded)
    head_bytes = call.block_size // GROUP_TOKENS * size
    block_bytes = call.kv_heads * head_bytes
    # The entry of the block table that holds the number of the current block.
    entry_index = batch_row * call.table_width + first // call.block_size
    entry_address = call.table + entry_index * _TABLE_ENTRY_BYTES
    # Bytes from the head's first group in the current block to the current group.
    offset_in_head = first % call.block_size // GROUP_TOKENS * size
    count = ceil_div(end - first, GROUP_TOKENS)
    for g in range(count):
        block = np.int64(load_i32(entry_address))
        offset = block * block_bytes + kv_head * head_bytes + offset_in_head
        store_i64(keys + g * I64_BYTES, call.key_cache + offset)
        store_i64(values + g * I64_BYTES, call.value_cache + offset)
        offset_in_head += size
        if offset_in_head == head_bytes:
            # The head's next group is the first one in the row's next block.
            offset_in_head = 0
            entry_address += _TABLE_ENTRY_BYTES
    return count


@inner
def list_item_groups(cache_tag, call, piece, kv_head, next_piece, next_head, scratch):
    """List all groups that are read for an item: see the module's docstring. The item is ``piece``
    and ``kv_head``; the thread's next item is ``next_piece`` and ``next_head``."""
    keys = scratch.key_groups
    values = scratch.value_groups
    count = list_groups(
        cache_tag,
        call,
        piece.batch_row,
        kv_head,
        first=piece.keys_begin,
        end=piece.keys_end,
        keys=keys,
        values=values,
    )
    tokens_of_last = (piece.keys_end - piece.keys_begin) % GROUP_TOKENS
    if tokens_of_last != 0 and not has_scales(cache_tag):
        last_values = values + (count - 1) * I64_BYTES
        replace_last_values(cache_tag, call, last_values, tokens_of_last, scratch)
    # Behind these, the first groups of the next item.
    next_keys = keys + count * I64_BYTES
    next_values = values + count * I64_BYTES
    next_begin = next_piece.keys_begin
    next_count = list_groups(
        cache_tag,
        call,
        next_piece.batch_row,
        next_head,
        first=next_begin,
        end=min(next_piece.keys_end, next_begin + PREFETCH_GROUPS * GROUP_TOKENS),
        keys=next_keys,
        values=next_values,
    )
    fill_margin(next_keys, next_count)
    fill_margin(next_values, next_count)


@inlined
def replace_last_values(cache_tag, call, last_values, tokens, scratch):
    """Replace the item's last group of values, whose address in the list is at ``last_values``, by
    a copy that has zeros behind its first ``tokens``.

    The slots behind the last key may hold anything, even NaN. Their weights are 0, but 0 times NaN
    is NaN. Keys need no copy, as the scores of these slots are hidden. Nor do bytes, as none of
    them is NaN: ``read_scales`` sets the scales of these slots to 0.
    """
    source = load_i64(last_values)
    copy_last_values(cache_tag, source, call.padded, tokens, scratch.last_values)
    store_i64(last_values, scratch.last_values)


@inlined
def fill_margin(addresses, count):
    """Fill the margin of a list, behind ``count`` addresses of the next item. Any address that can
    be read will do, such as the first of these."""
    readable = load_i64(addresses)
    for g in range(count, LIST_MARGIN):
        store_i64(addresses + g * I64_BYTES, readable)


@inner
def list_widened_groups(product_tag, padded, scratch):
    """List a thread's widened groups, a span of them, and behind them the margin."""
    size = GROUP_TOKENS * padded * right_bytes(product_tag)
    for g in range(SPAN_GROUPS + LIST_MARGIN):
        # The margin is the first group, again and again: it can be read.
        offset = g * size if g < SPAN_GROUPS else 0
        store_i64(scratch.widened_key_groups + g * I64_BYTES, scratch.widened_keys + offset)
        store_i64(scratch.widened_value_groups + g * I64_BYTES, scratch.widened_values + offset)
