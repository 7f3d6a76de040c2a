"""What a CPU computes fused layers with: which kernel for which layer.

Called by ``accelerator``, which hands it to ``fused``. Imported only where Numba is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from jitney.execution.low_rank import Part
from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of
from jitney.kernels.cpu.attention_kernel import TAGS
from jitney.kernels.cpu.column_linear import ColumnLinear, fits_columns
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.linear import PackedLinear, can_pack
from jitney.kernels.cpu.norm_rotary_kernel import CpuAttentionLayer, RowNorm, norm_rotary_body
from jitney.kernels.cpu.program import LayerProgram
from jitney.kernels.fused.forms import (
    ACTIVATIONS,
    Activation,
    AttentionForm,
    EndBranch,
    Misfit,
    Norm,
    NormForm,
    RowFunction,
)
from jitney.kernels.fused.layers import merged_linears
from jitney.kernels.fused.whole_model import AdaptedKernels, FusedForward, Places


@dataclass(frozen=True)
class _Weights:
    """The weights of linear layers that have the same input, one above the other."""

    weight: Tensor
    bias: Tensor | None
    # Of quantized weights alone: see :class:`ColumnLinear`.
    scale: Tensor | None = None
    factors: Tensor | None = None


class CpuLayerKernels:
    """The :class:`fused.whole_model.ModelKernels` of a CPU, for one dtype."""

    def __init__(self, dtype: torch.dtype, rows: int, *, batch_invariant: bool = False) -> None:
        """Compile the kernel of norms, or load it from the cache of compiled code.

        ``dtype`` is float32 or bfloat16: on a CPU, loads refuse float16 before they come here
        (``machine.resolve_dtype``). ``rows`` are the tokens of a usual step. With
        ``batch_invariant``, no product is torch's.
        """
        self._dtype = dtype
        self._rows = rows
        self._batch_invariant = batch_invariant
        tag = TAGS[dtype]
        self._rows_kernel = Kernel(lambda address: norm_rotary_body(tag, address))
        # Asked once for each dtype: it tries to pack a weight.
        self._why_not_packed = cache(can_pack)

    def norm(self, form: NormForm) -> RowNorm:
        """See :class:`fused.whole_model.ModelKernels`, here and below."""
        return RowNorm(form, self._dtype, self._rows_kernel)

    def linear(self, products: Sequence[Any], activation: Activation | None = None) -> nn.Module:
        joined = _join(products)
        weight = joined.weight
        # Our own product comes first, but for float32, where oneDNN's is as fast.
        wants_ours = weight.dtype != torch.float32 or self._batch_invariant
        if wants_ours and fits_columns(weight, activation):
            return ColumnLinear(weight, joined.bias, activation, joined.scale, joined.factors)
        # oneDNN has no products of quantized weights, and its sums depend on the batch.
        if joined.scale is not None or self._batch_invariant:
            raise Misfit("there is no product of ours for its dtype, sizes and activation")
        reason = self._why_not_packed(weight.dtype)
        if reason is not None:
            raise Misfit(reason)
        if activation is None:
            return PackedLinear(weight, joined.bias, self._rows)
        return _split_gate(joined, activation, self._rows)

    def attention(self, form: AttentionForm) -> CpuAttentionLayer:
        return CpuAttentionLayer(form, self._dtype, self._rows_kernel)

    def end_branch(self, product: RowFunction, branch_norm: Norm, norm: Norm) -> EndBranch:
        add = _sum_of(product, branch_norm)

        def end(x: Tensor, residual: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            """(norm(sum), sum); without a norm, the sum twice."""
            total = add(x, residual)
            if rows is not None:
                total = total[rows]
            if norm is None:
                return total, total
            return norm.kernel(total), total

        return end

    def program(self, model: FusedForward) -> LayerProgram | None:
        return LayerProgram.of(model)

    def adapted_program(
        self, model: FusedForward, places: Sequence[Places]
    ) -> AdaptedKernels | None:
        # What cannot be a program without adapters cannot be one with them.
        if model.program is None:
            return None
        program = LayerProgram.of(model, places)
        if program is None:
            return None
        return AdaptedKernels(pack=program.pack, program=program)

    def adapted_products(self, products: Sequence[Sequence[Part]]) -> AdaptedKernels:
        return AdaptedKernels()


def _join(products: Sequence[Any]) -> _Weights:
    """The weights of ``products``. Raises Misfit if they are not of one kind."""
    first = products[0]
    quantized = [isinstance(each, QuantizedLinear) for each in products]
    if any(quantized) and not all(quantized):
        raise Misfit("it has quantized products and others")
    if isinstance(first, QuantizedLinear):
        if not first.suits_integer_kernels or first.dtype != torch.bfloat16:
            raise Misfit("a CPU has no fused products of such quantized weights")
        joined = first.merge(products)
        if joined is None:
            raise Misfit("its products are quantized in different ways")
        return _Weights(joined.weight, joined.bias, joined.scale, joined.input_factors)
    # A single one may also be a Conv1D, as GPT-2 has it.
    if len(products) == 1 and is_linear(first):
        return _Weights(weight_of(first), first.bias)
    if any(type(each) is not nn.Linear for each in products):
        raise Misfit("it has products that are no plain linear layers")
    plain = merged_linears(products)
    return _Weights(plain.weight, plain.bias)


def _sum_of(product: RowFunction, norm: Norm) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, residual) -> residual + norm(product(x))."""
    if norm is not None:
        kernel = norm.kernel
        return lambda x, residual: residual + kernel(product(x))
    # These add in their epilogue, before the result is written.
    if isinstance(product, (PackedLinear, ColumnLinear)):
        return product.plus
    return lambda x, residual: residual + product(x)


def _split_gate(joined: _Weights, activation: Activation, rows: int) -> "_SplitGate":
    """The layer of ``joined``, which has the weights of gate and, below them, those of up."""
    gate_weight, up_weight = joined.weight.chunk(2)
    gate_bias = None
    up_bias = None
    if joined.bias is not None:
        gate_bias, up_bias = joined.bias.chunk(2)
    gate = PackedLinear(gate_weight, gate_bias, rows)
    up = PackedLinear(up_weight, up_bias, rows)
    return _SplitGate(gate, up, activation)


class _SplitGate(nn.Module):
    """activation(gate(x)) * up(x), each in the epilogue of a product."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, activation: Activation) -> None:
        super().__init__()
        self.gate = gate
        self.up = up
        self._activation: Activation = activation
        # Looked up once: an attribute of a module costs about a microsecond a call.
        self._activated = gate.activated
        self._times = up.times

    def forward(self, x: Tensor) -> Tensor:
        return self._times(x, self._activated(x, self._activation))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """As :meth:`forward`, with ``other`` [T, 2 * outputs]. Its first half is added to what the
        gate gives, before the activation; its second half to what ``up`` gives."""
        for_gate, for_up = other.chunk(2, -1)
        gate = self.gate.plus(x, for_gate.contiguous())
        up = self.up.plus(x, for_up.contiguous())
        return ACTIVATIONS[self._activation](gate) * up
