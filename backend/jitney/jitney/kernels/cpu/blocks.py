# mypy: disable-error-code="no-untyped-def"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""How the CPU kernel lays tokens out inside a block of the cache: writing and finding them.

A head's tokens lie in groups of 16: keys as [units of the head, 16 tokens], values as
[units of 16 tokens, head], where a unit is four bytes (``simd``), that is two neighbouring head
elements of a key, or one head element of two neighbouring tokens' values, if elements have two
bytes. So one vector load feeds the scores of 16 tokens, or 16 head elements of the output, and
nothing is summed across lanes. Block sizes are multiples of 16.
"""

import numpy as np

from jitney.kernels.cpu.layout import LIST_MARGIN, WRITE_TOKENS, read_call
from jitney.kernels.cpu.products import GROUP_TOKENS, PREFETCH_GROUPS, VECTOR_BYTES
from jitney.kernels.cpu.simd import (
    UNIT_BYTES,
    ZERO,
    copy_element,
    element_bytes,
    fetch_add,
    inner,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    store_one,
)


@inner
def pack_key(tag, source, head, padded, group, lane):
    """One token's key into lane ``lane`` of a group; zeros beyond the head."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    target = group + lane * UNIT_BYTES
    full = head // pairs
    for unit in range(full):
        store_i32(target + unit * VECTOR_BYTES, load_i32(source + unit * UNIT_BYTES))
    for unit in range(full, padded // pairs):
        store_i32(target + unit * VECTOR_BYTES, np.int32(0))
    if head % pairs != 0:
        copy_element(tag, source + (head - 1) * size, target + full * VECTOR_BYTES)


@inner
def pack_value(tag, source, head, padded, group, lane):
    """One token's value into lane ``lane`` of a group; zeros beyond the head."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    target = group + (lane // pairs) * padded * UNIT_BYTES + (lane % pairs) * size
    copy_vector(tag, source, head, padded, target, UNIT_BYTES)


@inner
def copy_vector(tag, source, head, padded, target, step):
    """One token's vector to every ``step`` bytes; zeros beyond the head."""
    for d in range(head):
        copy_element(tag, source + d * element_bytes(tag), target + d * step)
    for d in range(head, padded):
        store_one(tag, target + d * step, ZERO)


@inner
def write_token(tag, call, t, kv_head):
    """Put K and V of flattened token ``t`` into its slot."""
    slot = load_i64(call.slots + 8 * t)
    block, offset = slot // call.block_size, slot % call.block_size
    lane = offset % GROUP_TOKENS
    first = (block * call.kv_heads + kv_head) * call.block_size + offset - lane
    group = first * call.padded * element_bytes(tag)
    key = call.key + t * call.key_token_stride + kv_head * call.key_head_stride
    value = call.value + t * call.value_token_stride + kv_head * call.value_head_stride
    pack_key(tag, key, call.head_size, call.padded, call.key_cache + group, lane)
    pack_value(tag, value, call.head_size, call.padded, call.value_cache + group, lane)


@inner
def write_body(tag, arguments):
    """Write the new K and V; an item is WRITE_TOKENS tokens of one KV head."""
    call = read_call(arguments)
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        first = item // call.kv_heads * WRITE_TOKENS
        for t in range(first, min(first + WRITE_TOKENS, call.tokens)):
            write_token(tag, call, t, item % call.kv_heads)


@inner
def list_groups(tag, call, row, kv_head, first, limit, keys, values):
    """List the addresses of the K and V groups of positions [first, limit) of a row.

    ``first`` is a multiple of 16, ``keys`` and ``values`` the addresses of two int64 lists. Returns
    the number of groups.
    """
    entry = call.table + (row * call.table_width + first // call.block_size) * 4
    group_bytes = GROUP_TOKENS * call.padded * element_bytes(tag)
    plane = call.block_size // GROUP_TOKENS * group_bytes
    block_bytes = call.kv_heads * plane
    inside = first % call.block_size // GROUP_TOKENS * group_bytes
    count = -(-(limit - first) // GROUP_TOKENS)
    for g in range(count):
        at = np.int64(load_i32(entry)) * block_bytes + kv_head * plane + inside
        store_i64(keys + 8 * g, call.key_cache + at)
        store_i64(values + 8 * g, call.value_cache + at)
        inside += group_bytes
        if inside == plane:
            inside = 0
            entry += 4
    return count


@inner
def find_groups(tag, call, work, kv_head, upcoming, upcoming_head, at):
    """List the work's groups in ``at``, and after them the first ones of the thread's next item.

    What follows the groups in use is prefetched; it must be readable, and is not used. The last V
    group is copied with zeros for the slots beyond the last key: a weight of zero does not cancel
    what an unwritten slot may hold. (K needs no such care: its lanes do not mix.)
    """
    keys, values = at.key_groups, at.value_groups
    width = work.keys_end - work.keys_begin
    n = list_groups(
        tag, call, work.row, kv_head, work.keys_begin, work.keys_end, keys, values
    )  # fmt: skip
    if width % GROUP_TOKENS != 0:
        source = load_i64(values + 8 * (n - 1))
        copy_last_values(tag, source, call.padded, width % GROUP_TOKENS, at.last_values)
        store_i64(values + 8 * (n - 1), at.last_values)
    begin = upcoming.keys_begin
    end = min(upcoming.keys_end, begin + PREFETCH_GROUPS * GROUP_TOKENS)
    more = list_groups(
        tag, call, upcoming.row, upcoming_head, begin, end, keys + 8 * n, values + 8 * n
    )  # fmt: skip
    for g in range(n + more, n + LIST_MARGIN):
        store_i64(keys + 8 * g, load_i64(keys + 8 * n))
        store_i64(values + 8 * g, load_i64(values + 8 * n))


@inner
def copy_last_values(tag, source, padded, tokens, target):
    """The first ``tokens`` of a V group, and zeros for the rest."""
    pairs = UNIT_BYTES // element_bytes(tag)
    full = tokens // pairs * padded
    for i in range(full):
        store_i32(target + i * UNIT_BYTES, load_i32(source + i * UNIT_BYTES))
    for i in range(full, GROUP_TOKENS // pairs * padded):
        store_i32(target + i * UNIT_BYTES, np.int32(0))
    if tokens % pairs != 0:
        for d in range(padded):
            where = (full + d) * UNIT_BYTES
            copy_element(tag, source + where, target + where)
