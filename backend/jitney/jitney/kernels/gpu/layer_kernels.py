"""Fused layers on a GPU."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of
from jitney.kernels.fused.fuse import FuseReport, fuse, swap_children
from jitney.kernels.fused.invariant import check_invariant
from jitney.kernels.fused.layers import (
    Activation,
    AdaptedKernels,
    AttentionForm,
    EndBranch,
    FusedForward,
    Misfit,
    Norm,
    NormForm,
    Places,
    RowFunction,
    merged_linears,
)
from jitney.kernels.gpu.attention import GpuAttention, HeadTransform
from jitney.kernels.gpu.low_rank import GroupedProducts
from jitney.kernels.gpu.norm import MOST_WIDTH, add_norm, gate, layer_norm, norm_in_place, norm_rows
from jitney.kernels.gpu.products import InvariantLinear


def fuse_for_gpu(module: PreTrainedModel, config: EngineConfig, length: int) -> FuseReport:
    """See :func:`fused.fuse.fuse`. Run once, after loading and quantization.

    With option ``batch_invariant``, products and norms that depend on the batch are replaced as
    well, whatever could be fused. Raises ConfigError if that cannot be.
    """
    for each in module.modules():
        if isinstance(each, PreTrainedModel):
            # It looks for padding among the ids, which makes the host wait for the device. There is
            # none here.
            vars(each)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    report = FuseReport()
    if config.fuse or config.batch_invariant:
        kernels = GpuLayerKernels(batch_invariant=config.batch_invariant)
        report = fuse(module, kernels, length, norms_alone=not config.fuse)
    if config.batch_invariant:
        _make_invariant(module, config, report)
        check_invariant(module, report.forward)
    if module.device.type == "cuda":
        torch.cuda.empty_cache()  # unmerged weights have left gaps that nothing else fits into
    return report


def _make_invariant(module: PreTrainedModel, config: EngineConfig, report: FuseReport) -> None:
    """Replace linear layers and layer norms by kernels with fixed tiles. What is left is for
    ``fused.invariant`` to judge.

    Raises ConfigError if weights are quantized: their products are not ours to choose.
    """
    if config.quantization != "none" or any(
        isinstance(each, QuantizedLinear) for each in module.modules()
    ):
        raise ConfigError(
            "option batch_invariant is true, but the products of quantized weights depend on the "
            "batch: set it to false, or quantization to 'none' with a checkpoint that is not "
            "quantized"
        )

    def product(linear: Any) -> InvariantLinear:
        return InvariantLinear(weight_of(linear), linear.bias)

    swap_children(module, "product", is_linear, product, report)
    swap_children(module, "layer norm", lambda x: type(x) is nn.LayerNorm, layer_norm, report)


class GpuLayerKernels:
    """The :class:`fused.layers.LayerKernels` of a GPU."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def norm(self, form: NormForm) -> RowFunction:
        """See :class:`fused.layers.LayerKernels`, here and below."""
        if form.scale.numel() > MOST_WIDTH:
            raise Misfit(f"it is over more than {MOST_WIDTH} values")
        return partial(norm_rows, form=form)

    def linear(self, products: Sequence[Any], activation: Activation | None = None) -> nn.Module:
        product = self._side_by_side(products)
        return product if activation is None else _MergedGate(product, activation)

    def _side_by_side(self, products: Sequence[Any]) -> nn.Module:
        first: nn.Module = products[0]
        if all(type(each) is nn.Linear for each in products):
            together = merged_linears(products)
            if self._batch_invariant:
                return InvariantLinear(together.weight, together.bias)
            return together
        if len(products) == 1:
            return first
        quantized = first.merge(products) if isinstance(first, QuantizedLinear) else None
        return quantized or _SideBySide(products)

    def attention(self, form: AttentionForm) -> "GpuHeadAttention":
        return GpuHeadAttention(form)

    def end_branch(self, product: RowFunction, branch_norm: Norm, norm: Norm) -> EndBranch:
        forms = [None if each is None else each.form for each in (branch_norm, norm)]

        def end(x: Tensor, residual: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            return add_norm(product(x), residual, branch_norm=forms[0], norm=forms[1], indices=rows)

        return end

    def program(self, model: FusedForward) -> None:
        """CUDA graphs do this."""

    def adapted(self, model: FusedForward, places: Sequence[Places]) -> AdaptedKernels:
        products = GroupedProducts([parts for place in places for parts in place])
        return AdaptedKernels(products.begin, products.pack)


class _SideBySide(nn.Module):
    """The results of several layers of one input: for weights that cannot be merged into one."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        """x is [T, inputs]."""
        return torch.cat([part(x) for part in self.parts], -1)


class _MergedGate(nn.Module):
    """activation(gate(x)) * up(x): one product, and a kernel for the rest."""

    def __init__(self, gate_up: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.gate_up = gate_up
        self._activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return gate(self.gate_up(x), self._activation)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """With ``other`` [T, 2 outputs] added to gate and up."""
        return gate(self.gate_up(x) + other, self._activation)


class GpuHeadAttention:
    """Norms of query and key heads if there are any, rotary embedding, attention: in one kernel
    together with the write into the cache where attention is our own."""

    def __init__(self, form: AttentionForm) -> None:
        self._form, self._wide = form, form.wide_norms

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.layers.AttentionKernel`."""
        form, norms = self._form, self._form.norms
        query, key, value = form.split(qkv)
        if norms is not None and self._wide:
            norm_in_place(query.flatten(1), norms[0])  # a view, as is the next
            norm_in_place(key.flatten(1), norms[1])
            norms = None
        if isinstance(paged, PagedStep):
            cache, transform = paged.layers[form.layer], HeadTransform(cos, sin)
            if norms is not None:
                scales = norms[0].scale, norms[1].scale
                transform = HeadTransform(cos, sin, *scales, norms[0].epsilon)
            if isinstance(cache.attend, GpuAttention):
                return cache.attend(form.call(query, key, value), cache, paged.meta, transform)
        if norms is not None:
            query, key = norm_rows(query, norms[0]), norm_rows(key, norms[1])
        return paged(form.call(rotate(query, cos, sin), rotate(key, cos, sin), value))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, head size], of the first R values of each: value i of these
    makes a pair with value i + R / 2. cos and sin are [T, R]."""
    size = cos.shape[-1]
    x = heads[..., :size].float()
    left, right = x.chunk(2, -1)
    turned = x * cos.unsqueeze(1) + torch.cat((-right, left), -1) * sin.unsqueeze(1)
    return torch.cat((turned.to(heads.dtype), heads[..., size:]), -1)
