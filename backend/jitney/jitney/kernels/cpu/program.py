"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`LayerProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, where the angles of the rotary embedding lie, and what
attention must know. The kernels are those that the fused modules run one by one.

One engine's thread calls it; activations are kept between calls. Imported only where Numba is.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import LayerCache, PagedFunction, PagedStep
from jitney.kernels.cpu import program_kernel
from jitney.kernels.cpu.attention import CpuAttention, Prepared
from jitney.kernels.cpu.compiled import Kernel, source_version
from jitney.kernels.cpu.layout import AttentionCall
from jitney.kernels.cpu.openmp import function_address
from jitney.kernels.cpu.program_kernel import ProgramCall
from jitney.kernels.cpu.row_kernels import NormCall, RotateCall
from jitney.kernels.cpu.rows import HeadAttention, RowNorm
from jitney.kernels.cpu.tile_kernel import ProductCall
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import AttentionForm, FusedDecoderLayer, FusedForward, FusedMLP

_Record = TypeVar("_Record", bound=ctypes.Structure)

_WIDTH = 64
"""Of every kernel's arguments, in units of 8 bytes: whole cache lines."""
_ROWS_PER_ITEM = 4
_LEAST_TOKENS = 64
_TEAM_SIZE, _YIELD = "omp_get_num_threads", "sched_yield"
# The arguments of a layer's kernels, those of one sort side by side; and the order of the kernels.
_ATTENTION_NORM, _MLP_NORM, _ROTATE, _QKV, _OUTPUT, _GATED, _DOWN, _WRITE, _ATTEND = range(9)
_ROW_KERNELS, _PRODUCTS = slice(_ATTENTION_NORM, _QKV), slice(_QKV, _WRITE)
_ORDER = (_ATTENTION_NORM, _QKV, _ROTATE, _WRITE, _ATTEND, _OUTPUT, _MLP_NORM, _GATED, _DOWN)


def _index(record: type[ctypes.Structure], field: str) -> int:
    """Of a field, in units of 8 bytes."""
    return int(getattr(record, field).offset) // 8


_ROWS, _PRODUCT_ROWS = _index(NormCall, "rows"), _index(ProductCall, "rows")
_PER_ITEM = _index(NormCall, "rows_per_item")
_POSITIONS = _index(RotateCall, "positions")
_NUM_ITEMS = _index(AttentionCall, "num_items")
_STEP_FIELDS = slice(_index(AttentionCall, "works"), ctypes.sizeof(AttentionCall) // 8)


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


@dataclass(frozen=True)
class _Kind:
    """Layers whose attention takes the same arguments in a step."""

    attend: CpuAttention
    form: AttentionForm
    cache_shape: tuple[int, ...]
    layers: slice | list[int]


def _sort(forms: list[AttentionForm], caches: list[LayerCache]) -> list[_Kind]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, form in enumerate(forms):
        cache = caches[form.layer]
        key = (cache.attend, *cache.keys.shape, replace(form, layer=0))
        kinds.setdefault(key, []).append(number)
    found = []
    for numbers in kinds.values():
        form = forms[numbers[0]]
        cache = caches[form.layer]
        assert isinstance(cache.attend, CpuAttention)
        every = slice(None) if len(kinds) == 1 else numbers  # numpy writes a slice faster
        found.append(_Kind(cache.attend, form, tuple(cache.keys.shape), every))
    return found


class _Layer(NamedTuple):
    """The parts of a layer that a program can run."""

    attention_norm: RowNorm
    qkv: TileLinear
    attention: HeadAttention
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
        or not isinstance(heads, HeadAttention)
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
        self._kinds: list[_Kind] = []
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
            self._kinds = _sort([layer.attention.form for layer in self._layers], paged.layers)
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
        held = [self._set_attention(kind, memory, meta, tokens) for kind in self._kinds]
        self._call.arrived = 0
        self._kernel.run(self._call, torch.get_num_threads())
        del held
        if memory.head is None:
            out = self._head(out)
        return out

    @staticmethod
    def _set_attention(
        kind: _Kind, memory: _Memory, meta: AttentionMetadata, tokens: int
    ) -> Prepared:
        """Write what is of this step; returns what owns the memory that it points to."""
        form = kind.form
        num_blocks, _, block_size, padded = kind.cache_shape
        shape = (form.query_heads, form.key_heads, form.head_size, padded)
        step = kind.attend.prepare(meta, shape, form.scale, form.window, form.softcap)
        assert (step.call.tokens, step.call.block_size) == (tokens, block_size)
        assert step.last_block < num_blocks
        constants = np.frombuffer(bytes(step.call), np.int64)[_STEP_FIELDS]
        for kernel, items in ((_WRITE, step.write_items), (_ATTEND, step.items)):
            memory.layers[kind.layers, kernel, _STEP_FIELDS] = constants
            memory.layers[kind.layers, kernel, _NUM_ITEMS] = items
        return step

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        first, count, dtype = self._layers[0], len(self._layers), self._embedding.dtype
        size = self._embedding.shape[1]
        widths = (size, size, size, first.qkv.out_features, first.output.in_features)
        tensors = [torch.empty(tokens, w, dtype=dtype) for w in (*widths, first.down.in_features)]
        arguments = np.zeros((len(_ORDER) * count + 2, _WIDTH), np.int64)
        kernels: list[tuple[int, int]] = []

        def write(row: int, call: _Record) -> _Record:
            """Into ``arguments``; returns the record there."""
            address = int(arguments[row].ctypes.data)
            ctypes.memmove(address, ctypes.addressof(call), ctypes.sizeof(call))
            return type(call).from_address(address)

        hidden, middle, normed, qkv, attended, inner = (each.data_ptr() for each in tensors)
        for number, layer in enumerate(self._layers):
            cache = self._caches[layer.attention.form.layer]
            attend = cache.attend
            assert isinstance(attend, CpuAttention)
            rotation = layer.attention.call_for(tensors[3])
            rotation.rotary_size = self._table.shape[2]
            rotation.cos, rotation.sin = (each.data_ptr() for each in self._table.unbind(1))
            rotation.angle_stride = self._table.stride(0) * self._table.element_size()
            begin = len(_ORDER) * number
            for kernel, call in (
                (_ATTENTION_NORM, layer.attention_norm.call_for(hidden, normed)),
                (_MLP_NORM, layer.mlp_norm.call_for(middle, normed)),
                (_ROTATE, rotation),
                (_QKV, layer.qkv.call_for(normed, qkv)),
                (_OUTPUT, layer.output.call_for(attended, middle, hidden)),
                (_GATED, layer.gated.call_for(normed, inner)),
                (_DOWN, layer.down.call_for(inner, hidden, middle)),
            ):
                write(begin + kernel, call)
            fields = _attention_fields(layer.attention.form, cache, tensors[3], attended)
            for kernel in (_WRITE, _ATTEND):
                write(begin + kernel, AttentionCall(**fields))
            norm, product = layer.attention_norm.kernel.address, layer.qkv.kernel.address
            bodies = {
                _ATTENTION_NORM: norm, _MLP_NORM: norm, _ROTATE: layer.attention.kernel.address,
                _QKV: product, _OUTPUT: product, _GATED: product, _DOWN: product,
                _WRITE: attend.write_address, _ATTEND: attend.attend_address,
            }  # fmt: skip
            kernels += [(bodies[k], int(arguments[begin + k].ctypes.data)) for k in _ORDER]
        end = len(_ORDER) * count
        last_norm = write(end, self._norm.call_for(hidden, normed))
        kernels.append((self._norm.kernel.address, ctypes.addressof(last_norm)))
        head = None
        if isinstance(self._head, TileLinear):
            head = write(end + 1, self._head.call_for(normed, 0))
            kernels.append((self._head.kernel.address, ctypes.addressof(head)))
        layers = arguments[:end].reshape(count, len(_ORDER), _WIDTH)
        layers[:, _ROW_KERNELS, _PER_ITEM] = last_norm.rows_per_item = _ROWS_PER_ITEM
        memory = _Memory(
            tokens, tensors, arguments, layers, last_norm, head, np.array(kernels, np.int64)
        )
        self._call.count, self._call.kernels = len(kernels), memory.kernels.ctypes.data
        return memory


def _attention_fields(
    form: AttentionForm, cache: LayerCache, qkv: Tensor, out: int
) -> dict[str, int]:
    """The part of attention's arguments that is of a layer."""
    size = qkv.element_size()
    token, head = qkv.stride(0) * size, form.head_size * size
    key = qkv.data_ptr() + form.query_heads * head
    addresses = {"query": qkv.data_ptr(), "key": key, "value": key + form.key_heads * head}
    return {
        **addresses,
        **{f"{name}_token_stride": token for name in addresses},
        **{f"{name}_head_stride": head for name in addresses},
        "key_cache": cache.keys.data_ptr(),
        "value_cache": cache.values.data_ptr(),
        "sinks": 0,
        "out": out,
    }
