"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`LayerProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, their positions, and what attention must know. The
kernels are those that the fused modules run one by one. Of each layer, over [tokens, width]::

    states -norm-> normed -product-> qkv -rotate-> qkv -write K, V; attend-> attended
           -product, + states-> middle -norm-> normed -gated product-> inside
           -product, + middle-> states

then the last norm of the rows that are asked for, and the head. Where a product takes another form
of x, a rounding kernel stands before it; where adapters are, two kernels (``adapter_kernel``).

Called by ``fused``'s whole model for each step, through what ``layer_kernels`` gives. One engine's
thread calls it; activations are kept between calls. Imported only where Numba is.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution.interface import AttentionCall, LayerCache, PagedFunction, PagedStep
from jitney.execution.low_rank import Factors, Span
from jitney.kernels.cpu.adapter_kernel import (
    EXPAND_ITEMS,
    LowRankCall,
    expand_body,
    shrink_body,
)
from jitney.kernels.cpu.adapter_table import (
    GATED,
    PLACE_FIELDS,
    PLACES,
    PackedAdapter,
    list_items,
    pack,
)
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.compiled import Kernel, function_address, source_version
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.paged_attention import CpuAttention, set_layer
from jitney.kernels.cpu.product_kernel import ProductCall
from jitney.kernels.cpu.program_kernel import ROW_FIELDS, ProgramCall, run_body
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMLP
from jitney.kernels.fused.whole_model import FusedForward, Places

_LEAST_TOKENS = 64

# Fields of a kernel's row, 8 bytes each.
_HEAD = slice(3)
"""Two counters, and the number of rows or of items."""
_COUNT = 2
_OUT = ProductCall.out.offset // 8  # type: ignore[attr-defined]
_OTHER = ProductCall.other.offset // 8  # type: ignore[attr-defined]
_OF_STEP = slice(
    AttentionArguments.plan.offset // 8,  # type: ignore[attr-defined]
    ctypes.sizeof(AttentionArguments) // 8,
)

_Call = tuple[Kernel, ctypes.Structure]
"""A kernel, and its arguments but for the number of rows."""


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class _Activations:
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
class _AdapterMemory:
    """Where what adapters add is kept: [tokens, width] each, and the list of a step's items."""

    added: Tensor
    """To a product."""
    shrunk: Tensor
    """x, to the ranks."""
    items: np.ndarray
    """int64 [most, 3], as ``adapter_kernel`` has them."""


@dataclass(frozen=True)
class _AdaptedPlace:
    """Rows of the kernels of one place, [layers, ROW_FIELDS] each."""

    shrink: np.ndarray
    expand: np.ndarray
    product: np.ndarray
    other: int
    """The address of what the product adds without adapters."""


@dataclass(frozen=True)
class _Adapted:
    """What adapters add within a program."""

    memory: _AdapterMemory
    places: list[_AdaptedPlace]

    def prepare(self, spans: Sequence[Span], tokens: int) -> None:
        """Fill in a step."""
        count = list_items(self.memory.items, spans, tokens)
        used = {place for span in spans for place in span.adapter.packed.used}
        added = self.memory.added.data_ptr()
        for number, place in enumerate(self.places):
            # No adapter of this step changes the place: its two kernels have nothing to do.
            items = count if number in used else 0
            place.shrink[:, _COUNT] = items
            place.expand[:, _COUNT] = items * EXPAND_ITEMS
            place.product[:, _OTHER] = added if items else place.other


@dataclass
class _LayerKind:
    """Layers whose attention takes the same of a step."""

    call: AttentionCall
    """Of one of them."""
    cache: LayerCache
    layers: Any
    """Indices of all of them, or a slice."""


@dataclass(frozen=True)
class _Memory:
    """Activations of at most ``tokens`` rows, and the rows of all kernels over them."""

    tokens: int
    activations: _Activations
    rows: np.ndarray
    """int64 [kernels, ROW_FIELDS], in the order in which they run: those of the layers, of the last
    norm, and of the head if it is a TileLinear."""
    of_layers: int
    """Of these, those of the layers."""
    attention: np.ndarray
    """Of those, what writes K and V and what attends: [layers, 2, ROW_FIELDS]."""
    kinds: list[_LayerKind]
    adapted: _Adapted | None


# --------------------------------------------------------------------------- the program


class LayerProgram:
    """The layers of one model, the embedding before them, the norm behind, and the head. All
    products are of :class:`TileLinear`; the head may be another."""

    def __init__(self, model: Any, places: Sequence[Places] | None) -> None:
        """See :meth:`of`."""
        self._places = places
        self._shrunk = 0
        self._embedding = model.embed.weight.detach()
        self._table = model.tables[0]
        self._layers = model.layers
        self._norm = model.norm.kernel
        self._head = model.head
        self._call = ProgramCall(
            team_size=function_address("omp_get_num_threads"),
            give_way=function_address("sched_yield"),
        )
        self._caches: list[LayerCache] = []
        self._memory: _Memory | None = None
        version = source_version()
        self._kernel = Kernel(lambda address: run_body(address) if version else None)
        if places is not None:
            self._shrink = Kernel(lambda address: shrink_body(address) if version else None)
            self._expand = Kernel(lambda address: expand_body(address) if version else None)

    @classmethod
    def of(
        cls, model: FusedForward, places: Sequence[Places] | None = None
    ) -> "LayerProgram | None":
        """A program of ``model``, if its parts are those that one can run. With ``places``, it is
        one of steps with adapters, which change these of each layer."""
        parts = [part for each in places or () for place in each for part in place]
        if any(part.first % LANES or part.last % LANES for part in parts):
            return None
        if len(model.tables) > 1 or type(model.embed) is not nn.Embedding:
            return None
        # The kernels of adapters have no other dtype.
        if places is not None and model.embed.weight.dtype != torch.bfloat16:
            return None
        if not all(map(_can_run, model.layers)):
            return None
        # All layers share one memory.
        if len({_shape(layer) for layer in model.layers}) > 1:
            return None
        return cls(model, places)

    def pack(self, factors: Mapping[str, Factors]) -> PackedAdapter:
        """An adapter as the program reads it. Any thread may call it."""
        return pack(factors, self._places or ())

    def fits(self, paged: PagedFunction) -> TypeGuard[PagedStep]:
        """Whether ``paged`` is a step over caches that our attention kernel reads and writes."""
        if not isinstance(paged, PagedStep) or paged.meta.max_context_len > self._table.shape[0]:
            return False
        # The memory of caches that are held here belongs to no others.
        theirs = [cache.keys.data_ptr() for cache in paged.layers]
        ours = [cache.keys.data_ptr() for cache in self._caches]
        if theirs == ours:
            return True
        for cache in paged.layers:
            if not isinstance(cache.attend, CpuAttention):
                return False
            if cache.attend.dtype != self._embedding.dtype:
                return False
        self._caches = paged.layers
        self._memory = None
        return True

    def __call__(self, ids: Tensor, rows: Tensor, paged: PagedFunction) -> Tensor | None:
        """Run a step, if it is one that :meth:`fits`: ``ids`` are its T tokens, ``rows`` indices of
        them, both int64. Returns what the head gives of these [rows, vocabulary]."""
        if not self.fits(paged):
            return None
        tokens = ids.shape[0]
        count = rows.shape[0]
        assert count <= tokens
        memory = self._memory_for(tokens, paged.meta.adapted)
        activations = memory.activations
        torch.index_select(self._embedding, 0, ids, out=activations.states[:tokens])
        activations.indices[0, :tokens] = paged.meta.positions
        activations.indices[1, :count] = rows
        memory.rows[:, _HEAD] = 0, 0, tokens
        memory.rows[memory.of_layers :, _COUNT] = count
        if memory.adapted is not None:
            memory.adapted.prepare(paged.meta.adapted, tokens)
        self._prepare_attention(memory, paged, tokens)
        normed = activations.normed[:count]
        if not isinstance(self._head, TileLinear):
            self._run()
            logits: Tensor = self._head(normed)
            return logits
        filled = torch.empty(count, self._head.width, dtype=normed.dtype)
        memory.rows[-1, _OUT] = filled.data_ptr()
        self._run()
        return self._head.without_filling(filled)

    def _run(self) -> None:
        self._call.arrived = 0
        self._kernel.run(self._call, torch.get_num_threads())

    def _prepare_attention(self, memory: _Memory, paged: PagedStep, tokens: int) -> None:
        """Fill in what attention must know of a step, once for layers of one kind."""
        for kind in memory.kinds:
            assert isinstance(kind.cache.attend, CpuAttention)
            step = kind.cache.attend.prepare(kind.call, kind.cache, paged.meta)
            assert step.arguments.tokens == tokens
            fields = np.frombuffer(bytes(step.arguments), np.int64)[_OF_STEP]
            memory.attention[kind.layers, :, _OF_STEP] = fields
            memory.attention[kind.layers, :, _COUNT] = step.write_items, step.items

    def _memory_for(self, tokens: int, spans: Sequence[Span]) -> _Memory:
        """Memory for a step, made anew if it has more tokens or larger adapters than any before."""
        shrunk = max((span.adapter.packed.columns for span in spans), default=0)
        if shrunk > self._shrunk:
            self._shrunk = shrunk
            self._memory = None
        if self._memory is None or self._memory.tokens < tokens:
            self._memory = self._lay_out(tokens)
        return self._memory

    # ----------------------------------------------------------------- the list of kernels

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        adapter_memory = self._adapter_memory(tokens)
        writer = _Writer(
            activations=self._activations(tokens),
            layers=self._layers,
            caches=self._caches,
            table=self._table,
            norm=self._norm.kernel,
            adapter_memory=adapter_memory,
            shrink=None if adapter_memory is None else self._shrink,
            expand=None if adapter_memory is None else self._expand,
        )
        for number in range(len(self._layers)):
            writer.add_layer(number)
        of_layers = len(writer.calls)
        writer.add_end(self._norm, self._head)
        rows = writer.rows()
        self._call.count = len(rows)
        self._call.kernels = rows.ctypes.data
        by_layer = rows[:of_layers].reshape(len(self._layers), -1, ROW_FIELDS)
        kinds = list(writer.kinds.values())
        if len(kinds) == 1:
            kinds[0].layers = slice(None)  # which numpy writes faster than a list
        attending = writer.indices_of(AttentionArguments)[0]
        adapted = None
        if adapter_memory is not None:
            adapted = _Adapted(adapter_memory, writer.adapted_places(by_layer))
        return _Memory(
            tokens=tokens,
            activations=writer.activations,
            rows=rows,
            of_layers=of_layers,
            attention=by_layer[:, attending : attending + 2],
            kinds=kinds,
            adapted=adapted,
        )

    def _activations(self, tokens: int) -> _Activations:
        """Memory for so many rows."""
        dtype = self._embedding.dtype
        size = self._embedding.shape[1]
        first = self._layers[0]
        attention = first.self_attn

        def rows(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype)

        return _Activations(
            states=rows(size),
            middle=rows(size),
            normed=rows(size),
            qkv=rows(attention.qkv.out_features),
            attended=rows(attention.output.in_features),
            inside=rows(first.mlp.down.in_features),
            indices=torch.empty(2, tokens, dtype=torch.int64),
            rounded=torch.empty(tokens * self._spare_bytes(), dtype=torch.uint8),
        )

    def _spare_bytes(self) -> int:
        """The most that a row of another form takes before any product."""
        most = 0
        for layer in self._layers:
            for product in _products(layer):
                most = max(most, product.spare_bytes)
        if isinstance(self._head, TileLinear):
            most = max(most, self._head.spare_bytes)
        return most

    def _adapter_memory(self, tokens: int) -> _AdapterMemory | None:
        """None: the program has no adapters."""
        if self._places is None:
            return None
        qkv, output, gated, down = _products(self._layers[0])
        widest = max(qkv.width, output.width, 2 * gated.width, down.width)
        dtype = self._embedding.dtype
        return _AdapterMemory(
            added=torch.empty(tokens, widest, dtype=dtype),
            shrunk=torch.empty(tokens, self._shrunk * LANES, dtype=dtype),
            items=np.zeros((tokens, 3), np.int64),
        )


@dataclass
class _Writer:
    """Writes down the kernels of a program, in the order in which they run."""

    activations: _Activations
    layers: Sequence[Any]
    caches: Sequence[LayerCache]
    table: Tensor
    """cos and sin of all positions."""
    norm: Kernel
    adapter_memory: _AdapterMemory | None
    shrink: Kernel | None
    expand: Kernel | None
    calls: list[_Call] = field(default_factory=list)
    kinds: dict[object, _LayerKind] = field(default_factory=dict)

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

    def adapted_places(self, by_layer: np.ndarray) -> list[_AdaptedPlace]:
        """The places of one layer, with the rows of all layers: these are in the same order."""
        states = self.activations.states.data_ptr()
        middle = self.activations.middle.data_ptr()
        others = (0, states, 0, middle)
        shrinks = [index for index, (kernel, _) in enumerate(self.calls) if kernel is self.shrink]
        products = self.indices_of(ProductCall)
        found = []
        for place, other in enumerate(others):
            shrink = shrinks[place]
            adapted = _AdaptedPlace(
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
            self.kinds[kind] = _LayerKind(call, cache, [])
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
        linear = _products(self.layers[number])[place]
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


# --------------------------------------------------------------------------- what can be run


def _can_run(layer: FusedDecoderLayer) -> bool:
    """Whether a program can run all parts of the layer."""
    norms = layer.norms
    if norms.attention is None or norms.mlp is None or norms.attended or norms.mixed:
        return False
    if not isinstance(layer.mlp, FusedMLP) or layer.self_attn.form.sinks is not None:
        return False
    for product in _products(layer):
        # Rows that are filled up would have to be cut between two kernels.
        if not isinstance(product, TileLinear) or product.width != product.out_features:
            return False
    return True


def _products(layer: FusedDecoderLayer) -> list[Any]:
    """Those of query, key and value, of attention's output, and of the MLP."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    return [attention.qkv, attention.output, mlp.gated, mlp.down]


def _shape(layer: FusedDecoderLayer) -> tuple[tuple[int, int, bool], ...]:
    """What must be the same of all layers."""
    return tuple(
        (product.in_features, product.width, product.spare_bytes > 0)
        for product in _products(layer)
    )
