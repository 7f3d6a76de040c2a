"""Writes down the kernels of a program, in the order in which they run, over shared memory.

Called by ``program``, once for each size of memory.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from jitney.execution.interface import AttentionCall, LayerCache
from jitney.execution.low_rank import AdapterSpan
from jitney.kernels.cpu.adapter_kernel import EXPAND_ITEMS, LowRankCall
from jitney.kernels.cpu.adapter_table import GATED, PLACE_FIELDS, PLACES, list_items
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.emit import I64_BYTES, LANES
from jitney.kernels.cpu.paged_attention import CpuAttention, set_layer
from jitney.kernels.cpu.product_call import ProductCall
from jitney.kernels.cpu.program_kernel import BODY, COUNT, ROW_FIELDS
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import FusedDecoderLayer
from jitney.kernels.fused.whole_model import Places

_BF16_BYTES = 2
"""Bytes of an element of all that adapters read and write: they have no other dtype."""
_OTHER = ProductCall.other.offset // I64_BYTES  # type: ignore[attr-defined]
"""The field ``ProductCall.other`` in a kernel's row (``program_kernel``)."""


class ListedKernel(NamedTuple):
    """A kernel of the program, and its arguments but for ``count``."""

    kernel: Kernel
    arguments: ctypes.Structure


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Activations:
    """The memory through which kernels pass their results on. [tokens, width], if not said
    otherwise; ``program`` draws which kernel reads and writes what."""

    states: Tensor
    """The input of a layer. The layer overwrites it with its output, the input of the next one."""
    middle: Tensor
    """A layer's input plus the output of its attention."""
    normed: Tensor
    """The result of the last norm: behind all layers, of the rows whose logits are asked for."""
    qkv: Tensor
    attended: Tensor
    """The result of attention, of all heads."""
    inside: Tensor
    """activation(gate) * up, inside the MLP."""
    indices: Tensor
    """int64 [2, tokens]: the position of each token; and the indices of the rows whose logits are
    asked for."""
    rounded: Tensor
    """uint8: rows in another form before a product (``convert_kernel``)."""


@dataclass(frozen=True)
class AdapterMemory:
    """Memory for what adapters add to the products, and the list of a step's items."""

    added: Tensor
    """[tokens, width]: what a product adds to its own result (``ProductCall.other``)."""
    shrunk: Tensor
    """[tokens, ranks]: x A^T, which is x shrunk to the adapters' ranks."""
    items: np.ndarray
    """int64 [tokens, 3]: ``LowRankCall.items``."""


# --------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class AdaptedPlace:
    """The rows of the kernels of one place (``Places``), in all layers: [layers, ROW_FIELDS]
    each. They are views of the program's rows: what is written here, the program runs."""

    shrink: np.ndarray
    expand: np.ndarray
    product: np.ndarray
    other: int
    """``ProductCall.other`` where no adapter changes the place."""


@dataclass(frozen=True)
class AdaptedSteps:
    """What adapters add within a program."""

    memory: AdapterMemory
    places: list[AdaptedPlace]

    def prepare(self, spans: Sequence[AdapterSpan], tokens: int) -> None:
        """Fill in what differs from step to step."""
        count = list_items(self.memory.items, spans, tokens)
        used = set[int]()
        for span in spans:
            used |= span.adapter.packed.used
        added = self.memory.added.data_ptr()
        for index, place in enumerate(self.places):
            if index in used:
                place.shrink[:, COUNT] = count
                place.expand[:, COUNT] = count * EXPAND_ITEMS
                place.product[:, _OTHER] = added
            else:
                # No adapter of this step changes the place: its two kernels have nothing to do.
                place.shrink[:, COUNT] = 0
                place.expand[:, COUNT] = 0
                place.product[:, _OTHER] = place.other


@dataclass
class LayerKind:
    """Layers that share the second part of attention's arguments, which is that of a step."""

    call: AttentionCall
    """The call of one of these layers. Which of them makes no difference; so with its cache."""
    cache: LayerCache
    layers: list[int]
    """The indices of all of them."""


class _PlaceInLayer(NamedTuple):
    """Where a place's kernels are among those of each layer, from 0 on."""

    shrink: int
    expand: int
    product: int
    other: int
    """As in :class:`AdaptedPlace`."""


# --------------------------------------------------------------------------- the list


@dataclass
class KernelList:
    """Writes down the kernels of a program, in the order in which they run. All layers have the
    same kernels in the same order."""

    activations: Activations
    layers: Sequence[Any]
    caches: Sequence[LayerCache]
    table: Tensor
    """cos and sin of all positions."""
    norm: Kernel
    adapter_memory: AdapterMemory | None
    """None, and so the next two: there are no adapters."""
    shrink: Kernel | None
    expand: Kernel | None
    kernels: list[ListedKernel] = field(default_factory=list)
    kinds: dict[object, LayerKind] = field(default_factory=dict)
    write_in_layer: int = 0
    """Which of a layer's kernels, from 0 on, writes K and V. The next one attends."""
    places: list[_PlaceInLayer] = field(default_factory=list)
    """In the order of ``Places``, which is that of :meth:`add_layer`; empty without adapters."""

    def add_layer(self, number: int) -> None:
        """All kernels of a decoder layer."""
        layer = self.layers[number]
        states = self.activations.states.data_ptr()
        middle = self.activations.middle.data_ptr()
        normed = self.activations.normed.data_ptr()
        qkv = self.activations.qkv.data_ptr()
        attended = self.activations.attended.data_ptr()
        inside = self.activations.inside.data_ptr()
        # (The ``kernel`` of a fused module is a RowNorm or a CpuHeadAttention, which has the
        # arguments. The ``kernel`` of these is the machine code.)
        # states -> normed -> qkv
        self._add(self.norm, layer.norms.attention.kernel.call_for(states, normed))
        self._add_product(number, "qkv", x=normed, out=qkv)
        self._add_rotation(layer)
        # qkv -> attended
        self._add_attention(number, layer)
        # attended + states -> middle
        self._add_product(number, "output", x=attended, out=middle, other=states)
        # middle -> normed -> inside
        self._add(self.norm, layer.norms.mlp.kernel.call_for(middle, normed))
        self._add_product(number, "gated", x=normed, out=inside)
        # inside + middle -> states, the input of the next layer
        self._add_product(number, "down", x=inside, out=states, other=middle)

    def add_end(self, norm: Any, head: Any) -> None:
        """The last norm, of the rows whose logits are asked for, and the head if it is ours."""
        states = self.activations.states.data_ptr()
        normed = self.activations.normed.data_ptr()
        asked = self.activations.indices[1].data_ptr()
        self._add(self.norm, norm.call_for(states, normed, asked))
        if isinstance(head, TileLinear):
            # Where its result goes is said in each step.
            self._add_linear(head, x=normed, out=0, other=0)

    def rows(self) -> np.ndarray:
        """int64 [kernels, ROW_FIELDS]: see ``program_kernel``."""
        rows = np.zeros((len(self.kernels), ROW_FIELDS), np.int64)
        for row, listed in zip(rows, self.kernels, strict=True):
            arguments = listed.arguments
            ctypes.memmove(row.ctypes.data, ctypes.addressof(arguments), ctypes.sizeof(arguments))
            row[BODY] = listed.kernel.address
        return rows

    def adapted_places(self, by_layer: np.ndarray) -> list[AdaptedPlace]:
        """The places with the rows of their kernels. ``by_layer`` is the layers' part of
        :meth:`rows`, as [layers, kernels of a layer, ROW_FIELDS]."""
        adapted = []
        for place in self.places:
            of_place = AdaptedPlace(
                shrink=by_layer[:, place.shrink],
                expand=by_layer[:, place.expand],
                product=by_layer[:, place.product],
                other=place.other,
            )
            adapted.append(of_place)
        return adapted

    def _add(self, kernel: Kernel, arguments: ctypes.Structure) -> None:
        self.kernels.append(ListedKernel(kernel, arguments))

    def _add_linear(self, linear: TileLinear, *, x: int, out: int, other: int) -> None:
        """The kernels of a linear layer: its product, and before it, if the product needs one, the
        kernel that brings x into another form."""
        spare = self.activations.rounded.data_ptr()
        for kernel, arguments in linear.calls(x, out=out, other=other, spare=spare):
            self._add(kernel, arguments)

    def _add_rotation(self, layer: Any) -> None:
        """The norms and the rotary embedding of a layer's heads."""
        attention = layer.self_attn.kernel
        cos, sin = self.table.unbind(1)
        positions = self.activations.indices[0].data_ptr()
        self._add(attention.kernel, attention.call_for(self.activations.qkv, cos, sin, positions))

    def _add_attention(self, number: int, layer: Any) -> None:
        """What writes K and V, and what attends."""
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
        if number == 0:
            self.write_in_layer = len(self.kernels)
        kernels = cache.attend.kernels
        self._add(kernels.write, arguments)
        self._add(kernels.attend, arguments)

    def _add_product(self, number: int, name: str, *, x: int, out: int, other: int = 0) -> None:
        """The product of layer ``number`` that has this ``name`` in ``Places``. Its result is
        ``x`` times the weight, plus ``other``.

        If there are adapters, two kernels come before it. They write the sum of ``other`` and of
        the adapters' products to ``AdapterMemory.added``. The product then adds that instead."""
        place = Places._fields.index(name)
        linear = products_of(self.layers[number])[place]
        memory = self.adapter_memory
        if memory is None:
            self._add_linear(linear, x=x, out=out, other=other)
            return
        shrink = len(self.kernels)
        self._add_low_rank(number, place, linear, memory, x=x, other=other)
        self._add_linear(linear, x=x, out=out, other=memory.added.data_ptr())
        product = len(self.kernels) - 1
        if number == 0:
            kernels = _PlaceInLayer(shrink=shrink, expand=shrink + 1, product=product, other=other)
            self.places.append(kernels)

    def _add_low_rank(
        self, number: int, place: int, linear: Any, memory: AdapterMemory, *, x: int, other: int
    ) -> None:
        """The two kernels of adapters for one product (``adapter_kernel``): shrink, then expand."""
        assert self.shrink is not None
        assert self.expand is not None
        shrunk = memory.shrunk.data_ptr()
        shrunk_stride = memory.shrunk.shape[1] * _BF16_BYTES
        # A gated product adds to gate and to up: twice as many numbers as its result has.
        width = 2 * linear.width if place == GATED else linear.width
        items = memory.items.ctypes.data
        # Where the fields of this layer and place are in an adapter's table.
        place_offset = (number * PLACES + place) * PLACE_FIELDS * I64_BYTES
        shrink = LowRankCall(
            x=x,
            x_stride=linear.in_features * _BF16_BYTES,
            out=shrunk,
            out_stride=shrunk_stride,
            items=items,
            place=place_offset,
            units=linear.in_features // 2,
        )
        expand = LowRankCall(
            x=shrunk,
            x_stride=shrunk_stride,
            out=memory.added.data_ptr(),
            out_stride=width * _BF16_BYTES,
            other=other,
            items=items,
            place=place_offset,
            columns=width // LANES,
        )
        self._add(self.shrink, shrink)
        self._add(self.expand, expand)


def products_of(layer: FusedDecoderLayer) -> list[Any]:
    """A layer's products, in the order of ``Places``."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    return [attention.qkv, attention.output, mlp.gated, mlp.down]
