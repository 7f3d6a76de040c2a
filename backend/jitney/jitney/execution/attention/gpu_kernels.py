# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""The kernel in the Triton language of attention over the paged cache.

Compiled at first use by ``gpu.GpuAttention``, which alone launches it. The same query head order,
causality, window, cap and sinks as :class:`attention.AttentionFunction`. Scores are kept in units
of log2, so that one exponential of base 2 does; maxima, sums and results are float32.

The query heads that share a KV head are packed with the tokens of a tile into its rows: row i of a
tile is token ``i // GROUP`` and head ``i % GROUP``, so that each K and V is loaded once per group.
A row of the batch with one new token is cut along its context into parts, one program each; a
longer one is cut into tiles of tokens. Tiles of the context begin at multiples of BLOCK_N of the
position, whatever the queries: a position meets the same tiles in every chunk.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter holds bfloat16 as integers and would multiply those."""


@triton.jit
def row_offset(
    block, head, token, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """int64: where in a cache [blocks, KV_HEADS, BLOCK_SIZE, PADDED] a token's elements begin."""
    inside = (head * BLOCK_SIZE + token) * PADDED  # of one block: fits 32 bits
    return block.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * PADDED) + inside


@triton.jit
def part_span(
    context, low, num_parts, MIN_PART: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(begin, size, parts): the keys low to context - 1 are in ``parts`` parts of ``size`` keys
    from ``begin`` on, both multiples of BLOCK_N. With SEGMENT they depend on nothing else."""
    if SEGMENT:
        begin = low // SEGMENT * SEGMENT
        size = begin * 0 + SEGMENT
    else:
        begin = low // BLOCK_N * BLOCK_N
        size = tl.cdiv(tl.cdiv(context - begin, num_parts), BLOCK_N) * BLOCK_N
        size = tl.maximum(size, MIN_PART)
    return begin, size, tl.cdiv(context - begin, size)


@triton.jit
def merge(top, total, result, part_top, part_total, part_result):
    """Two online softmaxes as one. A part without keys (top -inf, sums 0) changes no bit."""
    largest = tl.maximum(top, part_top)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    old, new = tl.exp2(top - safe), tl.exp2(part_top - safe)
    # One rounding each: a compiler that contracts products and sums has nothing to choose.
    total = tl.fma(total, old, part_total * new)
    result = tl.fma(result, old[:, None], part_result * new[:, None])
    return largest, total, result


@triton.jit
def finish(top, total, result, sink, factor):
    """The softmax's quotient, its denominator with one more logit; 0 where there was no key."""
    if sink is not None:
        largest = tl.maximum(top, sink)
        scale = tl.exp2(top - largest)
        total = tl.fma(total, scale, tl.exp2(sink - largest))
    else:
        scale = total * 0.0 + 1.0
    scale = scale * factor / tl.where(total == 0.0, 1.0, total)
    return result * scale[:, None]


@triton.jit
def _attend(
    query, top, total, result,
    keys, values, table, head, begin, end, first, position, scale, softcap, window,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys begin (a multiple of BLOCK_N) to end - 1 of a sequence.

    MASKED: some are before ``first`` (and may never have been written) or hidden from a query.
    """
    element = tl.arange(0, HEAD_TILE)
    # The block numbers of a tile are loaded while the tile before it is computed: the pipeliner
    # then sees loads of K and V whose addresses are known, and keeps its stages for them.
    place = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + place // BLOCK_SIZE, (place >= first) & (place < end), other=0)
    for start in tl.range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = (place >= first) & (place < end)
        following = place + BLOCK_N
        next_block = tl.load(table + following // BLOCK_SIZE, following < end, other=0)
        row = row_offset(block, head, place % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, PADDED)
        offset = row[:, None] + element[None, :]
        if MASKED or HEAD_SIZE < HEAD_TILE:
            if HEAD_SIZE == HEAD_TILE:
                wanted = inside[:, None]
            elif MASKED:
                wanted = inside[:, None] & (element < HEAD_SIZE)[None, :]
            else:
                wanted = (element < HEAD_SIZE)[None, :]
            k = tl.load(keys + offset, mask=wanted, other=0.0)
            v = tl.load(values + offset, mask=wanted, other=0.0)
        else:
            k = tl.load(keys + offset)
            v = tl.load(values + offset)
        k, v = k.to(query.dtype), v.to(query.dtype)
        if INTERPRETED:
            scores = tl.dot(query.to(tl.float32), k.to(tl.float32).T, input_precision="ieee")
        else:
            scores = tl.dot(query, k.T, input_precision="ieee")
        if softcap is not None:  # tanh(x) = 1 - 2 / (exp(2x) + 1), also at both infinities
            power = tl.exp2(scores * (scale * 2.0 / softcap))
            scores = softcap * (1.0 - 2.0 / (power + 1.0))
        factor = scale if softcap is None else LOG2_E
        if MASKED:
            seen = inside[None, :] & (place[None, :] <= position[:, None])
            if window is not None:
                seen &= place[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        # The factor is positive: it is applied to the maximum, and in the exponent by one fma.
        largest = tl.maximum(top, tl.max(scores, 1) * factor)
        safe = largest
        if MASKED:
            safe = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.exp2(tl.fma(scores, factor, -safe[:, None]))
        shrink = tl.exp2(top - safe)
        total = tl.fma(total, shrink, tl.sum(weight, 1))
        result = result * shrink[:, None]
        weight = weight.to(query.dtype)
        if INTERPRETED:
            result += tl.dot(weight.to(tl.float32), v.to(tl.float32), input_precision="ieee")
        else:
            result = tl.dot(weight, v, result, input_precision="ieee")
        top, block = largest, next_block
    return top, total, result


@triton.jit
def _attend_span(
    query, keys, values, table, head, begin, end, first, position, first_position,
    scale, softcap, window,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys begin to end - 1 for a tile of queries, its lowest position
    ``first_position``: (largest score, sum of weights, weighted sum of V)."""
    ROWS: tl.constexpr = query.shape[0]
    HEAD_TILE: tl.constexpr = query.shape[1]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_TILE], tl.float32)
    if window is None and not ALWAYS_MASKED:
        # Whole tiles that every query sees need no mask.
        middle = (
            begin + tl.maximum(tl.minimum(end, first_position + 1) - begin, 0) // BLOCK_N * BLOCK_N
        )
        top, total, result = _attend(
            query, top, total, result, keys, values, table, head, begin, middle, first, position,
            scale, softcap, window,
            KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, HEAD_TILE, BLOCK_N, False,
        )  # fmt: skip
    else:
        middle = begin
    return _attend(
        query, top, total, result, keys, values, table, head, middle, end, first, position,
        scale, softcap, window,
        KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, HEAD_TILE, BLOCK_N, True,
    )  # fmt: skip


@triton.jit
def _attend_segments(
    query, keys, values, table, head, begin, end, first, position, first_position,
    scale, softcap, window,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """As :func:`_attend_span`; with SEGMENT, one after another the very parts that other programs
    may compute, merged as :func:`reduction_kernel` does: bitwise the same."""
    if SEGMENT:
        ROWS: tl.constexpr = query.shape[0]
        HEAD_TILE: tl.constexpr = query.shape[1]
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, HEAD_TILE], tl.float32)
        for start in tl.range(begin, end, SEGMENT):
            part_top, part_total, part_result = _attend_span(
                query, keys, values, table, head, start, tl.minimum(start + SEGMENT, end), first,
                position, first_position, scale, softcap, window,
                KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N, True,
            )  # fmt: skip
            top, total, result = merge(top, total, result, part_top, part_total, part_result)
    else:
        top, total, result = _attend_span(
            query, keys, values, table, head, begin, end, first, position, first_position,
            scale, softcap, window,
            KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N, ALWAYS_MASKED,
        )  # fmt: skip
    return top, total, result


@triton.jit
def _decode(
    out, part_results, part_tops, part_totals,
    query, keys, values, factor, sinks, table, context, row, part, token, head,
    scale, softcap, window, num_parts, query_token_stride, query_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PART: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One part of a row with one new token, for all query heads of a KV head."""
    low = context * 0
    if window is not None:
        low = tl.maximum(context - window, 0)
    begin, size, parts = part_span(context, low, num_parts, MIN_PART, SEGMENT, BLOCK_N)
    if part < tl.maximum(parts, 1):
        index, element = tl.arange(0, ROWS), tl.arange(0, HEAD_TILE)
        query_head = head * GROUP + index
        real = (index < GROUP)[:, None] & (element < HEAD_SIZE)[None, :]
        start = query + token * query_token_stride
        q = tl.load(
            start + query_head[:, None] * query_head_stride + element[None, :], real, other=0.0
        ).to(OPERAND)
        end = context
        if num_parts > 1:
            begin += part * size
            end = tl.minimum(begin + size, context)
        position = index * 0 + (context - 1)
        top, total, result = _attend_segments(
            q, keys, values, table, head, begin, end, low, position, context - 1,
            scale, softcap, window,
            KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N, SEGMENT, True,
        )  # fmt: skip
        if (num_parts > 1) & (parts > 1):
            heads: tl.constexpr = KV_HEADS * GROUP
            at = (row.to(tl.int64) * heads + query_head) * num_parts + part
            tl.store(part_tops + at, top, index < GROUP)
            tl.store(part_totals + at, total, index < GROUP)
            tl.store(part_results + at[:, None] * HEAD_SIZE + element[None, :], result, real)
        else:
            sink = None
            if sinks is not None:
                sink = tl.load(sinks + query_head, index < GROUP, other=0.0) * LOG2_E
            result = finish(top, total, result, sink, factor)
            start = out + token * (KV_HEADS * GROUP * HEAD_SIZE)
            place = query_head[:, None] * HEAD_SIZE + element[None, :]
            tl.store(start + place, result.to(out.dtype.element_ty), real)


@triton.jit
def _chunk(
    out, query, keys, values, factor, sinks, table, context, begin, length, skipped, head,
    scale, softcap, window, query_token_stride, query_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The tile of a row's new tokens that begins ``skipped`` after the first of ``length``."""
    TOKENS: tl.constexpr = ROWS // GROUP
    index, element = tl.arange(0, ROWS), tl.arange(0, HEAD_TILE)
    nth = skipped + index // GROUP
    query_head = head * GROUP + index % GROUP
    real_row = (index < TOKENS * GROUP) & (nth < length)
    real = real_row[:, None] & (element < HEAD_SIZE)[None, :]
    token = (begin + nth).to(tl.int64)
    place = token * query_token_stride + query_head * query_head_stride
    q = tl.load(query + place[:, None] + element[None, :], real, other=0.0).to(OPERAND)
    first_position = context - length + skipped
    end = tl.minimum(first_position + TOKENS, context)
    low = context * 0
    if window is not None:
        low = tl.maximum(first_position - window + 1, 0)
    unit: tl.constexpr = SEGMENT if SEGMENT else BLOCK_N
    top, total, result = _attend_segments(
        q, keys, values, table, head, low // unit * unit, end, low, context - length + nth,
        first_position, scale, softcap, window,
        KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N, SEGMENT, False,
    )  # fmt: skip
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + query_head, real_row, other=0.0) * LOG2_E
    result = finish(top, total, result, sink, factor)
    place = (token * (KV_HEADS * GROUP) + query_head) * HEAD_SIZE
    tl.store(out + place[:, None] + element[None, :], result.to(out.dtype.element_ty), real)


@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "window", "table_stride"],
    do_not_specialize_on_alignment=["part_tops", "part_totals"],  # it changes with the step
)
def attention_kernel(
    out, part_results, part_tops, part_totals,
    query, keys, values, key_scale, value_scale, sinks,
    block_table, context_len, query_start,
    scale, softcap, window, num_rows, num_parts,
    query_token_stride, query_head_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, OPERAND: tl.constexpr,
    DECODE_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_PART: tl.constexpr, SEGMENT: tl.constexpr, ONLY_DECODES: tl.constexpr,
):  # fmt: skip
    """Programs (num_rows * num_parts + tiles, KV heads). The first compute a part of a row that has
    one new token, the others a tile of a longer row's; what has no work ends at once.

    out is [T, heads, HEAD_SIZE]; part_results float32 [rows, heads, num_parts, HEAD_SIZE] and the
    other two [rows, heads, num_parts] are written where a row has more than one part.
    ``scale`` is in units of log2, and includes no scale of the cache.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    factor = 1.0
    if key_scale is not None:
        scale = scale * tl.load(key_scale + head)
        factor = tl.load(value_scale + head)
    if program < num_rows * num_parts:
        row, part = program // num_parts, program % num_parts
        token, length = row, 1
        if not ONLY_DECODES:
            token = tl.load(query_start + row)
            length = tl.load(query_start + row + 1) - token
        context = tl.load(context_len + row)
        if length == 1:
            _decode(
                out, part_results, part_tops, part_totals,
                query, keys, values, factor, sinks, block_table + row.to(tl.int64) * table_stride,
                context, row, part, token.to(tl.int64), head,
                scale, softcap, window, num_parts, query_token_stride, query_head_stride,
                KV_HEADS, GROUP, HEAD_SIZE, PADDED, HEAD_TILE, BLOCK_SIZE, OPERAND, DECODE_ROWS,
                BLOCK_N, MIN_PART, SEGMENT,
            )  # fmt: skip
    elif not ONLY_DECODES:
        # Later tiles of a row have more keys: they go first.
        tile = tl.num_programs(0) - 1 - program
        TOKENS: tl.constexpr = TILE_ROWS // GROUP
        row, upper = num_rows * 0, num_rows
        while upper - row > 1:  # the last row whose tiles begin at or before this one
            middle = (row + upper) // 2
            if tl.load(query_start + middle) // TOKENS + middle <= tile:
                row = middle
            else:
                upper = middle
        begin = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - begin
        skipped = (tile - begin // TOKENS - row) * TOKENS
        if (length > 1) & (skipped < length):
            _chunk(
                out, query, keys, values, factor, sinks,
                block_table + row.to(tl.int64) * table_stride,
                tl.load(context_len + row), begin, length, skipped, head,
                scale, softcap, window, query_token_stride, query_head_stride,
                KV_HEADS, GROUP, HEAD_SIZE, PADDED, HEAD_TILE, BLOCK_SIZE, OPERAND, TILE_ROWS,
                BLOCK_N, SEGMENT,
            )  # fmt: skip
