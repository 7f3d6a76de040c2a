"""What LoRA adapters add to a step's products, as items of a ``program``; imported only where Numba
is.

For each product two kernels run before it. One shrinks x to ``x A^T``, of the adapters' ranks; one
expands that to what the product adds to its own result::

    x [T, K]  -- shrink: A, columns of 16 ranks -->  [T, ranks]
              -- expand: B, columns of 16 outputs -->  other + x A^T B^T  [T, N]

Loops, from outer to inner::

    items      a few tokens of one adapter; to expand, a quarter of the outputs of these
      columns  of A, 16 ranks each; to expand, of the result, 16 outputs each
        multiply_tokens    all tokens of the item at once, the factor A or B is streamed
        rounding           of the 16 numbers of each token, which are on the thread's stack

An adapter's ranks are filled up to whole columns; they do not depend on the ranks of other
adapters. A row's result depends on that row and its adapter alone.

``adapter_table`` says how factors are packed. Called by ``program``.
"""

import ctypes

import numpy as np
from numba import types

from jitney.kernels.cpu.adapter_table import (
    ITEM_TOKENS,
    MOST_SEGMENTS,
    SEGMENT_BYTES,
    AdapterTokens,
    ProductEntry,
    Segment,
)
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import (
    I64_BYTES,
    LANES,
    VECTOR_BYTES,
    ceil_div,
    emitted,
    stack_memory,
)
from jitney.kernels.cpu.micro_kernel import make_micro_kernel
from jitney.kernels.cpu.simd import (
    BF16,
    ZERO,
    fetch_add,
    inner,
    load,
    load_as,
    splat,
    store_as,
    store_i64,
)

EXPAND_ITEMS = 4
"""The outputs of each AdapterTokens are cut into so many items of :func:`expand_body`."""
_TOKENS_BYTES = ctypes.sizeof(AdapterTokens)
_ENTRY_BYTES = ctypes.sizeof(ProductEntry)
_OUT_COLUMN_BYTES = LANES * 2
"""Bytes of 16 numbers in a row of a result, which is bfloat16."""


@record
class LowRankCall(KernelCall):
    """Arguments of :func:`shrink_body` and :func:`expand_body`; ``count`` is in items. Of
    shrink_body these are AdapterTokens, of expand_body EXPAND_ITEMS for each of them."""

    x: int
    """Address of bfloat16 [T, K]; to expand, of what x was shrunk to."""
    x_stride: int
    """Bytes from row to row."""
    out: int
    """Address of the result, bfloat16."""
    out_stride: int
    """Bytes from row to row."""
    other: int
    """Address of what :func:`expand_body` adds its product to, with rows as those of ``out``. 0:
    none."""
    tokens: int
    """Address of an array of AdapterTokens."""
    entry_offset: int
    """Bytes from the beginning of an adapter's table to the entry of this layer and product."""
    units: int
    """For :func:`shrink_body`: units of x, pairs of inputs."""
    columns: int
    """For :func:`expand_body`: columns of ``out``, 16 outputs each."""


read_low_rank = reader(LowRankCall)
read_tokens = reader(AdapterTokens)
read_entry = reader(ProductEntry)
read_segment = reader(Segment)


# --------------------------------------------------------------------------- one column

multiply_column = make_micro_kernel(1, source_per_vector=True, ahead=1)
"""Rows of x times one column of A or B, which is the source."""
_RESULT = VECTOR_BYTES
"""Bytes from the beginning of :func:`column_memory` to the result."""


@emitted(types.int64)
def column_memory(builder):
    """The address of a thread's memory: a list of two columns, int64 [2], and at _RESULT the
    result, float32 [ITEM_TOKENS, 16]."""
    return stack_memory(builder, _RESULT + ITEM_TOKENS * VECTOR_BYTES)


@inner
def multiply_tokens(call, rows, x, column, units, memory):
    """float32 [rows, 16] at _RESULT of ``memory``: so many rows of ``x`` times one column of A or
    B, which has so many units."""
    store_i64(memory, column)
    next_column = column + units * VECTOR_BYTES  # to be prefetched
    store_i64(memory + I64_BYTES, next_column)
    multiply_column(
        BF16,
        use_tiles=False,
        rows=rows,
        left=x,
        left_stride=call.x_stride,
        sources=memory,
        num_sources=1,
        units=units,
        unit_stride=VECTOR_BYTES,
        offset=0,
        out=memory + _RESULT,
        out_stride=VECTOR_BYTES,
    )


# --------------------------------------------------------------------------- shrink


@inner
def shrink_body(arguments):
    """out = x A^T of each token's adapter. Rows without an adapter are not written."""
    call = read_low_rank(arguments)
    memory = column_memory()
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        tokens = read_tokens(call.tokens + item * _TOKENS_BYTES)
        if tokens.table == 0:
            continue
        entry = read_entry(tokens.table + call.entry_offset)
        x = call.x + tokens.first * call.x_stride
        for n in range(entry.a_columns):
            column = entry.a_factors + n * call.units * VECTOR_BYTES
            multiply_tokens(call, tokens.number, x, column, units=call.units, memory=memory)
            for m in range(tokens.number):
                row = call.out + (tokens.first + m) * call.out_stride
                value = load(memory + _RESULT + m * VECTOR_BYTES)
                store_as(BF16, row + n * _OUT_COLUMN_BYTES, value)


# --------------------------------------------------------------------------- expand


@inner
def find_segment(entry_address, column):
    """The address of the segment that changes a column of the result; 0 if none does."""
    for n in range(MOST_SEGMENTS):
        address = entry_address + _ENTRY_BYTES + n * SEGMENT_BYTES
        segment = read_segment(address)
        # A segment that the adapter does not change has no columns, and no spacing.
        inside = segment.first_column <= column and column < segment.end_column
        if inside and (column - segment.first_column) % segment.spacing == 0:
            return address
    return np.int64(0)


@inner
def expand_body(arguments):
    """out = other + x B^T of each token's adapter; all rows are written."""
    call = read_low_rank(arguments)
    memory = column_memory()
    columns_per_item = ceil_div(call.columns, EXPAND_ITEMS)
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        tokens = read_tokens(call.tokens + item // EXPAND_ITEMS * _TOKENS_BYTES)
        begin = item % EXPAND_ITEMS * columns_per_item
        for column in range(begin, min(begin + columns_per_item, call.columns)):
            segment_address = np.int64(0)
            if tokens.table != 0:
                segment_address = find_segment(tokens.table + call.entry_offset, column)
            # What the adapter adds to this column, if it changes it.
            if segment_address != 0:
                segment = read_segment(segment_address)
                # Which column of the segment's B gives this column of the result.
                b_index = (column - segment.first_column) // segment.spacing
                b_column = segment.b_factor + b_index * segment.units * VECTOR_BYTES
                x = call.x + tokens.first * call.x_stride + segment.x_offset
                multiply_tokens(
                    call, tokens.number, x, b_column, units=segment.units, memory=memory
                )
            # The column of each token: what the adapter adds, and ``other``.
            for m in range(tokens.number):
                offset = (tokens.first + m) * call.out_stride + column * _OUT_COLUMN_BYTES
                value = splat(ZERO)
                if segment_address != 0:
                    value = load(memory + _RESULT + m * VECTOR_BYTES)
                if call.other != 0:
                    value = value + load_as(BF16, call.other + offset)
                store_as(BF16, call.out + offset, value)
