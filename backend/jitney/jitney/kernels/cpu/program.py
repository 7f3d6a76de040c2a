"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`LayerProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, their positions, and what attention must know. The
kernels are those that the fused modules run one by one. Each layer runs these, over [tokens,
width]. The names are those of ``program_list.Activations``::

    states    -> norm                        -> normed
    normed    -> product "qkv"               -> projected
    projected -> norms and rotary embedding  -> projected
    projected -> write K and V, then attend  -> mixed
    mixed     -> product "output" + states   -> middle
    middle    -> norm                        -> normed
    normed    -> product "gated"             -> inside
    inside    -> product "down" + middle     -> states, the input of the next layer

In a layer that keeps states, ``state_layer``'s kernels stand between projected and mixed; in one
that attends over latents, ``latent_layer``'s.

This is a Llama. A norm that a layer does not have is left out; one behind a branch stands between
its product and the sum. In a parallel layer, what gives ``inside`` reads what ``qkv`` reads, or the
norm of ``states``. Experts, and their router before them, stand in place of the last two products.

Behind all layers come the last norm and the head, of the tokens whose logits are asked for. If a
product takes another form of its input, a conversion stands before it (``convert_kernel``). With
adapters, two kernels stand before each product (``adapter_kernel``).

Called by ``fused``'s whole model for each step, through what ``layer_kernels`` gives. One engine's
thread calls it; activations are kept between calls. Imported only where Numba is.
"""

import ctypes
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution.interface import LayerCache, PagedFunction, PagedStep
from jitney.execution.low_rank import AdapterSpan, Factors
from jitney.execution.state_slots import StateSlots
from jitney.kernels.cpu.adapter_kernel import expand_body, shrink_body
from jitney.kernels.cpu.adapter_table import PackedAdapter, pack_adapter
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.column_linear import ColumnLinear, ScaledColumns
from jitney.kernels.cpu.compiled import Kernel, function_address
from jitney.kernels.cpu.emit import I64_BYTES, LANES
from jitney.kernels.cpu.latent_layer import OF_STEP, PRODUCT_OF_STEP, prepare_latents
from jitney.kernels.cpu.norm_rotary_kernel import RowNorm
from jitney.kernels.cpu.paged_attention import CpuAttention
from jitney.kernels.cpu.product_call import ProductCall
from jitney.kernels.cpu.program_fit import (
    check_adapters,
    check_layer,
    fits_cache,
    spare_floats,
    widths_of,
)
from jitney.kernels.cpu.program_kernel import (
    COUNT,
    COUNTERS,
    RECORD_FIELDS,
    ProgramCall,
    run_body,
)
from jitney.kernels.cpu.program_list import (
    Activations,
    AdaptedSteps,
    AdapterMemory,
    KernelList,
    LayerKind,
    ListedKernel,
    products_of,
)
from jitney.kernels.cpu.state_records import ROW_FIELDS
from jitney.kernels.cpu.step_rotation import StepRotation
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.layers import FusedMixture
from jitney.kernels.fused.rotary import RotaryTable
from jitney.kernels.fused.states import FusedStates
from jitney.kernels.fused.whole_model import FusedForward, Places

_LEAST_TOKENS = 64
"""Memory is made for so many tokens at least."""

# Fields of a kernel's record, which are int64: see ``program_kernel``.
_OUT = ProductCall.out.offset // I64_BYTES  # type: ignore[attr-defined]
"""The field ``ProductCall.out``."""
_OF_STEP = slice(
    AttentionArguments.plan.offset // I64_BYTES,  # type: ignore[attr-defined]
    ctypes.sizeof(AttentionArguments) // I64_BYTES,
)
"""The fields of AttentionArguments that are a step's: from ``plan`` on."""


RecordIndex = slice | np.ndarray
"""Some of a program's records. NumPy writes to a slice faster than to a list of indices."""


def _index_of(kernels: Sequence[int]) -> RecordIndex:
    """The records of these kernels, as a slice if they are evenly spaced."""
    if len(kernels) > 1:
        step = kernels[1] - kernels[0]
        if step > 0 and list(kernels) == list(range(kernels[0], kernels[-1] + 1, step)):
            return slice(kernels[0], kernels[-1] + 1, step)
    return np.array(kernels, np.int64)


@dataclass(frozen=True)
class _AttentionKind:
    """Layers that attend alike, and the records of their kernels."""

    layers: LayerKind
    write: RecordIndex
    attend: RecordIndex


@dataclass(frozen=True)
class _LatentKernels:
    """The records of the kernels over latents, as in ``program_list.LatentKernels``."""

    attention: RecordIndex
    products: RecordIndex


@dataclass(frozen=True)
class _Memory:
    """Activations of at most ``tokens`` tokens, and the records of all kernels over them."""

    tokens: int
    activations: Activations
    records: np.ndarray
    """int64 [kernels, RECORD_FIELDS], in the order in which the kernels run: those of the layers,
    of the last norm, and of the head if it is a ColumnLinear."""
    rows_per_token: np.ndarray | int
    """Of each kernel of the layers, or of all: see ``ListedKernel``."""
    num_layer_kernels: int
    """How many of these, the first ones, are of the layers."""
    kinds: list[_AttentionKind]
    row_kernels: RecordIndex
    """The kernels that have items for each row, and how many (``RowItems``)."""
    items_per_row: np.ndarray
    """int64 [row kernels]"""
    latent_kernels: dict[int, _LatentKernels]
    """By the number of heads."""
    rotations: list[StepRotation]
    kept: list[object]
    """What records point to and nothing else owns."""
    adapted: AdaptedSteps | None


# --------------------------------------------------------------------------- the program


class LayerProgram:
    """The layers of one model, the embedding before them, the norm behind, and the head. All
    products are of :class:`ColumnLinear`; the head may be another."""

    def __init__(self, model: Any, places: Sequence[Places] | None) -> None:
        """See :meth:`of`."""
        self._places = places
        # The most columns that the A factors of a product had in any step so far. A column is 16
        # ranks.
        self._most_rank_columns = 0
        self._input_rows = model.input_rows
        self._embedding: Tensor = model.input_rows.embed.weight.detach()
        self._tables: Sequence[RotaryTable] = model.tables
        self._table_of_layer: Sequence[int | None] = model.table_of_layer
        # A whole table has no later positions.
        lengths = [len(table.angles) for table in model.tables if table.is_whole]
        self._most_positions = min(lengths, default=sys.maxsize)
        self._layers = model.layers
        self._last_norm: RowNorm = model.norm.kernel
        self._head = model.head
        self._call = ProgramCall(
            team_size=function_address("omp_get_num_threads"),
            give_way=function_address("sched_yield"),
        )
        self._has_states = any(isinstance(layer.mixer, FusedStates) for layer in model.layers)
        self._caches: list[LayerCache] = []
        self._states: StateSlots | None = None
        self._memory: _Memory | None = None
        self._kernel = Kernel(lambda address: run_body(address))
        if places is not None:
            self._shrink = Kernel(lambda address: shrink_body(address))
            self._expand = Kernel(lambda address: expand_body(address))

    @classmethod
    def of(cls, model: FusedForward, places: Sequence[Places] | None = None) -> "LayerProgram":
        """A program of ``model``. Raises Misfit if it has parts that a program cannot run.

        With ``places``, the linear layers that adapters may change in each layer, the program is
        one of steps with adapters.
        """
        if not model.input_rows.is_table:
            raise Misfit("its embedding is no plain table")
        for layer in model.layers:
            check_layer(layer)
        if places is not None:
            check_adapters(model, places)
        return cls(model, places)

    def pack(self, factors: Mapping[str, Factors]) -> PackedAdapter:
        """An adapter as the program reads it. Any thread may call it."""
        return pack_adapter(factors, self._places or ())

    def can_run(self, paged: PagedFunction) -> TypeGuard[PagedStep]:
        """Whether the program can run a step with this attention."""
        if not isinstance(paged, PagedStep):
            return False
        if paged.meta.max_context_len > self._most_positions:
            return False
        if self._has_states and paged.cache is None:
            return False
        if self._has_caches(paged.layers):
            return True
        dtype = self._embedding.dtype
        return all(fits_cache(layer.mixer, paged.layers, dtype) for layer in self._layers)

    def _has_caches(self, caches: Sequence[LayerCache]) -> bool:
        """Whether these are the caches whose addresses the program has written down. A LayerCache
        cannot be changed: as long as it is the same object, its tensors and its attention function
        are the same, too."""
        if len(caches) != len(self._caches):
            return False
        return all(map(operator.is_, caches, self._caches))

    def use_caches(self, paged: PagedStep) -> None:
        """This step's caches and states are used from now on. If they are others than before, the
        program forgets its memory, in which the addresses of those are written down."""
        states = None if paged.cache is None else paged.cache.slots
        if not self._has_caches(paged.layers) or states is not self._states:
            self._caches = list(paged.layers)
            self._states = states
            self._memory = None

    def __call__(self, ids: Tensor, indices: Tensor, paged: PagedFunction) -> Tensor | None:
        """Run a step; None if it is not one that the program can run.

        ``ids`` are the step's T tokens, ``indices`` says which of them are asked for logits, both
        int64. Returns the logits, [len(indices), vocabulary].
        """
        if not self.can_run(paged):
            return None
        self.use_caches(paged)
        tokens = ids.shape[0]
        num_asked = indices.shape[0]
        assert num_asked <= tokens
        memory = self._memory_for(tokens, paged.meta.adapted)
        activations = memory.activations
        activations.indices[0, :tokens] = paged.meta.positions
        self._fill_states(activations.states[:tokens], ids, paged.meta.positions)
        activations.indices[1, :num_asked] = indices
        memory.records[:, COUNTERS] = 0
        memory.records[: memory.num_layer_kernels, COUNT] = tokens * memory.rows_per_token
        # Behind the layers, only the tokens whose logits are asked for.
        memory.records[memory.num_layer_kernels :, COUNT] = num_asked
        # Attention and adapters count items, not tokens: they set their own counts.
        if memory.adapted is not None:
            memory.adapted.fill_in(paged.meta.adapted, tokens)
        for rotation in memory.rotations:
            rotation.fill_in(paged.meta.positions, paged.meta.max_context_len)
        self._prepare_attention(memory, paged, tokens)
        if paged.cache is not None:
            rows = paged.cache.row_table
            activations.rows[: len(rows)] = rows
            memory.records[memory.row_kernels, COUNT] = len(rows) * memory.items_per_row
        for heads, kernels in memory.latent_kernels.items():
            latent_step = prepare_latents(paged.meta, heads)
            fields = np.frombuffer(bytes(latent_step.arguments), np.int64)
            memory.records[kernels.attention, OF_STEP] = fields[OF_STEP]
            of_step = (latent_step.lanes, latent_step.patterns)
            memory.records[kernels.products, PRODUCT_OF_STEP] = of_step
        normed = activations.normed[:num_asked]
        head = _columns_of(self._head)
        if head is None:
            self._run()
            logits: Tensor = self._head(normed)
            return logits
        # The head is the last kernel.
        filled = torch.empty(num_asked, head.width, dtype=normed.dtype)
        memory.records[-1, _OUT] = filled.data_ptr()
        self._run()
        return head.without_filling(filled)

    def _fill_states(self, states: Tensor, ids: Tensor, positions: Tensor) -> None:
        """Write what the first layer reads: see :class:`InputRows`, which computes the same."""
        rows = self._input_rows
        torch.index_select(self._embedding, 0, ids, out=states)
        if rows.factor != 1.0:
            states.mul_(rows.factor)
        if rows.positions is not None:
            states.add_(rows.positions.index_select(0, positions))

    def _run(self) -> None:
        self._call.arrived = 0
        self._kernel.run(self._call, torch.get_num_threads())

    def _prepare_attention(self, memory: _Memory, paged: PagedStep, tokens: int) -> None:
        """Fill in the arguments of attention that are a step's, once for all layers of a kind."""
        records = memory.records
        for kind in memory.kinds:
            layers = kind.layers
            assert isinstance(layers.cache.attend, CpuAttention)
            step = layers.cache.attend.prepare(layers.attention_call, layers.cache, paged.meta)
            assert step.arguments.tokens == tokens
            fields = np.frombuffer(bytes(step.arguments), np.int64)
            of_step = fields[_OF_STEP]
            records[kind.write, _OF_STEP] = of_step
            records[kind.write, COUNT] = step.write_items
            records[kind.attend, _OF_STEP] = of_step
            records[kind.attend, COUNT] = step.attend_items

    def _memory_for(self, tokens: int, spans: Sequence[AdapterSpan]) -> _Memory:
        """Memory for a step. It is made anew if the step has more tokens than the memory is for, or
        an adapter of larger ranks than all before."""
        shrunk_columns = max((span.adapter.packed.columns for span in spans), default=0)
        if shrunk_columns > self._most_rank_columns:
            self._most_rank_columns = shrunk_columns
            self._memory = None
        if self._memory is None or self._memory.tokens < tokens:
            self._memory = self._lay_out(tokens)
            # The list of kernels that the program runs from now on.
            self._call.count = len(self._memory.records)
            self._call.kernels = self._memory.records.ctypes.data
        return self._memory

    # ----------------------------------------------------------------- the list of kernels

    def _lay_out(self, tokens: int) -> _Memory:
        """Memory for steps of at most ``tokens`` tokens, rounded up to a power of two, and the list
        of kernels over it."""
        tokens = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        adapter_memory = self._adapter_memory(tokens)
        listed = KernelList(
            activations=self._activations(tokens),
            layers=self._layers,
            caches=self._caches,
            states=self._states,
            tables=[None if n is None else self._tables[n].angles for n in self._table_of_layer],
            norm_rotary=self._last_norm.machine_code,
            adapter_memory=adapter_memory,
            shrink=None if adapter_memory is None else self._shrink,
            expand=None if adapter_memory is None else self._expand,
        )
        num_layers = len(self._layers)
        for number in range(num_layers):
            listed.add_layer(number)
        num_layer_kernels = len(listed.kernels)
        listed.add_end(self._last_norm, self._head)
        records = listed.records()
        adapted = None
        if adapter_memory is not None:
            # [layers, kernels of a layer, RECORD_FIELDS]
            by_layer = records[:num_layer_kernels].reshape(num_layers, -1, RECORD_FIELDS)
            adapted = AdaptedSteps(adapter_memory, listed.adapted_products(by_layer))
        return _Memory(
            tokens=tokens,
            activations=listed.activations,
            records=records,
            rows_per_token=_rows_per_token(listed.kernels[:num_layer_kernels]),
            num_layer_kernels=num_layer_kernels,
            kinds=[
                _AttentionKind(kind, write=_index_of(kind.writes), attend=_index_of(kind.attends))
                for kind in listed.kinds.values()
            ],
            row_kernels=_index_of([items.kernel for items in listed.row_items]),
            items_per_row=np.array([items.per_row for items in listed.row_items], np.int64),
            latent_kernels={
                heads: _LatentKernels(_index_of(kernels.attention), _index_of(kernels.products))
                for heads, kernels in listed.latent_kernels.items()
            },
            rotations=self._short_rotations(records, listed.rotating, tokens),
            kept=[*listed.kept, *listed.expert_memories.values()],
            adapted=adapted,
        )

    def _short_rotations(
        self, records: np.ndarray, rotating: Sequence[Sequence[int]], tokens: int
    ) -> list[StepRotation]:
        """Those of the layers whose tables are not whole. ``rotating``: by layer, the indices of
        the kernels that rotate."""
        rotations = []
        for index, table in enumerate(self._tables):
            if table.is_whole:
                continue
            kernels: list[int] = []
            for used, of_layer in zip(self._table_of_layer, rotating, strict=True):
                if used == index:
                    kernels += of_layer
            rotations.append(StepRotation(table, records, kernels, tokens))
        return rotations

    def _activations(self, tokens: int) -> Activations:
        """Memory for so many tokens."""
        dtype = self._embedding.dtype
        size = self._embedding.shape[1]
        widths = widths_of(self._layers)

        def empty(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype)

        return Activations(
            states=empty(size),
            middle=empty(size),
            normed=empty(size),
            branch=empty(size),
            projected=empty(widths.projected),
            convolved=empty(widths.convolved),
            low=empty(widths.low),
            latent=empty(widths.latent),
            spare=torch.empty(spare_floats(self._layers, tokens), dtype=torch.float32),
            mixed=empty(widths.mixed),
            inside=empty(widths.inside),
            rows=np.zeros((tokens, ROW_FIELDS), np.int64),
            indices=torch.empty(2, tokens, dtype=torch.int64),
            converted=torch.empty(tokens * self._converted_row_bytes(), dtype=torch.uint8),
        )

    def _converted_row_bytes(self) -> int:
        """Bytes of a row that a conversion makes for a product, the most of all products."""
        most = 0
        for layer in self._layers:
            for product in products_of(layer).values():
                most = max(most, product.converted_row_bytes)
            if isinstance(layer.mlp, FusedMixture):
                router: Any = layer.mlp.router
                most = max(most, router.converted_row_bytes)
        head = _columns_of(self._head)
        if head is not None:
            most = max(most, head.converted_row_bytes)
        return most

    def _adapter_memory(self, tokens: int) -> AdapterMemory | None:
        """Memory for what adapters add; None if the program has no adapters."""
        if self._places is None:
            return None
        products = products_of(self._layers[0])
        widest = max(product.width for product in products.values())
        # A gated product adds to gate and to up.
        widest = max(widest, 2 * products["gated"].width)
        dtype = self._embedding.dtype
        return AdapterMemory(
            added=torch.empty(tokens, widest, dtype=dtype),
            shrunk=torch.empty(tokens, self._most_rank_columns * LANES, dtype=dtype),
            tokens=np.zeros((tokens, 3), np.int64),
        )


def _columns_of(head: nn.Module) -> ColumnLinear | None:
    """The product of an output layer, if it is ours."""
    if isinstance(head, ScaledColumns):
        return head.linear
    return head if isinstance(head, ColumnLinear) else None


def _rows_per_token(kernels: Sequence[ListedKernel]) -> np.ndarray | int:
    rows = [listed.rows_per_token for listed in kernels]
    # Most models have no experts. NumPy writes a single number faster than as many of them.
    return np.array(rows) if max(rows) > 1 else 1
