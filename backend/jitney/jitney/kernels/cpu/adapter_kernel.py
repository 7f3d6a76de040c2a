"""What LoRA adapters add to a step's products, as items of a ``program``; imported only where Numba
is.

For each product two kernels run before it. One shrinks x to ``x A^T``, of the adapters' ranks; one
expands that to what the product adds to its own result::

    x [T, K]  -- shrink: A, columns of 16 ranks -->  [T, ranks]
              -- expand: B, columns of 16 outputs -->  other + x A^T B^T  [T, N]

Loops, from outer to inner: items (a few tokens of one adapter; to expand, a quarter of the outputs
of these), columns of a factor, then the micro-kernel: all tokens of the item at once, the factor
streamed, sums in registers. A result of 16 numbers for each token stays on the stack until it is
rounded.

Ranks are filled up to whole columns, whatever other adapters have. A row's result depends on that
row and its adapter alone.

``adapter_table`` says how factors are packed. Called by ``program``.
"""

import numpy as np
from numba import types

from jitney.kernels.cpu.adapter_table import (
    A_COLUMNS,
    A_FACTORS,
    B_FACTOR,
    FIRST,
    ITEM_TOKENS,
    LAST,
    MOST_SEGMENTS,
    SEGMENT_FIELDS,
    SEGMENTS,
    STEP,
    UNITS,
    X_OFFSET,
)
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import LANES, VECTOR_BYTES, emitted, stack_memory
from jitney.kernels.cpu.micro_kernel import make_micro_kernel
from jitney.kernels.cpu.simd import (
    BF16,
    ZERO,
    fetch_add,
    inner,
    load,
    load_as,
    load_i64,
    splat,
    store_as,
    store_i64,
)

EXPAND_ITEMS = 4
"""Items that the outputs of a few tokens are shared out among."""
_ENTRY_BYTES = 24
"""Bytes of an entry of ``LowRankCall.items``."""
_RESULT = 64
"""Bytes from the beginning of :func:`column_memory` to the result."""


@record
class LowRankCall(KernelCall):
    """Arguments of :func:`shrink_body` and :func:`expand_body`; ``count`` is that of items."""

    x: int
    """[T, K] bfloat16; expanding: what was shrunk."""
    x_stride: int
    """Bytes from row to row."""
    out: int
    out_stride: int
    other: int
    """Address of what :func:`expand_body` adds its product to, as ``out``. 0: none."""
    items: int
    """Address of int64 [items, 3]: first token, number of tokens, address of a table or 0."""
    place: int
    """Bytes from an adapter's table to that of the layer and place."""
    units: int
    """Pairs of inputs: K / 2. For :func:`shrink_body`."""
    columns: int
    """Columns of ``out`` that are written: N / 16. For :func:`expand_body`."""


read_low_rank = reader(LowRankCall)
multiply_column = make_micro_kernel(1, across=True, ahead=1)


@emitted(types.int64)
def column_memory(builder):
    """The address of int64 [2], a list of columns, and at _RESULT of float32 [ITEM_TOKENS, 16]."""
    return stack_memory(builder, _RESULT + ITEM_TOKENS * VECTOR_BYTES)


@inner
def multiply_tokens(call, rows, x, factor, units, memory):
    """float32 [rows, 16] at _RESULT of ``memory``: rows of x times one column of a factor, whose
    address is ``factor``."""
    store_i64(memory, factor)
    store_i64(memory + 8, factor + units * VECTOR_BYTES)  # the next column, to prefetch
    multiply_column(
        BF16,
        False,
        rows,
        left=x,
        left_stride=call.x_stride,
        sources=memory,
        count=1,
        units=units,
        step=VECTOR_BYTES,
        offset=0,
        out=memory + _RESULT,
        out_stride=VECTOR_BYTES,
    )


@inner
def shrink_body(arguments):
    """out = x A^T of each item's adapter. Rows without an adapter are not written."""
    call = read_low_rank(arguments)
    memory = column_memory()
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        entry = call.items + _ENTRY_BYTES * item
        first = load_i64(entry)
        rows = load_i64(entry + 8)
        adapter = load_i64(entry + 16)
        if adapter == 0:
            continue
        table = adapter + call.place
        x = call.x + first * call.x_stride
        for n in range(load_i64(table + 8 * A_COLUMNS)):
            factor = load_i64(table + 8 * A_FACTORS) + n * call.units * VECTOR_BYTES
            multiply_tokens(call, rows, x, factor, units=call.units, memory=memory)
            for m in range(rows):
                out = call.out + (first + m) * call.out_stride + 2 * LANES * n
                store_as(BF16, out, load(memory + _RESULT + m * VECTOR_BYTES))


@inner
def find_segment(table, column):
    """The address of the segment that changes a column of the result; 0 if none does. (A segment
    that is not filled in has FIRST = LAST = 0, which is no column.)"""
    for n in range(MOST_SEGMENTS):
        segment = table + 8 * (SEGMENTS + n * SEGMENT_FIELDS)
        first = load_i64(segment + 8 * FIRST)
        step = load_i64(segment + 8 * STEP)
        inside = first <= column and column < load_i64(segment + 8 * LAST)
        if inside and (column - first) % step == 0:
            return segment
    return np.int64(0)


@inner
def expand_body(arguments):
    """out = other + x B^T of each item's adapter; all rows are written."""
    call = read_low_rank(arguments)
    memory = column_memory()
    columns_per_item = -(-call.columns // EXPAND_ITEMS)
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        entry = call.items + _ENTRY_BYTES * (item // EXPAND_ITEMS)
        first = load_i64(entry)
        rows = load_i64(entry + 8)
        adapter = load_i64(entry + 16)
        begin = item % EXPAND_ITEMS * columns_per_item
        for column in range(begin, min(begin + columns_per_item, call.columns)):
            segment = np.int64(0)
            if adapter != 0:
                segment = find_segment(adapter + call.place, column)
            if segment != 0:
                # This column of the result is column ``index`` of the segment's B.
                distance = column - load_i64(segment + 8 * FIRST)
                index = distance // load_i64(segment + 8 * STEP)
                units = load_i64(segment + 8 * UNITS)
                factor = load_i64(segment + 8 * B_FACTOR) + index * units * VECTOR_BYTES
                x = call.x + first * call.x_stride + load_i64(segment + 8 * X_OFFSET)
                multiply_tokens(call, rows, x, factor, units=units, memory=memory)
            for m in range(rows):
                at = (first + m) * call.out_stride + column * 2 * LANES
                value = splat(ZERO)
                if segment != 0:
                    value = load(memory + _RESULT + m * VECTOR_BYTES)
                if call.other != 0:
                    value = value + load_as(BF16, call.other + at)
                store_as(BF16, call.out + at, value)
