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
from jitney.kernels.fused.whole_model import Places

_OTHER = ProductCall.other.offset // 8  # type: ignore[attr-defined]
"""The field ``other`` of a product, in a kernel's row."""

_Call = tuple[Kernel, ctypes.Structure]
"""A kernel, and its arguments but for the number of rows."""


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Activations:
    """What kernels hand on: [tokens, width] each."""

    states: Tensor
    """The input of a layer. The layer overwrites it with its output, the input of the next one."""
    middle: Tensor
    """A layer's input plus the output of its attention."""
    normed: Tensor
    """The result of the last norm: behind all layers, only the rows that were asked for."""
    qkv: Tensor
    attended: Tensor
    inside: Tensor
    """activation(gate) * up, inside the MLP."""
    indices: Tensor
    """int64 [2, tokens]: positions, and which rows are asked for."""
    rounded: Tensor
    """uint8: rows in another form before a product (``rounding_kernel``)."""


@dataclass(frozen=True)
class AdapterMemory:
    """Where what adapters add is kept: [tokens, width] each, and the list of a step's items."""

    added: Tensor
    """What a product adds to its own result."""
    shrunk: Tensor
    """x A^T: x, shrunk to the adapters' ranks."""
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
    """That of one of these layers, and below its cache: which of them makes no difference."""
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
        self._add_product(number, "qkv", x=normed, out=qkv)
        self.calls.append(self._rotation(layer))
        self.calls.append((write, arguments))
        self.calls.append((attend, arguments))
        self._add_product(number, "output", x=attended, out=middle, other=states)
        self.calls.append((self.norm, layer.norms.mlp.kernel.call_for(middle, normed)))
        self._add_product(number, "gated", x=normed, out=inside)
        self._add_product(number, "down", x=inside, out=states, other=middle)

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
        """Which of ``calls`` have such a record as arguments."""
        return [index for index, (_, call) in enumerate(self.calls) if type(call) is record]

    def adapted_places(self, by_layer: np.ndarray) -> list[AdaptedPlace]:
        """The places of a layer, each with the rows of its kernels: ``by_layer`` is
        [layers, kernels of a layer, ROW_FIELDS], as all layers have the same kernels in one order.
        """
        # What the product of each place adds without adapters: see add_layer.
        others = {
            "qkv": 0,
            "output": self.activations.states.data_ptr(),
            "gated": 0,
            "down": self.activations.middle.data_ptr(),
        }
        # The first ones are of layer 0, in the order of the places.
        shrinks = [index for index, (kernel, _) in enumerate(self.calls) if kernel is self.shrink]
        products = self.indices_of(ProductCall)
        found = []
        for place, name in enumerate(Places._fields):
            shrink = shrinks[place]
            adapted = AdaptedPlace(
                shrink=by_layer[:, shrink],
                expand=by_layer[:, shrink + 1],
                product=by_layer[:, products[place]],
                other=others[name],
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
        # All that the arguments of a step depend on, without what is the layer's own.
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

    def _add_product(self, number: int, name: str, *, x: int, out: int, other: int = 0) -> None:
        """The product of layer ``number`` that has this ``name`` in ``Places``; before it, if there
        are adapters, the two kernels that make what it adds."""
        place = Places._fields.index(name)
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
        # What is added to a gated product is added to gate and up: twice as wide as its result.
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
    """A layer's products, in the order of ``Places``."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    return [attention.qkv, attention.output, mlp.gated, mlp.down]
