# mypy: disable-error-code="no-untyped-def"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""What the attention kernel is told and where it keeps things: arguments, scratch memory, and the
works that a step is cut into.

Addresses are integers, strides and sizes are in bytes.
"""

import ctypes

import numpy as np

from jitney.kernels.cpu.amx import MAX_ROWS_AMX
from jitney.kernels.cpu.compiled import compile_function
from jitney.kernels.cpu.products import COLUMNS, GROUP_TOKENS, PREFETCH_GROUPS
from jitney.kernels.cpu.records import Call, reader, record
from jitney.kernels.cpu.simd import LANES, inner

SPAN_GROUPS = 16
SPAN_TOKENS = SPAN_GROUPS * GROUP_TOKENS
"""Keys per turn of the online softmax."""
SPLIT_TOKENS = 512
"""Keys per item of a decode row."""
TILE_ROWS = 48
"""Query heads times tokens of one item, at most, unless one token has more."""
WRITE_TOKENS = 16
"""Tokens of one item that writes to the cache."""
LIST_MARGIN = PREFETCH_GROUPS + COLUMNS
"""Entries behind the groups in use that may be read: to prefetch, and to fill up a tile."""


@record
class AttentionArguments(Call):
    """The arguments: first those of one layer, then those of one step for layers of one kind."""

    query: int
    query_token_stride: int
    query_head_stride: int
    key: int
    key_token_stride: int
    key_head_stride: int
    value: int
    value_token_stride: int
    value_head_stride: int
    key_cache: int
    value_cache: int
    sinks: int
    """Address of float32 [heads]; 0: none."""
    out: int
    """[T, heads, head size], contiguous."""

    works: int
    """Address of an array of Work. From here on: what is of the step."""
    scratch: int
    """Address of an array of Scratch, one per thread."""
    parts: int
    """Records of split rows: per part and KV head, float32 outputs [heads of the group, padded],
    running maxima and running sums [heads of the group]."""
    parts_done: int
    """int64 [split rows, KV heads], all 0 at the start and at the end."""
    heads: int
    kv_heads: int
    group: int
    """Query heads for each KV head."""
    head_size: int
    padded: int
    """Head size in the cache."""
    block_size: int
    table: int
    """int32 [R, table_width]"""
    table_width: int
    slots: int
    """int64 [T]"""
    tokens: int
    """T."""
    decode: int
    """1 if every row has one token: then the item that reads a token's slot writes it first, and
    :func:`blocks.write_body` need not run."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    scale: float
    window: int
    """0: none."""
    softcap: float
    """0: none."""


@record
class Work(ctypes.Structure):
    """A tile of one row's queries and the keys they are to see."""

    row: int
    first_token: int
    """Of the flattened T."""
    num_tokens: int
    position: int
    """Of the first token."""
    keys_begin: int
    """A multiple of 16."""
    keys_end: int
    part: int
    """Index among the parts of a split row."""
    num_parts: int
    first_part: int
    """Record of the row's part 0, counted over all split rows."""
    split_row: int


@record
class Scratch(ctypes.Structure):
    """Where one thread keeps what it works on; see :func:`scratch_sizes`."""

    queries: int
    scores: int
    weights: int
    outputs: int
    maxima: int
    """In base 2."""
    sums: int
    last_values: int
    """A row's last group of values."""
    key_groups: int
    """Addresses of the item's groups, and LIST_MARGIN more."""
    value_groups: int


def scratch_sizes(size: int, rows: int, padded: int, longest: int) -> list[int]:
    """Bytes of each area of a :class:`Scratch`, for tiles of ``rows``.

    ``size`` is that of an element in the cache, ``longest`` the longest context in tokens.
    """
    rows = -(-rows // LANES) * LANES
    groups = -(-longest // GROUP_TOKENS) + 1 + LIST_MARGIN
    return [
        rows * padded * size,
        MAX_ROWS_AMX * SPAN_TOKENS * 4,
        MAX_ROWS_AMX * SPAN_TOKENS * size,
        rows * padded * 4,
        rows * 4,
        rows * 4,
        GROUP_TOKENS * padded * size,
        groups * 8,
        groups * 8,
    ]


read_call, _read_work, read_scratch = map(reader, (AttentionArguments, Work, Scratch))
_WORK_BYTES, SCRATCH_BYTES = ctypes.sizeof(Work), ctypes.sizeof(Scratch)
_WORK_FIELDS = _WORK_BYTES // 8


@inner
def read_work(call, index):
    """Work ``index``."""
    return _read_work(call.works + index * _WORK_BYTES)


# --------------------------------------------------------------------------- plan


@compile_function
def cut_works(query_start, context_len, tile, reach, split_tokens, group_tokens):
    """Cut a step, whose queries see ``reach`` keys at most, into works.

    A row of one token is split by its keys into parts of ``split_tokens``, a longer one by its
    tokens into tiles of ``tile`` tokens. Neither looks at any other row. The first two arrays are
    int32. Returns int64 [works, fields of ``Work``], the longest first, the number of parts of all
    split rows, and the number of these. Done for every step, so it is compiled: that takes a tenth
    of the time of NumPy's calls.
    """
    most = np.sum(context_len // split_tokens + 2) + query_start[-1] // tile
    works = np.empty((most, _WORK_FIELDS), np.int64)
    done = parts = split_rows = 0
    for row in range(len(context_len)):
        start, context = np.int64(query_start[row]), np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - start
        for offset in range(0, length, tile):
            position = context - length + offset
            begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            end = min(position + tile, context)
            tokens, size, count = end - position, end - begin, 1
            if length == 1:
                size, count = split_tokens, -(-(end - begin) // split_tokens)
            for part in range(count):
                works[done] = (
                    row, start + offset, tokens, position, begin + part * size,
                    min(begin + (part + 1) * size, end), part, count, parts, split_rows,
                )  # fmt: skip
                done += 1
            if count > 1:
                parts += count
                split_rows += 1
    works = works[:done]
    cost = works[:, 2] * (works[:, 5] - works[:, 4])
    return works[np.argsort(-cost, kind="mergesort")], parts, split_rows  # a stable order
