"""The paged attention kernel for the CPU, as Numba functions over raw addresses.

An item is an entry of the step's plan (some tokens of one row) and one KV head, with all query
heads of it together, so that K and V are read once for them. Its *rows* are (token, query head),
token by token. The loops, from outer to inner::

    items                       a thread takes them from a counter            attend_body
      splits of 512 keys        the softmax begins anew, results are merged   attend_item
        spans of 256 keys       one turn of the online softmax                attend_split
          rows, a few at once   6 of vectors, 16 of the tile unit             attend_rows
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
    PRODUCT_VECTORS,
    SCRATCH_BYTES,
    SPAN_GROUPS,
    SPAN_TOKENS,
    SPLIT_TOKENS,
    read_call,
    read_entry,
    read_scratch,
)
from jitney.kernels.cpu.cache_blocks import (
    find_groups,
    list_wide_groups,
    write_body,
    write_token,
)
from jitney.kernels.cpu.cache_groups import (
    GROUP_TOKENS,
    PREFETCH_GROUPS,
    load_some,
    read_scales,
    widen_groups,
)
from jitney.kernels.cpu.compiled import THREADS_OFFSET, Kernel, source_version
from jitney.kernels.cpu.emit import LANES, UNIT_BYTES, VECTOR_BYTES
from jitney.kernels.cpu.micro_kernel import (
    MAX_ROWS,
    MAX_ROWS_AMX,
    begin_tiles,
    make_micro_kernel,
)
from jitney.kernels.cpu.processor import widens
from jitney.kernels.cpu.simd import (
    BF16,
    F32,
    I8,
    LOG2_E,
    ONE,
    WIDE,
    ZERO,
    copy_element,
    element_bytes,
    fetch_add,
    has_scales,
    inlined,
    inner,
    load,
    load_i64,
    prefetch,
    second_bytes,
    splat,
    store,
    store_as,
    store_i64,
    vector_on_stack,
)
from jitney.kernels.cpu.softmax import (
    begin_states,
    merge_states,
    raise_maximum,
    scale_row,
    share_of,
    state_bytes,
    weigh_row,
)

TAGS: dict[torch.dtype, Any] = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: I8}
"""By cache type."""


def attention_kernels(dtype: torch.dtype, model_dtype: torch.dtype) -> tuple[Kernel, Kernel]:
    """:func:`attend_body` and ``write_body`` for caches of ``dtype``, compiled or found so."""
    tag = TAGS[model_dtype]
    cache_tag = TAGS[dtype]
    version = source_version()
    product_tag = tag
    if model_dtype == torch.bfloat16 and widens():
        # Bytes are widened anyway: to float32 at once.
        product_tag = F32 if dtype == torch.int8 else WIDE
    return (
        Kernel(
            lambda address: attend_body(tag, cache_tag, product_tag, address) if version else None
        ),
        Kernel(lambda address: write_body(tag, cache_tag, address) if version else None),
    )


multiply_groups = make_micro_kernel(PRODUCT_VECTORS, across=True, ahead=PREFETCH_GROUPS)
"""Scores: queries times PRODUCT_VECTORS groups of keys, 16 tokens in each vector."""
multiply_values_wide = make_micro_kernel(PRODUCT_VECTORS, across=False, ahead=PREFETCH_GROUPS)
"""Outputs: weights times all groups of values, PRODUCT_VECTORS times 16 elements of the head."""
multiply_values_narrow = make_micro_kernel(1, across=False, ahead=PREFETCH_GROUPS)
"""The same of 16 elements."""


# --------------------------------------------------------------------------- items


@inner
def attend_body(tag, cache_tag, product_tag, arguments):
    """Take items until none is left. A thread knows its next item while it works on one."""
    call = read_call(arguments)
    thread = fetch_add(arguments + THREADS_OFFSET)
    scratch = read_scratch(call.scratch + thread * SCRATCH_BYTES)
    shaped = np.int64(0)
    if has_scales(cache_tag):
        list_wide_groups(product_tag, call.padded, scratch)
    item = fetch_add(arguments)
    while item < call.count:
        upcoming = fetch_add(arguments)
        # Nothing follows the last item: it is read once more, which is harmless.
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
    # The only split of rows without sinks is their total.
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
        finish_split(tag, call, entry, kv_head, rows, scratch)
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
        there = call.head_size if r < rows else 0
        target = scratch.queries + r * call.padded * new_size
        for d in range(0, call.padded, LANES):
            x = load_some(tag, source + d * size, there - d, spare)
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
    """Each row's output: what it added up over its sum. ``spare`` is overwritten."""
    size = element_bytes(tag)
    whole = call.head_size // LANES * LANES
    for r in range(rows):
        token = entry.first_token + r // call.heads_per_kv
        head = kv_head * call.heads_per_kv + r % call.heads_per_kv
        target = call.out + (token * call.heads + head) * call.head_size * size
        state = states + r * state_bytes(call.padded)
        share = splat(share_of(state, call.padded))
        for d in range(0, whole, LANES):
            store_as(tag, target + d * size, load(state + d * 4) * share)
        # A head that is no multiple of 16: a whole vector would overwrite the next head.
        if whole < call.head_size:
            store_as(tag, spare, load(state + whole * 4) * share)
            for e in range(call.head_size - whole):
                copy_element(tag, spare + e * size, target + (whole + e) * size)


# --------------------------------------------------------------------------- spans


@inner
def attend_split(cache_tag, product_tag, call, entry, split, rows, scratch):
    """The states of all rows over those keys of the entry that are in the split that begins at
    ``split``.

    A span begins at a multiple of SPAN_TOKENS, or where the entry does: keys before that are hidden
    from all rows, and so no row's sums are added up in another order."""
    tiles = call.tiles != 0
    turns = -(-rows // (MAX_ROWS_AMX if tiles else MAX_ROWS))
    begin = max(split, entry.keys_begin // SPAN_TOKENS * SPAN_TOKENS)
    limit = min(split + SPLIT_TOKENS, entry.keys_end)
    for span in range(begin, limit, SPAN_TOKENS):
        base = max(span, entry.keys_begin)
        width = min(span + SPAN_TOKENS, entry.keys_end) - base
        at = (base - entry.keys_begin) // GROUP_TOKENS * 8
        keys = scratch.key_groups + at
        values = scratch.value_groups + at
        if has_scales(cache_tag):
            read_scales(call.padded, keys, values, width, scratch)
            if turns > 1:
                # Once for all rows, not again in each turn.
                widen_span(product_tag, call.padded, keys, values, width=width, scratch=scratch)
        elif tiles and rows >= MAX_ROWS and turns == 1:
            prefetch_span(cache_tag, call, entry, span + SPAN_TOKENS, scratch)
        for i in range(turns):
            # Tiles take 16 rows while they last; vectors share the rows out evenly.
            first = i * MAX_ROWS_AMX if tiles else rows * i // turns
            last = min(rows, first + MAX_ROWS_AMX) if tiles else rows * (i + 1) // turns
            attend_rows(
                cache_tag,
                product_tag,
                call,
                entry,
                first,
                rows=last - first,
                base=base,
                width=width,
                is_wide=turns > 1,
                keys=keys,
                values=values,
                scratch=scratch,
            )


@inlined
def widen_span(product_tag, padded, keys, values, width, scratch):
    """Widen all groups of a span of bytes, which are listed at ``keys`` and ``values``."""
    count = -(-width // GROUP_TOKENS)
    widen_groups(product_tag, keys, count, scratch.wide_keys, padded=padded, width=LANES)
    widen_groups(product_tag, values, count, scratch.wide_values, padded=padded, width=padded)


@inner
def prefetch_span(cache_tag, call, entry, base, scratch):
    """Ask for the K and V of the span at ``base``, or of the thread's next item: the products of
    few rows do so as they go, and in several turns most are found in the second-level cache."""
    count = -(-(entry.keys_end - entry.keys_begin) // GROUP_TOKENS)
    begin = min((base - entry.keys_begin) // GROUP_TOKENS, count)
    size = GROUP_TOKENS * call.padded * element_bytes(cache_tag)
    for g in range(begin, min(begin + SPAN_GROUPS, count + PREFETCH_GROUPS)):
        keys = load_i64(scratch.key_groups + 8 * g)
        values = load_i64(scratch.value_groups + 8 * g)
        for line in range(0, size, VECTOR_BYTES):
            prefetch(keys + line)
            prefetch(values + line)


# --------------------------------------------------------------------------- a few rows


@inner
def attend_rows(
    cache_tag,
    product_tag,
    call,
    entry,
    first,
    rows,
    base,
    width,
    is_wide,
    keys,
    values,
    scratch,
):
    """So many ``rows`` of an item, from ``first`` on, against the span of ``width`` keys at
    ``base``, whose groups are listed at ``keys`` and ``values``.

    Groups of bytes are widened here, a few at a time, unless they are already (``is_wide``)."""
    oldest = entry.position + first // call.heads_per_kv
    newest = entry.position + (first + rows - 1) // call.heads_per_kv
    # Groups that no row here may see are left out: those after it, and those before the window.
    groups = min(-(-width // GROUP_TOKENS), (newest - base) // GROUP_TOKENS + 1)
    hidden = np.int64(0)
    if call.window > 0:
        hidden = max(0, oldest - call.window + 1 - base) // GROUP_TOKENS
        base += hidden * GROUP_TOKENS
        groups -= hidden
    if groups <= 0:
        return
    keys += hidden * 8
    values += hidden * 8
    if has_scales(cache_tag) and is_wide:
        keys = scratch.wide_key_groups + hidden * 8
        values = scratch.wide_value_groups + hidden * 8
    widens_here = has_scales(cache_tag) and not is_wide
    queries = scratch.queries + first * call.padded * element_bytes(product_tag)
    states = scratch.states + first * state_bytes(call.padded)
    multiply_keys(
        product_tag,
        call,
        rows,
        queries,
        keys,
        groups=groups,
        widens_here=widens_here,
        scratch=scratch,
    )
    weigh_rows(
        cache_tag,
        product_tag,
        call,
        entry,
        first,
        rows=rows,
        base=base,
        groups=groups,
        states=states,
        scales=hidden * VECTOR_BYTES,
        scratch=scratch,
    )
    multiply_values(
        product_tag,
        call,
        rows,
        values,
        groups=groups,
        widens_here=widens_here,
        states=states,
        scratch=scratch,
    )


@inlined
def multiply_keys(product_tag, call, rows, queries, keys, groups, widens_here, scratch):
    """Scores of so many rows and groups of keys: PRODUCT_VECTORS groups at a time, of the last ones
    more than are asked for."""
    stride = call.padded * element_bytes(product_tag)
    units = call.padded * second_bytes(product_tag) // UNIT_BYTES
    for g in range(0, groups, PRODUCT_VECTORS):
        sources = keys + 8 * g
        if widens_here:
            count = min(PRODUCT_VECTORS, groups - g)
            widen_groups(
                product_tag,
                sources,
                count,
                scratch.wide_keys,
                padded=call.padded,
                width=LANES,
            )
            sources = scratch.wide_key_groups
        multiply_groups(
            product_tag,
            call.tiles != 0,
            rows,
            left=queries,
            left_stride=stride,
            sources=sources,
            count=1,
            units=units,
            step=VECTOR_BYTES,
            offset=0,
            out=scratch.scores + g * VECTOR_BYTES,
            out_stride=SPAN_TOKENS * 4,
        )


@inlined
def weigh_rows(
    cache_tag,
    product_tag,
    call,
    entry,
    first,
    rows,
    base,
    groups,
    states,
    scales,
    scratch,
):
    """Weights of so many rows, of their scores of groups from position ``base`` on; the scales of
    their keys and values are ``scales`` bytes further on than those of the span."""
    # Capped scores are in base 2 already.
    factor = ONE if call.softcap != ZERO else call.scale * LOG2_E
    # In two turns, so that the processor has several rows under way at once in the first one.
    for r in range(rows):
        position = entry.position + (first + r) // call.heads_per_kv
        low = position - call.window + 1 - base
        raise_maximum(
            cache_tag,
            scores=scratch.scores + r * SPAN_TOKENS * 4,
            groups=groups,
            low=low if call.window > 0 else 0,
            high=position + 1 - base,
            scale=call.scale,
            softcap=call.softcap,
            factor=factor,
            behind=states + r * state_bytes(call.padded) + 4 * call.padded,
            key_scales=scratch.key_scales + scales,
        )
    for r in range(rows):
        state = states + r * state_bytes(call.padded)
        rescale = weigh_row(
            cache_tag,
            product_tag,
            scores=scratch.scores + r * SPAN_TOKENS * 4,
            weights=scratch.weights + r * SPAN_TOKENS * element_bytes(product_tag),
            groups=groups,
            factor=factor,
            behind=state + 4 * call.padded,
            value_scales=scratch.value_scales + scales,
        )
        if rescale != ONE:
            scale_row(state, call.padded, rescale)


@inlined
def multiply_values(product_tag, call, rows, values, groups, widens_here, states, scratch):
    """Outputs += weights times values, of so many rows and groups."""
    if not widens_here:
        add_values(product_tag, call, rows, scratch.weights, values, groups=groups, states=states)
        return
    for g in range(0, groups, PRODUCT_VECTORS):
        count = min(PRODUCT_VECTORS, groups - g)
        widen_groups(
            product_tag,
            values + 8 * g,
            count,
            scratch.wide_values,
            padded=call.padded,
            width=call.padded,
        )
        add_values(
            product_tag,
            call,
            rows,
            scratch.weights + g * LANES * element_bytes(product_tag),
            scratch.wide_value_groups,
            groups=count,
            states=states,
        )


@inner
def add_values(product_tag, call, rows, weights, values, groups, states):
    """Outputs += weights times values that are as products read them, for all head elements."""
    tiles = call.tiles != 0
    stride = SPAN_TOKENS * element_bytes(product_tag)
    step = call.padded * UNIT_BYTES
    units = GROUP_TOKENS * second_bytes(product_tag) // UNIT_BYTES
    at_once = PRODUCT_VECTORS * LANES
    wide = call.padded // at_once * at_once
    for d in range(0, wide, at_once):
        multiply_values_wide(
            product_tag,
            tiles,
            rows,
            left=weights,
            left_stride=stride,
            sources=values,
            count=groups,
            units=units,
            step=step,
            offset=d * UNIT_BYTES,
            out=states + d * 4,
            out_stride=state_bytes(call.padded),
        )
    for d in range(wide, call.padded, LANES):
        multiply_values_narrow(
            product_tag,
            tiles,
            rows,
            left=weights,
            left_stride=stride,
            sources=values,
            count=groups,
            units=units,
            step=step,
            offset=d * UNIT_BYTES,
            out=states + d * 4,
            out_stride=state_bytes(call.padded),
        )
