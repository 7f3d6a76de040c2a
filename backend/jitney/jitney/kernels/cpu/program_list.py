"""Writes down the kernels of a program, in the order in which they run, over shared memory.

Called by ``program``, once for each size of memory.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from jitney.execution.interface import AttentionCall, LayerCache
from jitney.execution.low_rank import AdapterSpan
from jitney.kernels.cpu.adapter_kernel import EXPAND_ITEMS, LowRankCall
from jitney.kernels.cpu.adapter_table import ENTRY_FIELDS, GATED, PRODUCTS, list_tokens
from jitney.kernels.cpu.attention_records import AttentionArguments
from jitney.kernels.cpu.column_linear import ColumnLinear, ScaledColumns
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.emit import I64_BYTES, LANES
from jitney.kernels.cpu.experts import ExpertMemory, FusedExperts
from jitney.kernels.cpu.norm_rotary_kernel import CpuAttentionLayer, RowNorm
from jitney.kernels.cpu.paged_attention import CpuAttention, kind_of, set_layer
from jitney.kernels.cpu.product_call import ProductCall
from jitney.kernels.cpu.program_kernel import BODY, COUNT, RECORD_FIELDS
from jitney.kernels.fused.forms import FusedNorm, Norm, Scaling
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMixture, FusedMLP, LayerNorms
from jitney.kernels.fused.rotary import NO_ANGLES
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
    qkv: Tensor
    attended: Tensor
    """The result of attention, of all heads."""
    inside: Tensor
    """activation(gate) * up, inside the MLP; without a gate, activation(up)."""
    indices: Tensor
    """int64 [2, tokens]: the position of each token; and the indices of the tokens whose logits are
    asked for."""
    converted: Tensor
    """uint8: rows in another form before a product (``convert_kernel``)."""


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
    layers: list[int]
    """The indices of all of them."""


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
    """Writes down the kernels of a program, in the order in which they run. All layers have the
    same kernels in the same order."""

    activations: Activations
    layers: Sequence[Any]
    caches: Sequence[LayerCache]
    tables: Sequence[Tensor | None]
    """By layer: cos and sin of each position, [positions, 2, R]. None: the layer has no rotary
    embedding."""
    norm_rotary: Kernel
    """The kernel of ``norm_rotary_kernel``."""
    expert_memory: ExpertMemory | None
    """None if no layer has experts."""
    adapter_memory: AdapterMemory | None
    """This and the next two are None if there are no adapters."""
    shrink: Kernel | None
    expand: Kernel | None

    # What is written down. It is empty at first, and :meth:`add_layer` and :meth:`add_end` add to
    # it.
    kernels: list[ListedKernel] = field(default_factory=list)
    kinds: dict[object, LayerKind] = field(default_factory=dict)
    write_in_layer: int = 0
    """Which of a layer's kernels, from 0 on, writes K and V. The one before it rotates, the next
    one attends."""
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
        qkv = self.activations.qkv.data_ptr()
        attended = self.activations.attended.data_ptr()
        inside = self.activations.inside.data_ptr()
        # states -> normed -> qkv
        x = self._add_norm_if_any(norms.attention, x=states)
        self._add_product(number, "qkv", x=x, out=qkv)
        self._add_rotation(number, layer)
        # qkv -> attended
        self._add_attention(number, layer)
        # attended + states -> middle
        self._add_end(
            number, "output", norms.after_attention, x=attended, residual=states, out=middle
        )
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
        memory = self.expert_memory
        assert memory is not None
        router: Any = mixture.router
        experts: FusedExperts = mixture.experts
        self._add_linear(router, x=x, out=memory.numbers.data_ptr(), other=0)
        branch = self.activations.branch.data_ptr()
        steps = [experts.choose_step(memory, mixture.form)]
        if norm is None:
            steps += experts.steps(memory, x=x, out=out, other=residual)
        else:
            steps += experts.steps(memory, x=x, out=branch, other=0)
        self.kept.append(memory)
        for step in steps:
            self._add(step.kernel, step.arguments, step.rows_per_token)
            self.kept.append(step.owned)
        if norm is not None:
            self._add_norm(_row_norm(norm), x=branch, out=out, other=residual)

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

    def _add_rotation(self, number: int, layer: Any) -> None:
        """The norms and the rotary embedding of a layer's heads."""
        attention: CpuAttentionLayer = layer.self_attn.kernel
        table = self.tables[number]
        cos, sin = NO_ANGLES if table is None else table.unbind(1)
        positions = self.activations.indices[0].data_ptr()
        arguments = attention.call_for(self.activations.qkv, cos, sin, positions)
        self._add(self.norm_rotary, arguments)

    def _add_attention(self, number: int, layer: Any) -> None:
        """What writes K and V, and what attends."""
        form = layer.self_attn.form
        cache = self.caches[form.layer]
        assert isinstance(cache.attend, CpuAttention)
        attention_call = form.call(*form.split(self.activations.qkv))
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
            out=self.activations.attended.data_ptr(),
        )
        kind = kind_of(attention_call, cache)
        if kind not in self.kinds:
            self.kinds[kind] = LayerKind(attention_call, cache, [])
        self.kinds[kind].layers.append(number)
        if number == 0:
            # In the first layer, an index among all kernels is one among the layer's.
            self.write_in_layer = len(self.kernels)
        kernels = cache.attend.kernels
        self._add(kernels.write, arguments)
        self._add(kernels.attend, arguments)

    def _add_product(self, number: int, name: str, *, x: int, out: int, other: int = 0) -> None:
        """The product of layer ``number`` that has this ``name`` in ``Places``. Its result is
        ``x`` times the weight, plus ``other``. Before it is added to that, the last product of a
        branch is multiplied by the layer's factor.

        If there are adapters, two kernels come before it. They write the sum of ``other`` and of
        the adapters' products to ``AdapterMemory.added``. The product then adds that instead."""
        product_index = Places._fields.index(name)
        linear = products_of(self.layers[number])[product_index]
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
            # As in ``_add_attention``.
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


def products_of(layer: FusedDecoderLayer) -> list[Any]:
    """A layer's products, in the order of ``Places``. Those of experts are not among them."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    products = [attention.qkv, attention.output]
    if isinstance(mlp, FusedMLP):
        products += [mlp.gated, mlp.down]
    return products
