"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`LayerProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, their positions, and what attention must know. The
kernels are those that the fused modules run one by one.

The call runs the list of kernels one after the other, each on all threads of a team, which wait for
each other between two kernels. A thread that waits spins for a moment, since the others end within
microseconds as a rule, and then gives its core away at every turn: on a machine with other work the
thread that is waited for may need that very core.

One engine's thread calls it; activations are kept between calls. Imported only where Numba is.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from torch import Tensor, nn

from jitney.execution.interface import AttentionCall, LayerCache, PagedFunction, PagedStep
from jitney.execution.low_rank import Factors, Span
from jitney.kernels.cpu.attention import CpuAttention, set_layer
from jitney.kernels.cpu.compiled import Kernel, function_address, reader, record, source_version
from jitney.kernels.cpu.layout import AttentionArguments
from jitney.kernels.cpu.low_rank import (
    PARTS,
    PLACE_FIELDS,
    PLACES,
    LowRankCall,
    PackedAdapter,
    expand_body,
    fill_spans,
    pack,
    shrink_body,
)
from jitney.kernels.cpu.product_kernel import ProductCall
from jitney.kernels.cpu.simd import LANES, emitted, fetch_add, i32, i64, inner, load_i64, pointer
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMLP
from jitney.kernels.fused.whole_model import FusedForward, Places

SPINS = 2000
_LEAST_TOKENS = 64

# Of each kernel's arguments, in units of 8 bytes.
_WIDTH = 64
"""Whole cache lines; the last unit is the address of the kernel's body."""
_HEAD, _COUNT = slice(3), 2
"""Two counters, and the number of rows or of items."""
_OUT = ProductCall.out.offset // 8  # type: ignore[attr-defined]
_OTHER = ProductCall.other.offset // 8  # type: ignore[attr-defined]
_OF_STEP = slice(
    AttentionArguments.works.offset // 8,  # type: ignore[attr-defined]
    ctypes.sizeof(AttentionArguments) // 8,
)


# --------------------------------------------------------------------------- the native call


@record
class ProgramCall(ctypes.Structure):
    """Arguments of :func:`run_body`."""

    arrived: int
    """Threads that have ended a kernel, summed over kernels: 0 at the start."""
    count: int
    """Of kernels."""
    kernels: int
    """Address of int64 [count, _WIDTH]: their arguments."""
    team_size: int
    """Address of int omp_get_num_threads(void)."""
    give_way: int
    """Address of int sched_yield(void)."""


read_program = reader(ProgramCall)


@emitted(types.void, types.int64, types.int64)
def call_body(builder, body, arguments):
    """Call ``void body(void *)``."""
    kind = ir.FunctionType(ir.VoidType(), [i64])
    builder.call(builder.inttoptr(body, kind.as_pointer()), [arguments])


@emitted(types.int64, types.int64)
def call_int(builder, function):
    """Call ``int function(void)``."""
    kind = ir.FunctionType(i32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), i64)


@emitted(types.int64, types.int64)
def load_shared(builder, address):
    """An int64 that other threads change: what they wrote before it is seen after it."""
    return builder.load_atomic(pointer(builder, address, i64), ordering="acquire", align=8)


@inner
def wait_for_all(arrived, total, give_way):
    """Arrive, and return when ``total`` arrivals have been counted since the start."""
    fetch_add(arrived)
    spins = np.int64(0)
    while load_shared(arrived) < total:
        spins += 1
        if spins > SPINS:
            call_int(give_way)


@inner
def run_body(arguments):
    """Call every kernel in order."""
    call = read_program(arguments)
    team = call_int(call.team_size)
    for i in range(call.count):
        each = call.kernels + 8 * _WIDTH * i
        call_body(load_i64(each + 8 * (_WIDTH - 1)), each)
        wait_for_all(arguments, (i + 1) * team, call.give_way)


# --------------------------------------------------------------------------- the list of kernels


@dataclass(frozen=True)
class _Adapted:
    """What adapters add within a program's memory."""

    tensors: list[Tensor]
    """[tokens, width] each: what is added to the products; x shrunk to the ranks."""
    spans: np.ndarray
    """int64 [most, 3], as ``low_rank`` has them."""
    places: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]
    """Of each: the arguments of shrinking, of expanding and of the product [layers, _WIDTH], and
    the address of what the product adds without adapters."""

    def prepare(self, spans: Sequence[Span], tokens: int) -> None:
        """Fill in a step."""
        count = fill_spans(self.spans, spans, tokens)
        used = {place for span in spans for place in span.adapter.packed.used}
        for place, (shrink, expand, product, other) in enumerate(self.places):
            items = count if place in used else 0
            shrink[:, _COUNT], expand[:, _COUNT] = items, items * PARTS
            product[:, _OTHER] = self.tensors[0].data_ptr() if items else other


@dataclass(frozen=True)
class _Memory:
    """Activations of at most ``tokens`` rows, and the arguments of all kernels over them."""

    tokens: int
    activations: list[Tensor]
    """[tokens, width] each: the input of a layer, which is also what the last one gives; what is
    behind its attention; what is normed, at the end of the rows that were asked for; query, key and
    value; what attention gives; what is inside of the MLP."""
    indices: Tensor
    """int64 [2, tokens]: positions; which rows are asked for."""
    arguments: np.ndarray
    """int64 [kernels, _WIDTH], in the order in which they run: those of the layers, of the last
    norm, and of the head if it is a TileLinear."""
    of_layers: int
    """Of these, those of the layers."""
    attention: np.ndarray
    """Of those, what writes K and V and what attends: [layers, 2, _WIDTH]."""
    rounded: Tensor
    """Rows of another form before a product."""
    kinds: list[tuple[AttentionCall, LayerCache, Any]]
    """One layer's, and the indices of all layers whose attention takes the same of a step."""
    adapted: _Adapted | None


def _can_run(layer: FusedDecoderLayer) -> bool:
    """Whether a program can run all parts of the layer."""
    attention, mlp, norms = layer.self_attn, layer.mlp, layer.norms
    if norms.attention is None or norms.mlp is None or norms.attended or norms.mixed:
        return False
    if not isinstance(mlp, FusedMLP) or attention.form.sinks is not None:
        return False
    return all(
        isinstance(each, TileLinear) and each.width == each.out_features
        for each in _products(layer)
    )


def _products(layer: FusedDecoderLayer) -> list[Any]:
    """Those of query, key and value, of attention's output, and of the MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.qkv, attention.output, mlp.gated, mlp.down]


class LayerProgram:
    """The layers of one model, the embedding before them, the norm behind, and the head. All
    products are of :class:`TileLinear`; the head may be another."""

    def __init__(self, model: Any, places: Sequence[Places] | None) -> None:
        """See :meth:`of`."""
        self._places, self._shrunk = places, 0
        self._embedding, self._table = model.embed.weight.detach(), model.tables[0]
        self._layers, self._norm, self._head = model.layers, model.norm.kernel, model.head
        team_size, give_way = map(function_address, ("omp_get_num_threads", "sched_yield"))
        self._call = ProgramCall(team_size=team_size, give_way=give_way)
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
        if places is not None and model.embed.weight.dtype != torch.bfloat16:
            return None
        if not all(map(_can_run, model.layers)):
            return None
        shapes = {
            tuple((each.in_features, each.width, each.spare_bytes > 0) for each in _products(layer))
            for layer in model.layers
        }
        if len(shapes) > 1:
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
        if [c.keys.data_ptr() for c in paged.layers] != [c.keys.data_ptr() for c in self._caches]:
            dtype = self._embedding.dtype
            for cache in paged.layers:
                if not isinstance(cache.attend, CpuAttention) or cache.attend.dtype != dtype:
                    return False
            self._caches, self._memory = paged.layers, None
        return True

    def __call__(self, ids: Tensor, rows: Tensor, paged: PagedFunction) -> Tensor | None:
        """Run a step, if it is one that :meth:`fits`: ``ids`` are its T tokens, ``rows`` indices of
        them, both int64. Returns what the head gives of these [rows, vocabulary]."""
        if not self.fits(paged):
            return None
        tokens, count, meta = ids.shape[0], rows.shape[0], paged.meta
        assert count <= tokens
        shrunk = max((span.adapter.packed.columns for span in meta.adapted), default=0)
        if shrunk > self._shrunk:
            self._shrunk, self._memory = shrunk, None
        memory = self._memory
        if memory is None or memory.tokens < tokens:
            memory = self._memory = self._lay_out(tokens)
        torch.index_select(self._embedding, 0, ids, out=memory.activations[0][:tokens])
        memory.indices[0, :tokens] = meta.positions
        memory.indices[1, :count] = rows
        memory.arguments[:, _HEAD] = 0, 0, tokens
        memory.arguments[memory.of_layers :, _COUNT] = count
        if memory.adapted is not None:
            memory.adapted.prepare(meta.adapted, tokens)
        out = normed = memory.activations[2][:count]
        if isinstance(self._head, TileLinear):
            out = torch.empty(count, self._head.width, dtype=out.dtype)
            memory.arguments[-1, _OUT] = out.data_ptr()
        for call, cache, layers in memory.kinds:
            assert isinstance(cache.attend, CpuAttention)
            step = cache.attend.prepare(call, cache, meta)
            assert step.arguments.tokens == tokens
            fields = np.frombuffer(bytes(step.arguments), np.int64)[_OF_STEP]
            memory.attention[layers, :, _OF_STEP] = fields
            memory.attention[layers, :, _COUNT] = step.write_items, step.items
        self._call.arrived = 0
        self._kernel.run(self._call, torch.get_num_threads())
        return self._head(normed) if out is normed else self._head.without_filling(out)

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        first, dtype, size = self._layers[0], self._embedding.dtype, self._embedding.shape[1]
        attention, inner = first.self_attn, first.mlp.down.in_features
        widths = size, size, size, attention.qkv.out_features, attention.output.in_features, inner
        tensors = [torch.empty(tokens, width, dtype=dtype) for width in widths]
        indices = torch.empty(2, tokens, dtype=torch.int64)
        hidden, middle, normed, qkv, attended, inside = (each.data_ptr() for each in tensors)
        positions, rows = (each.data_ptr() for each in indices)
        cos, sin = self._table.unbind(1)
        most = max(
            each.spare_bytes
            for layer in self._layers
            for each in (*_products(layer), self._head)
            if isinstance(each, TileLinear)
        )
        rounded = torch.empty(tokens * most, dtype=torch.uint8)
        spare = rounded.data_ptr()
        norm, calls = self._norm.kernel, list[tuple[Kernel, ctypes.Structure]]()
        room = self._room_for_adapters(tokens)
        place = partial(self._product, spare=spare, room=room)
        kinds: dict[object, tuple[AttentionCall, LayerCache, list[int]]] = {}
        for number, layer in enumerate(self._layers):
            attention, norms = layer.self_attn, layer.norms
            form, rotate = attention.form, attention.kernel
            cache, call = self._caches[form.layer], form.call(*form.split(tensors[3]))
            assert isinstance(cache.attend, CpuAttention)
            attend, write = cache.attend.kernels
            arguments = AttentionArguments()
            set_layer(arguments, call.query, call.key, call.value, cache, attended)
            kind = (cache.attend, cache.keys.shape, replace(form, layer=0, norms=None))
            kinds.setdefault(kind, (call, cache, []))[2].append(number)
            calls += [
                (norm, norms.attention.kernel.call_for(hidden, normed)),
                *place(0, number, normed, qkv, 0),
                (rotate.kernel, rotate.call_for(tensors[3], cos, sin, positions)),
                (write, arguments),
                (attend, arguments),
                *place(1, number, attended, middle, hidden),
                (norm, norms.mlp.kernel.call_for(middle, normed)),
                *place(2, number, normed, inside, 0),
                *place(3, number, inside, hidden, middle),
            ]
        of_layers = len(calls)
        calls.append((norm, self._norm.call_for(hidden, normed, rows)))
        if isinstance(self._head, TileLinear):
            calls += self._head.calls(normed, 0, 0, spare)
        table = np.zeros((len(calls), _WIDTH), np.int64)
        for row, (kernel, each) in zip(table, calls, strict=True):
            ctypes.memmove(row.ctypes.data, ctypes.addressof(each), ctypes.sizeof(each))
            row[-1] = kernel.address
        by_layer = table[:of_layers].reshape(len(self._layers), -1, _WIDTH)
        of_kinds: list[tuple[AttentionCall, LayerCache, Any]] = list(kinds.values())
        if len(of_kinds) == 1:
            of_kinds = [(*of_kinds[0][:2], slice(None))]  # which numpy writes faster than a list
        self._call.count, self._call.kernels = len(calls), table.ctypes.data
        records = [type(each) for _, each in calls]
        attending = records.index(AttentionArguments)
        attended_by = by_layer[:, attending : attending + 2]
        adapted = None
        if room is not None:
            shrinks = [i for i, (kernel, _) in enumerate(calls) if kernel is self._shrink]
            ends = [i for i, kind in enumerate(records) if kind is ProductCall]
            of_places = [
                (by_layer[:, i], by_layer[:, i + 1], by_layer[:, end], other)
                for i, end, other in zip(shrinks, ends, (0, hidden, 0, middle), strict=False)
            ]
            adapted = _Adapted(*room, of_places)
        return _Memory(
            tokens, tensors, indices, table, of_layers, attended_by, rounded, of_kinds, adapted
        )

    def _room_for_adapters(self, tokens: int) -> tuple[list[Tensor], np.ndarray] | None:
        """See :class:`_Adapted`. None: the program has none."""
        if self._places is None:
            return None
        qkv, output, gated, down = _products(self._layers[0])
        widths = max(qkv.width, output.width, 2 * gated.width, down.width), self._shrunk * LANES
        dtype = self._embedding.dtype
        tensors = [torch.empty(tokens, width, dtype=dtype) for width in widths]
        return tensors, np.zeros((tokens, 3), np.int64)

    def _product(
        self,
        place: int,
        number: int,
        x: int,
        out: int,
        other: int,
        spare: int,
        room: tuple[list[Tensor], np.ndarray] | None,
    ) -> list[tuple[Kernel, Any]]:
        """A product of a layer, and before it what adapters add."""
        linear = _products(self._layers[number])[place]
        if room is None:
            calls: list[tuple[Kernel, Any]] = linear.calls(x, out, other, spare)
            return calls
        (added, shrunk), spans = room
        width = linear.width * (2 if place == Places._fields.index("gated") else 1)
        common = {"spans": spans.ctypes.data, "place": (number * PLACES + place) * 8 * PLACE_FIELDS}
        first = LowRankCall(
            x=x,
            x_stride=2 * linear.in_features,
            out=shrunk.data_ptr(),
            out_stride=2 * shrunk.shape[1],
            units=linear.in_features // 2,
            **common,
        )
        second = LowRankCall(
            x=shrunk.data_ptr(),
            x_stride=2 * shrunk.shape[1],
            out=added.data_ptr(),
            out_stride=2 * width,
            other=other,
            columns=width // LANES,
            **common,
        )
        product = linear.calls(x, out, added.data_ptr(), spare)
        return [(self._shrink, first), (self._expand, second), *product]
