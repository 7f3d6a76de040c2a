"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`StepProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, where the angles of the rotary embedding lie, and what
attention must know. The kernels are those that the fused modules run one by one.

One engine's thread calls it; activations are kept between calls. Imported only where Numba is.
"""

from collections.abc import Callable, Sequence
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
from jitney.execution.fused import AttentionForm, FusedDecoderLayer, FusedRMSNorm
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
    """[tokens, hidden size]; at the end the last norm of the rows that were asked for."""
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    """[tokens, intermediate size]"""
    arguments: np.ndarray
    """int64 [kernels, _WIDTH]: of all of the following, which are parts of it."""
    norms: np.ndarray
    """[2 * layers, _WIDTH]"""
    last_norm: np.ndarray
    """[_WIDTH]"""
    head: np.ndarray
    """[_WIDTH]: of the product that gives the logits."""
    rotations: np.ndarray
    """[layers, _WIDTH]"""
    products: np.ndarray
    """[4 * layers, _WIDTH]"""
    writes: np.ndarray
    """[layers, _WIDTH], as the next ones."""
    attends: np.ndarray
    kernels: np.ndarray
    """int64 [kernels, 2]: addresses of body and arguments, in the order in which they run."""


@dataclass(frozen=True)
class _Kind:
    """Layers whose attention takes the same arguments in a step."""

    attend: CpuAttention
    form: AttentionForm
    cache_shape: tuple[int, ...]
    numbers: slice | list[int]
    """Of the layers."""


class StepProgram:
    """The layers of one model, all of whose products are of :class:`panels.PanelLinear`, the
    embedding before them, the norm behind, and the head if that is such a product too."""

    def __init__(
        self,
        embedding: Tensor,
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        layers: Sequence[FusedDecoderLayer],
        norm: FusedRMSNorm,
        head: PanelLinear | None = None,
    ) -> None:
        """``embedding`` is [vocabulary, hidden size]; ``rotary`` as of :class:`RotaryTable`."""
        self._embedding = embedding
        self._rotary = RotaryTable(rotary, embedding.dtype)
        self._layers = list(layers)
        self._norm = norm
        self._head = head
        self._caches: list[LayerCache] | None = None
        self._kinds: list[_Kind] = []
        self._memory: _Memory | None = None
        version = source_version("program_kernel.py", "attention/simd.py")

        def run(arguments: int) -> None:
            if version != 0:
                program_kernel.run_body(arguments)

        self._function = compile_body(run)  # owns the code
        self._run = team_runner()
        self._arguments = np.zeros(program_kernel.ARGUMENTS, np.int64)
        self._address = self._arguments.ctypes.data
        self._arguments[program_kernel.TEAM_SIZE] = team_size_address()
        self._arguments[program_kernel.YIELD] = yield_address()

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

    @property
    def has_head(self) -> bool:
        """Whether a step gives logits, and not the states before the head."""
        return self._head is not None

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

    def __call__(self, ids: Tensor, wanted: Tensor, paged: PagedStep) -> Tensor:
        """Run a step that :meth:`fits`: ``ids`` are its T tokens, ``wanted`` indices of them, both
        int64. Returns logits [wanted, vocabulary], or without a head [wanted, hidden size] behind
        the last norm, which the next call overwrites."""
        tokens, meta = ids.shape[0], paged.meta
        memory = self._memory
        if memory is None or memory.tokens < tokens:
            memory = self._memory = self._lay_out(tokens)
        torch.index_select(self._embedding, 0, ids, out=memory.hidden[:tokens])
        cos, sin = self._rotary.upto(meta.max_context_len)
        positions, wanted = meta.positions.contiguous(), wanted.contiguous()
        assert positions.dtype == wanted.dtype == torch.int64
        assert wanted.shape[0] <= tokens

        memory.arguments[:, :2] = 0  # the counters
        memory.norms[:, row_kernels.ROWS] = memory.rotations[:, row_kernels.ROWS] = tokens
        memory.products[:, panel_kernel.ROWS] = tokens
        memory.rotations[:, row_kernels.ROTARY_SIZE : row_kernels.QUERY_SCALE] = (
            cos.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0) * cos.element_size(),
            positions.data_ptr(),
        )
        rows = wanted.shape[0]
        memory.last_norm[row_kernels.ROWS] = rows
        memory.last_norm[row_kernels.INDEX] = wanted.data_ptr()
        out = memory.normed[:rows]
        if self._head is not None:
            out = torch.empty(rows, self._head.out_features, dtype=out.dtype)
            memory.head[panel_kernel.ROWS] = rows
            memory.head[panel_kernel.OUT] = out.data_ptr()
        held = [self._set_attention(kind, memory, meta, tokens) for kind in self._kinds]
        self._arguments[program_kernel.ARRIVED] = 0
        self._run(self._function.address, self._address, torch.get_num_threads())
        del held
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
        assert (step.tokens, step.block_size) == (tokens, block_size)
        assert step.last_block < num_blocks
        constants = np.asarray(step.buffer)[NUM_LAYER_FIELDS:]
        for blocks, items in ((memory.writes, step.write_items), (memory.attends, step.items)):
            blocks[kind.numbers, NUM_LAYER_FIELDS : len(Call._fields)] = constants
            blocks[kind.numbers, _FIELD["num_items"]] = items
        return step

    # ------------------------------------------------------------------ laying out

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        first, count = self._layers[0], len(self._layers)

        def rows(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=first.dtype)

        size = first.qkv.in_features
        kernels = _KERNELS_PER_LAYER * count + 1 + self.has_head
        arguments = np.zeros((_KERNELS_PER_LAYER * count + 2, _WIDTH), np.int64)
        ends = np.cumsum([2 * count, 1, 1, count, 4 * count, count])
        norms, last_norm, head, rotations, products, writes, attends = np.split(arguments, ends)
        memory = _Memory(
            tokens,
            hidden=rows(size),
            middle=rows(size),
            normed=rows(size),
            qkv=rows(first.qkv.out_features),
            attended=rows(first.output.in_features),
            inner=rows(first.mlp.down.in_features),
            arguments=arguments,
            norms=norms,
            last_norm=last_norm[0],
            head=head[0],
            rotations=rotations,
            products=products,
            writes=writes,
            attends=attends,
            kernels=np.zeros((kernels, 2), np.int64),
        )
        assert self._caches is not None
        for number, layer in enumerate(self._layers):
            at = slice(_KERNELS_PER_LAYER * number, _KERNELS_PER_LAYER * (number + 1))
            memory.kernels[at] = _place(layer, number, self._caches[layer.form.layer], memory)
        self._norm.write_call(memory.last_norm, memory.hidden.data_ptr(), memory.normed.data_ptr())
        memory.last_norm[row_kernels.ROWS_PER_ITEM] = _ROWS_PER_ITEM
        last = _KERNELS_PER_LAYER * count
        memory.kernels[last] = first.kernels.norm, memory.last_norm.ctypes.data
        if self._head is not None:
            self._head.write_call(memory.head, memory.normed.data_ptr(), 0)
            memory.kernels[last + 1] = self._head.kernel.address, memory.head.ctypes.data
        self._arguments[program_kernel.COUNT] = len(memory.kernels)
        self._arguments[program_kernel.KERNELS] = memory.kernels.ctypes.data
        return memory


class RotaryTable:
    """Cosines and sines of a model's rotary embedding by position, as far as they were needed."""

    def __init__(
        self, rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> None:
        """``rotary(x, positions)`` gives both [1, T, rotary size] in x's dtype, each row by its
        position alone."""
        self._rotary = rotary
        self._like = torch.empty(0, dtype=dtype)
        self._cos = self._sin = torch.empty(0, 0)

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """Both [at least ``positions``, rotary size]."""
        if self._cos.shape[0] < positions:
            count = max(1024, 1 << (positions - 1).bit_length())
            cos, sin = self._rotary(self._like, torch.arange(count)[None])
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos, self._sin


def _sort(layers: list[FusedDecoderLayer], caches: list[LayerCache]) -> list[_Kind]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, layer in enumerate(layers):
        form, cache = layer.form, caches[layer.form.layer]
        key = (cache.attend, *cache.keys.shape, form.query_heads, form.key_heads, form.head_size,
               form.scale, form.window, form.softcap)  # fmt: skip
        kinds.setdefault(key, []).append(number)
    sorted_kinds = []
    for numbers in kinds.values():
        form = layers[numbers[0]].form
        cache = caches[form.layer]
        assert isinstance(cache.attend, CpuAttention)
        every = slice(None) if len(kinds) == 1 else numbers  # numpy writes a slice faster
        sorted_kinds.append(_Kind(cache.attend, form, tuple(cache.keys.shape), every))
    return sorted_kinds


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
