"""A split of the keys of an item: cut into spans, and each span met by all rows of the item.

``attention_kernel`` draws the loops. The rows of an item are taken in *passes* of 6 rows (16 with
the tile unit), each of which is a call of ``attention_rows.attend_rows``::

    attend_split        512 keys, all rows of the item
      spans of 256 keys: their scales are read and, if they are bytes, their groups are widened
        passes          a few rows against the span

A cache of bytes is widened before products read it. If an item takes several passes, a span is
widened as a whole, here, once for all of them. If it takes one pass, ``attention_rows`` widens
groups a few at a time, just before they are multiplied: so they stay in the first-level cache.

Called by ``attention_kernel``.
"""

from jitney.kernels.cpu.attention_records import SPAN_GROUPS, SPAN_TOKENS, SPLIT_TOKENS
from jitney.kernels.cpu.attention_rows import attend_rows
from jitney.kernels.cpu.cache_groups import (
    GROUP_TOKENS,
    PREFETCH_GROUPS,
    group_bytes,
    read_scales,
    widen_groups,
)
from jitney.kernels.cpu.emit import I64_BYTES, VECTOR_BYTES, ceil_div
from jitney.kernels.cpu.micro_kernel import MAX_ROWS, MAX_ROWS_AMX
from jitney.kernels.cpu.simd import has_scales, inlined, inner, load_i64, prefetch


@inner
def attend_split(cache_tag, product_tag, call, piece, split_begin, rows, scratch):
    """Add the keys of one split to the states of all rows of the item: those of positions
    split_begin to split_begin + SPLIT_TOKENS - 1, as far as the piece has them."""
    use_tiles = call.use_tiles != 0
    rows_at_once = MAX_ROWS_AMX if use_tiles else MAX_ROWS
    passes = ceil_div(rows, rows_at_once)
    # This function prefetches the next span only if nobody else does and all rows take one pass:
    # - in a cache of bytes, ``widen_groups`` does;
    # - by vectors, and by tiles with few rows, the micro-kernel does;
    # - with several passes there is no need: the first pass alone waits for memory, and the others
    #   find the span in the second-level cache.
    prefetches = not has_scales(cache_tag) and use_tiles and rows >= MAX_ROWS and passes == 1
    # Spans begin at multiples of SPAN_TOKENS, whatever the piece is, so that a row's sums are
    # always added up in the same order.
    first_span_begin = max(split_begin, piece.keys_begin // SPAN_TOKENS * SPAN_TOKENS)
    split_end = min(split_begin + SPLIT_TOKENS, piece.keys_end)
    for span_begin in range(first_span_begin, split_end, SPAN_TOKENS):
        # The piece may begin within its first span. The keys before are hidden from all its rows:
        # they would add zeros.
        first_key = max(span_begin, piece.keys_begin)
        span_end = min(span_begin + SPAN_TOKENS, piece.keys_end)
        num_keys = span_end - first_key
        first_group = (first_key - piece.keys_begin) // GROUP_TOKENS
        key_list = scratch.key_groups + first_group * I64_BYTES
        value_list = scratch.value_groups + first_group * I64_BYTES
        if has_scales(cache_tag):
            read_scales(call.padded, key_list, value_list, num_keys, scratch)
            if passes > 1:
                widen_span(
                    product_tag,
                    call.padded,
                    key_list,
                    value_list,
                    num_keys=num_keys,
                    scratch=scratch,
                )
        if prefetches:
            prefetch_span(cache_tag, call, piece, span_begin + SPAN_TOKENS, scratch)
        for number in range(passes):
            if use_tiles:
                # 16 rows in each pass, and in the last one what is left.
                first = number * MAX_ROWS_AMX
                end = min(rows, first + MAX_ROWS_AMX)
            else:
                # The same number of rows in each pass, or one more: 7 are 3 and 4, not 6 and 1.
                first = rows * number // passes
                end = rows * (number + 1) // passes
            attend_rows(
                cache_tag,
                product_tag,
                call,
                piece,
                first,
                rows=end - first,
                first_key=first_key,
                num_keys=num_keys,
                span_is_widened=passes > 1,
                key_list=key_list,
                value_list=value_list,
                scratch=scratch,
            )


@inlined
def widen_span(product_tag, padded, key_list, value_list, num_keys, scratch):
    """Widen all groups of a span of bytes."""
    count = ceil_div(num_keys, GROUP_TOKENS)
    widen_groups(
        product_tag,
        key_list,
        count,
        scratch.widened_keys,
        padded=padded,
        line_bytes=GROUP_TOKENS,
    )
    widen_groups(
        product_tag,
        value_list,
        count,
        scratch.widened_values,
        padded=padded,
        line_bytes=padded,
    )


@inner
def prefetch_span(cache_tag, call, piece, span_begin, scratch):
    """Prefetch keys and values of the span that begins at this position. Behind the piece's last
    group the lists go on with groups of the thread's next item: these are prefetched, too."""
    own_groups = ceil_div(piece.keys_end - piece.keys_begin, GROUP_TOKENS)
    listed_groups = own_groups + PREFETCH_GROUPS
    first = min((span_begin - piece.keys_begin) // GROUP_TOKENS, own_groups)
    for g in range(first, min(first + SPAN_GROUPS, listed_groups)):
        keys = load_i64(scratch.key_groups + g * I64_BYTES)
        values = load_i64(scratch.value_groups + g * I64_BYTES)
        for offset in range(0, group_bytes(cache_tag, call.padded), VECTOR_BYTES):
            prefetch(keys + offset)
            prefetch(values + offset)
