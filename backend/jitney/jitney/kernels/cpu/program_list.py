"""Writes down the kernels of a program, in the order in which they run, over shared memory.

Called by ``program``, once for each size of memory.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from jitney.execution.interface import AttentionCall, LayerCache
from jitney.execution.low_rank import AdapterSpan
from jitney.execution.state_slots import StateSlots
from jitney.kernels.cpu.adapter_kernel import EXPAND_ITEMS, LowRankCall
from jitney.kernels.cpu.adapter_table import ENTRY_FIELDS, GATED, PRODUCTS, list_tokens
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.column_linear import ColumnLinear, ScaledColumns
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.emit import I64_BYTES, LANES
from jitney.kernels.cpu.experts import ExpertMemory, FusedExperts
from jitney.kernels.cpu.latent_kernel import LatentCall
from jitney.kernels.cpu.latent_layer import CpuLatentLayer
from jitney.kernels.cpu.norm_rotary_kernel import CpuAttentionLayer, NormRotaryCall, RowNorm
from jitney.kernels.cpu.paged_attention import CpuAttention, kind_of, set_layer
from jitney.kernels.cpu.product_call import ProductCall
from jitney.kernels.cpu.program_kernel import BODY, COUNT, RECORD_FIELDS
from jitney.kernels.cpu.state_layer import CpuStateLayer, StateMemory
from jitney.kernels.fused.forms import FusedNorm, Norm, Scaling
from jitney.kernels.fused.latents import FusedLatents
from jitney.kernels.fused.layers import (
    FusedAttention,
    FusedDecoderLayer,
    FusedMixture,
    FusedMLP,
    LayerNorms,
    Mixer,
)
from jitney.kernels.fused.rotary import NO_ANGLES, CosSin
from jitney.kernels.fused.states import FusedStates, states_of
from jitney.kernels.fused.whole_model import Places

_BF16_BYTES = 2
"""Bytes of an element of all that adapters read and write: they have no other dtype."""
_OTHER = ProductCall.other.offset // I64_BYTES  # type: ignore[attr-defined]
"""The field ``ProductCall.other`` in a kernel's record (``program_kernel``)."""


class ListedKernel(NamedTuple):
    """A kernel of the program, and its arguments but for ``count``."""

    kernel: Kernel
    arguments: ctypes.Structure
    rows_per_token: int = 1
    """``count`` is so many times the number of tokens, unless the kernel counts items."""


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
    """The result of a norm. That of the norm behind all layers has only the tokens whose logits are
    asked for."""
    branch: Tensor
    """What a branch gives, where a norm follows before it is added to the residual."""
    projected: Tensor
    """The result of a layer's first product: query, key and value, or what a layer with states
    reads. A layer whose product is narrower than others' has its rows one behind the other."""
    convolved: Tensor
    """The same of a convolution."""
    low: Tensor
    """The same of the first product, where queries are made by two."""
    latent: Tensor
    """The same of the product that gives latents."""
    spare: Tensor
    """float32: what lies between the kernels of an attention over latents."""
    mixed: Tensor
    """The same of attention, of all heads, or of a recurrence."""
    inside: Tensor
    """activation(gate) * up, inside the MLP; without a gate, activation(up)."""
    indices: Tensor
    """int64 [2, tokens]: the position of each token; and the indices of the tokens whose logits are
    asked for."""
    converted: Tensor
    """uint8: rows in another form before a product (``convert_kernel``)."""
    rows: np.ndarray
    """int64 [tokens, ROW_FIELDS]: the rows of the step, for layers with states."""


@dataclass(frozen=True)
class AdapterMemory:
    """Memory for what adapters add to the products, and the list of a step's tokens."""

    added: Tensor
    """[tokens, width]: what a product adds to its own result (``ProductCall.other``)."""
    shrunk: Tensor
    """[tokens, ranks]: x A^T, which is x shrunk to the adapters' ranks."""
    tokens: np.ndarray
    """int64 [tokens, 3]: ``LowRankCall.tokens``."""


# --------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class AdaptedProduct:
    """The records of the kernels of one product, in all layers: [layers, RECORD_FIELDS] each. They
    are views of the program's records: what is written here, the program runs."""

    shrink: np.ndarray
    expand: np.ndarray
    product: np.ndarray
    other: int
    """``ProductCall.other`` where no adapter changes the product."""


@dataclass(frozen=True)
class AdaptedSteps:
    """What adapters add within a program."""

    memory: AdapterMemory
    products: list[AdaptedProduct]

    def fill_in(self, spans: Sequence[AdapterSpan], tokens: int) -> None:
        """Fill in what differs from step to step."""
        count = list_tokens(self.memory.tokens, spans, tokens)
        used = set[int]()
        for span in spans:
            used |= span.adapter.packed.used
        added = self.memory.added.data_ptr()
        for product_index, adapted in enumerate(self.products):
            if product_index in used:
                adapted.shrink[:, COUNT] = count
                adapted.expand[:, COUNT] = count * EXPAND_ITEMS
                adapted.product[:, _OTHER] = added
            else:
                # No adapter of this step changes the product: its two kernels have nothing to do.
                adapted.shrink[:, COUNT] = 0
                adapted.expand[:, COUNT] = 0
                adapted.product[:, _OTHER] = adapted.other


@dataclass
class LayerKind:
    """Layers whose arguments of attention are equal from ``plan`` on. They have the same
    ``paged_attention.kind_of``."""

    attention_call: AttentionCall
    """Of any of these layers."""
    cache: LayerCache
    """That layer's cache."""
    writes: list[int] = field(default_factory=list)
    """The indices of the kernels that write K and V, in all of these layers."""
    attends: list[int] = field(default_factory=list)
    """The same of those that attend."""


@dataclass
class LatentKernels:
    """The indices of the kernels over latents, in layers of so many heads."""

    attention: list[int] = field(default_factory=list)
    """Those with a LatentCall."""
    products: list[int] = field(default_factory=list)
    """Those with a HeadProductCall."""


class RowItems(NamedTuple):
    """A kernel that has items for each row of a step."""

    kernel: int
    """Its index."""
    per_row: int


class _ProductInLayer(NamedTuple):
    """Where a product's kernels are among those of each layer, from 0 on."""

    shrink: int
    expand: int
    product: int
    other: int
    """As in :class:`AdaptedProduct`."""


# --------------------------------------------------------------------------- the list


@dataclass
class KernelList:
    """Writes down the kernels of a program, in the order in which they run. With adapters, all
    layers have the same kernels in the same order."""

    activations: Activations
    layers: Sequence[Any]
    caches: Sequence[LayerCache]
    states: StateSlots | None
    """None: no layer keeps any."""
    tables: Sequence[Tensor | None]
    """By layer: cos and sin of each position, [positions, 2, R]. None: the layer has no rotary
    embedding."""
    norm_rotary: Kernel
    """The kernel of ``norm_rotary_kernel``."""
    adapter_memory: AdapterMemory | None
    """This and the next two are None if there are no adapters."""
    shrink: Kernel | None
    expand: Kernel | None

    # What is written down. It is empty at first, and :meth:`add_layer` and :meth:`add_end` add to
    # it.
    kernels: list[ListedKernel] = field(default_factory=list)
    kinds: dict[object, LayerKind] = field(default_factory=dict)
    row_items: list[RowItems] = field(default_factory=list)
    latent_kernels: dict[int, LatentKernels] = field(default_factory=dict)
    """By the number of heads."""
    rotating: list[list[int]] = field(default_factory=list)
    """By layer: the indices of the kernels that rotate. A layer may have none."""
    expert_memories: dict[tuple[int, ...], ExpertMemory] = field(default_factory=dict)
    """By the sizes of the experts and their router."""
    kept: list[object] = field(default_factory=list)
    """Memory that arguments point to and that nothing else owns."""
    products: list[_ProductInLayer] = field(default_factory=list)
    """In the order of ``Places``, which is that of :meth:`add_layer`; empty without adapters."""

    def add_layer(self, number: int) -> None:
        """All kernels of a decoder layer."""
        layer = self.layers[number]
        norms: LayerNorms = layer.norms
        states = self.activations.states.data_ptr()
        middle = self.activations.middle.data_ptr()
        projected = self.activations.projected.data_ptr()
        mixed = self.activations.mixed.data_ptr()
        inside = self.activations.inside.data_ptr()
        self.rotating.append([])
        # states -> normed -> projected
        x = self._add_norm_if_any(norms.attention, x=states)
        if isinstance(layer.mixer, FusedLatents):
            self._add_latent_products(layer.mixer, x=x)
        else:
            self._add_product(number, "qkv", x=x, out=projected)
        # projected -> mixed
        if isinstance(layer.mixer, FusedStates):
            self._add_states(layer.mixer)
        elif isinstance(layer.mixer, FusedLatents):
            self._add_latents(number, layer.mixer)
        else:
            self._add_attention(number, layer.mixer)
        # mixed + states -> middle
        self._add_end(number, "output", norms.after_attention, x=mixed, residual=states, out=middle)
        # middle -> normed -> inside
        if not layer.wiring.parallel:
            x = self._add_norm_if_any(norms.mlp, x=middle)
        elif norms.mlp is not None:
            x = self._add_norm_if_any(norms.mlp, x=states)
        if isinstance(layer.mlp, FusedMixture):
            self._add_mixture(layer.mlp, norms.after_mlp, x=x, residual=middle, out=states)
            return
        self._add_product(number, "gated", x=x, out=inside)
        # inside + middle -> states, the input of the next layer
        self._add_end(number, "down", norms.after_mlp, x=inside, residual=middle, out=states)

    def add_end(self, last_norm: RowNorm, head: Any) -> None:
        """The last norm, of the tokens whose logits are asked for, and the head if it is ours."""
        states = self.activations.states.data_ptr()
        normed = self.activations.normed.data_ptr()
        asked = self.activations.indices[1].data_ptr()
        self._add_norm(last_norm, x=states, out=normed, index=asked)
        # Where the head's result goes is said in each step.
        if isinstance(head, ColumnLinear):
            self._add_linear(head, x=normed, out=0, other=0)
        elif isinstance(head, ScaledColumns):
            self._add_linear(head.linear, x=normed, out=0, other=0, scaling=head.scaling)

    def records(self) -> np.ndarray:
        """int64 [kernels, RECORD_FIELDS]: see ``program_kernel``."""
        records = np.zeros((len(self.kernels), RECORD_FIELDS), np.int64)
        for fields, listed in zip(records, self.kernels, strict=True):
            arguments = listed.arguments
            size = ctypes.sizeof(arguments)
            assert size <= BODY * I64_BYTES, "the arguments fit in front of the body's address"
            ctypes.memmove(fields.ctypes.data, ctypes.addressof(arguments), size)
            fields[BODY] = listed.kernel.address
        return records

    def adapted_products(self, by_layer: np.ndarray) -> list[AdaptedProduct]:
        """The products with the records of their kernels. ``by_layer`` is the layers' part of
        :meth:`records`, as [layers, kernels of a layer, RECORD_FIELDS]."""
        adapted = []
        for in_layer in self.products:
            product = AdaptedProduct(
                shrink=by_layer[:, in_layer.shrink],
                expand=by_layer[:, in_layer.expand],
                product=by_layer[:, in_layer.product],
                other=in_layer.other,
            )
            adapted.append(product)
        return adapted

    def _add(self, kernel: Kernel, arguments: ctypes.Structure, rows_per_token: int = 1) -> None:
        self.kernels.append(ListedKernel(kernel, arguments, rows_per_token))

    def _add_norm(self, norm: RowNorm, *, x: int, out: int, index: int = 0, other: int = 0) -> None:
        """The norm of whole rows, plus ``other``."""
        self._add(self.norm_rotary, norm.call_for(x, out, index=index, other=other))

    def _add_norm_if_any(self, norm: Norm, *, x: int) -> int:
        """The norm before a branch. Returns the address of what the branch reads."""
        if norm is None:
            return x
        normed = self.activations.normed.data_ptr()
        self._add_norm(_row_norm(norm), x=x, out=normed)
        return normed

    def _add_end(
        self, number: int, name: str, norm: Norm, *, x: int, residual: int, out: int
    ) -> None:
        """The end of a branch: its last product, its norm if it has one, and the sum."""
        if norm is None:
            self._add_product(number, name, x=x, out=out, other=residual)
            return
        branch = self.activations.branch.data_ptr()
        self._add_product(number, name, x=x, out=branch)
        self._add_norm(_row_norm(norm), x=branch, out=out, other=residual)

    def _add_mixture(
        self, mixture: FusedMixture, norm: Norm, *, x: int, residual: int, out: int
    ) -> None:
        """A router, its experts, their norm if there is one, and the sum."""
        memory = self._expert_memory(mixture)
        router: Any = mixture.router
        experts: FusedExperts = mixture.experts
        self._add_linear(router, x=x, out=memory.numbers.data_ptr(), other=0)
        branch = self.activations.branch.data_ptr()
        steps = [experts.choose_step(memory, mixture.form)]
        if norm is None:
            steps += experts.steps(memory, x=x, out=out, other=residual)
        else:
            steps += experts.steps(memory, x=x, out=branch, other=0)
        for step in steps:
            self._add(step.kernel, step.arguments, step.rows_per_token)
            self.kept.append(step.owned)
        if norm is not None:
            self._add_norm(_row_norm(norm), x=branch, out=out, other=residual)

    def _expert_memory(self, mixture: FusedMixture) -> ExpertMemory:
        """The memory that mixtures of these sizes share."""
        router: Any = mixture.router
        experts: FusedExperts = mixture.experts
        sizes = (
            mixture.form.chosen,
            experts.experts,
            experts.inner_width,
            experts.converted_row_bytes,
            router.width,
        )
        if sizes not in self.expert_memories:
            tokens = len(self.activations.states)
            self.expert_memories[sizes] = experts.memory(
                tokens, mixture.form.chosen, numbers_width=router.width
            )
        return self.expert_memories[sizes]

    def _add_linear(
        self,
        linear: ColumnLinear,
        *,
        x: int,
        out: int,
        other: int,
        scaling: Scaling = Scaling(),  # noqa: B008  (it cannot be changed)
    ) -> None:
        """The kernels of a linear layer: its product, and before it, if the product needs one, the
        kernel that brings x into another form."""
        spare = self.activations.converted.data_ptr()
        calls = linear.calls(x, out=out, other=other, spare=spare, scaling=scaling)
        for kernel, arguments in calls:
            self._add(kernel, arguments)

    def _angles(self, number: int) -> CosSin:
        """cos and sin of each position for this layer, [positions, R]."""
        table = self.tables[number]
        if table is None:
            return NO_ANGLES
        cos, sin = table.unbind(1)
        return cos, sin

    def _add_rotation(self, number: int, call: NormRotaryCall) -> None:
        """A kernel that normalises, or rotates, or both."""
        if call.rotary_size > 0:
            self.rotating[number].append(len(self.kernels))
        self._add(self.norm_rotary, call)

    def _add_attention(self, number: int, mixer: FusedAttention) -> None:
        """The norms and the rotary embedding of a layer's heads, what writes K and V, what attends,
        and the gates of the heads, if it has any."""
        kernel: Any = mixer.kernel
        attention: CpuAttentionLayer = kernel
        product: Any = mixer.qkv
        qkv = _rows(self.activations.projected, product.out_features)
        cos, sin = self._angles(number)
        positions = self.activations.indices[0].data_ptr()
        self._add_rotation(number, attention.call_for(qkv, cos, sin, positions))

        form = mixer.form
        mixed = self.activations.mixed.data_ptr()
        cache = self.caches[form.layer]
        assert isinstance(cache.attend, CpuAttention)
        attention_call = form.call(*form.split(qkv))
        arguments = AttentionArguments()
        if form.sinks is not None:
            sinks = form.sinks.detach().float().contiguous()
            self.kept.append(sinks)
            arguments.sinks = sinks.data_ptr()
        set_layer(
            arguments,
            attention_call.query,
            attention_call.key,
            attention_call.value,
            cache=cache,
            out=mixed,
        )
        kind = kind_of(attention_call, cache)
        if kind not in self.kinds:
            self.kinds[kind] = LayerKind(attention_call, cache)
        kernels = cache.attend.kernels
        self.kinds[kind].writes.append(len(self.kernels))
        self._add(kernels.write, arguments)
        self.kinds[kind].attends.append(len(self.kernels))
        self._add(kernels.attend, arguments)
        if attention.gate is not None:
            self._add(attention.gate, attention.gate_call(qkv, mixed))

    def _add_latent_products(self, mixer: FusedLatents, *, x: int) -> None:
        """The products that give queries and latents."""
        query_input = x
        if mixer.query_low is not None:
            assert mixer.query_norm is not None
            low = self.activations.low.data_ptr()
            self._add_linear(_own(mixer.query_low), x=x, out=low, other=0)
            self._add_norm(_row_norm(mixer.query_norm), x=low, out=low)
            query_input = low
        projected = self.activations.projected.data_ptr()
        latent = self.activations.latent.data_ptr()
        self._add_linear(_own(mixer.query), x=query_input, out=projected, other=0)
        self._add_linear(_own(mixer.latent), x=x, out=latent, other=0)

    def _add_latents(self, number: int, mixer: FusedLatents) -> None:
        """The norm of latents, the rotary embedding, and attention."""
        kernel: Any = mixer.kernel
        layer: CpuLatentLayer = kernel
        query = _rows(self.activations.projected, _own(mixer.query).out_features)
        latent = _rows(self.activations.latent, _own(mixer.latent).out_features)
        cos, sin = self._angles(number)
        positions = self.activations.indices[0].data_ptr()
        for call in layer.norm_rotary_calls(query, latent, cos, sin, positions):
            self._add_rotation(number, call)
        memory = layer.memory(
            query,
            latent,
            self.activations.spare,
            tokens=len(query),
            out=self.activations.mixed.data_ptr(),
        )
        for step in layer.steps(memory, self.caches[mixer.form.layer]):
            kernels = self.latent_kernels.setdefault(mixer.form.heads, LatentKernels())
            if isinstance(step.arguments, LatentCall):
                kernels.attention.append(len(self.kernels))
            else:
                kernels.products.append(len(self.kernels))
            self._add(step.kernel, step.arguments)

    def _add_states(self, mixer: FusedStates) -> None:
        """What a layer with states computes between its products."""
        assert self.states is not None
        kernel: Any = mixer.kernel
        layer: CpuStateLayer = kernel
        product: Any = mixer.project
        memory = StateMemory(
            rows=self.activations.rows.ctypes.data,
            projected=self.activations.projected.data_ptr(),
            projected_stride=product.width * product.dtype.itemsize,
            convolved=self.activations.convolved.data_ptr(),
            mixed=self.activations.mixed.data_ptr(),
        )
        states = states_of(mixer.form, self.states, self.activations.rows)
        for step in layer.steps(memory, states):
            if step.items_per_row is not None:
                self.row_items.append(RowItems(len(self.kernels), step.items_per_row))
            self._add(step.kernel, step.arguments)

    def _add_product(self, number: int, name: str, *, x: int, out: int, other: int = 0) -> None:
        """The product of layer ``number`` that has this ``name`` in ``Places``. Its result is
        ``x`` times the weight, plus ``other``. Before it is added to that, the last product of a
        branch is multiplied by the layer's factor.

        If there are adapters, two kernels come before it. They write the sum of ``other`` and of
        the adapters' products to ``AdapterMemory.added``. The product then adds that instead."""
        product_index = Places._fields.index(name)
        linear = products_of(self.layers[number])[name]
        memory = self.adapter_memory
        if memory is None:
            ends_branch = name in ("output", "down")
            factor = self.layers[number].wiring.factor if ends_branch else 1.0
            self._add_linear(linear, x=x, out=out, other=other, scaling=Scaling(factor))
            return
        shrink = len(self.kernels)
        self._add_low_rank(number, product_index, linear, memory, x=x, other=other)
        self._add_linear(linear, x=x, out=out, other=memory.added.data_ptr())
        product = len(self.kernels) - 1
        if number == 0:
            # In the first layer, an index among all kernels is one among the layer's.
            in_layer = _ProductInLayer(
                shrink=shrink, expand=shrink + 1, product=product, other=other
            )
            self.products.append(in_layer)

    def _add_low_rank(
        self,
        number: int,
        product_index: int,
        linear: Any,
        memory: AdapterMemory,
        *,
        x: int,
        other: int,
    ) -> None:
        """The two kernels of adapters for one product (``adapter_kernel``): shrink, then expand."""
        assert self.shrink is not None
        assert self.expand is not None
        shrunk = memory.shrunk.data_ptr()
        shrunk_stride = memory.shrunk.shape[1] * _BF16_BYTES
        # A gated product adds to gate and to up: twice as many numbers as its result has.
        width = 2 * linear.width if product_index == GATED else linear.width
        tokens = memory.tokens.ctypes.data
        # Where the entry of this layer and product is in an adapter's table.
        entry_offset = (number * PRODUCTS + product_index) * ENTRY_FIELDS * I64_BYTES
        shrink = LowRankCall(
            x=x,
            x_stride=linear.in_features * _BF16_BYTES,
            out=shrunk,
            out_stride=shrunk_stride,
            tokens=tokens,
            entry_offset=entry_offset,
            units=linear.in_features // 2,
        )
        expand = LowRankCall(
            x=shrunk,
            x_stride=shrunk_stride,
            out=memory.added.data_ptr(),
            out_stride=width * _BF16_BYTES,
            other=other,
            tokens=tokens,
            entry_offset=entry_offset,
            columns=width // LANES,
        )
        self._add(self.shrink, shrink)
        self._add(self.expand, expand)


def _row_norm(norm: FusedNorm) -> RowNorm:
    kernel = norm.kernel
    assert isinstance(kernel, RowNorm)
    return kernel


def products_of(layer: FusedDecoderLayer) -> dict[str, Any]:
    """A layer's products: by their names in ``Places``, and behind them those of latents. Those of
    experts are not among them."""
    mixer = layer.mixer
    products: dict[str, Any] = {"qkv": projection_of(mixer), "output": mixer.output}
    if isinstance(layer.mlp, FusedMLP):
        products["gated"] = layer.mlp.gated
        products["down"] = layer.mlp.down
    if isinstance(mixer, FusedLatents):
        products["latent"] = mixer.latent
        if mixer.query_low is not None:
            products["query_low"] = mixer.query_low
    return products


def projection_of(mixer: Mixer) -> Any:
    """The product that gives ``Activations.projected``."""
    if isinstance(mixer, FusedStates):
        return mixer.project
    return mixer.query if isinstance(mixer, FusedLatents) else mixer.qkv


def _own(product: nn.Module) -> ColumnLinear:
    assert isinstance(product, ColumnLinear)
    return product


def _rows(memory: Tensor, width: int) -> Tensor:
    """The same memory with narrower rows."""
    return memory.flatten()[: len(memory) * width].view(-1, width)
