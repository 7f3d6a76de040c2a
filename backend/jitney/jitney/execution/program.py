"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`StepProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, where the angles of the rotary embedding lie, and what
attention must know. The kernels are those that the fused modules run one by one.

One engine's thread calls it; activations are kept between calls. Imported only where Numba is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jitney.execution import panel_kernel, program_kernel, row_kernels
from jitney.execution.attention.cpu import CpuAttention, Prepared
from jitney.execution.attention.layout import NUM_LAYER_FIELDS, Call
from jitney.execution.attention.metadata import AttentionMetadata
from jitney.execution.attention.openmp import team_runner, team_size_address, yield_address
from jitney.execution.compiled import compile_body, source_version
from jitney.execution.fused import AttentionForm, FusedDecoderLayer
from jitney.execution.interface import LayerCache, PagedStep
from jitney.execution.panels import GatedPanels, PanelLinear

_FIELD = {name: i for i, name in enumerate(Call._fields)}
_WIDTH = 64
"""Of every kernel's arguments, in units of 8 bytes: whole cache lines."""
_ROWS_PER_ITEM = 4
_LEAST_TOKENS = 64
_KERNELS_PER_LAYER = 9


@dataclass(frozen=True)
class _Memory:
    """Activations of at most ``tokens`` rows, and the arguments of all kernels over them."""

    tokens: int
    hidden: Tensor
    """[tokens, hidden size]: a layer's input, and what the last one gives."""
    middle: Tensor
    """[tokens, hidden size]: behind the attention of a layer."""
    normed: Tensor
    """[tokens, hidden size]"""
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    """[tokens, intermediate size]"""
    norms: np.ndarray
    """int64 [2 * layers, _WIDTH]: arguments of the layers' norms. As for the next four."""
    products: np.ndarray
    """[4 * layers, _WIDTH]"""
    rotations: np.ndarray
    writes: np.ndarray
    attends: np.ndarray
    kernels: np.ndarray
    """int64 [kernels, 2]: addresses of body and arguments, in the order in which they run."""


@dataclass(frozen=True)
class _Kind:
    """Layers whose attention takes the same arguments in a step."""

    attend: CpuAttention
    form: AttentionForm
    cache_shape: tuple[int, ...]
    numbers: list[int]
    """Of the layers."""


class StepProgram:
    """The layers of one model, all of whose products are of :class:`panels.PanelLinear`."""

    def __init__(self, layers: Sequence[FusedDecoderLayer]) -> None:
        self._layers = list(layers)
        self._caches: list[LayerCache] | None = None
        self._kinds: list[_Kind] = []
        self._memory: _Memory | None = None
        version = source_version("program_kernel.py", "attention/simd.py")

        def run(arguments: int) -> None:
            if version != 0:
                program_kernel.run_body(arguments)

        self._function = compile_body(run)  # owns the code
        self._run = team_runner()
        self._head = np.zeros(program_kernel.ARGUMENTS, np.int64)
        self._head[program_kernel.TEAM_SIZE] = team_size_address()
        self._head[program_kernel.YIELD] = yield_address()

    @staticmethod
    def can_run(layers: Sequence[object]) -> bool:
        """Whether a program can be made of ``layers``."""
        if not layers or team_size_address() is None or yield_address() is None:
            return False
        return all(
            isinstance(layer, FusedDecoderLayer)
            and isinstance(layer.mlp, GatedPanels)
            and isinstance(layer.qkv, PanelLinear)
            and isinstance(layer.output, PanelLinear)
            and layer.form.sinks is None
            for layer in layers
        )

    def fits(self, paged: object) -> bool:
        """Whether ``paged`` is a step over caches that our attention kernel reads and writes."""
        if not isinstance(paged, PagedStep):
            return False
        if paged.layers is not self._caches:
            dtype = self._layers[0].dtype
            for cache in paged.layers:
                if not isinstance(cache.attend, CpuAttention) or cache.keys.dtype != dtype:
                    return False
            self._caches, self._memory = paged.layers, None
            self._kinds = _sort(self._layers, paged.layers)
        return True

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, paged: PagedStep) -> Tensor:
        """``hidden`` is [1, T, hidden size], cos and sin are [1, T, rotary size]; for what
        :meth:`fits`. Returns [1, T, hidden size], which the next call overwrites."""
        tokens = hidden.shape[1]
        memory = self._memory
        if memory is None or memory.tokens < tokens:
            memory = self._memory = self._lay_out(tokens)
        memory.hidden[:tokens] = hidden[0]
        cos, sin = cos.contiguous(), sin.contiguous()
        assert cos.dtype == sin.dtype == memory.hidden.dtype
        norms, rotations, products = memory.norms, memory.rotations, memory.products
        norms[:, row_kernels.COUNTER] = rotations[:, row_kernels.COUNTER] = 0
        norms[:, row_kernels.ROWS] = rotations[:, row_kernels.ROWS] = tokens
        rotations[:, row_kernels.ROTARY_SIZE : row_kernels.QUERY_SCALE] = (
            cos.shape[-1],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1] * cos.element_size(),
        )
        products[:, panel_kernel.COUNTER : panel_kernel.X] = (0, 0, tokens)
        held = [self._set_attention(kind, memory, paged.meta, tokens) for kind in self._kinds]
        self._head[program_kernel.ARRIVED] = 0
        self._run(self._function.address, self._head.ctypes.data, torch.get_num_threads())
        del held
        return memory.hidden[None, :tokens]

    @staticmethod
    def _set_attention(
        kind: _Kind, memory: _Memory, meta: AttentionMetadata, tokens: int
    ) -> Prepared:
        """Write what is of this step; returns what owns the memory that it points to."""
        form = kind.form
        num_blocks, _, block_size, padded = kind.cache_shape
        shape = (form.query_heads, form.key_heads, form.head_size, padded)
        step = kind.attend.prepare(meta, shape, form.scale, form.window, form.softcap)
        assert (step.tokens, step.block_size) == (tokens, block_size)
        assert step.last_block < num_blocks
        constants = np.asarray(step.buffer)[NUM_LAYER_FIELDS:]
        for blocks, items in ((memory.writes, step.write_items), (memory.attends, step.items)):
            blocks[kind.numbers, NUM_LAYER_FIELDS : len(Call._fields)] = constants
            blocks[kind.numbers, :3] = (0, 0, items)
        return step

    # ------------------------------------------------------------------ laying out

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        first, count = self._layers[0], len(self._layers)

        def rows(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=first.dtype)

        def arguments(number: int) -> np.ndarray:
            return np.zeros((number, _WIDTH), np.int64)

        size = first.qkv.in_features
        memory = _Memory(
            tokens,
            hidden=rows(size),
            middle=rows(size),
            normed=rows(size),
            qkv=rows(first.qkv.out_features),
            attended=rows(first.output.in_features),
            inner=rows(first.mlp.down.in_features),
            norms=arguments(2 * count),
            products=arguments(4 * count),
            rotations=arguments(count),
            writes=arguments(count),
            attends=arguments(count),
            kernels=np.zeros((_KERNELS_PER_LAYER * count, 2), np.int64),
        )
        assert self._caches is not None
        for number, layer in enumerate(self._layers):
            at = slice(_KERNELS_PER_LAYER * number, _KERNELS_PER_LAYER * (number + 1))
            memory.kernels[at] = _place(layer, number, self._caches[layer.form.layer], memory)
        self._head[program_kernel.COUNT] = len(memory.kernels)
        self._head[program_kernel.KERNELS] = memory.kernels.ctypes.data
        return memory


def _sort(layers: list[FusedDecoderLayer], caches: list[LayerCache]) -> list[_Kind]:
    kinds: dict[tuple[object, ...], _Kind] = {}
    for number, layer in enumerate(layers):
        form, cache = layer.form, caches[layer.form.layer]
        assert isinstance(cache.attend, CpuAttention)
        key = (cache.attend, *cache.keys.shape, form.query_heads, form.key_heads, form.head_size,
               form.scale, form.window, form.softcap)  # fmt: skip
        kind = kinds.setdefault(key, _Kind(cache.attend, form, tuple(cache.keys.shape), []))
        kind.numbers.append(number)
    return list(kinds.values())


def _place(
    layer: FusedDecoderLayer, number: int, cache: LayerCache, memory: _Memory
) -> list[tuple[int, int]]:
    """Write the arguments of one layer that stay; returns (body, arguments) of its kernels."""
    attend, mlp = cache.attend, layer.mlp
    assert isinstance(attend, CpuAttention)
    assert isinstance(mlp, GatedPanels)
    assert isinstance(layer.qkv, PanelLinear)
    assert isinstance(layer.output, PanelLinear)
    hidden, middle, normed, qkv, attended, inner = (
        tensor.data_ptr()
        for tensor in (
            memory.hidden, memory.middle, memory.normed, memory.qkv, memory.attended, memory.inner
        )
    )  # fmt: skip
    norms = memory.norms[2 * number : 2 * number + 2]
    for arguments, norm, source in (
        (norms[0], layer.attention_norm, hidden),
        (norms[1], layer.mlp_norm, middle),
    ):
        norm.write_call(arguments, source, normed)
    products = memory.products[4 * number : 4 * number + 4]
    for arguments, product, x, out, other in (
        (products[0], layer.qkv, normed, qkv, 0),
        (products[1], layer.output, attended, middle, hidden),
        (products[2], mlp.gate_up, normed, inner, 0),
        (products[3], mlp.down, inner, hidden, middle),
    ):
        product.write_call(arguments, x, out, other)
    rotation = memory.rotations[number]
    layer.rotation.write_call(rotation, qkv, memory.qkv.stride(0))
    for arguments in (*norms, rotation):
        arguments[row_kernels.ROWS_PER_ITEM] = _ROWS_PER_ITEM
    _place_attention(layer.form, cache, memory, number)
    kernels, panels = layer.kernels, layer.qkv.kernel.address
    bodies = (
        (kernels.norm, norms[0]),
        (panels, products[0]),
        (kernels.rotate, rotation),
        (attend.write_address, memory.writes[number]),
        (attend.attend_address, memory.attends[number]),
        (panels, products[1]),
        (kernels.norm, norms[1]),
        (panels, products[2]),
        (panels, products[3]),
    )
    return [(body, arguments.ctypes.data) for body, arguments in bodies]


def _place_attention(form: AttentionForm, cache: LayerCache, memory: _Memory, number: int) -> None:
    """The part of attention's arguments that is of a layer."""
    size = memory.qkv.element_size()
    token, head = memory.qkv.stride(0) * size, form.head_size * size
    query = memory.qkv.data_ptr()
    key = query + form.query_heads * head
    fields = {
        "query": query,
        "query_token_stride": token,
        "query_head_stride": head,
        "key": key,
        "key_token_stride": token,
        "key_head_stride": head,
        "value": key + form.key_heads * head,
        "value_token_stride": token,
        "value_head_stride": head,
        "key_cache": cache.keys.data_ptr(),
        "value_cache": cache.values.data_ptr(),
        "sinks": 0,
        "out": memory.attended.data_ptr(),
    }
    for blocks in (memory.writes, memory.attends):
        for name, value in fields.items():
            blocks[number, _FIELD[name]] = value
