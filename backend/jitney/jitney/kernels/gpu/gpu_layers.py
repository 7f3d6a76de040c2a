"""What a GPU computes fused layers with: which kernel for which part of a layer.

Products are torch's (cuBLAS), or, with option ``batch_invariant``, of ``invariant_product``. What
is between two products is one kernel of ``norm_kernels``, or the kernel that writes K and V. The
host waits for nothing, so CUDA graphs can capture all of it.

Called by ``gpu_fuse``, which hands it to ``fused``. Imported only where the Triton language is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.low_rank import Part
from jitney.execution.quantized import QuantizedLinear
from jitney.kernels.fused.forms import (
    Activation,
    AttentionForm,
    EndBranch,
    HeadNorms,
    Misfit,
    Norm,
    NormForm,
    RowFunction,
)
from jitney.kernels.fused.layers import merged_linears
from jitney.kernels.fused.whole_model import AdaptedKernels, FusedForward, Places
from jitney.kernels.gpu.adapter_products import GroupedProducts
from jitney.kernels.gpu.gpu_attention import GpuAttention, HeadTransform
from jitney.kernels.gpu.invariant_product import InvariantLinear
from jitney.kernels.gpu.norm_kernels import MOST_WIDTH, add_norm, gate, norm_in_place, norm_rows


class GpuLayerKernels:
    """The :class:`fused.whole_model.ModelKernels` of a GPU."""

    def __init__(self, *, batch_invariant: bool) -> None:
        """With ``batch_invariant``, no product is cuBLAS's."""
        self._batch_invariant = batch_invariant

    def norm(self, form: NormForm) -> RowFunction:
        """See :class:`fused.whole_model.ModelKernels`, here and below."""
        if form.scale.numel() > MOST_WIDTH:
            raise Misfit(f"it is over more than {MOST_WIDTH} values")
        return partial(norm_rows, norm=form)

    def linear(self, products: Sequence[Any], activation: Activation | None = None) -> nn.Module:
        joined = self._join(products)
        if activation is None:
            return joined
        return _MergedGate(joined, activation)

    def _join(self, products: Sequence[Any]) -> nn.Module:
        """One layer that gives the results of ``products`` side by side."""
        if all(type(each) is nn.Linear for each in products):
            merged = merged_linears(products)
            if self._batch_invariant:
                return InvariantLinear(merged.weight, merged.bias)
            return merged
        first: nn.Module = products[0]
        if len(products) == 1:
            return first
        if isinstance(first, QuantizedLinear):
            merged_quantized = first.merge(products)
            if merged_quantized is not None:
                return merged_quantized
        return _SideBySide(products)

    def attention(self, form: AttentionForm) -> "GpuHeadAttention":
        return GpuHeadAttention(form)

    def end_branch(self, product: RowFunction, branch_norm: Norm, norm: Norm) -> EndBranch:
        branch_form = None if branch_norm is None else branch_norm.form
        form = None if norm is None else norm.form

        def end(x: Tensor, residual: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            return add_norm(product(x), residual, branch_norm=branch_form, norm=form, indices=rows)

        return end

    def program(self, model: FusedForward) -> None:
        """None. CUDA graphs do what a native call does on a CPU."""

    def adapted_program(self, model: FusedForward, places: Sequence[Places]) -> None:
        """None, as :meth:`program`."""

    def adapted_products(self, products: Sequence[Sequence[Part]]) -> AdaptedKernels:
        grouped = GroupedProducts(products)
        return AdaptedKernels(begin_products=grouped.begin, pack=grouped.pack)


class _SideBySide(nn.Module):
    """The results of several layers of one input, side by side, for weights that cannot be
    joined."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """x is [T, inputs]."""
        return torch.cat([layer(x) for layer in self.layers], -1)


class _MergedGate(nn.Module):
    """``activation(gate(x)) * up(x)``: one product for gate and up, and one kernel for the rest."""

    def __init__(self, gate_up: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.gate_up = gate_up
        self._activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return gate(self.gate_up(x), self._activation)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """As :meth:`forward`, with ``other`` [T, 2 * outputs] added to the results of gate and up,
        before the activation."""
        return gate(self.gate_up(x) + other, self._activation)


class GpuHeadAttention:
    """Norms of query and key heads if there are any, rotary embedding, attention.

    In service the layer attends through :class:`GpuAttention`, whose write kernel computes norms of
    single heads and the rotary embedding. In a trial at load there is no cache, and they are
    computed by themselves.
    """

    def __init__(self, form: AttentionForm) -> None:
        self._form = form
        self._norms_of_all_heads: HeadNorms | None = None
        self._norms_of_each_head: HeadNorms | None = None
        if form.wide_norms:
            self._norms_of_all_heads = form.norms
        else:
            self._norms_of_each_head = form.norms

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.forms.AttentionKernel`."""
        form = self._form
        query, key, value = form.split(qkv)
        if self._norms_of_all_heads is not None:
            # ``flatten`` gives views: these are columns of ``qkv``.
            norm_in_place(query.flatten(1), self._norms_of_all_heads.query)
            norm_in_place(key.flatten(1), self._norms_of_all_heads.key)

        if isinstance(paged, PagedStep):
            cache = paged.layers[form.layer]
            # A layer that attends again has other caches, too: ``paged`` knows whose turn it is.
            if isinstance(cache.attend, GpuAttention) and cache.again is None:
                call = form.call(query, key, value)
                return cache.attend(call, cache, paged.meta, self._transform(cos, sin))

        norms = self._norms_of_each_head
        if norms is not None:
            query = norm_rows(query, norms.query)
            key = norm_rows(key, norms.key)
        return paged(form.call(rotate(query, cos, sin), rotate(key, cos, sin), value))

    def _transform(self, cos: Tensor, sin: Tensor) -> HeadTransform:
        """What the write kernel computes."""
        norms = self._norms_of_each_head
        if norms is None:
            return HeadTransform(cos, sin)
        return HeadTransform(
            cos=cos,
            sin=sin,
            query_norm=norms.query.scale,
            key_norm=norms.key.scale,
            epsilon=norms.query.epsilon,
        )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of [T, heads, head size]. cos and sin are [T, R]: the first R values of
    each head are rotated, and values i and i + R / 2 are a pair."""
    size = cos.shape[-1]
    x = heads[..., :size].float()
    first, second = x.chunk(2, -1)
    partner = torch.cat((-second, first), -1)
    rotated = x * cos.unsqueeze(1) + partner * sin.unsqueeze(1)
    return torch.cat((rotated.to(heads.dtype), heads[..., size:]), -1)
