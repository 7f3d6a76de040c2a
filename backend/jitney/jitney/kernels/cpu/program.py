"""All layers of a model in one native call per step.

Between the products of a layer, Python takes as long as the products of a small model do. So a
:class:`LayerProgram` writes down once which kernels a step runs, over which memory, and each step
fills in what differs: the number of tokens, their positions, and what attention must know. The
kernels are those that the fused modules run one by one. Each layer runs these, over [tokens,
width]. The names are those of ``program_list.Activations``::

    states   -> norm                        -> normed
    normed   -> product "qkv"               -> qkv
    qkv      -> norms and rotary embedding  -> qkv
    qkv      -> write K and V, then attend  -> attended
    attended -> product "output" + states   -> middle
    middle   -> norm                        -> normed
    normed   -> product "gated"             -> inside
    inside   -> product "down" + middle     -> states, the input of the next layer

This is a Llama. A norm that a layer does not have is left out; one behind a branch stands between
its product and the sum. In a parallel layer, what gives ``inside`` reads what ``qkv`` reads, or the
norm of ``states``.

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
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution.interface import LayerCache, PagedFunction, PagedStep
from jitney.execution.low_rank import AdapterSpan, Factors
from jitney.kernels.cpu.adapter_kernel import expand_body, shrink_body
from jitney.kernels.cpu.adapter_table import PackedAdapter, pack_adapter
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.column_linear import ColumnLinear, ScaledColumns
from jitney.kernels.cpu.compiled import Kernel, function_address
from jitney.kernels.cpu.emit import I64_BYTES, LANES
from jitney.kernels.cpu.experts import ExpertMemory, FusedExperts
from jitney.kernels.cpu.norm_rotary_kernel import RowNorm
from jitney.kernels.cpu.paged_attention import CpuAttention
from jitney.kernels.cpu.product_call import ProductCall
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
from jitney.kernels.cpu.step_rotation import StepRotation
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMixture, FusedMLP
from jitney.kernels.fused.rotary import RotaryTable
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
    write_records: np.ndarray
    """A view of ``records``, [layers, RECORD_FIELDS]: those of the kernels that write K and V."""
    attend_records: np.ndarray
    """The same of the kernels that attend."""
    kinds: list[LayerKind]
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
        self._caches: list[LayerCache] = []
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
            _check_layer(layer)
        # All layers have the same kernels, and share one memory.
        shapes = [_shape(layer) for layer in model.layers]
        if any(shape != shapes[0] for shape in shapes):
            raise Misfit("its layers have different sizes or norms")
        if places is not None:
            _check_adapters(model, places)
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
        if self._has_caches(paged.layers):
            return True
        for cache in paged.layers:
            if not isinstance(cache.attend, CpuAttention):
                return False
            if cache.attend.dtype != self._embedding.dtype:
                return False
        return True

    def _has_caches(self, caches: Sequence[LayerCache]) -> bool:
        """Whether these are the caches whose addresses the program has written down. A LayerCache
        cannot be changed: as long as it is the same object, its tensors and its attention function
        are the same, too."""
        if len(caches) != len(self._caches):
            return False
        return all(map(operator.is_, caches, self._caches))

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        """Steps use these caches from now on. If they are others than before, the program forgets
        its memory, in which the addresses of those are written down."""
        if not self._has_caches(caches):
            self._caches = list(caches)
            self._memory = None

    def __call__(self, ids: Tensor, indices: Tensor, paged: PagedFunction) -> Tensor | None:
        """Run a step; None if it is not one that the program can run.

        ``ids`` are the step's T tokens, ``indices`` says which of them are asked for logits, both
        int64. Returns the logits, [len(indices), vocabulary].
        """
        if not self.can_run(paged):
            return None
        self.use_caches(paged.layers)
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
        for kind in memory.kinds:
            assert isinstance(kind.cache.attend, CpuAttention)
            step = kind.cache.attend.prepare(kind.attention_call, kind.cache, paged.meta)
            assert step.arguments.tokens == tokens
            fields = np.frombuffer(bytes(step.arguments), np.int64)
            # A single kind has all layers. NumPy writes to a slice faster than to a list of
            # indices.
            layers = slice(None) if len(memory.kinds) == 1 else kind.layers
            of_step = fields[_OF_STEP]
            memory.write_records[layers, _OF_STEP] = of_step
            memory.write_records[layers, COUNT] = step.write_items
            memory.attend_records[layers, _OF_STEP] = of_step
            memory.attend_records[layers, COUNT] = step.attend_items

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
            tables=[None if n is None else self._tables[n].angles for n in self._table_of_layer],
            norm_rotary=self._last_norm.machine_code,
            expert_memory=self._expert_memory(tokens),
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
        # [layers, kernels of a layer, RECORD_FIELDS]
        by_layer = records[:num_layer_kernels].reshape(num_layers, -1, RECORD_FIELDS)
        adapted = None
        if adapter_memory is not None:
            adapted = AdaptedSteps(adapter_memory, listed.adapted_products(by_layer))
        rotate_records = by_layer[:, listed.write_in_layer - 1]
        return _Memory(
            tokens=tokens,
            activations=listed.activations,
            records=records,
            rows_per_token=_rows_per_token(listed.kernels[:num_layer_kernels]),
            num_layer_kernels=num_layer_kernels,
            write_records=by_layer[:, listed.write_in_layer],
            attend_records=by_layer[:, listed.write_in_layer + 1],
            kinds=list(listed.kinds.values()),
            rotations=self._short_rotations(rotate_records, tokens),
            kept=listed.kept,
            adapted=adapted,
        )

    def _short_rotations(self, rotate_records: np.ndarray, tokens: int) -> list[StepRotation]:
        """Those of the layers whose tables are not whole. ``rotate_records`` are [layers,
        RECORD_FIELDS]."""
        rotations = []
        for index, table in enumerate(self._tables):
            if table.is_whole:
                continue
            layers = [n for n, used in enumerate(self._table_of_layer) if used == index]
            rotations.append(StepRotation(table, rotate_records, layers, tokens))
        return rotations

    def _activations(self, tokens: int) -> Activations:
        """Memory for so many tokens."""
        dtype = self._embedding.dtype
        size = self._embedding.shape[1]
        first = self._layers[0]
        attention = first.self_attn

        def empty(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype)

        return Activations(
            states=empty(size),
            middle=empty(size),
            normed=empty(size),
            branch=empty(size),
            qkv=empty(attention.qkv.out_features),
            attended=empty(attention.output.in_features),
            inside=empty(_inner_width(first.mlp)),
            indices=torch.empty(2, tokens, dtype=torch.int64),
            converted=torch.empty(tokens * self._converted_row_bytes(), dtype=torch.uint8),
        )

    def _converted_row_bytes(self) -> int:
        """Bytes of a row that a conversion makes for a product, the most of all products."""
        most = 0
        for layer in self._layers:
            for product in products_of(layer):
                most = max(most, product.converted_row_bytes)
            if isinstance(layer.mlp, FusedMixture):
                router: Any = layer.mlp.router
                most = max(most, router.converted_row_bytes)
        head = _columns_of(self._head)
        if head is not None:
            most = max(most, head.converted_row_bytes)
        return most

    def _expert_memory(self, tokens: int) -> ExpertMemory | None:
        """Memory for the experts of each layer in turn; None if there are none."""
        mlp = self._layers[0].mlp
        if not isinstance(mlp, FusedMixture):
            return None
        router: Any = mlp.router
        experts: FusedExperts = mlp.experts
        return experts.memory(tokens, mlp.form.chosen, numbers_width=router.width)

    def _adapter_memory(self, tokens: int) -> AdapterMemory | None:
        """Memory for what adapters add; None if the program has no adapters."""
        if self._places is None:
            return None
        qkv, output, gated, down = products_of(self._layers[0])
        # A gated product adds to gate and to up.
        widest = max(qkv.width, output.width, 2 * gated.width, down.width)
        dtype = self._embedding.dtype
        return AdapterMemory(
            added=torch.empty(tokens, widest, dtype=dtype),
            shrunk=torch.empty(tokens, self._most_rank_columns * LANES, dtype=dtype),
            tokens=np.zeros((tokens, 3), np.int64),
        )


# --------------------------------------------------------------------------- what can be run


def _have_whole_columns(places: Sequence[Places]) -> bool:
    """Whether each linear layer that adapters may change gives whole columns of a product's result.
    (A ``Part`` counts single outputs, a column is 16 of them.)"""
    for places_of_layer in places:
        for parts in places_of_layer:
            for part in parts:
                if part.first % LANES != 0 or part.last % LANES != 0:
                    return False
    return True


def _columns_of(head: nn.Module) -> ColumnLinear | None:
    """The product of an output layer, if it is ours."""
    if isinstance(head, ScaledColumns):
        return head.linear
    return head if isinstance(head, ColumnLinear) else None


def _check_layer(layer: FusedDecoderLayer) -> None:
    """Raise Misfit if a program cannot run all parts of the layer."""
    if isinstance(layer.mlp, FusedMixture):
        if not isinstance(layer.mlp.router, ColumnLinear):
            raise Misfit("the product of its router is torch's")
        if layer.wiring.factor != 1.0:
            raise Misfit("it has a factor on what its experts give")
    elif not isinstance(layer.mlp, FusedMLP):
        raise Misfit("its MLP is of another kind")
    for product in products_of(layer):
        if not isinstance(product, ColumnLinear):
            raise Misfit("its products are torch's")
        # Rows that are filled up would have to be cut between two kernels.
        if product.width != product.out_features:
            raise Misfit("its products have no whole pairs of columns")


def _check_adapters(model: FusedForward, places: Sequence[Places]) -> None:
    """Raise Misfit if a program of this model cannot have adapters."""
    if not _have_whole_columns(places):
        raise Misfit("adapters change layers that are no whole columns")
    # The kernels of adapters have no other dtype.
    if model.input_rows.embed.weight.dtype != torch.bfloat16:
        raise Misfit("adapters are bfloat16")
    for layer in model.layers:
        if not isinstance(layer.mlp, FusedMLP):
            raise Misfit("adapters change layers with experts")
        # What these add to a product is not scaled with it, and is in the order of gate and up.
        gated: Any = layer.mlp.gated
        if layer.wiring.factor != 1.0 or not gated.is_gated:
            raise Misfit("adapters change layers with a factor, or without a gate")


def _inner_width(mlp: Any) -> int:
    """Of what is between the two products of an MLP. Experts have memory of their own for that."""
    if isinstance(mlp, FusedMixture):
        return 0
    width: int = mlp.down.in_features
    return width


def _rows_per_token(kernels: Sequence[ListedKernel]) -> np.ndarray | int:
    rows = [listed.rows_per_token for listed in kernels]
    # Most models have no experts. NumPy writes a single number faster than as many of them.
    return np.array(rows) if max(rows) > 1 else 1


class _ProductShape(NamedTuple):
    """What must be the same for a product in all layers."""

    in_features: int
    width: int
    has_conversion: bool
    """Whether a conversion stands before it."""


def _shape(layer: FusedDecoderLayer) -> list[object]:
    """What must be the same in all layers."""
    shapes: list[object] = [layer.wiring.parallel]
    shapes += [norm is not None for norm in layer.norms]
    if isinstance(layer.mlp, FusedMixture):
        experts: FusedExperts = layer.mlp.experts
        shapes += [layer.mlp.form.chosen, experts.experts, experts.inner_width]
    for product in products_of(layer):
        has_conversion = product.converted_row_bytes > 0
        shapes.append(_ProductShape(product.in_features, product.width, has_conversion))
    return shapes
