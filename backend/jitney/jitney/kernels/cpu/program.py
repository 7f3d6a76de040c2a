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
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution.interface import LayerCache, PagedFunction, PagedStep
from jitney.execution.low_rank import Factors, Span
from jitney.kernels.cpu.adapter_kernel import expand_body, shrink_body
from jitney.kernels.cpu.adapter_table import PackedAdapter, pack
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.compiled import Kernel, function_address, source_version
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.paged_attention import CpuAttention
from jitney.kernels.cpu.product_kernel import ProductCall
from jitney.kernels.cpu.program_kernel import COUNT, ROW_FIELDS, ProgramCall, run_body
from jitney.kernels.cpu.program_list import (
    Activations,
    AdaptedSteps,
    AdapterMemory,
    KernelList,
    LayerKind,
    products_of,
)
from jitney.kernels.cpu.tile_linear import TileLinear
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMLP
from jitney.kernels.fused.whole_model import FusedForward, Places

_LEAST_TOKENS = 64

# Fields of a kernel's row, 8 bytes each.
_KERNEL_CALL = slice(3)
"""Those of ``KernelCall``: two counters, and the number of rows or of items."""
_OUT = ProductCall.out.offset // 8  # type: ignore[attr-defined]
_OF_STEP = slice(
    AttentionArguments.plan.offset // 8,  # type: ignore[attr-defined]
    ctypes.sizeof(AttentionArguments) // 8,
)
"""The arguments of attention that are a step's: from ``plan`` on."""


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class _Memory:
    """Activations of at most ``tokens`` rows, and the rows of all kernels over them."""

    tokens: int
    activations: Activations
    rows: np.ndarray
    """int64 [kernels, ROW_FIELDS], in the order in which they run: those of the layers, of the last
    norm, and of the head if it is a TileLinear."""
    num_layer_rows: int
    """How many of these, the first ones, are of the layers."""
    attention: np.ndarray
    """Those of the layers that write K and V and that attend: [layers, 2, ROW_FIELDS]."""
    kinds: list[LayerKind]
    adapted: AdaptedSteps | None


# --------------------------------------------------------------------------- the program


class LayerProgram:
    """The layers of one model, the embedding before them, the norm behind, and the head. All
    products are of :class:`TileLinear`; the head may be another."""

    def __init__(self, model: Any, places: Sequence[Places] | None) -> None:
        """See :meth:`of`."""
        self._places = places
        # The most columns of A that adapters of a step have had so far.
        self._shrunk_columns = 0
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
        """Whether ``paged`` is a step over caches that our attention kernel reads and writes. If
        they are others than before, the program forgets its memory, which points to those."""
        if not isinstance(paged, PagedStep) or paged.meta.max_context_len > self._table.shape[0]:
            return False
        # Same addresses, same caches: as long as they are held here, nobody else gets that memory.
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
        memory.rows[:, _KERNEL_CALL] = 0, 0, tokens
        # Behind the layers, only the rows that are asked for.
        memory.rows[memory.num_layer_rows :, COUNT] = count
        if memory.adapted is not None:
            memory.adapted.prepare(paged.meta.adapted, tokens)
        self._prepare_attention(memory, paged, tokens)
        normed = activations.normed[:count]
        if not isinstance(self._head, TileLinear):
            self._run()
            logits: Tensor = self._head(normed)
            return logits
        # The head is the last kernel.
        filled = torch.empty(count, self._head.width, dtype=normed.dtype)
        memory.rows[-1, _OUT] = filled.data_ptr()
        self._run()
        return self._head.without_filling(filled)

    def _run(self) -> None:
        self._call.arrived = 0
        self._kernel.run(self._call, torch.get_num_threads())

    def _prepare_attention(self, memory: _Memory, paged: PagedStep, tokens: int) -> None:
        """Fill in the arguments of attention that are a step's, once for layers of one kind. This
        sets the number of items of these kernels, too, which is not that of tokens."""
        for kind in memory.kinds:
            assert isinstance(kind.cache.attend, CpuAttention)
            step = kind.cache.attend.prepare(kind.call, kind.cache, paged.meta)
            assert step.arguments.tokens == tokens
            fields = np.frombuffer(bytes(step.arguments), np.int64)[_OF_STEP]
            memory.attention[kind.layers, :, _OF_STEP] = fields
            memory.attention[kind.layers, :, COUNT] = step.write_items, step.items

    def _memory_for(self, tokens: int, spans: Sequence[Span]) -> _Memory:
        """Memory for a step, made anew if the step has more tokens or adapters of larger ranks than
        all before it."""
        shrunk = max((span.adapter.packed.columns for span in spans), default=0)
        if shrunk > self._shrunk_columns:
            self._shrunk_columns = shrunk
            self._memory = None
        if self._memory is None or self._memory.tokens < tokens:
            self._memory = self._lay_out(tokens)
        return self._memory

    # ----------------------------------------------------------------- the list of kernels

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` rows, rounded up to a power of two."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        adapter_memory = self._adapter_memory(tokens)
        kernels = KernelList(
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
            kernels.add_layer(number)
        num_layer_rows = len(kernels.calls)
        kernels.add_end(self._norm, self._head)
        rows = kernels.rows()
        self._call.count = len(rows)
        self._call.kernels = rows.ctypes.data
        by_layer = rows[:num_layer_rows].reshape(len(self._layers), -1, ROW_FIELDS)
        kinds = list(kernels.kinds.values())
        if len(kinds) == 1:
            kinds[0].layers = slice(None)  # which numpy writes faster than a list
        attending = kernels.indices_of(AttentionArguments)[0]
        adapted = None
        if adapter_memory is not None:
            adapted = AdaptedSteps(adapter_memory, kernels.adapted_places(by_layer))
        return _Memory(
            tokens=tokens,
            activations=kernels.activations,
            rows=rows,
            num_layer_rows=num_layer_rows,
            attention=by_layer[:, attending : attending + 2],
            kinds=kinds,
            adapted=adapted,
        )

    def _activations(self, tokens: int) -> Activations:
        """Memory for so many rows."""
        dtype = self._embedding.dtype
        size = self._embedding.shape[1]
        first = self._layers[0]
        attention = first.self_attn

        def rows(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype)

        return Activations(
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
        """Bytes of a row in the form that a product needs before it, the most of all products."""
        most = 0
        for layer in self._layers:
            for product in products_of(layer):
                most = max(most, product.spare_bytes)
        if isinstance(self._head, TileLinear):
            most = max(most, self._head.spare_bytes)
        return most

    def _adapter_memory(self, tokens: int) -> AdapterMemory | None:
        """None: the program has no adapters."""
        if self._places is None:
            return None
        qkv, output, gated, down = products_of(self._layers[0])
        widest = max(qkv.width, output.width, 2 * gated.width, down.width)
        dtype = self._embedding.dtype
        return AdapterMemory(
            added=torch.empty(tokens, widest, dtype=dtype),
            shrunk=torch.empty(tokens, self._shrunk_columns * LANES, dtype=dtype),
            items=np.zeros((tokens, 3), np.int64),
        )


# --------------------------------------------------------------------------- what can be run


def _can_run(layer: FusedDecoderLayer) -> bool:
    """Whether a program can run all parts of the layer."""
    norms = layer.norms
    if norms.attention is None or norms.mlp is None or norms.attended or norms.mixed:
        return False
    if not isinstance(layer.mlp, FusedMLP) or layer.self_attn.form.sinks is not None:
        return False
    for product in products_of(layer):
        # Rows that are filled up would have to be cut between two kernels.
        if not isinstance(product, TileLinear) or product.width != product.out_features:
            return False
    return True


def _shape(layer: FusedDecoderLayer) -> tuple[tuple[int, int, bool], ...]:
    """What must be the same of all layers."""
    return tuple(
        (product.in_features, product.width, product.spare_bytes > 0)
        for product in products_of(layer)
    )
