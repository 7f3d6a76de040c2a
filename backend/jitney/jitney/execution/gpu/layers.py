"""Fused modules for a GPU: what ``gpu.fuse`` puts in the place of a model's own.

Each computes what the module it replaces does, in fewer and larger kernels: one product for query,
key and value, one kernel for rotary embedding and the write into the KV cache, one product for gate
and up, and one kernel for a residual sum together with the norms around it. Nothing here waits for
the device, so that a CUDA graph can capture all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.gpu.norm import RmsNorm, add_norm, gate, norm_in_place
from jitney.execution.interface import AttentionCall, PagedFunction, PagedStep
from jitney.execution.linear import Activation


@dataclass(frozen=True)
class AttentionForm:
    """How a layer calls attention: what an :class:`interface.AttentionCall` has beside tensors."""

    layer: int
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class JoinedLinear(nn.Module):
    """The results of several layers of one input, side by side: for weights that cannot be merged
    into one."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        """x is [T, inputs]."""
        return torch.cat([part(x) for part in self.parts], -1)


class FusedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)): two products and a kernel between them."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self._activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., hidden size]."""
        rows = x.reshape(-1, x.shape[-1])
        result: Tensor = self.down(gate(self.gate_up(rows), self._activation))
        return result.view(x.shape)


class FusedAttention(nn.Module):
    """One product for query, key and value, norms of their heads if any, rotary embedding,
    attention, the output product."""

    is_causal = True

    def __init__(
        self,
        form: AttentionForm,
        qkv: nn.Module,
        norms: tuple[RmsNorm, RmsNorm] | None,
        output: nn.Module,
        half_rotary: bool,
    ) -> None:
        """``norms`` are those of query and key: of each head, with one epsilon, or of all heads
        together. With ``half_rotary``, cos and sin have one column for each pair of values that is
        rotated."""
        super().__init__()
        self.form, self.qkv, self.output = form, qkv, output
        self.query_norm: RmsNorm | None = None
        self.key_norm: RmsNorm | None = None
        self._wide_norms: tuple[RmsNorm, ...] = ()
        if norms is not None and norms[0].scale.numel() == form.head_size:
            self.query_norm, self.key_norm = norms
        elif norms is not None:
            self._wide_norms = norms
        self.half_rotary = half_rotary
        self._parts = [form.query_heads, form.key_heads, form.key_heads]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: object,
        paged: PagedFunction,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: ``hidden_states`` is [1, T, hidden size]."""
        cos, sin = whole_rotary(position_embeddings, self.half_rotary)
        return self.attend(hidden_states[0], cos, sin, paged).unsqueeze(0), None

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """x is [T, hidden size], cos and sin are [T, R]."""
        qkv = self.qkv(x)
        if self._wide_norms:
            query, key, _ = qkv.split([n * self.form.head_size for n in self._parts], 1)
            for part, norm in zip((query, key), self._wide_norms, strict=True):
                norm_in_place(part, norm)
        attended = self._attend_in_place(qkv, cos, sin, paged)
        if attended is None:
            attended = self._attend_apart(qkv, cos, sin, paged)
        result: Tensor = self.output(attended.reshape(x.shape[0], -1))
        return result

    def _attend_in_place(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction
    ) -> Tensor | None:
        """By an attention that rotates and writes the cache in one kernel; None if it does not."""
        if not isinstance(paged, PagedStep):
            return None
        form = self.form
        cache = paged.layers[form.layer]
        fused = getattr(cache.attend, "fused", None)
        if fused is None:
            return None
        query, key = self.query_norm, self.key_norm
        attended: Tensor = fused(
            qkv,
            cos,
            sin,
            cache.keys,
            cache.values,
            paged.meta,
            num_heads=form.query_heads,
            num_kv_heads=form.key_heads,
            scale=form.scale,
            window=form.window,
            softcap=form.softcap,
            sinks=form.sinks,
            q_norm=None if query is None else query.scale,
            k_norm=None if key is None else key.scale,
            norm_epsilon=0.0 if query is None else query.epsilon,
            key_scale=getattr(cache, "key_scale", None),
            value_scale=getattr(cache, "value_scale", None),
        )
        return attended

    def _attend_apart(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        form = self.form
        heads = qkv.view(qkv.shape[0], sum(self._parts), form.head_size)
        query, key, value = torch.split_with_sizes(heads, self._parts, 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return paged(
            AttentionCall(
                module=self,
                layer=form.layer,
                query=rotate(query, cos, sin),
                key=rotate(key, cos, sin),
                value=value,
                mask=None,
                scale=form.scale,
                window=form.window,
                softcap=form.softcap,
                sinks=form.sinks,
                extra={},
            )
        )


def whole_rotary(made: tuple[Tensor, Tensor], half: bool) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R], a column for each rotated value, of what a model's rotary module gives:
    [1, T, R], or ``half`` as wide."""
    cos, sin = made[0][0], made[1][0]
    if half:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, head size], of the first R values of each: value i of these
    makes a pair with value i + R / 2. cos and sin are [T, R]."""
    size = cos.shape[-1]
    x = heads[..., :size].float()
    left, right = x.chunk(2, -1)
    turned = x * cos.unsqueeze(1) + torch.cat((-right, left), -1) * sin.unsqueeze(1)
    return torch.cat((turned.to(heads.dtype), heads[..., size:]), -1)


class LayerNorms(NamedTuple):
    """The norms of a layer: of what goes into a branch, and of what comes out of it before it is
    added. None where a layer has none."""

    attention: RmsNorm | None
    attended: RmsNorm | None
    mlp: RmsNorm | None
    mixed: RmsNorm | None


class FusedLayer(nn.Module):
    """A decoder layer of two residual branches, attention and an MLP of whatever kind.

    In a whole fused model (``forward.FusedForward``) the sum that ends a layer is computed together
    with the norm that begins the next.
    """

    def __init__(self, attention: FusedAttention, mlp: nn.Module, norms: LayerNorms) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.attention_norm, self.attended_norm, self.mlp_norm, self.mixed_norm = norms

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedFunction,
        **unused: object,
    ) -> Tensor:
        """As transformers calls it: ``hidden_states`` is [1, T, hidden size]; so is the result."""
        cos, sin = whole_rotary(position_embeddings, self.self_attn.half_rotary)
        hidden = hidden_states[0]
        x = hidden if self.attention_norm is None else self.attention_norm(hidden)
        branch, residual = self.run(x, hidden, cos, sin, paged)
        _, hidden = add_norm(branch, residual, branch_norm=self.mixed_norm)
        return hidden.unsqueeze(0)

    def run(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction
    ) -> tuple[Tensor, Tensor]:
        """From the input of attention to the output of the MLP, not yet added to the residual,
        which comes second."""
        attended = self.self_attn.attend(x, cos, sin, paged)
        x, residual = add_norm(
            attended, residual, branch_norm=self.attended_norm, norm=self.mlp_norm
        )
        return first_of(self.mlp, x), residual


def first_of(mlp: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """What an MLP gives for x [T, hidden size]; some return the scores of their router as well."""
    result = mlp(x.unsqueeze(0))
    out: Tensor = result if isinstance(result, Tensor) else result[0]
    return out.view(x.shape)
