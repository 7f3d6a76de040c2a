"""The kernels in the Triton language of attention over the paged cache.

A program of :func:`attention_kernel` computes one tile (``attention_tile``, which has the names).

A row of the batch with several new tokens is cut along these into tiles. A row with one, a decode,
is a single tile; instead its context is cut into *parts*, with a program for each.
:func:`reduction_kernel` joins what they give. Here for num_parts = 4, MIN_PART = 256 and
BLOCK_N = 64::

    1,200 keys     4 parts of 320 keys: 0 to 319, 320 to 639, 640 to 959, 960 to 1,199
    300 keys       2 parts of 256 keys: 0 to 255, 256 to 299. The other programs have no work

Compiled at first use by ``gpu_attention.GpuAttention``, which alone launches them.
"""

import triton
import triton.language as tl

from jitney.kernels.gpu.attention_tile import compute_tile, part_span, store_result


@triton.jit
def _row_of_tile(tile, query_start, num_rows, TOKENS: tl.constexpr):
    """Which row of the batch a tile belongs to.

    Row r, whose first new token is token t of the step, has the tiles from t // TOKENS + r on, up
    to the first tile of the next row. These are as many as its tokens fill, or one more, which has
    no work. So a launch need not know how long rows are: the numbers of rows and of tokens give the
    number of tiles. Here of rows with 6, 1 and 9 tokens, with TOKENS = 4, where the first tiles
    are 0 // 4 + 0, 6 // 4 + 1 and 7 // 4 + 2::

        row 0: t = 0, tiles 0 and 1       row 1: t = 6, tile 2
        row 2: t = 7, tiles 3 to 6, of which 3, 4 and 5 have tokens
    """
    # By bisection: the last row whose first tile is at most ``tile``.
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
    out,  # [T, HEADS, HEAD_SIZE]
    part_results,  # written where a context is cut into several parts; likewise the next two
    part_tops,
    part_totals,
    query,  # [T, HEADS, HEAD_SIZE]; elements of a head are neighbours
    keys,  # [blocks, KV_HEADS, BLOCK_SIZE, PADDED]; so is ``values``
    values,
    key_scale,  # of a float8 cache: float32 [KV_HEADS]; else None. So is ``value_scale``
    value_scale,
    sinks,  # [HEADS] or None
    block_table,  # int32 [rows of the batch, table_stride]
    context_len,  # int32 [rows of the batch]
    query_start,  # int32 [rows of the batch + 1]
    scale,  # in units of log2, without the scale of the cache
    softcap,  # or None; so is ``window``
    window,
    num_rows,  # rows of the batch
    num_parts,
    query_token_stride,
    query_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    DECODE_ROWS: tl.constexpr,  # ROWS of a decode's tile
    CHUNK_ROWS: tl.constexpr,  # ROWS of all other tiles
    BLOCK_N: tl.constexpr,
    MIN_PART: tl.constexpr,
    ONLY_DECODES: tl.constexpr,  # each row of the batch has one new token
    ALWAYS_MASKED: tl.constexpr,  # all tiles run the masked loop, as decodes do: the same bits
):
    """Programs (num_rows * num_parts + tiles, KV_HEADS).

    Of the first dimension, the first num_rows * num_parts programs compute decodes, a part each;
    the others compute tiles of longer rows. Here with 2 rows, 2 parts and 5 tiles::

        program    0       1       2       3       4       5       6       7       8
        row        0       0       1       1
        part       0       1       0       1
        tile                                       4       3       2       1       0

    Each row has programs of both kinds, as the host knows no lengths. Those of the wrong kind have
    no work and end at once.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    v_scale = 1.0
    if key_scale is not None:
        # K times its scale gives the same scores as K does with a larger ``scale``.
        scale = scale * tl.load(key_scale + head)
        v_scale = tl.load(value_scale + head)

    if program < num_rows * num_parts:
        row = program // num_parts
        part = program % num_parts
        first_token = row
        length = 1
        if not ONLY_DECODES:
            first_token = tl.load(query_start + row)
            length = tl.load(query_start + row + 1) - first_token
        if length == 1:
            compute_tile(
                out, part_results, part_tops, part_totals,
                query, keys, values, v_scale, sinks,
                table=block_table + row.to(tl.int64) * table_stride,
                context=tl.load(context_len + row),
                row=row,
                first_token=first_token,
                length=1,
                skipped=0,
                head=head,
                part=part,
                scale=scale, softcap=softcap, window=window,
                num_parts=num_parts,
                query_token_stride=query_token_stride, query_head_stride=query_head_stride,
                KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_SIZE=HEAD_SIZE, PADDED=PADDED,
                HEAD_TILE=HEAD_TILE, BLOCK_SIZE=BLOCK_SIZE, OPERAND=OPERAND,
                BLOCK_N=BLOCK_N, MIN_PART=MIN_PART,
                ROWS=DECODE_ROWS,
                ALWAYS_MASKED=True,
            )  # fmt: skip
    elif not ONLY_DECODES:
        # Later tiles of a row have more keys: they go first.
        tile = tl.num_programs(0) - 1 - program
        TOKENS: tl.constexpr = CHUNK_ROWS // GROUP
        row = _row_of_tile(tile, query_start, num_rows, TOKENS)
        first_token = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - first_token
        first_tile = first_token // TOKENS + row
        skipped = (tile - first_tile) * TOKENS
        # A decode is computed above; the last tile of a row may have no tokens.
        if (length > 1) & (skipped < length):
            compute_tile(
                out, part_results, part_tops, part_totals,
                query, keys, values, v_scale, sinks,
                table=block_table + row.to(tl.int64) * table_stride,
                context=tl.load(context_len + row),
                row=row,
                first_token=first_token,
                length=length,
                skipped=skipped,
                head=head,
                part=0,
                scale=scale, softcap=softcap, window=window,
                num_parts=1,
                query_token_stride=query_token_stride, query_head_stride=query_head_stride,
                KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_SIZE=HEAD_SIZE, PADDED=PADDED,
                HEAD_TILE=HEAD_TILE, BLOCK_SIZE=BLOCK_SIZE, OPERAND=OPERAND,
                BLOCK_N=BLOCK_N, MIN_PART=MIN_PART,
                ROWS=CHUNK_ROWS,
                ALWAYS_MASKED=ALWAYS_MASKED,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_parts", "window"],
    do_not_specialize_on_alignment=["part_tops", "part_totals"],  # it changes with the step
)
def reduction_kernel(
    out,  # the arguments are those of ``attention_kernel``
    part_results,
    part_tops,
    part_totals,
    value_scale,
    sinks,
    context_len,
    query_start,
    window,
    num_parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    MOST_PARTS: tl.constexpr,  # a power of 2, num_parts or more: all parts are loaded at once
    BLOCK_N: tl.constexpr,
    MIN_PART: tl.constexpr,
):
    """Programs (rows of the batch, HEADS): join the parts of a decode that has more than one."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    token = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - token
    context = tl.load(context_len + row)
    # As in ``compute_tile`` for a decode, whose position is the context's last one.
    _first_seen, _begin, _part_size, used_parts = part_span(
        context - 1, context, window, num_parts, MIN_PART, BLOCK_N
    )
    if (length == 1) & (used_parts > 1):
        element = tl.arange(0, HEAD_TILE)
        part = tl.arange(0, MOST_PARTS)
        index_of_part = (row.to(tl.int64) * HEADS + query_head) * num_parts + part
        real_part = part < used_parts
        tops = tl.load(part_tops + index_of_part, real_part, other=float("-inf"))
        top = tl.max(tops, 0)
        shrink = tl.exp2(tops - top)  # brings each part to the maximum of all
        totals = tl.load(part_totals + index_of_part, real_part, other=0.0)
        total = tl.sum(shrink * totals, 0)
        results = tl.load(
            part_results + index_of_part[:, None] * HEAD_SIZE + element[None, :],
            real_part[:, None] & (element < HEAD_SIZE)[None, :],
            other=0.0,
        )
        result = tl.sum(results * shrink[:, None], 0)
        v_scale = 1.0
        if value_scale is not None:
            v_scale = tl.load(value_scale + query_head // GROUP)

        # ``store_result`` takes a tile. Here it has one row: adding [0] to a number makes it [1].
        index = tl.arange(0, 1)
        zero = tl.zeros([1], tl.float32)
        store_result(
            out,
            token=token.to(tl.int64) + index,
            query_head=query_head + index,
            real_row=index == 0,
            top=top + zero,
            total=total + zero,
            result=result[None, :],
            sinks=sinks,
            v_scale=v_scale,
            HEADS=HEADS,
            HEAD_SIZE=HEAD_SIZE,
        )
