"""The kernels in the Triton language of attention over the paged cache.

Compiled at first use by ``gpu_attention.GpuAttention``, which alone launches them. Query heads,
causality, window, cap and sinks are those of :class:`execution.attention.AttentionFunction`. Scores
are in units of log2, so that one exponential of base 2 does; maxima, sums and results are float32.

The query heads that share a KV head are packed with the tokens of a tile into its rows: row i of a
tile is token ``i // GROUP`` and head ``i % GROUP``. So each K and V is loaded once for the group.

- A row of the batch with one new token is cut along its context into parts, one program each, which
  ``reduction_kernel`` joins.
- A longer row of the batch is cut along its new tokens into tiles, one program each.

Tiles of the context begin at multiples of BLOCK_N of the position, whatever the queries: a position
meets the same tiles in every chunk.

| name | meaning |
|---|---|
| KV_HEADS, GROUP | KV heads, and the query heads that share one |
| HEAD_SIZE | elements of a head |
| PADDED | elements that a head's row in the cache has, HEAD_SIZE or more |
| HEAD_TILE | HEAD_SIZE, rounded up to a power of 2 |
| BLOCK_SIZE | tokens of a block of the cache |
| OPERAND | the dtype in which products are computed |
| ROWS, BLOCK_N | rows and keys of a tile |
| MIN_PART | keys that a part of a context has at least |
| top, total, result | of each row: the largest score, the sum of weights, the weighted sum of V |
| parts | part_tops, part_totals [rows, heads, num_parts], part_results […, HEAD_SIZE], float32 |
"""

import triton
import triton.language as tl

from jitney.kernels.gpu.language import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_offset(
    block, head, token, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """int64: where in a cache [blocks, KV_HEADS, BLOCK_SIZE, PADDED] a token's elements begin."""
    inside = (head * BLOCK_SIZE + token) * PADDED  # of one block: fits 32 bits
    return block.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * PADDED) + inside


@triton.jit
def _part_span(position, end, window, num_parts, MIN_PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """(low, begin, size, parts): ``low`` is the first key that the query at ``position`` sees. The
    keys low to end - 1 are in ``parts`` parts of ``size`` keys from ``begin`` on, both multiples of
    BLOCK_N."""
    low = position * 0  # 0 of the type that the branch below gives
    if window is not None:
        low = tl.maximum(position - window + 1, 0)
    begin = low // BLOCK_N * BLOCK_N
    size = tl.cdiv(tl.cdiv(end - begin, num_parts), BLOCK_N) * BLOCK_N
    size = tl.maximum(size, MIN_PART)
    return low, begin, size, tl.cdiv(end - begin, size)


@triton.jit
def _store(
    out, token, head, real_row, top, total, result, sinks, factor,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Store ``result / total * factor``, or 0 where no key was seen.

    ``factor`` is the scale of the cached values. A sink is one more logit of its head: it counts in
    the softmax's denominator, and has no value.
    """
    if sinks is not None:
        # Add it to ``total``, as one more key; what came before is rescaled to the new maximum.
        sink = tl.load(sinks + head, real_row, other=0.0) * LOG2_E
        largest = tl.maximum(top, sink)
        shrink = tl.exp2(top - largest)
        total = tl.fma(total, shrink, tl.exp2(sink - largest))
        factor = factor * shrink
    result = result * (factor / tl.where(total == 0.0, 1.0, total))[:, None]
    element = tl.arange(0, result.shape[1])
    address = out + ((token * HEADS + head) * HEAD_SIZE)[:, None] + element[None, :]
    real = real_row[:, None] & (element < HEAD_SIZE)[None, :]
    tl.store(address, result.to(out.dtype.element_ty), real)


@triton.jit
def _load_tile(
    cache, offset, inside, element,
    HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[keys, elements] of K or V. MASKED: keys that are not ``inside`` are 0."""
    if MASKED and HEAD_SIZE == HEAD_TILE:
        tile = tl.load(cache + offset, mask=inside[:, None], other=0.0)
    elif MASKED:
        real = inside[:, None] & (element < HEAD_SIZE)[None, :]
        tile = tl.load(cache + offset, mask=real, other=0.0)
    elif HEAD_SIZE < HEAD_TILE:
        tile = tl.load(cache + offset, mask=(element < HEAD_SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(cache + offset)
    return tile


@triton.jit
def _attend(
    query, top, total, result,
    keys, values, table, head, begin, end, low, position, scale, softcap, window,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys begin (a multiple of BLOCK_N) to end - 1 of a sequence. Returns (top,
    total, result) with these keys included.

    query is [ROWS, HEAD_TILE], ``position`` [ROWS] that of each row's token. MASKED: some keys are
    before ``low`` (these may never have been written) or hidden from some query.
    """
    HEAD_TILE: tl.constexpr = query.shape[1]
    element = tl.arange(0, HEAD_TILE)
    # The block numbers of a tile are loaded while the tile before it is computed: the pipeliner
    # then sees loads of K and V whose addresses are known, and keeps its stages for them.
    key = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + key // BLOCK_SIZE, (key >= low) & (key < end), other=0)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = (key >= low) & (key < end)
        following = key + BLOCK_N
        next_block = tl.load(table + following // BLOCK_SIZE, following < end, other=0)
        row = row_offset(block, head, key % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, PADDED)
        offset = row[:, None] + element[None, :]
        k = _load_tile(keys, offset, inside, element, HEAD_SIZE, HEAD_TILE, MASKED)
        v = _load_tile(values, offset, inside, element, HEAD_SIZE, HEAD_TILE, MASKED)
        k = k.to(query.dtype)
        v = v.to(query.dtype)

        scores = dot(query, k.T)
        if softcap is not None:  # tanh(x) = 1 - 2 / (exp(2x) + 1), also at both infinities
            power = tl.exp2(scores * (scale * 2.0 / softcap))
            scores = softcap * (1.0 - 2.0 / (power + 1.0))
        # From here on, scores * factor is in units of log2.
        factor = scale if softcap is None else LOG2_E
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if window is not None:
                seen &= key[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))

        # The factor is positive, so the largest score times it is the largest product: the scores
        # themselves are multiplied only in the exponent, where one fma does it.
        largest = tl.maximum(top, tl.max(scores, 1) * factor)
        safe = largest
        if MASKED:  # a row that has seen no key yet
            safe = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.exp2(tl.fma(scores, factor, -safe[:, None]))
        shrink = tl.exp2(top - safe)  # from the old maximum to the new one
        total = tl.fma(total, shrink, tl.sum(weight, 1))
        result = dot(weight.to(query.dtype), v, result * shrink[:, None])
        top = largest
        block = next_block
    return top, total, result


@triton.jit
def _tile(
    out, part_results, part_tops, part_totals,
    query, keys, values, factor, sinks, table, context, row, first_token, length, skipped, head,
    part, scale, softcap, window, num_parts, query_token_stride, query_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PART: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of queries: some new tokens of a row, for the query heads of KV head ``head``.

    The row has ``length`` new tokens, of which the first is token ``first_token`` of the step, and
    ``context`` tokens with them. The tile begins ``skipped`` tokens after the first and has as many
    as fit. If ``num_parts`` is over 1, the row has one new token, and only part ``part`` of its
    context is attended to. ``factor`` is the scale of the cached values.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TOKENS: tl.constexpr = ROWS // GROUP
    first_position = context - length + skipped
    end = tl.minimum(first_position + TOKENS, context)
    low, begin, size, parts = _part_span(first_position, end, window, num_parts, MIN_PART, BLOCK_N)
    # A row without context (padding of a graph) has no parts: part 0 stores its zeros.
    if part < tl.maximum(parts, 1):
        index = tl.arange(0, ROWS)
        element = tl.arange(0, HEAD_TILE)
        new_token = skipped + index // GROUP  # counted from the row's first
        query_head = head * GROUP + index % GROUP
        real_row = (index < TOKENS * GROUP) & (new_token < length)
        real = real_row[:, None] & (element < HEAD_SIZE)[None, :]
        token = (first_token + new_token).to(tl.int64)
        offset = token * query_token_stride + query_head * query_head_stride
        q = tl.load(query + offset[:, None] + element[None, :], real, other=0.0).to(OPERAND)
        if num_parts > 1:
            begin += part * size
            end = tl.minimum(begin + size, end)

        position = context - length + new_token
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, HEAD_TILE], tl.float32)
        middle = begin
        if window is None and not ALWAYS_MASKED:
            # Whole tiles that every query sees need no mask.
            seen = tl.maximum(tl.minimum(end, first_position + 1) - begin, 0)
            middle = begin + seen // BLOCK_N * BLOCK_N
            top, total, result = _attend(
                q, top, total, result, keys, values, table, head, begin, middle, low, position,
                scale, softcap, window, KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N, False,
            )  # fmt: skip
        top, total, result = _attend(
            q, top, total, result, keys, values, table, head, middle, end, low, position,
            scale, softcap, window, KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N, True,
        )  # fmt: skip

        if (parts > 1) & (num_parts > 1):  # for the reduction kernel to join
            index_of_part = (row.to(tl.int64) * HEADS + query_head) * num_parts + part
            tl.store(part_tops + index_of_part, top, real_row)
            tl.store(part_totals + index_of_part, total, real_row)
            target = part_results + index_of_part[:, None] * HEAD_SIZE + element[None, :]
            tl.store(target, result, real)
        else:
            _store(
                out, token, query_head, real_row, top, total, result, sinks, factor,
                HEADS, HEAD_SIZE,
            )  # fmt: skip


@triton.jit
def _row_of_tile(tile, query_start, num_rows, TOKENS: tl.constexpr):
    """The last row whose first tile is ``tile`` or before it: by bisection.

    Row r, whose first token is token t of the step, begins with tile t // TOKENS + r. So a launch
    needs to know no lengths: the numbers of rows and tokens give the number of tiles. The 1 for
    each row makes up for rounding down, so that a row has at least the tiles that it fills. If it
    has one more, that one has no work.
    """
    row = num_rows * 0  # 0 of the type that the loop gives
    upper = num_rows
    while upper - row > 1:
        middle = (row + upper) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            row = middle
        else:
            upper = middle
    return row


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
    MIN_PART: tl.constexpr, ONLY_DECODES: tl.constexpr, ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """Programs (num_rows * num_parts + tiles, KV heads). Of the first dimension, the first
    num_rows * num_parts compute a part of a row that has one new token, the others a tile of a
    longer row (see ``_row_of_tile``). A program that has no work ends at once.

    out is [T, heads, HEAD_SIZE]; the parts are written where a row has more than one. ``scale`` is
    in units of log2, and includes no scale of the cache. ALWAYS_MASKED: a longer row's tiles run
    the very loop that a single token's does, so that both give the same bits.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    factor = 1.0
    if key_scale is not None:
        scale = scale * tl.load(key_scale + head)
        factor = tl.load(value_scale + head)

    if program < num_rows * num_parts:
        row = program // num_parts
        part = program % num_parts
        token = row
        length = 1
        if not ONLY_DECODES:
            token = tl.load(query_start + row)
            length = tl.load(query_start + row + 1) - token
        if length == 1:
            _tile(
                out, part_results, part_tops, part_totals,
                query, keys, values, factor, sinks, block_table + row.to(tl.int64) * table_stride,
                tl.load(context_len + row), row, token, 1, 0, head, part,
                scale, softcap, window, num_parts, query_token_stride, query_head_stride,
                KV_HEADS, GROUP, HEAD_SIZE, PADDED, HEAD_TILE, BLOCK_SIZE, OPERAND, DECODE_ROWS,
                BLOCK_N, MIN_PART, True,
            )  # fmt: skip
    elif not ONLY_DECODES:
        # Later tiles of a row have more keys: they go first.
        tile = tl.num_programs(0) - 1 - program
        TOKENS: tl.constexpr = TILE_ROWS // GROUP
        row = _row_of_tile(tile, query_start, num_rows, TOKENS)
        token = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - token
        skipped = (tile - token // TOKENS - row) * TOKENS
        if (length > 1) & (skipped < length):
            _tile(
                out, part_results, part_tops, part_totals,
                query, keys, values, factor, sinks, block_table + row.to(tl.int64) * table_stride,
                tl.load(context_len + row), row, token, length, skipped, head, 0,
                scale, softcap, window, 1, query_token_stride, query_head_stride,
                KV_HEADS, GROUP, HEAD_SIZE, PADDED, HEAD_TILE, BLOCK_SIZE, OPERAND, TILE_ROWS,
                BLOCK_N, MIN_PART, ALWAYS_MASKED,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_parts", "window"],
    do_not_specialize_on_alignment=["part_tops", "part_totals"],  # it changes with the step
)
def reduction_kernel(
    out, part_results, part_tops, part_totals, value_scale, sinks, context_len, query_start,
    window, num_parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr,
    MOST_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PART: tl.constexpr,
):  # fmt: skip
    """Programs (rows, heads): join the parts of a row that has more than one."""
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    token = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - token
    context = tl.load(context_len + row)
    _low, _begin, _size, parts = _part_span(
        context - 1, context, window, num_parts, MIN_PART, BLOCK_N
    )
    if (length == 1) & (parts > 1):
        element = tl.arange(0, HEAD_TILE)
        part = tl.arange(0, MOST_PARTS)
        index_of_part = (row.to(tl.int64) * (KV_HEADS * GROUP) + query_head) * num_parts + part
        real = part < parts
        tops = tl.load(part_tops + index_of_part, real, other=float("-inf"))
        top = tl.max(tops, 0)
        weight = tl.exp2(tops - top)
        totals = tl.load(part_totals + index_of_part, real, other=0.0)
        total = tl.sum(weight * totals, 0)
        results = tl.load(
            part_results + index_of_part[:, None] * HEAD_SIZE + element[None, :],
            real[:, None] & (element < HEAD_SIZE)[None, :],
            other=0.0,
        )
        result = tl.sum(results * weight[:, None], 0)[None, :]
        factor = 1.0
        if value_scale is not None:
            factor = tl.load(value_scale + query_head // GROUP)

        # ``_store`` takes a tile: one of one row, made by adding [0] to the scalars.
        index = tl.arange(0, 1)
        zero = tl.zeros([1], tl.float32)
        _store(
            out, token.to(tl.int64) + index, query_head + index, index == 0, top + zero,
            total + zero, result, sinks, factor, KV_HEADS * GROUP, HEAD_SIZE,
        )  # fmt: skip
