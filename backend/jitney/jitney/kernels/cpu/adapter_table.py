"""LoRA adapters as ``adapter_kernel`` reads them, and which tokens of a step have which adapter.

A *place* is one of the four fused layers of a decoder layer that adapters may change
(``fused.whole_model.Places``). It may join several linear layers of the module, as query, key and
value. Each of these is a *segment* of the place.

Each adapter has a table with an entry for each decoder layer and place. An entry says where the
adapter's factors are::

    | PlaceEntry: the A factors of all segments | Segment: the B factor of segment 0 | 1 | 2 |

The A factors of all segments lie one above the other, so that x is shrunk once. Both factors are
packed in columns as a weight is (``product_kernel``): A in columns of 16 ranks, where each segment
is filled up with zeros; B in columns of 16 outputs.

Called by ``program``, which packs adapters and lists a step's tokens.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from jitney.execution.low_rank import AdapterSpan, Factors, Part
from jitney.kernels.cpu.compiled import record
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.micro_kernel import MAX_ROWS
from jitney.kernels.fused.whole_model import Places

ITEM_TOKENS = MAX_ROWS
"""Tokens of one adapter that an item of the kernels has, at most."""
MOST_SEGMENTS = 3
PLACES = len(Places._fields)
GATED = Places._fields.index("gated")
_BF16_BYTES = 2


# --------------------------------------------------------------------------- records


@record
class PlaceEntry(ctypes.Structure):
    """The beginning of an entry of the table; behind it are MOST_SEGMENTS segments."""

    a_factors: int
    """Address of the A factors of all segments."""
    a_columns: int
    """How many columns these have. 0: the adapter does not change the place."""


@record
class Segment(ctypes.Structure):
    """One linear layer of a place."""

    first: int
    """The columns of the place's result that this linear layer gives: ``first``, ``first`` +
    ``spacing``, ... below ``last``. If the adapter does not change it, there are none: 0 and 0."""
    last: int
    spacing: int
    b_factor: int
    """Address of its B factor."""
    units: int
    """Units of a column of B: pairs of ranks."""
    x_offset: int
    """Bytes from the beginning of a row that x was shrunk to, to this segment's ranks."""


SEGMENT_BYTES = ctypes.sizeof(Segment)
_SEGMENT_FIELDS = len(Segment.__annotations__)
_FIRST_SEGMENT = len(PlaceEntry.__annotations__)
PLACE_FIELDS = _FIRST_SEGMENT + MOST_SEGMENTS * _SEGMENT_FIELDS
"""Numbers, of 64 bits, of an entry."""


@record
class AdapterItem(ctypes.Structure):
    """A few neighbouring tokens of one adapter, or of none."""

    first_token: int
    tokens: int
    table: int
    """Address of the adapter's table. 0: the tokens have no adapter."""


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


# --------------------------------------------------------------------------- packing


def pack(factors: Mapping[str, Factors], layers: Sequence[Places]) -> PackedAdapter:
    """An adapter of ``factors`` in bfloat16, by path, for the places of each decoder layer."""
    table = np.zeros((len(layers), PLACES, PLACE_FIELDS), np.int64)
    memory = list[Tensor]()
    for layer, places in enumerate(layers):
        for place, parts in enumerate(places):
            if any(part.path in factors for part in parts):
                entry = table[layer, place]
                memory += _pack_place(entry, parts, factors, gated=place == GATED)
    a_columns = table[:, :, list(PlaceEntry.__annotations__).index("a_columns")]
    used = np.flatnonzero(a_columns.any(0)).tolist()
    return PackedAdapter(
        table=table,
        address=table.ctypes.data,
        used=frozenset(used),
        columns=int(a_columns.max(initial=0)),
        memory=memory,
    )


def _pack_place(
    entry: np.ndarray, parts: Sequence[Part], factors: Mapping[str, Factors], *, gated: bool
) -> list[Tensor]:
    """Fill an entry of the table. Returns the tensors that it points to.

    If the place is ``gated``, its result is that of gate and up, by turns 16 outputs of each. The
    module may have one linear layer for both, or two."""
    a_factors = list[Tensor]()
    memory = list[Tensor]()
    ranks_before = 0
    for number, part in enumerate(parts):
        if part.path not in factors:
            continue
        a = factors[part.path].a  # [rank, inputs]
        b = factors[part.path].b.T  # [outputs, rank]
        if gated and len(parts) == 1:
            # The one layer gives gate and up, one above the other. Take its outputs by turns.
            b = b.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)
        filling = -len(a) % LANES
        ranks = len(a) + filling
        a_factors.append(functional.pad(a, (0, 0, 0, filling)))
        b_factor = _columns(functional.pad(b, (0, filling)))
        memory.append(b_factor)
        segment = Segment(
            first=part.first // LANES,
            last=part.last // LANES,
            spacing=1,
            b_factor=b_factor.data_ptr(),
            units=ranks // 2,
            x_offset=ranks_before * _BF16_BYTES,
        )
        if gated and len(parts) == 2:
            # Gate, layer 0, gives columns 0, 2, 4 ..., and up, layer 1, gives columns 1, 3, 5 ...
            segment.first = number
            segment.last = 2 * len(b_factor)
            segment.spacing = 2
        begin = _FIRST_SEGMENT + number * _SEGMENT_FIELDS
        entry[begin : begin + _SEGMENT_FIELDS] = np.frombuffer(bytes(segment), np.int64)
        ranks_before += ranks
    all_a_factors = _columns(torch.cat(a_factors))
    memory.append(all_a_factors)
    head = PlaceEntry(a_factors=all_a_factors.data_ptr(), a_columns=ranks_before // LANES)
    entry[:_FIRST_SEGMENT] = np.frombuffer(bytes(head), np.int64)
    return memory


def _columns(weight: Tensor) -> Tensor:
    """[N / 16, K / 2, 16, 2] of a weight [N, K]."""
    return weight.view(len(weight) // LANES, LANES, -1, 2).transpose(1, 2).contiguous()


# --------------------------------------------------------------------------- a step's tokens


def list_items(array: np.ndarray, spans: Sequence[AdapterSpan], tokens: int) -> int:
    """Write the items of all of a step's tokens, those without an adapter too, to int64 [most, 3]:
    an :class:`AdapterItem` in each row. Returns how many items there are.

    (An ``AdapterSpan`` is neighbouring tokens, and has nothing to do with a span of attention.)
    """
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
        array[count] = start, min(ITEM_TOKENS, last - start), table  # the fields of AdapterItem
        count += 1
    return count
