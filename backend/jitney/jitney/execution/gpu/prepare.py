# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
"""The kernel that unpacks a step's inputs on the device. Called by ``step``.

One host-to-device copy brings everything about a step as 32-bit numbers (``step`` says how they are
packed); this kernel makes of them what module and attention read. One program per row and per
stride of its tokens and its table: each reads only what the copy brought and what earlier steps
wrote, so programs need not wait for one another.
"""

import triton
import triton.language as tl

# Fields of a row, each an array of R numbers at the beginning of the packed step.
FIELDS = ("begin", "length", "start", "place", "first", "count", "offset", "carried")
LANES = 512


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "tokens_at", "values_at", "columns"])
def prepare(
    packed,  # int32: FIELDS x [R], token ids [T] at tokens_at, new table entries at values_at
    sampled,  # int64: the tokens that the step before sampled
    tables,  # int32 [device rows, columns]: all sequences' block tables
    ids,  # int64 [T]; this and those below are written
    positions,  # int64 [T]
    slots,  # int64 [T]
    query_start,  # int32 [R + 1], of which the first is 0 for ever
    context_len,  # int32 [R]
    block_table,  # int32 [R, columns]
    num_rows,
    num_tokens,
    tokens_at,
    values_at,
    columns,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    stride = tl.program_id(1)
    step = tl.num_programs(1) * LANES
    lanes = tl.arange(0, LANES)
    if row >= num_rows:  # a row of padding: one token that is written nowhere and sees nothing
        if stride == 0:
            at = num_tokens + row - num_rows
            tl.store(query_start + row + 1, at + 1)
            tl.store(context_len + row, 0)
            tl.store(ids + at, tl.zeros((), tl.int64))
            tl.store(positions + at, tl.zeros((), tl.int64))
            tl.store(slots + at, tl.zeros((), tl.int64) - 1)
    else:
        begin = tl.load(packed + row)
        length = tl.load(packed + num_rows + row)
        start = tl.load(packed + 2 * num_rows + row)
        place = tl.load(packed + 3 * num_rows + row)
        first = tl.load(packed + 4 * num_rows + row)
        count = tl.load(packed + 5 * num_rows + row)
        offset = tl.load(packed + 6 * num_rows + row)
        carried = tl.load(packed + 7 * num_rows + row)
        if stride == 0:
            tl.store(query_start + row + 1, begin + length)
            tl.store(context_len + row, start + length)
        table = tables + place.to(tl.int64) * columns
        gathered = block_table + row.to(tl.int64) * columns
        news = packed + values_at + offset

        # The table, as far as this step's context reaches, and its new entries in any case.
        used = (start + length + BLOCK_SIZE - 1) // BLOCK_SIZE
        end = tl.maximum(used, first + count)
        for at in range(stride * LANES, end, step):
            column = at + lanes
            old = column < tl.minimum(first, used)
            new = (column >= first) & (column < first + count)
            block = tl.load(table + column, mask=old, other=0)
            block = tl.where(new, tl.load(news + (column - first), mask=new, other=0), block)
            tl.store(gathered + column, block, mask=old | new)
            tl.store(table + column, block, mask=new)

        for at in range(stride * LANES, length, step):
            token = at + lanes
            here = token < length
            position = start + token
            column = position // BLOCK_SIZE
            old = here & (column < first)
            new = here & (column >= first)
            block = tl.load(table + column, mask=old, other=0)
            block += tl.load(news + (column - first), mask=new, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            value = tl.load(packed + tokens_at + begin + token, mask=here, other=0).to(tl.int64)
            on_device = here & (carried >= 0)
            carry = tl.load(sampled + carried + token, mask=on_device, other=0)
            tl.store(slots + begin + token, slot, mask=here)
            tl.store(positions + begin + token, position.to(tl.int64), mask=here)
            tl.store(ids + begin + token, tl.where(on_device, carry, value), mask=here)
