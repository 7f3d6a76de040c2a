"""The paged attention kernel for the CPU, as Numba functions over raw addresses.

An item is an entry of the step's plan (some tokens of one row) and one KV head, with all query
heads of it together, so that K and V are read once for them. Its *rows* are (token, query head),
token by token. The loops, from outer to inner::

    items                       a thread takes them from a counter            attend_body
      splits of 512 keys        the softmax begins anew, results are merged   attend_item
        spans of 256 keys       one turn of the online softmax                attend_split, from
          rows, a few at once   6 of vectors, 16 of the tile unit             here on in
                                                                              ``attention_rows``
            scores   = queries x keys      per 4 groups of 16 tokens          multiply_keys
            weights  = softmax of scores   per row                            weigh_rows
            outputs += weights x values    per 64 elements of the head        multiply_values

In registers: the sums of one product (``micro_kernel``). In the first-level cache: the scores and
weights of a few rows and a span, 16 x 256 at most. In the second-level cache: the item's queries
and states. Streamed: K and V, each once for all rows of the item.

There are three element types: ``tag``, of queries, new keys and values, and results; ``cache_tag``;
and ``product_tag``, of products: queries and weights are WIDE where the processor multiplies no
bfloat16. A cache of bytes is widened, exactly, to what products read. A key's scale multiplies its
scores, and a value's its weights before they are rounded.

The splits of a row of one token are items of their own, and whichever ends last merges them.

A row's result is bitwise the same from a prefill, a piece of one and a decode, whatever else is in
the batch: spans and splits lie on one grid for all, keys that are hidden from a row add exact zeros
to its sums, and an item computes each row as it would alone.

``paged_attention`` calls ``cache_blocks.write_body``, unless all rows decode, and then
:func:`attend_body` on every thread of a team, with the address of
``attention_records.AttentionArguments``; ``program`` calls both as steps of its own.
"""

from typing import Any

import numpy as np
import torch

from jitney.kernels.cpu.amx import amx_end
from jitney.kernels.cpu.attention_plan import ENTRY_BYTES
from jitney.kernels.cpu.attention_records import (
    SCRATCH_BYTES,
    SPLIT_TOKENS,
    read_call,
    read_entry,
    read_scratch,
)
from jitney.kernels.cpu.attention_rows import attend_split
from jitney.kernels.cpu.cache_blocks import find_groups, list_wide_groups, write_body, write_token
from jitney.kernels.cpu.cache_groups import load_some
from jitney.kernels.cpu.compiled import THREADS_OFFSET, Kernel, source_version
from jitney.kernels.cpu.emit import LANES, VECTOR_BYTES
from jitney.kernels.cpu.micro_kernel import MAX_ROWS_AMX, begin_tiles
from jitney.kernels.cpu.processor import must_widen_bf16
from jitney.kernels.cpu.simd import (
    BF16,
    F32,
    I8,
    WIDE,
    copy_element,
    element_bytes,
    fetch_add,
    has_scales,
    inner,
    load,
    splat,
    store,
    store_as,
    store_i64,
    vector_on_stack,
)
from jitney.kernels.cpu.softmax import begin_states, merge_states, one_over_sum, state_bytes

TAGS: dict[torch.dtype, Any] = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: I8}
"""The tag of each dtype that a cache may have."""


def attention_kernels(dtype: torch.dtype, model_dtype: torch.dtype) -> tuple[Kernel, Kernel]:
    """:func:`attend_body` and ``write_body`` for caches of ``dtype``, compiled or loaded."""
    tag = TAGS[model_dtype]
    cache_tag = TAGS[dtype]
    version = source_version()
    product_tag = tag
    if model_dtype == torch.bfloat16 and must_widen_bf16():
        # Bytes are widened anyway: to float32 at once.
        product_tag = F32 if dtype == torch.int8 else WIDE
    return (
        Kernel(
            lambda address: attend_body(tag, cache_tag, product_tag, address) if version else None
        ),
        Kernel(lambda address: write_body(tag, cache_tag, address) if version else None),
    )


# --------------------------------------------------------------------------- items


@inner
def attend_body(tag, cache_tag, product_tag, arguments):
    """Take items until none is left. A thread takes its next item before it works on one, so that
    the next one's first groups are prefetched meanwhile."""
    call = read_call(arguments)
    thread = fetch_add(arguments + THREADS_OFFSET)
    scratch = read_scratch(call.scratch + thread * SCRATCH_BYTES)
    shaped = np.int64(0)
    if has_scales(cache_tag):
        list_wide_groups(product_tag, call.padded, scratch)
    item = fetch_add(arguments)
    while item < call.count:
        upcoming = fetch_add(arguments)
        # With its last item a thread prefetches that item's own first groups, which does no harm.
        following = upcoming if upcoming < call.count else item
        shaped = attend_item(
            tag,
            cache_tag,
            product_tag,
            call,
            item,
            following=following,
            scratch=scratch,
            shaped=shaped,
        )
        item = upcoming
    if call.tiles != 0:
        amx_end()


@inner
def attend_item(tag, cache_tag, product_tag, call, item, following, scratch, shaped):
    """The queries of an item against all keys of its entry. The tile unit is set for ``shaped``
    rows at once; returns for how many it is set afterwards."""
    kv_head = item % call.kv_heads
    entry = read_entry(call.plan + item // call.kv_heads * ENTRY_BYTES)
    next_entry = read_entry(call.plan + following // call.kv_heads * ENTRY_BYTES)
    rows = entry.num_tokens * call.heads_per_kv
    if call.tiles != 0 and min(rows, MAX_ROWS_AMX) != shaped:
        shaped = min(rows, MAX_ROWS_AMX)
        begin_tiles(shaped)
    # When all rows decode, nobody else writes the new token: the item that reads it does.
    if call.decode != 0 and entry.split == entry.num_splits - 1:
        write_token(tag, cache_tag, call, entry.first_token, kv_head)
    copy_queries(tag, product_tag, call, entry, kv_head, rows=rows, scratch=scratch)
    find_groups(
        cache_tag,
        call,
        entry,
        kv_head,
        upcoming=next_entry,
        upcoming_head=following % call.kv_heads,
        scratch=scratch,
    )
    first_split = entry.keys_begin // SPLIT_TOKENS * SPLIT_TOKENS
    # An entry that has all keys of its rows merges its splits into totals. It need not if there is
    # a single split and no sink: then the state over that split is the total. An entry that has one
    # split of several (num_splits > 1) leaves the merging to whoever ends last (finish_split).
    several = entry.keys_end > first_split + SPLIT_TOKENS
    merges = entry.num_splits == 1 and (several or call.sinks != 0)
    if merges:
        begin_states(call, kv_head, rows, scratch.totals, call.sinks)
    for split in range(first_split, entry.keys_end, SPLIT_TOKENS):
        begin_states(call, kv_head, rows, scratch.states, 0)
        attend_split(cache_tag, product_tag, call, entry, split, rows=rows, scratch=scratch)
        if merges:
            merge_states(call, rows, scratch.totals, scratch.states)
    if entry.num_splits > 1:
        finish_split(tag, call, entry, kv_head, rows=rows, scratch=scratch)
    else:
        states = scratch.totals if merges else scratch.states
        write_rows(tag, call, entry, kv_head, rows, states=states, spare=scratch.scores)
    return shaped


@inner
def copy_queries(tag, product_tag, call, entry, kv_head, rows, scratch):
    """The item's queries, in the type of products, with zeros beyond the head and up to a multiple
    of 16 rows."""
    size = element_bytes(tag)
    new_size = element_bytes(product_tag)
    spare = vector_on_stack()
    for r in range(-(-rows // LANES) * LANES):
        token = entry.first_token + r // call.heads_per_kv
        head = kv_head * call.heads_per_kv + r % call.heads_per_kv
        source = call.query + token * call.query_token_stride + head * call.query_head_stride
        elements = call.head_size if r < rows else 0
        target = scratch.queries + r * call.padded * new_size
        for d in range(0, call.padded, LANES):
            x = load_some(tag, source + d * size, elements - d, spare)
            store_as(product_tag, target + d * new_size, x)


@inner
def finish_split(tag, call, entry, kv_head, rows, scratch):
    """Keep this split's states; the last split of the row to end merges them all, in order."""
    size = rows * state_bytes(call.padded)
    first = call.states + (entry.first_split * call.kv_heads + kv_head) * size
    stride = call.kv_heads * size
    for i in range(0, size, VECTOR_BYTES):
        store(first + entry.split * stride + i, load(scratch.states + i))
    done = call.splits_done + (entry.split_row * call.kv_heads + kv_head) * 8
    if fetch_add(done) != entry.num_splits - 1:
        return
    store_i64(done, 0)
    begin_states(call, kv_head, rows, scratch.totals, call.sinks)
    for i in range(entry.num_splits):
        merge_states(call, rows, scratch.totals, first + i * stride)
    write_rows(tag, call, entry, kv_head, rows, states=scratch.totals, spare=scratch.scores)


@inner
def write_rows(tag, call, entry, kv_head, rows, states, spare):
    """Each row's output: its weighted values divided by its sum. ``spare`` is overwritten."""
    size = element_bytes(tag)
    whole = call.head_size // LANES * LANES
    for r in range(rows):
        token = entry.first_token + r // call.heads_per_kv
        head = kv_head * call.heads_per_kv + r % call.heads_per_kv
        target = call.out + (token * call.heads + head) * call.head_size * size
        state = states + r * state_bytes(call.padded)
        inverse = splat(one_over_sum(state, call.padded))
        for d in range(0, whole, LANES):
            store_as(tag, target + d * size, load(state + d * 4) * inverse)
        # A head that is no multiple of 16: a whole vector would overwrite the next head.
        if whole < call.head_size:
            store_as(tag, spare, load(state + whole * 4) * inverse)
            for e in range(call.head_size - whole):
                copy_element(tag, spare + e * size, target + (whole + e) * size)
