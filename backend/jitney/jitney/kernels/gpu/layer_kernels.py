"""What a GPU computes fused layers with."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.quantized import QuantizedLinear
from jitney.kernels.fused.layers import (
    Activation,
    AttentionForm,
    EndBranch,
    FusedForward,
    FusedRMSNorm,
    HeadNorms,
    Misfit,
    NormForm,
    NormKernel,
)
from jitney.kernels.fused.parts import merged_linears
from jitney.kernels.gpu.attention import GpuAttention, HeadTransform
from jitney.kernels.gpu.norm import MOST_WIDTH, add_norm, gate, norm_in_place, rms_norm
from jitney.kernels.gpu.products import InvariantLinear


class GpuLayerKernels:
    """The :class:`fused.layers.LayerKernels` of a GPU."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def norm(self, form: NormForm) -> NormKernel:
        """See :class:`fused.layers.LayerKernels`, here and below."""
        if form.scale.numel() > MOST_WIDTH:
            raise Misfit(f"it is over more than {MOST_WIDTH} values")
        return partial(rms_norm, form=form)

    def linear(self, products: Sequence[nn.Module]) -> nn.Module:
        kinds = {type(each) for each in products}
        if kinds == {nn.Linear}:
            together = merged_linears([each for each in products if isinstance(each, nn.Linear)])
            if self._batch_invariant:
                return InvariantLinear(together.weight, together.bias)
            return together
        first = products[0]
        if len(products) == 1:
            return first
        quantized = first.merge(products) if isinstance(first, QuantizedLinear) else None
        return quantized or _SideBySide(products)

    def gated(self, products: Sequence[nn.Module], activation: Activation) -> nn.Module:
        return _Gated(self.linear(products), activation)

    def attention(self, form: AttentionForm, norms: HeadNorms | None) -> "HeadAttention":
        return HeadAttention(form, norms)

    def end_branch(
        self,
        product: Callable[[Tensor], Tensor],
        branch_norm: FusedRMSNorm | None,
        norm: FusedRMSNorm | None,
    ) -> EndBranch:
        forms = [None if each is None else each.form for each in (branch_norm, norm)]

        def end(x: Tensor, residual: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            return add_norm(product(x), residual, branch_norm=forms[0], norm=forms[1], indices=rows)

        return end

    def program(self, model: FusedForward) -> None:
        """CUDA graphs do this."""


class _SideBySide(nn.Module):
    """The results of several layers of one input: for weights that cannot be merged into one."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        """x is [T, inputs]."""
        return torch.cat([part(x) for part in self.parts], -1)


class _Gated(nn.Module):
    """activation(gate(x)) * up(x): one product, and a kernel for the rest."""

    def __init__(self, gate_up: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.gate_up = gate_up
        self._activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return gate(self.gate_up(x), self._activation)


class HeadAttention:
    """Norms of query and key heads if there are any, rotary embedding, attention: in one kernel
    together with the write into the cache where attention is our own."""

    def __init__(self, form: AttentionForm, norms: HeadNorms | None) -> None:
        self._form = form
        forms = None if norms is None else (norms.query.form, norms.key.form)
        wide = forms is not None and forms[0].scale.numel() > form.head_size
        self._wide_norms = forms if wide else None
        self._norms = None if wide else forms

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.layers.AttentionKernel`."""
        query, key, value = self._form.split(qkv)
        if self._wide_norms is not None:
            for heads, norm in zip((query, key), self._wide_norms, strict=True):
                norm_in_place(heads.flatten(1), norm)  # a view
        if isinstance(paged, PagedStep):
            cache = paged.layers[self._form.layer]
            if isinstance(cache.attend, GpuAttention):
                return self._attend_in_place(cache.attend, (query, key, value), cos, sin, paged)
        if self._norms is not None:
            query, key = (
                rms_norm(x, form) for x, form in zip((query, key), self._norms, strict=True)
            )
        return paged(self._form.call(rotate(query, cos, sin), rotate(key, cos, sin), value))

    def _attend_in_place(
        self,
        attend: GpuAttention,
        qkv: tuple[Tensor, Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        paged: PagedStep,
    ) -> Tensor:
        form, transform = self._form, HeadTransform(cos, sin)
        cache = paged.layers[form.layer]
        if self._norms is not None:
            query, key = self._norms
            transform = HeadTransform(cos, sin, query.scale, key.scale, query.epsilon)
        return attend(form.call(*qkv), cache, paged.meta, transform)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, head size], of the first R values of each: value i of these
    makes a pair with value i + R / 2. cos and sin are [T, R]."""
    size = cos.shape[-1]
    x = heads[..., :size].float()
    left, right = x.chunk(2, -1)
    turned = x * cos.unsqueeze(1) + torch.cat((-right, left), -1) * sin.unsqueeze(1)
    return torch.cat((turned.to(heads.dtype), heads[..., size:]), -1)
