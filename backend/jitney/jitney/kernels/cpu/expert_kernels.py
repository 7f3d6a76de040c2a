"""A mixture of experts as kernels: which tokens go to which expert, and the experts' products.

A router gives each token a number for each of E experts. The token goes to the k experts with the
largest ones, and the sum of what these give, each times its score, is the result. Each token is in
the work k times: such a *pair* of token and expert has a row of its own::

    numbers [T, E]  -- choose:  experts [T, k], scores [T, k]
                    -- sort:    pairs by expert, and which row each pair has
    x [T, H]        -- gather:  x of each pair [T k, H], those of one expert side by side
                    -- product "gated" of each expert with its rows    [T k, I]
                    -- product "down" of each expert with its rows     [T k, H]
                    -- combine: other + the sum of score * row over a token's pairs  [T, H]

The products are those of ``product_kernel``, for one expert after the other. A token's result
depends on that token alone: its pairs are summed up in the order in which they were chosen.

Called by ``experts``. Imported only where Numba is.
"""

import ctypes

import numpy as np
from numba import types

from jitney.kernels.cpu.amx import amx_end
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import (
    F32_BYTES,
    I64_BYTES,
    LANES,
    ceil_div,
    emitted,
    stack_memory,
)
from jitney.kernels.cpu.product_call import RESULT_BYTES, ROWS_PER_ITEM, ProductCall, read_product
from jitney.kernels.cpu.product_kernel import LISTED_COLUMNS, multiply_pair
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ZERO,
    element_bytes,
    exp2,
    fetch_add,
    first_lane,
    fma,
    inner,
    keep_below,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load_as,
    load_f32,
    load_i64,
    load_one,
    splat,
    store_as,
    store_f32,
    store_i64,
)

_TOKENS_PER_ITEM = 4
_PRODUCT_BYTES = ctypes.sizeof(ProductCall)
_LEAST = np.float32(-np.inf)


@record
class RouteCall(KernelCall):
    """Arguments of all kernels here but the products; ``count`` is in tokens."""

    chosen: int
    """k: how many experts a token goes to."""
    experts: int
    """E."""
    numbers: int
    """Address of the router's numbers, in the model's type. A row is filled up to whole vectors."""
    numbers_stride: int
    """Bytes from token to token."""
    over_all: int
    """1: a score is the softmax over all experts. 0: over the k that were chosen."""
    expert_of_pair: int
    """Address of int64 [count, k]."""
    score_of_pair: int
    """Address of float32 [count, k]."""
    row_of_pair: int
    """Address of int64 [count, k]: which row each pair has."""
    token_of_row: int
    """Address of int64 [count * k]."""
    segments: int
    """Address of int64 [E + 1]: the first row of each expert; and behind them, count * k."""
    used: int
    """Address of int64 [1 + E]: how many experts have rows, and which they are."""
    x: int
    """Address of [count, width] in the model's type."""
    rows: int
    """Address of [count * k, width]: x of each pair, or what the experts gave for it."""
    width: int
    """H, a multiple of 16."""
    out: int
    """Address of [count, width]."""
    other: int
    """Address of [count, width], which is added to the result. 0: nothing is added."""


read_route = reader(RouteCall)


@record
class GroupCall(KernelCall):
    """Arguments of :func:`group_body`; ``count`` is not used."""

    products: int
    """Address of a ProductCall for each expert."""
    segments: int
    """As in RouteCall, and so is ``used``."""
    used: int
    pairs: int
    """Pairs of columns of each weight."""
    pairs_per_item: int
    use_tiles: int
    """As in ProductCall."""


read_group = reader(GroupCall)


# --------------------------------------------------------------------------- choose


@inner
def power_of_e(x):
    """e**x."""
    return first_lane(exp2(splat(x * LOG2_E)))


@inner
def find_number(tag, numbers, first, experts, value):
    """The first index from ``first`` on whose number is ``value``; ``experts`` if there is none."""
    e = first
    while e < experts and load_one(tag, numbers + e * element_bytes(tag)) != value:
        e += 1
    return e


@inner
def next_largest(tag, numbers, experts, last_value, last):
    """The index of the largest number behind the one that was chosen last, which has the index
    ``last`` and the value ``last_value``. Of equal numbers the first comes first. Where none is
    left, as among NaNs, it is the expert behind ``last``."""
    equal = find_number(tag, numbers, last + 1, experts, last_value)
    if equal < experts:
        return equal, last_value
    largest = splat(_LEAST)
    for e in range(0, experts, LANES):
        values = load_as(tag, numbers + e * element_bytes(tag))
        # What the row is filled up with is never chosen.
        values = keep_between(values, np.int64(0), experts - e, _LEAST)
        largest = larger(keep_below(values, last_value, _LEAST), largest)
    value = lane_max(largest)
    found = find_number(tag, numbers, np.int64(0), experts, value)
    if found < experts:
        return found, value
    return (last + 1) % experts, last_value


@inner
def sum_of_powers(tag, numbers, experts, largest):
    """The sum of e**(number - largest) over all experts."""
    sums = splat(ZERO)
    for e in range(0, experts, LANES):
        values = load_as(tag, numbers + e * element_bytes(tag)) - splat(largest)
        # What the row is filled up with has no part in it.
        values = keep_between(values, np.int64(0), experts - e, _LEAST)
        sums = sums + exp2(values * splat(LOG2_E))
    return lane_sum(sums)


@inner
def choose_body(tag, arguments):
    """Choose experts and scores of each token."""
    call = read_route(arguments)
    while True:
        first = fetch_add(arguments) * _TOKENS_PER_ITEM
        if first >= call.count:
            return
        for t in range(first, min(first + _TOKENS_PER_ITEM, call.count)):
            numbers = call.numbers + t * call.numbers_stride
            experts = call.expert_of_pair + t * call.chosen * I64_BYTES
            scores = call.score_of_pair + t * call.chosen * F32_BYTES
            last = np.int64(-1)
            value = np.float32(np.inf)
            largest = ZERO
            total = ZERO
            for j in range(call.chosen):
                last, value = next_largest(tag, numbers, call.experts, value, last)
                if j == 0:
                    largest = value
                power = power_of_e(value - largest)
                total += power
                store_i64(experts + j * I64_BYTES, last)
                store_f32(scores + j * F32_BYTES, power)
            if call.over_all != 0:
                total = sum_of_powers(tag, numbers, call.experts, largest)
            for j in range(call.chosen):
                score = scores + j * F32_BYTES
                store_f32(score, load_f32(score) / total)


# --------------------------------------------------------------------------- sort and gather


@inner
def sort_body(arguments):
    """Give each pair a row, by expert and then by token. One thread does it: it is a few additions
    for each pair."""
    call = read_route(arguments)
    if fetch_add(arguments) > 0:
        return
    pairs = call.count * call.chosen
    for e in range(call.experts + 1):
        store_i64(call.segments + e * I64_BYTES, 0)
    # How many rows each expert has, one place further on.
    for p in range(pairs):
        expert = load_i64(call.expert_of_pair + p * I64_BYTES)
        counted = call.segments + (expert + 1) * I64_BYTES
        store_i64(counted, load_i64(counted) + 1)
    used = np.int64(0)
    for e in range(call.experts):
        rows = load_i64(call.segments + (e + 1) * I64_BYTES)
        begin = load_i64(call.segments + e * I64_BYTES)
        store_i64(call.segments + (e + 1) * I64_BYTES, begin + rows)
        if rows > 0:
            used += 1
            store_i64(call.used + used * I64_BYTES, e)
    store_i64(call.used, used)
    # Each pair takes the next row of its expert: that moves the expert's segment to its end.
    for p in range(pairs):
        expert = load_i64(call.expert_of_pair + p * I64_BYTES)
        segment = call.segments + expert * I64_BYTES
        row = load_i64(segment)
        store_i64(segment, row + 1)
        store_i64(call.row_of_pair + p * I64_BYTES, row)
        store_i64(call.token_of_row + row * I64_BYTES, p // call.chosen)
    # And back: where an expert ended, the next one begins.
    for e in range(call.experts, 0, -1):
        store_i64(call.segments + e * I64_BYTES, load_i64(call.segments + (e - 1) * I64_BYTES))
    store_i64(call.segments, 0)


@inner
def gather_body(tag, arguments):
    """Copy x to the row of each pair."""
    call = read_route(arguments)
    stride = call.width * element_bytes(tag)
    rows = call.count * call.chosen
    while True:
        first = fetch_add(arguments) * _TOKENS_PER_ITEM
        if first >= rows:
            return
        for r in range(first, min(first + _TOKENS_PER_ITEM, rows)):
            x = call.x + load_i64(call.token_of_row + r * I64_BYTES) * stride
            row = call.rows + r * stride
            for i in range(0, call.width, LANES):
                offset = i * element_bytes(tag)
                store_as(tag, row + offset, load_as(tag, x + offset))


# --------------------------------------------------------------------------- products


@emitted(types.int64)
def thread_memory(builder):
    return stack_memory(builder, RESULT_BYTES + LISTED_COLUMNS * I64_BYTES)


@inner
def group_body(tag, arguments):
    """The product of each expert with its rows. An item is one expert and some of its pairs of
    columns."""
    group = read_group(arguments)
    memory = thread_memory()
    shaped = np.int64(0)
    used = load_i64(group.used)
    items_of_expert = ceil_div(group.pairs, group.pairs_per_item)
    while True:
        item = fetch_add(arguments)
        number = item // items_of_expert
        if number >= used:
            break
        expert = load_i64(group.used + (1 + number) * I64_BYTES)
        call = read_product(group.products + expert * _PRODUCT_BYTES)
        begin = load_i64(group.segments + expert * I64_BYTES)
        end = load_i64(group.segments + (expert + 1) * I64_BYTES)
        first_pair = item % items_of_expert * group.pairs_per_item
        end_pair = min(first_pair + group.pairs_per_item, group.pairs)
        for pair in range(first_pair, end_pair):
            for first in range(begin, end, ROWS_PER_ITEM):
                last = min(first + ROWS_PER_ITEM, end)
                shaped = multiply_pair(tag, call, pair, first, last, memory=memory, shaped=shaped)
    if group.use_tiles != 0:
        amx_end()


# --------------------------------------------------------------------------- combine


@inner
def combine_body(tag, arguments):
    """Sum up the rows of each token's pairs, each times its score, and ``other``."""
    call = read_route(arguments)
    size = element_bytes(tag)
    stride = call.width * size
    while True:
        first = fetch_add(arguments) * _TOKENS_PER_ITEM
        if first >= call.count:
            return
        for t in range(first, min(first + _TOKENS_PER_ITEM, call.count)):
            pairs = t * call.chosen
            for i in range(0, call.width, LANES):
                offset = i * size
                total = splat(ZERO)
                for p in range(pairs, pairs + call.chosen):
                    row = load_i64(call.row_of_pair + p * I64_BYTES)
                    score = splat(load_f32(call.score_of_pair + p * F32_BYTES))
                    total = fma(load_as(tag, call.rows + row * stride + offset), score, total)
                if call.other != 0:
                    total = total + load_as(tag, call.other + t * stride + offset)
                store_as(tag, call.out + t * stride + offset, total)
