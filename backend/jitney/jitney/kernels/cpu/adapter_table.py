"""LoRA adapters as ``adapter_kernel`` reads them, and which tokens of a step have which adapter.

Adapters may change the four products of a decoder layer; ``fused.whole_model.Places`` lists them. A
product may join several linear layers of the module, as query, key and value. Each of these is a
*segment* of the product.

Each adapter has a table with an entry for each decoder layer and product. An entry says where the
adapter's factors A and B are::

    | ProductEntry: the A factors of all segments | Segment: the B factor of segment 0 | 1 | 2 |

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
"""Tokens of an :class:`AdapterTokens`, at most."""
MOST_SEGMENTS = 3
PRODUCTS = len(Places._fields)
"""Products of a decoder layer. Each has an index: that of its name in ``Places``."""
GATED = Places._fields.index("gated")
_BF16_BYTES = 2


# --------------------------------------------------------------------------- records


@record
class ProductEntry(ctypes.Structure):
    """The beginning of an entry of the table; behind it are MOST_SEGMENTS segments."""

    a_factors: int
    """Address of the A factors of all segments."""
    a_columns: int
    """How many columns these have. 0: the adapter does not change the product."""


@record
class Segment(ctypes.Structure):
    """One linear layer of a product."""

    first_column: int
    """The columns of the product's result that this linear layer gives: ``first_column``,
    ``first_column`` + ``spacing``, ... below ``end_column``. If the adapter does not change it,
    there are none: 0 and 0."""
    end_column: int
    spacing: int
    b_factor: int
    """Address of its B factor."""
    units: int
    """Units of a column of B: pairs of ranks."""
    x_offset: int
    """Offset in bytes of this segment's ranks within a row of the shrunk x."""


SEGMENT_BYTES = ctypes.sizeof(Segment)
_SEGMENT_FIELDS = len(Segment.__annotations__)
_FIRST_SEGMENT = len(ProductEntry.__annotations__)
ENTRY_FIELDS = _FIRST_SEGMENT + MOST_SEGMENTS * _SEGMENT_FIELDS
"""Numbers, of 64 bits, of an entry."""


@record
class AdapterTokens(ctypes.Structure):
    """A few neighbouring tokens of one adapter, or of none."""

    first: int
    """Index of the first token among those of the step."""
    number: int
    """How many tokens."""
    table: int
    """Address of the adapter's table. 0: the tokens have no adapter."""


class PackedAdapter(NamedTuple):
    """An adapter as the kernels read it."""

    table: np.ndarray
    """int64 [layers, PRODUCTS, ENTRY_FIELDS]"""
    address: int
    """Of the table."""
    used: frozenset[int]
    """Indices of the products that it changes in some layer."""
    columns: int
    """How many columns of A a product has at most: x is shrunk to 16 numbers for each."""
    memory: list[Tensor]
    """The tensors that the table's addresses point to."""


# --------------------------------------------------------------------------- packing


def pack_adapter(factors: Mapping[str, Factors], layers: Sequence[Places]) -> PackedAdapter:
    """An adapter of ``factors`` in bfloat16, by path, for the products of each decoder layer."""
    table = np.zeros((len(layers), PRODUCTS, ENTRY_FIELDS), np.int64)
    memory = list[Tensor]()
    for layer, places in enumerate(layers):
        for product_index, parts in enumerate(places):
            if any(part.path in factors for part in parts):
                entry = table[layer, product_index]
                gated = product_index == GATED
                memory += _pack_product(entry, parts, factors, gated=gated)
    a_columns = table[:, :, list(ProductEntry.__annotations__).index("a_columns")]
    used = np.flatnonzero(a_columns.any(0)).tolist()
    return PackedAdapter(
        table=table,
        address=table.ctypes.data,
        used=frozenset(used),
        columns=int(a_columns.max(initial=0)),
        memory=memory,
    )


def _pack_product(
    entry: np.ndarray, parts: Sequence[Part], factors: Mapping[str, Factors], *, gated: bool
) -> list[Tensor]:
    """Fill an entry of the table. Returns the tensors that it points to.

    If the product is ``gated``, its result is that of gate and up, by turns 16 outputs of each. The
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
            by_column = b.unflatten(0, (2, -1, LANES))  # [gate or up, column, 16, rank]
            b = by_column.transpose(0, 1).flatten(0, 2)
        filling = -len(a) % LANES
        ranks = len(a) + filling
        a_factors.append(functional.pad(a, (0, 0, 0, filling)))
        b_factor = _columns(functional.pad(b, (0, filling)))
        memory.append(b_factor)
        # A Part's ``last`` is the first output behind it.
        segment = Segment(
            first_column=part.first // LANES,
            end_column=part.last // LANES,
            spacing=1,
            b_factor=b_factor.data_ptr(),
            units=ranks // 2,
            x_offset=ranks_before * _BF16_BYTES,
        )
        if gated and len(parts) == 2:
            # Gate, layer 0, gives columns 0, 2, 4 ..., and up, layer 1, gives columns 1, 3, 5 ...
            segment.first_column = number
            segment.end_column = 2 * len(b_factor)
            segment.spacing = 2
        begin = _FIRST_SEGMENT + number * _SEGMENT_FIELDS
        entry[begin : begin + _SEGMENT_FIELDS] = np.frombuffer(bytes(segment), np.int64)
        ranks_before += ranks
    all_a_factors = _columns(torch.cat(a_factors))
    memory.append(all_a_factors)
    head = ProductEntry(a_factors=all_a_factors.data_ptr(), a_columns=ranks_before // LANES)
    entry[:_FIRST_SEGMENT] = np.frombuffer(bytes(head), np.int64)
    return memory


def _columns(weight: Tensor) -> Tensor:
    """[N / 16, K / 2, 16, 2] of a weight [N, K]."""
    return weight.view(len(weight) // LANES, LANES, -1, 2).transpose(1, 2).contiguous()


# --------------------------------------------------------------------------- a step's tokens


def list_tokens(array: np.ndarray, spans: Sequence[AdapterSpan], tokens: int) -> int:
    """Write all of a step's tokens, those without an adapter too, to int64 [most, 3]: an
    :class:`AdapterTokens` in each row. Returns how many rows are written.

    (An ``AdapterSpan`` is neighbouring tokens, and has nothing to do with a span of attention. Its
    ``last`` is the first token behind it.)
    """
    count = 0
    listed_end = 0  # the first token that is not listed yet
    for span in spans:
        count = _list_neighbours(array, count, listed_end, end=span.first, table=0)
        table = span.adapter.packed.address
        count = _list_neighbours(array, count, span.first, end=span.last, table=table)
        listed_end = span.last
    return _list_neighbours(array, count, listed_end, end=tokens, table=0)


def _list_neighbours(array: np.ndarray, count: int, first: int, *, end: int, table: int) -> int:
    """Write tokens [first, end) behind ``count`` rows; returns how many rows there are then."""
    for start in range(first, end, ITEM_TOKENS):
        array[count] = start, min(ITEM_TOKENS, end - start), table  # the fields of AdapterTokens
        count += 1
    return count
