"""The paged attention kernel for the CPU, as Numba functions over raw addresses.

An *item* is a piece of the step's plan (some tokens of one row of the batch) and one KV head, with
all query heads that share it, so that keys and values are read once for all of these. Inside an
item, a *row* is a token and a query head. Here for 2 tokens and 3 query heads::

    row 0            row 1            row 2            row 3            row 4  ...
    token 0, head 0  token 0, head 1  token 0, head 2  token 1, head 0

The loops, from outer to inner::

    attend_body      items, which each thread takes from a counter
    attend_item        splits of 512 keys: for each the softmax begins anew; results are merged
    attend_split         spans of 256 keys: the softmax takes in one after the other
                         passes: a few rows at once, 6 by vectors, 16 by the tile unit
    attend_rows            scores, weights, outputs of these rows

``attend_split`` is in ``attention_spans``, ``attend_rows`` in ``attention_rows``. What is where:

- in registers, the sums of one product (``micro_kernel``);
- in the first-level cache, the scores and weights of a few rows and a span, 16 x 256 at most;
- in the second-level cache, the item's queries and states;
- streamed from memory, keys and values, each once for all rows of the item.

A kernel is compiled for three tags::

    tag            what the model computes in: queries, new keys and values, results
    cache_tag      what the cache holds
    product_tag    what products are computed of: queries and keys, weights and values

    model      cache       tag     cache_tag    product_tag    (*)
    float32    float32     F32     F32          F32
    bfloat16   bfloat16    BF16    BF16         BF16           WIDE
    float32    int8        F32     I8           F32
    bfloat16   int8        BF16    I8           BF16           F32

    (*) if the processor has no instruction that multiplies bfloat16

A cache of bytes is widened, exactly, to what products read. A key's scale then multiplies its
scores; a value's scale multiplies its weights, before these are rounded.

The splits of a decode are items of their own. Each leaves its states in memory; the item that ends
last merges them all.

A row's result is bitwise the same from a prefill, a chunk of one and a decode, whatever else is in
the batch. There are three reasons: spans and splits begin at the same positions for all; keys that
are hidden from a row add exact zeros to its sums; and a row's arithmetic does not depend on the
other rows of its item.

``paged_attention`` calls ``cache_blocks.write_body``, unless all rows decode, and then
:func:`attend_body` on every thread of a team, with the address of
``attention_records.AttentionArguments``; ``program`` calls both as steps of its own.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from jitney.kernels.cpu.amx import amx_end
from jitney.kernels.cpu.attention_plan import PIECE_BYTES
from jitney.kernels.cpu.attention_records import (
    SCRATCH_BYTES,
    SPLIT_TOKENS,
    read_call,
    read_piece,
    read_scratch,
)
from jitney.kernels.cpu.attention_spans import attend_split
from jitney.kernels.cpu.cache_blocks import (
    list_item_groups,
    list_widened_groups,
    write_body,
    write_token,
)
from jitney.kernels.cpu.cache_groups import load_some
from jitney.kernels.cpu.compiled import THREADS_BEGUN_OFFSET, Kernel
from jitney.kernels.cpu.emit import F32_BYTES, I64_BYTES, LANES, VECTOR_BYTES, round_up
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
    left_bytes,
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


class AttentionKernels(NamedTuple):
    """The two kernels of attention."""

    attend: Kernel
    """:func:`attend_body`."""
    write: Kernel
    """``cache_blocks.write_body``."""


def attention_kernels(dtype: torch.dtype, model_dtype: torch.dtype) -> AttentionKernels:
    """The kernels for caches of ``dtype``, compiled or loaded."""
    tag = TAGS[model_dtype]
    cache_tag = TAGS[dtype]
    product_tag = tag
    if model_dtype == torch.bfloat16 and must_widen_bf16():
        # WIDE widens keys and values when a product reads them. Bytes are widened before that in
        # any case, so they are widened to float32 at once.
        product_tag = F32 if dtype == torch.int8 else WIDE
    return AttentionKernels(
        attend=Kernel(lambda address: attend_body(tag, cache_tag, product_tag, address)),
        write=Kernel(lambda address: write_body(tag, cache_tag, address)),
    )


# --------------------------------------------------------------------------- items


@inner
def attend_body(tag, cache_tag, product_tag, arguments):
    """Take items until none is left.

    A thread takes its next item before it computes the current one, so that the first groups of the
    next one can be prefetched meanwhile.
    """
    call = read_call(arguments)
    thread = fetch_add(arguments + THREADS_BEGUN_OFFSET)
    scratch = read_scratch(call.scratch + thread * SCRATCH_BYTES)
    shaped = np.int64(0)
    if has_scales(cache_tag):
        list_widened_groups(product_tag, call.padded, scratch)
    item = fetch_add(arguments)  # the counter is the first field
    while item < call.count:
        next_item = fetch_add(arguments)
        # A thread's last item has no next one: then its own first groups are prefetched again.
        prefetched_item = next_item if next_item < call.count else item
        shaped = attend_item(
            tag,
            cache_tag,
            product_tag,
            call,
            item,
            prefetched_item=prefetched_item,
            scratch=scratch,
            shaped=shaped,
        )
        item = next_item
    if call.use_tiles != 0:
        amx_end()


@inner
def attend_item(tag, cache_tag, product_tag, call, item, prefetched_item, scratch, shaped):
    """Compute the rows of an item, and prefetch the first groups of another, ``prefetched_item``.

    This thread's tiles are set for ``shaped`` rows at once. Returns for how many they are set
    afterwards.
    """
    kv_head = item % call.kv_heads
    piece = read_piece(call.plan + item // call.kv_heads * PIECE_BYTES)
    next_head = prefetched_item % call.kv_heads
    next_piece = read_piece(call.plan + prefetched_item // call.kv_heads * PIECE_BYTES)
    rows = piece.num_tokens * call.heads_per_kv
    rows_at_once = min(rows, MAX_ROWS_AMX)
    if call.use_tiles != 0 and rows_at_once != shaped:
        shaped = rows_at_once
        begin_tiles(shaped)
    # If all rows decode, no other kernel has written the new token's key and value. They are the
    # last keys of the row, so they are written by the item that has its last split.
    if call.only_decodes != 0 and piece.split == piece.num_splits - 1:
        write_token(tag, cache_tag, call, piece.first_token, kv_head)
    copy_queries(tag, product_tag, call, piece, kv_head, rows=rows, scratch=scratch)
    list_item_groups(
        cache_tag,
        call,
        piece,
        kv_head,
        next_piece=next_piece,
        next_head=next_head,
        scratch=scratch,
    )
    # The keys are cut into splits at multiples of SPLIT_TOKENS, in a decode by the plan and else
    # here. Three cases:
    # 1. The piece is one of several splits of a decode. ``finish_split`` merges these.
    # 2. The piece has all keys of its tokens, and they fill several splits: the splits' states are
    #    merged here, one after the other, into the totals.
    # 3. The piece has all keys, and they fill one split: its states are the result. But if there
    #    are sinks, they are merged into the totals as in case 2: only the totals begin with sinks.
    first_split_begin = piece.keys_begin // SPLIT_TOKENS * SPLIT_TOKENS
    has_all_keys = piece.num_splits == 1
    fills_several_splits = piece.keys_end > first_split_begin + SPLIT_TOKENS
    merges = has_all_keys and (fills_several_splits or call.sinks != 0)
    if merges:
        begin_states(call, kv_head, rows, scratch.totals, call.sinks)
    for split_begin in range(first_split_begin, piece.keys_end, SPLIT_TOKENS):
        begin_states(call, kv_head, rows, scratch.states, 0)
        attend_split(cache_tag, product_tag, call, piece, split_begin, rows=rows, scratch=scratch)
        if merges:
            merge_states(call, rows, scratch.totals, scratch.states)
    if not has_all_keys:
        finish_split(tag, call, piece, kv_head, rows=rows, scratch=scratch)
    else:
        states = scratch.totals if merges else scratch.states
        write_rows(tag, call, piece, kv_head, rows, states=states, spare=scratch.scores)
    return shaped


@inner
def copy_queries(tag, product_tag, call, piece, kv_head, rows, scratch):
    """Copy the item's queries to the scratch memory, in the type of products.

    There are zeros beyond the head, and whole rows of zeros up to a multiple of 16 rows: a tile is
    loaded with the row count that it is set for, which may be over that of the last pass.
    """
    size = element_bytes(tag)
    product_size = left_bytes(product_tag)
    spare = vector_on_stack()
    filled_rows = round_up(rows, MAX_ROWS_AMX)
    for r in range(filled_rows):
        token = piece.first_token + r // call.heads_per_kv
        head = kv_head * call.heads_per_kv + r % call.heads_per_kv
        source = call.query + token * call.query_token_stride + head * call.query_head_stride
        elements = call.head_size if r < rows else 0
        target = scratch.queries + r * call.padded * product_size
        for d in range(0, call.padded, LANES):
            x = load_some(tag, source + d * size, elements - d, spare)
            store_as(product_tag, target + d * product_size, x)


@inner
def finish_split(tag, call, piece, kv_head, rows, scratch):
    """Keep the states of a split of a decode. If all other splits of the row have ended before,
    merge them, from the first one to the last, and write the result."""
    # The states are [splits, KV heads, rows of an item].
    rows_bytes = rows * state_bytes(call.padded)
    split_stride = call.kv_heads * rows_bytes
    first_states = call.split_states + piece.first_split * split_stride + kv_head * rows_bytes
    states = first_states + piece.split * split_stride
    for i in range(0, rows_bytes, VECTOR_BYTES):
        store(states + i, load(scratch.states + i))
    counter = call.splits_done + (piece.split_batch_row * call.kv_heads + kv_head) * I64_BYTES
    ended_before = fetch_add(counter)
    if ended_before != piece.num_splits - 1:
        return  # another item of this row, which ends later, merges
    store_i64(counter, 0)
    begin_states(call, kv_head, rows, scratch.totals, call.sinks)
    for split in range(piece.num_splits):
        merge_states(call, rows, scratch.totals, first_states + split * split_stride)
    write_rows(tag, call, piece, kv_head, rows, states=scratch.totals, spare=scratch.scores)


@inner
def write_rows(tag, call, piece, kv_head, rows, states, spare):
    """Write each row's result: its outputs divided by its sum. ``spare`` is overwritten."""
    size = element_bytes(tag)
    whole_vectors_end = call.head_size // LANES * LANES
    for r in range(rows):
        token = piece.first_token + r // call.heads_per_kv
        head = kv_head * call.heads_per_kv + r % call.heads_per_kv
        target = call.out + (token * call.heads + head) * call.head_size * size
        state = states + r * state_bytes(call.padded)
        inverse = splat(one_over_sum(state, call.padded))
        for d in range(0, whole_vectors_end, LANES):
            store_as(tag, target + d * size, load(state + d * F32_BYTES) * inverse)
        # A head size that is no multiple of 16: a whole vector would overwrite the next head, which
        # another thread may have written.
        if whole_vectors_end < call.head_size:
            last_vector = load(state + whole_vectors_end * F32_BYTES)
            store_as(tag, spare, last_vector * inverse)
            for d in range(whole_vectors_end, call.head_size):
                copy_element(tag, spare + (d - whole_vectors_end) * size, target + d * size)
