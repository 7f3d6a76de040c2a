"""One tile of attention over the paged cache, in the Triton language.

A *tile* has queries of one row of the batch and one KV head. Its own rows are pairs of a token and
a query head, so that each K and V is loaded once for all query heads that share it. Here with
GROUP = 3 query heads and ROWS = 8, which is enough for TOKENS = 2::

    row of the tile     0   1   2   3   4   5   6   7
    token               0   0   0   1   1   1   (padding)
    query head          0   1   2   0   1   2

A tile meets BLOCK_N keys at a time, a *key tile*. Key tiles begin at multiples of BLOCK_N, whatever
the queries are: so a query meets the same key tiles in every chunk.

Query heads, causality, window, cap and sinks are those of
:class:`execution.interface.AttentionCall`. Scores are in units of log2, so that weights are powers
of 2, not of e. Maxima, sums and results are float32.

| name | meaning |
|---|---|
| KV_HEADS, GROUP | KV heads, and the query heads that share one |
| HEADS | query heads: KV_HEADS * GROUP |
| HEAD_SIZE | elements of a head |
| PADDED | elements that a head's row in the cache has, HEAD_SIZE or more |
| HEAD_TILE | elements of a head in a tile: HEAD_SIZE, rounded up to a power of 2 |
| BLOCK_SIZE | tokens of a block of the cache |
| OPERAND | the dtype in which products are computed |
| ROWS, TOKENS | rows of a tile, and the tokens that these are enough for: ROWS // GROUP |
| BLOCK_N | keys of a key tile |
| MIN_PART | keys that a part of a context has at least (``attention_kernels``) |
| num_parts | the most parts that a context is cut into in this launch |
| top | of each row of a tile: the largest score so far |
| total | of each row: the sum of the weights, which are 2 ** (score - top) |
| result | of each row: the sum of weight * V, [ROWS, HEAD_TILE] |
| part_tops, part_totals | the same of each part: float32 [rows of the batch, HEADS, num_parts] |
| part_results | float32 [rows of the batch, HEADS, num_parts, HEAD_SIZE] |
| ``real``, ``real_row`` | masks: false where a tile is padding |

Called by ``attention_kernels``.
"""

import triton
import triton.language as tl

from jitney.kernels.gpu.language import dot, row_offset

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def part_span(position, end, window, num_parts, MIN_PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """How the keys up to ``end`` - 1 are cut into parts, for a tile whose first query is at
    ``position``. Returns four numbers:

    - first_seen: the first key that this query sees; without a window, key 0;
    - begin: where part 0 begins, at first_seen or before: a multiple of BLOCK_N;
    - part_size: keys of a part, but for the last one: a multiple of BLOCK_N;
    - used_parts: how many parts have keys, at most num_parts.
    """
    first_seen = position * 0  # 0 of the type that the branch below gives
    if window is not None:
        first_seen = tl.maximum(position - window + 1, 0)
    begin = first_seen // BLOCK_N * BLOCK_N
    part_size = tl.cdiv(tl.cdiv(end - begin, num_parts), BLOCK_N) * BLOCK_N
    part_size = tl.maximum(part_size, MIN_PART)
    # Rounding up makes parts larger, so fewer of them may have keys.
    used_parts = tl.cdiv(end - begin, part_size)
    return first_seen, begin, part_size, used_parts


@triton.jit
def store_result(
    out, token, query_head, real_row, top, total, result, sinks, v_scale,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Store ``result / total * v_scale`` in ``out`` [T, HEADS, HEAD_SIZE], or 0 where no key was
    seen.

    ``token`` and ``query_head`` are those of each row of the tile. ``v_scale`` is the scale of the
    cached values. A sink is one more logit of its head: it counts in the softmax's denominator, and
    has no value.
    """
    if sinks is not None:
        # The sink is one more key: the maximum may rise. ``total`` and ``result`` are brought to
        # the new maximum by ``shrink``. ``result`` is multiplied by it below, with ``v_scale``.
        sink = tl.load(sinks + query_head, real_row, other=0.0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = tl.fma(total, shrink, tl.exp2(sink - new_top))
        v_scale = v_scale * shrink
    divisor = tl.where(total == 0.0, 1.0, total)  # no key was seen: 0 / 1
    result = result * (v_scale / divisor)[:, None]
    element = tl.arange(0, result.shape[1])
    offset = (token * HEADS + query_head) * HEAD_SIZE
    address = out + offset[:, None] + element[None, :]
    real = real_row[:, None] & (element < HEAD_SIZE)[None, :]
    tl.store(address, result.to(out.dtype.element_ty), real)


@triton.jit
def _load_tile(
    cache, offset, inside, element,
    HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, HEAD_TILE] of K or V, at ``offset`` in the cache. Elements beyond the head are 0.
    If MASKED, so are keys that are not ``inside``.

    A load gets no more of a mask than it needs: the less mask, the faster.
    """
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
    query,  # [ROWS, HEAD_TILE]
    top,  # of the keys before; likewise the next two
    total,
    result,
    keys,  # the layer's caches
    values,
    table,  # the row's part of the block table
    head,  # the KV head
    begin,  # the first key: a multiple of BLOCK_N
    end,  # behind the last key
    first_seen,  # keys before this one are hidden, and may never have been written
    position,  # [ROWS]: the position of each row's token
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees all these keys
):
    """Attend to keys begin to end - 1. Returns (top, total, result) with these keys included."""
    HEAD_TILE: tl.constexpr = query.shape[1]
    element = tl.arange(0, HEAD_TILE)
    # The block numbers of a key tile are loaded while the key tile before it is computed. So the
    # pipeliner sees loads of K and V whose addresses are known, and keeps its stages for them.
    key = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + key // BLOCK_SIZE, (key >= first_seen) & (key < end), other=0)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = (key >= first_seen) & (key < end)
        next_key = key + BLOCK_N
        next_block = tl.load(table + next_key // BLOCK_SIZE, next_key < end, other=0)
        row = row_offset(block, head, key % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, PADDED)
        offset = row[:, None] + element[None, :]
        k = _load_tile(keys, offset, inside, element, HEAD_SIZE, HEAD_TILE, MASKED)
        v = _load_tile(values, offset, inside, element, HEAD_SIZE, HEAD_TILE, MASKED)
        k = k.to(query.dtype)
        v = v.to(query.dtype)

        scores = dot(query, k.T)
        # What scores must be multiplied by to be in units of log2.
        to_log2 = scale
        if softcap is not None:
            # softcap * tanh(x), with x = the scaled score / softcap. tanh(x) is
            # 1 - 2 / (exp(2x) + 1), also at both infinities. ``scale`` has the factor log2(e)
            # already, so exp2(2 * scores * scale / softcap) is exp(2x).
            power = tl.exp2(scores * (scale * 2.0 / softcap))
            scores = softcap * (1.0 - 2.0 / (power + 1.0))
            to_log2 = LOG2_E
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if window is not None:
                seen &= key[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))

        # ``to_log2`` is positive, so the largest score gives the largest product. All other scores
        # are multiplied in the exponent alone, where one fma does it.
        new_top = tl.maximum(top, tl.max(scores, 1) * to_log2)
        subtracted = new_top
        if MASKED:
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            subtracted = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(tl.fma(scores, to_log2, -subtracted[:, None]))
        shrink = tl.exp2(top - subtracted)  # brings what came before to the new maximum
        total = tl.fma(total, shrink, tl.sum(weight, 1))
        result = dot(weight.to(query.dtype), v, result * shrink[:, None])
        top = new_top
        block = next_block
    return top, total, result


@triton.jit
def compute_tile(
    out,
    part_results,
    part_tops,
    part_totals,
    query,
    keys,
    values,
    v_scale,  # the scale of the cached values of this KV head
    sinks,
    table,  # the row's part of the block table
    context,  # tokens of the row in the cache, its new ones among them
    row,  # index of the row in the batch
    first_token,  # index of the row's first new token among the T tokens of the step
    length,  # new tokens of the row
    skipped,  # new tokens of the row before those of this tile
    head,  # the KV head
    part,  # which part of the context is attended to; 0 of a row with several new tokens
    scale,
    softcap,
    window,
    num_parts,  # 1 for a row with several new tokens
    query_token_stride,
    query_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_PART: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):
    """Compute one tile, or one part of it. A result that is whole goes to ``out``, that of one part
    of several to ``part_results`` and so on."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TOKENS: tl.constexpr = ROWS // GROUP
    first_position = context - length + skipped
    end = tl.minimum(first_position + TOKENS, context)
    first_seen, begin, part_size, used_parts = part_span(
        first_position, end, window, num_parts, MIN_PART, BLOCK_N
    )
    # A row without context, which pads a graph, has no parts: part 0 stores its zeros.
    if part < tl.maximum(used_parts, 1):
        index = tl.arange(0, ROWS)
        element = tl.arange(0, HEAD_TILE)
        # Of each row of the tile: the index of its token among the new tokens of the batch's row.
        new_token = skipped + index // GROUP
        query_head = head * GROUP + index % GROUP
        real_row = (index < TOKENS * GROUP) & (new_token < length)
        real = real_row[:, None] & (element < HEAD_SIZE)[None, :]
        token = (first_token + new_token).to(tl.int64)
        offset = token * query_token_stride + query_head * query_head_stride
        q = tl.load(query + offset[:, None] + element[None, :], real, other=0.0).to(OPERAND)
        if num_parts > 1:
            begin += part * part_size
            end = tl.minimum(begin + part_size, end)

        position = context - length + new_token
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, HEAD_TILE], tl.float32)
        # Keys ``begin`` to ``unmasked_end`` - 1 are whole key tiles that every query of the tile
        # sees. They need no mask.
        unmasked_end = begin
        if window is None and not ALWAYS_MASKED:
            seen_by_all = tl.maximum(tl.minimum(end, first_position + 1) - begin, 0)
            unmasked_end = begin + seen_by_all // BLOCK_N * BLOCK_N
            top, total, result = _attend(
                q, top, total, result, keys, values, table, head, begin, unmasked_end, first_seen,
                position, scale, softcap, window, KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N,
                MASKED=False,
            )  # fmt: skip
        top, total, result = _attend(
            q, top, total, result, keys, values, table, head, unmasked_end, end, first_seen,
            position, scale, softcap, window, KV_HEADS, BLOCK_SIZE, PADDED, HEAD_SIZE, BLOCK_N,
            MASKED=True,
        )  # fmt: skip

        # The second condition follows from the first. It is for the compiler: where ``num_parts``
        # is the constant 1, there is no code for parts.
        if (used_parts > 1) & (num_parts > 1):
            # For the reduction kernel to join.
            index_of_part = (row.to(tl.int64) * HEADS + query_head) * num_parts + part
            tl.store(part_tops + index_of_part, top, real_row)
            tl.store(part_totals + index_of_part, total, real_row)
            target = part_results + index_of_part[:, None] * HEAD_SIZE + element[None, :]
            tl.store(target, result, real)
        else:
            store_result(
                out, token, query_head, real_row, top, total, result, sinks, v_scale,
                HEADS, HEAD_SIZE,
            )  # fmt: skip
