"""An adapter's factors as ``adapter_kernel`` reads them, and a step's tokens by adapter.

Each adapter has a table of int64, [decoder layers, PLACES, PLACE_FIELDS]. A *place* is a fused
layer of a decoder layer (``fused``), which may join several linear layers, each a *segment*::

    A_FACTORS | A_COLUMNS | segment 0: FIRST LAST STEP B_FACTOR UNITS X_OFFSET | segment 1 | 2

A columns are 16 of the adapter's ranks: the A factors of all linear layers of a place lie one above
the other, so x is shrunk once. B columns are 16 outputs, as those of ``product_kernel``.

Called by ``program``, which packs adapters and lists a step's tokens.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from jitney.execution.low_rank import AdapterSpan, Factors, Part
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.micro_kernel import MAX_ROWS
from jitney.kernels.fused.whole_model import Places

ITEM_TOKENS = MAX_ROWS
"""Tokens of one adapter that an item of the kernels has, at most."""

# Fields of a place.
A_FACTORS = 0
"""Address of its A factors."""
A_COLUMNS = 1
"""How many columns they have."""
SEGMENTS = 2
"""From here on the segments, one for each linear layer."""

# Fields of a segment.
FIRST = 0
"""The segment changes these columns of the place's result: FIRST, FIRST + STEP, ... below LAST."""
LAST = 1
STEP = 2
B_FACTOR = 3
"""Address of its B factor."""
UNITS = 4
"""Pairs of ranks, which are the units of a column of B."""
X_OFFSET = 5
"""Bytes from the beginning of a row that x was shrunk to, to this segment's ranks."""
SEGMENT_FIELDS = 6
MOST_SEGMENTS = 3
PLACE_FIELDS = SEGMENTS + MOST_SEGMENTS * SEGMENT_FIELDS
PLACES = len(Places._fields)
GATED = Places._fields.index("gated")


class PackedAdapter(NamedTuple):
    """An adapter as the kernels read it."""

    table: np.ndarray
    """int64 [layers, PLACES, PLACE_FIELDS]"""
    address: int
    """Of the table."""
    used: frozenset[int]
    """Indices of the places that it changes in some layer."""
    columns: int
    """How many columns of A a place has at most: x is shrunk to 16 numbers for each."""
    memory: list[Tensor]
    """The tensors that the table's addresses point to."""


def pack(factors: Mapping[str, Factors], layers: Sequence[Places]) -> PackedAdapter:
    """Factors in bfloat16, by path, for the places of each decoder layer."""
    table = np.zeros((len(layers), PLACES, PLACE_FIELDS), np.int64)
    table[:, :, SEGMENTS + STEP :: SEGMENT_FIELDS] = 1  # the kernel divides by it
    memory = list[Tensor]()
    for layer, places in enumerate(layers):
        for place, parts in enumerate(places):
            if any(part.path in factors for part in parts):
                memory += _pack_place(table[layer, place], parts, factors, gated=place == GATED)
    columns = table[:, :, A_COLUMNS]
    used = np.flatnonzero(columns.any(0)).tolist()
    return PackedAdapter(
        table=table,
        address=table.ctypes.data,
        used=frozenset(used),
        columns=int(columns.max(initial=0)),
        memory=memory,
    )


def _pack_place(
    row: np.ndarray, parts: Sequence[Part], factors: Mapping[str, Factors], *, gated: bool
) -> list[Tensor]:
    """Fill ``row``, one place's part of the table. Returns the tensors that it points to.

    Where it is ``gated``, the place's result has the columns of gate and up by turns."""
    shrinking = list[Tensor]()
    memory = list[Tensor]()
    ranks_before = 0
    for number, part in enumerate(parts):
        if part.path not in factors:
            continue
        a = factors[part.path].a
        b = factors[part.path].b.T
        if gated and len(parts) == 1:
            # One linear layer gives gate and up, one above the other.
            b = b.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)
        filling = -len(a) % LANES
        shrinking.append(functional.pad(a, (0, 0, 0, filling)))
        packed = _columns(functional.pad(b, (0, filling)))
        memory.append(packed)
        first = part.first // LANES
        last = part.last // LANES
        if gated and len(parts) == 2:
            # Gate and up are linear layers of their own: every other column is this one's, for gate
            # from column 0 on, for up from column 1 on.
            last = 2 * (last - first)
            first = number
            step = 2
        else:
            step = 1
        ranks = len(a) + filling
        segment = SEGMENTS + number * SEGMENT_FIELDS
        row[segment + FIRST] = first
        row[segment + LAST] = last
        row[segment + STEP] = step
        row[segment + B_FACTOR] = packed.data_ptr()
        row[segment + UNITS] = ranks // 2
        row[segment + X_OFFSET] = 2 * ranks_before
        ranks_before += ranks
    a_factors = _columns(torch.cat(shrinking))
    memory.append(a_factors)
    row[A_FACTORS] = a_factors.data_ptr()
    row[A_COLUMNS] = ranks_before // LANES
    return memory


def _columns(weight: Tensor) -> Tensor:
    """[N / 16, K / 2, 16, 2] of a weight [N, K]."""
    return weight.view(len(weight) // LANES, LANES, -1, 2).transpose(1, 2).contiguous()


def list_items(array: np.ndarray, spans: Sequence[AdapterSpan], tokens: int) -> int:
    """Write the items of all of a step's tokens, those without an adapter too, to int64 [most, 3],
    as ``LowRankCall.items`` has them; returns how many items there are."""
    count = 0
    end = 0  # the first token that is not listed yet
    for span in spans:
        count = _list_tokens(array, count, end, last=span.first, table=0)
        table = span.adapter.packed.address
        count = _list_tokens(array, count, span.first, last=span.last, table=table)
        end = span.last
    return _list_tokens(array, count, end, last=tokens, table=0)


def _list_tokens(array: np.ndarray, count: int, first: int, *, last: int, table: int) -> int:
    """Write tokens [first, last) behind ``count`` items; returns how many items there are then."""
    for start in range(first, last, ITEM_TOKENS):
        array[count] = start, min(ITEM_TOKENS, last - start), table
        count += 1
    return count
