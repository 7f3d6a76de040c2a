"""Fused modules: each computes what the module it replaces does, in fewer and larger kernels.

- One product gives query, key and value.
- One kernel does the norms and the rotary embedding of the heads.
- The product of gate and up computes the activation too.
- The sum with the residual is computed by the product before it, or by the norm after it.

``fuse`` builds these modules from a device's ``LayerKernels``.

Tensors are [T, width] inside, and [1, T, width] where transformers calls.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.interface import PagedFunction
from jitney.kernels.fused.forms import AttentionForm, EndBranch, LayerKernels, Norm, RowFunction
from jitney.kernels.fused.rotary import CosSin, whole_rotary


def merged_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the results of all side by side, and owns its weight."""
    if len(linears) == 1:
        return linears[0]
    weight = torch.cat([each.weight.detach() for each in linears])
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if any(each.bias is not None for each in linears):
        biases = [_bias_or_zeros(each) for each in linears]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged


def _bias_or_zeros(linear: Any) -> Tensor:
    if linear.bias is None:
        return torch.zeros(
            linear.out_features, dtype=linear.weight.dtype, device=linear.weight.device
        )
    bias: Tensor = linear.bias.detach()
    return bias


class FusedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gated: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gated = gated
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., hidden size]."""
        rows = x.reshape(-1, x.shape[-1])
        result: Tensor = self.down(self.gated(rows))
        return result.view(x.shape)


class FusedAttention(nn.Module):
    """One product for query, key and value, attention, the output product."""

    def __init__(
        self,
        form: AttentionForm,
        qkv: nn.Module,
        output: nn.Module,
        half_rotary: bool,
        kernels: LayerKernels,
    ) -> None:
        """With ``half_rotary``, cos and sin have one column for each pair of values that is
        rotated."""
        super().__init__()
        self.form = form
        self.half_rotary = half_rotary
        self.qkv = qkv
        self.output = output
        self.kernel = kernels.attention(form)
        # Bound once: a submodule's lookup and call cost as much as a small kernel.
        self._qkv = qkv.forward

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        *args: object,
        paged: PagedFunction,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it."""
        angles = whole_rotary(position_embeddings, self.half_rotary)
        attended = self.attend(hidden_states[0], angles, paged)
        return self.output(attended).unsqueeze(0), None

    def attend(self, x: Tensor, angles: CosSin, paged: PagedFunction) -> Tensor:
        """All but the output product; cos and sin are [T, R]."""
        return self.kernel(self._qkv(x), *angles, paged).reshape(x.shape[0], -1)


class LayerNorms(NamedTuple):
    """The norms of a layer."""

    attention: Norm
    """Of the input of attention."""
    attended: Norm
    """Of the output of attention, before it is added to the residual."""
    mlp: Norm
    """Of the input of the MLP."""
    mixed: Norm
    """Of the output of the MLP, before it is added to the residual."""


class FusedDecoderLayer(nn.Module):
    """A decoder layer of two residual branches, attention and an MLP of whatever kind."""

    def __init__(
        self, attention: FusedAttention, mlp: nn.Module, norms: LayerNorms, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.norms = norms
        self._kernels = kernels
        self._attend = attention.attend
        self._end_attention = kernels.end_branch(attention.output, norms.attended, norms.mlp)

        # A device may compute the MLP's last product together with the sum and the norm behind it.
        # The MLP is therefore called in two steps; one that is not fused is all in the last step.
        self._before_last: RowFunction | None = None
        self._last: RowFunction = partial(call_mlp, mlp)
        if isinstance(mlp, FusedMLP):
            self._before_last = mlp.gated.forward
            self._last = mlp.down
        self._end_without_norm = self.end_before(None)

    def end_before(self, norm: Norm) -> EndBranch:
        """The end of this layer, together with the norm that begins the next one."""
        return self._kernels.end_branch(self._last, self.norms.mixed, norm)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: CosSin,
        paged: PagedFunction,
        **unused: object,
    ) -> Tensor:
        """As transformers calls it."""
        angles = whole_rotary(position_embeddings, self.self_attn.half_rotary)
        hidden = hidden_states[0]
        norm = self.norms.attention
        x = hidden if norm is None else norm(hidden)
        x, residual = self.run(x, hidden, angles, paged)
        _, total = self._end_without_norm(x, residual, None)
        return total.unsqueeze(0)

    def run(
        self, x: Tensor, residual: Tensor, angles: CosSin, paged: PagedFunction
    ) -> tuple[Tensor, Tensor]:
        """All but the end of the layer: x, the input of attention, and the residual -> the input of
        the layer's last product, and the residual behind attention."""
        attended = self._attend(x, angles, paged)
        x, residual = self._end_attention(attended, residual, None)
        if self._before_last is not None:
            x = self._before_last(x)
        return x, residual


def call_mlp(mlp: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """What an MLP gives for x [T, hidden size]; some return the scores of their router as well."""
    result = mlp(x.unsqueeze(0))
    out: Tensor = result if isinstance(result, Tensor) else result[0]
    return out.view(x.shape)
