"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`LayerProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, where the angles of the rotary embedding lie, and what
attention must know. The kernels are those that the fused modules run one by one.

One engine's thread calls it; activations are kept between calls. Imported only where Numba is.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution.interface import AttentionCall, LayerCache, PagedFunction, PagedStep
from jitney.kernels.cpu import program_kernel
from jitney.kernels.cpu.attention import CpuAttention, set_layer
from jitney.kernels.cpu.compiled import Kernel, source_version
from jitney.kernels.cpu.layout import AttentionArguments
from jitney.kernels.cpu.openmp import function_address
from jitney.kernels.cpu.program_kernel import ProgramCall
from jitney.kernels.cpu.row_kernels import NormCall, RotateCall
from jitney.kernels.cpu.rows import CpuHeadAttention, RowNorm
from jitney.kernels.cpu.tile_kernel import ProductCall
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedForward, FusedMLP

_Record = TypeVar("_Record", bound=ctypes.Structure)

_WIDTH = 64
"""Of every kernel's arguments, in units of 8 bytes: whole cache lines."""
_ROWS_PER_ITEM = 4
_LEAST_TOKENS = 64
_TEAM_SIZE, _YIELD = "omp_get_num_threads", "sched_yield"
# Indices of a layer's kernels among its arguments: those of one sort stand side by side.
_ATTENTION_NORM, _MLP_NORM, _ROTATE, _QKV, _OUTPUT, _GATED, _DOWN, _WRITE, _ATTEND = range(9)
_KERNELS = 9
_ROW_KERNELS, _PRODUCTS = slice(_ATTENTION_NORM, _QKV), slice(_QKV, _WRITE)
_ATTENTION = slice(_WRITE, _ATTEND + 1)
_ORDER = (_ATTENTION_NORM, _QKV, _ROTATE, _WRITE, _ATTEND, _OUTPUT, _MLP_NORM, _GATED, _DOWN)


def _index(record: type[ctypes.Structure], field: str) -> int:
    """Of a field, in units of 8 bytes."""
    return int(getattr(record, field).offset) // 8


_ROWS, _PRODUCT_ROWS = _index(NormCall, "rows"), _index(ProductCall, "rows")
_PER_ITEM = _index(NormCall, "rows_per_item")
_POSITIONS = _index(RotateCall, "positions")
_NUM_ITEMS = _index(AttentionArguments, "num_items")
_STEP_FIELDS = slice(_index(AttentionArguments, "works"), ctypes.sizeof(AttentionArguments) // 8)


@dataclass(frozen=True)
class _Memory:
    """Activations of at most ``tokens`` rows, and the arguments of all kernels over them."""

    tokens: int
    activations: list[Tensor]
    """[tokens, width] each: the input of a layer, which is also what the last one gives; what is
    behind its attention; what is normed, at the end of the rows that were asked for; query, key and
    value; what attention gives; what is inside of the MLP."""
    arguments: np.ndarray
    """int64 [9 * layers + 2, _WIDTH]: those of the layers, of the last norm, of the head."""
    layers: np.ndarray
    """The first of these as [layers, 9, _WIDTH]."""
    last_norm: NormCall
    """The arguments there; so is the next one."""
    head: ProductCall | None
    kernels: np.ndarray
    """int64 [kernels, 2]: addresses of body and arguments, in the order in which they run."""
    kinds: list[tuple[AttentionCall, LayerCache, Any]]
    """One layer's, and the indices of all layers whose attention takes the same of a step."""


class _Layer(NamedTuple):
    """The parts of a layer that a program can run."""

    attention_norm: RowNorm
    qkv: TileLinear
    attention: CpuHeadAttention
    output: TileLinear
    mlp_norm: RowNorm
    gated: TileLinear
    down: TileLinear


def _parts(layer: FusedDecoderLayer) -> _Layer | None:
    """None if it has others."""
    attention, mlp, norms = layer.self_attn, layer.mlp, layer.norms
    if norms.attention is None or norms.mlp is None or norms.attended or norms.mixed:
        return None
    if not isinstance(mlp, FusedMLP) or attention.form.sinks is not None:
        return None
    products = (attention.qkv, attention.output, mlp.gated, mlp.down)
    heads, kernels = attention.kernel, (norms.attention.kernel, norms.mlp.kernel)
    if (
        not all(isinstance(each, TileLinear) for each in products)
        or not all(isinstance(each, RowNorm) for each in kernels)
        or not isinstance(heads, CpuHeadAttention)
        or heads.wide_norms
    ):
        return None
    qkv, output, gated, down = products
    return _Layer(kernels[0], qkv, heads, output, kernels[1], gated, down)  # type: ignore[arg-type]


class LayerProgram:
    """The layers of one model, the embedding before them, the norm behind, and the head. All
    products are of :class:`TileLinear`; the head may be another."""

    def __init__(self, model: FusedForward, layers: list[_Layer], table: Tensor) -> None:
        """See :meth:`of`."""
        weight, norm = model.embed.weight, model.norm.kernel
        assert isinstance(weight, Tensor)
        assert isinstance(norm, RowNorm)
        self._embedding, self._table, self._layers = weight.detach(), table, layers
        self._norm, self._head = norm, model.head
        self._caches: list[LayerCache] = []
        self._memory: _Memory | None = None
        version = source_version()

        def run(arguments: int) -> None:
            if version != 0:
                program_kernel.run_body(arguments)

        self._kernel = Kernel(run)
        self._call = ProgramCall(
            team_size=function_address(_TEAM_SIZE), give_way=function_address(_YIELD)
        )

    @classmethod
    def of(cls, model: FusedForward) -> "LayerProgram | None":
        """A program of ``model``, if its parts are those that one can run."""
        table = model.rotaries[0].table if len(model.rotaries) == 1 else None
        layers = [parts for layer in model.layers if (parts := _parts(layer)) is not None]
        if table is None or type(model.embed) is not nn.Embedding:
            return None
        found = function_address(_TEAM_SIZE) and function_address(_YIELD)
        if len(layers) < len(model.layers) or not found:
            return None
        return cls(model, layers, table)

    def fits(self, paged: PagedFunction) -> bool:
        """Whether ``paged`` is a step over caches that our attention kernel reads and writes."""
        if not isinstance(paged, PagedStep) or paged.meta.max_context_len > self._table.shape[0]:
            return False
        # The memory of caches that are held here belongs to no others.
        if [c.keys.data_ptr() for c in paged.layers] != [c.keys.data_ptr() for c in self._caches]:
            dtype = self._embedding.dtype
            for cache in paged.layers:
                if not isinstance(cache.attend, CpuAttention) or cache.keys.dtype != dtype:
                    return False
            self._caches, self._memory = paged.layers, None
        return True

    def __call__(self, ids: Tensor, rows: Tensor, paged: PagedFunction) -> Tensor:
        """Run a step that :meth:`fits`: ``ids`` are its T tokens, ``rows`` indices of them, both
        int64. Returns what the head gives of these [rows, vocabulary]."""
        assert isinstance(paged, PagedStep)
        tokens, meta = ids.shape[0], paged.meta
        memory = self._memory
        if memory is None or memory.tokens < tokens:
            memory = self._memory = self._lay_out(tokens)
        torch.index_select(self._embedding, 0, ids, out=memory.activations[0][:tokens])
        positions, rows = meta.positions.contiguous(), rows.contiguous()
        assert positions.dtype == rows.dtype == torch.int64
        count = rows.shape[0]
        assert count <= tokens

        memory.arguments[:, :2] = 0  # the counters
        memory.layers[:, _ROW_KERNELS, _ROWS] = tokens
        memory.layers[:, _PRODUCTS, _PRODUCT_ROWS] = tokens
        memory.layers[:, _ROTATE, _POSITIONS] = positions.data_ptr()
        memory.last_norm.rows, memory.last_norm.index = count, rows.data_ptr()
        out = memory.activations[2][:count]
        if memory.head is not None:
            assert isinstance(self._head, TileLinear)
            out = torch.empty(count, self._head.out_features, dtype=out.dtype)
            memory.head.rows, memory.head.out = count, out.data_ptr()
        held = []  # what owns the memory that the arguments point to
        for call, cache, layers in memory.kinds:
            assert isinstance(cache.attend, CpuAttention)
            step = cache.attend.prepare(call, cache, meta)
            assert step.arguments.tokens == tokens
            fields = np.frombuffer(bytes(step.arguments), np.int64)[_STEP_FIELDS]
            memory.layers[layers, _ATTENTION, _STEP_FIELDS] = fields
            memory.layers[layers, _ATTENTION, _NUM_ITEMS] = step.write_items, step.items
            held.append(step)
        self._call.arrived = 0
        self._kernel.run(self._call, torch.get_num_threads())
        del held
        if memory.head is None:
            out = self._head(out)
        return out

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        first, count, dtype = self._layers[0], len(self._layers), self._embedding.dtype
        size = self._embedding.shape[1]
        widths = (size, size, size, first.qkv.out_features, first.output.in_features)
        tensors = [torch.empty(tokens, w, dtype=dtype) for w in (*widths, first.down.in_features)]
        arguments = np.zeros((_KERNELS * count + 2, _WIDTH), np.int64)
        kernels: list[tuple[int, int]] = []
        kinds: dict[object, tuple[AttentionCall, LayerCache, Any]] = {}

        def add(row: int, body: int, call: _Record) -> _Record:
            """Run ``body`` next, with a copy of ``call`` in ``arguments``; returns the copy."""
            address = int(arguments[row].ctypes.data)
            ctypes.memmove(address, ctypes.addressof(call), ctypes.sizeof(call))
            kernels.append((body, address))
            return type(call).from_address(address)

        hidden, middle, normed, qkv, attended, inner = (each.data_ptr() for each in tensors)
        for number, layer in enumerate(self._layers):
            form, cache = layer.attention.form, self._caches[layer.attention.form.layer]
            attend, call = cache.attend, form.call(*form.split(tensors[3]))
            assert isinstance(attend, CpuAttention)
            attention = AttentionArguments()
            set_layer(attention, call.query, call.key, call.value, cache, attended)
            kind = (attend, cache.keys.shape, replace(form, layer=0))
            kinds.setdefault(kind, (call, cache, []))[2].append(number)
            rotation = layer.attention.call_for(tensors[3])
            rotation.rotary_size = self._table.shape[2]
            rotation.cos, rotation.sin = (each.data_ptr() for each in self._table.unbind(1))
            rotation.angle_stride = self._table.stride(0) * self._table.element_size()
            norm, product = layer.attention_norm.kernel.address, layer.qkv.kernel.address
            begin = _KERNELS * number
            add(begin + _ATTENTION_NORM, norm, layer.attention_norm.call_for(hidden, normed))
            add(begin + _QKV, product, layer.qkv.call_for(normed, qkv))
            add(begin + _ROTATE, layer.attention.kernel.address, rotation)
            add(begin + _WRITE, attend.write_address, attention)
            add(begin + _ATTEND, attend.attend_address, attention)
            add(begin + _OUTPUT, product, layer.output.call_for(attended, middle, hidden))
            add(begin + _MLP_NORM, norm, layer.mlp_norm.call_for(middle, normed))
            add(begin + _GATED, product, layer.gated.call_for(normed, inner))
            add(begin + _DOWN, product, layer.down.call_for(inner, hidden, middle))
        end = _KERNELS * count
        last_norm = add(end, self._norm.kernel.address, self._norm.call_for(hidden, normed))
        head = None
        if isinstance(self._head, TileLinear):
            head = add(end + 1, self._head.kernel.address, self._head.call_for(normed, 0))
        layers = arguments[:end].reshape(count, _KERNELS, _WIDTH)
        layers[:, _ROW_KERNELS, _PER_ITEM] = last_norm.rows_per_item = _ROWS_PER_ITEM
        addresses, of_kinds = np.array(kernels, np.int64), list(kinds.values())
        if len(of_kinds) == 1:
            of_kinds = [(*of_kinds[0][:2], slice(None))]  # which numpy writes faster than a list
        memory = _Memory(tokens, tensors, arguments, layers, last_norm, head, addresses, of_kinds)
        self._call.count, self._call.kernels = len(kernels), memory.kernels.ctypes.data
        return memory
