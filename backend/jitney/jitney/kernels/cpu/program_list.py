"""Writes down the kernels of a program, in the order in which they run, over shared memory.

Called by ``program``, once for each size of memory.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from jitney.execution.interface import AttentionCall, LayerCache
from jitney.execution.low_rank import Span
from jitney.kernels.cpu.adapter_kernel import EXPAND_ITEMS, LowRankCall
from jitney.kernels.cpu.adapter_table import GATED, PLACE_FIELDS, PLACES, list_items
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.paged_attention import CpuAttention, set_layer
from jitney.kernels.cpu.product_kernel import ProductCall
from jitney.kernels.cpu.program_kernel import COUNT, ROW_FIELDS
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import FusedDecoderLayer

_OTHER = ProductCall.other.offset // 8  # type: ignore[attr-defined]

_Call = tuple[Kernel, ctypes.Structure]
"""A kernel, and its arguments but for the number of rows."""


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Activations:
    """What kernels hand on: [tokens, width] each."""

    states: Tensor
    """The input of a layer, which is also what the last one gives."""
    middle: Tensor
    """What is behind a layer's attention."""
    normed: Tensor
    """In the end, the rows that were asked for."""
    qkv: Tensor
    attended: Tensor
    inside: Tensor
    """Of the MLP."""
    indices: Tensor
    """int64 [2, tokens]: positions; which rows are asked for."""
    rounded: Tensor
    """Rows of another form before a product."""


@dataclass(frozen=True)
class AdapterMemory:
    """Where what adapters add is kept: [tokens, width] each, and the list of a step's items."""

    added: Tensor
    """To a product."""
    shrunk: Tensor
    """x, to the ranks."""
    items: np.ndarray
    """int64 [most, 3], as ``adapter_kernel`` has them."""


@dataclass(frozen=True)
class AdaptedPlace:
    """Rows of the kernels of one place, [layers, ROW_FIELDS] each."""

    shrink: np.ndarray
    expand: np.ndarray
    product: np.ndarray
    other: int
    """The address of what the product adds without adapters."""


@dataclass(frozen=True)
class AdaptedSteps:
    """What adapters add within a program."""

    memory: AdapterMemory
    places: list[AdaptedPlace]

    def prepare(self, spans: Sequence[Span], tokens: int) -> None:
        """Fill in a step."""
        count = list_items(self.memory.items, spans, tokens)
        used = {place for span in spans for place in span.adapter.packed.used}
        added = self.memory.added.data_ptr()
        for number, place in enumerate(self.places):
            # No adapter of this step changes the place: its two kernels have nothing to do.
            items = count if number in used else 0
            place.shrink[:, COUNT] = items
            place.expand[:, COUNT] = items * EXPAND_ITEMS
            place.product[:, _OTHER] = added if items else place.other


@dataclass
class LayerKind:
    """Layers whose attention takes the same of a step."""

    call: AttentionCall
    """Of one of them."""
    cache: LayerCache
    layers: Any
    """Indices of all of them, or a slice."""


@dataclass
class KernelList:
    """Writes down the kernels of a program, in the order in which they run."""

    activations: Activations
    layers: Sequence[Any]
    caches: Sequence[LayerCache]
    table: Tensor
    """cos and sin of all positions."""
    norm: Kernel
    adapter_memory: AdapterMemory | None
    shrink: Kernel | None
    expand: Kernel | None
    calls: list[_Call] = field(default_factory=list)
    kinds: dict[object, LayerKind] = field(default_factory=dict)

    def add_layer(self, number: int) -> None:
        """All kernels of a decoder layer."""
        layer = self.layers[number]
        states = self.activations.states.data_ptr()
        middle = self.activations.middle.data_ptr()
        normed = self.activations.normed.data_ptr()
        qkv = self.activations.qkv.data_ptr()
        attended = self.activations.attended.data_ptr()
        inside = self.activations.inside.data_ptr()
        arguments, attend, write = self._attention(number, layer)
        self.calls.append((self.norm, layer.norms.attention.kernel.call_for(states, normed)))
        self._add_product(number, 0, x=normed, out=qkv)
        self.calls.append(self._rotation(layer))
        self.calls.append((write, arguments))
        self.calls.append((attend, arguments))
        self._add_product(number, 1, x=attended, out=middle, other=states)
        self.calls.append((self.norm, layer.norms.mlp.kernel.call_for(middle, normed)))
        self._add_product(number, 2, x=normed, out=inside)
        self._add_product(number, 3, x=inside, out=states, other=middle)

    def add_end(self, norm: Any, head: Any) -> None:
        """The last norm, of the rows that are asked for, and the head if it is one of ours."""
        states = self.activations.states.data_ptr()
        normed = self.activations.normed.data_ptr()
        asked = self.activations.indices[1].data_ptr()
        self.calls.append((self.norm, norm.call_for(states, normed, asked)))
        if isinstance(head, TileLinear):
            spare = self.activations.rounded.data_ptr()
            self.calls += head.calls(normed, out=0, other=0, spare=spare)

    def rows(self) -> np.ndarray:
        """int64 [kernels, ROW_FIELDS]: see ``program_kernel``."""
        rows = np.zeros((len(self.calls), ROW_FIELDS), np.int64)
        for row, (kernel, call) in zip(rows, self.calls, strict=True):
            ctypes.memmove(row.ctypes.data, ctypes.addressof(call), ctypes.sizeof(call))
            row[-1] = kernel.address
        return rows

    def indices_of(self, record: type[ctypes.Structure]) -> list[int]:
        """Of kernels whose arguments are such a record."""
        return [index for index, (_, call) in enumerate(self.calls) if type(call) is record]

    def adapted_places(self, by_layer: np.ndarray) -> list[AdaptedPlace]:
        """The places of one layer, with the rows of all layers: these are in the same order."""
        states = self.activations.states.data_ptr()
        middle = self.activations.middle.data_ptr()
        others = (0, states, 0, middle)
        shrinks = [index for index, (kernel, _) in enumerate(self.calls) if kernel is self.shrink]
        products = self.indices_of(ProductCall)
        found = []
        for place, other in enumerate(others):
            shrink = shrinks[place]
            adapted = AdaptedPlace(
                shrink=by_layer[:, shrink],
                expand=by_layer[:, shrink + 1],
                product=by_layer[:, products[place]],
                other=other,
            )
            found.append(adapted)
        return found

    def _attention(self, number: int, layer: Any) -> tuple[AttentionArguments, Kernel, Kernel]:
        """A layer's arguments of attention, what attends, and what writes K and V."""
        form = layer.self_attn.form
        cache = self.caches[form.layer]
        assert isinstance(cache.attend, CpuAttention)
        call = form.call(*form.split(self.activations.qkv))
        arguments = AttentionArguments()
        set_layer(
            arguments,
            call.query,
            call.key,
            call.value,
            cache=cache,
            out=self.activations.attended.data_ptr(),
        )
        kind = (cache.attend, cache.keys.shape, replace(form, layer=0, norms=None))
        if kind not in self.kinds:
            self.kinds[kind] = LayerKind(call, cache, [])
        self.kinds[kind].layers.append(number)
        attend, write = cache.attend.kernels
        return arguments, attend, write

    def _rotation(self, layer: Any) -> _Call:
        """The norms and the rotary embedding of a layer's heads."""
        rotate = layer.self_attn.kernel
        cos, sin = self.table.unbind(1)
        positions = self.activations.indices[0].data_ptr()
        return rotate.kernel, rotate.call_for(self.activations.qkv, cos, sin, positions)

    def _add_product(self, number: int, place: int, *, x: int, out: int, other: int = 0) -> None:
        """A product of a layer, and before it what adapters add."""
        linear = products_of(self.layers[number])[place]
        spare = self.activations.rounded.data_ptr()
        memory = self.adapter_memory
        if memory is None:
            self.calls += linear.calls(x, out=out, other=other, spare=spare)
            return
        assert self.shrink is not None
        assert self.expand is not None
        added = memory.added.data_ptr()
        shrunk = memory.shrunk.data_ptr()
        shrunk_stride = 2 * memory.shrunk.shape[1]
        width = linear.width * (2 if place == GATED else 1)
        items = memory.items.ctypes.data
        place_offset = (number * PLACES + place) * 8 * PLACE_FIELDS
        shrink = LowRankCall(
            x=x,
            x_stride=2 * linear.in_features,
            out=shrunk,
            out_stride=shrunk_stride,
            items=items,
            place=place_offset,
            units=linear.in_features // 2,
        )
        expand = LowRankCall(
            x=shrunk,
            x_stride=shrunk_stride,
            out=added,
            out_stride=2 * width,
            other=other,
            items=items,
            place=place_offset,
            columns=width // LANES,
        )
        self.calls.append((self.shrink, shrink))
        self.calls.append((self.expand, expand))
        self.calls += linear.calls(x, out=out, other=added, spare=spare)


def products_of(layer: FusedDecoderLayer) -> list[Any]:
    """Those of query, key and value, of attention's output, and of the MLP."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    return [attention.qkv, attention.output, mlp.gated, mlp.down]
