"""Architectures that compute attention themselves, without transformers' AttentionInterface, and
that are still served: Falcon, Bloom, MPT, GPT-J and CodeGen.

:func:`bridge_own_attention` changes the ``forward`` of their attention layers. In our steps it
calls ``paged`` (``interface``) instead of computing attention. In transformers' own passes it does
what it did before.

Called by ``read_model``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jitney.execution.carry import carry_in_cache, paged_of
from jitney.execution.interface import AttentionCall, PagedFunction


def bridge_own_attention(module: PreTrainedModel) -> None:
    """Let the attention layers of ``module`` call ours, if it is one of these architectures."""
    found = False
    for layer in list(module.modules()):
        bridge = _BRIDGES.get(type(layer).__name__)
        if bridge is not None:
            bridge(layer)
            found = True
    if found:
        carry_in_cache(module)


def _heads(x: Tensor) -> Tensor:
    """[1, heads, T, head size] -> [T, heads, head size]"""
    return x[0].transpose(0, 1)


class _ByScores:
    """GPT-J and CodeGen: a layer computes everything but attention, for which it calls its method
    ``_attn``."""

    def __init__(self, layer: Any) -> None:
        self._layer: int = layer.layer_idx
        self._scale = float(1 / layer.scale_attn)
        self._forward: Callable[..., Any] = layer.forward
        self._own_attention: Callable[..., Any] = layer._attn
        self._paged: PagedFunction | None = None
        """While a step of ours runs."""
        layer.forward = self
        layer._attn = self._attend

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The layer's ``forward``."""
        self._paged = paged_of(arguments)
        try:
            return self._forward(*args, **arguments)
        finally:
            self._paged = None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        """The layer's ``_attn``: query, key and value are [1, heads, T, head size]."""
        if self._paged is None:
            return self._own_attention(query, key, value, attention_mask)
        call = AttentionCall(
            layer=self._layer,
            query=_heads(query).to(value.dtype),
            key=_heads(key).to(value.dtype),
            value=_heads(value),
            scale=self._scale,
        )
        return self._paged(call).transpose(0, 1)[None], None


class _Falcon:
    """Both of Falcon's decoders, with rotary embedding or ALiBi."""

    def __init__(self, layer: Any) -> None:
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        # Scores are scaled with their ALiBi in them.
        self._slopes = _slopes_of(build_alibi_tensor, layer) * layer.inv_norm_factor
        layer.forward = self

    def __call__(self, hidden_states: Tensor, *args: Any, **arguments: Any) -> Any:
        """The layer's ``forward``."""
        paged = paged_of(arguments)
        if paged is None:
            return self._forward(hidden_states, *args, **arguments)
        layer = self._layer
        # [1, T, heads, head size] each
        query, key, value = layer._split_heads(layer.query_key_value(hidden_states))
        if layer.new_decoder_architecture:
            # It repeats each KV head for all of its query heads.
            group = layer.num_heads // layer.num_kv_heads
            key = key[:, :, ::group]
            value = value[:, :, ::group]
        slopes = None
        if arguments.get("alibi") is None:
            from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

            cos, sin = arguments["position_embeddings"]
            query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        else:
            slopes = self._slopes
        call = AttentionCall(
            layer=layer.layer_idx,
            query=query[0],
            key=key[0],
            value=value[0],
            scale=layer.inv_norm_factor,
            slopes=slopes,
        )
        return layer.dense(paged(call).flatten(1)[None]), None


class _Bloom:
    """Bloom: ALiBi, and the residual is added within attention."""

    def __init__(self, layer: Any) -> None:
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        self._slopes = _slopes_of(build_alibi_tensor, layer)
        layer.forward = self

    def __call__(
        self, hidden_states: Tensor, residual: Tensor, *args: Any, **arguments: Any
    ) -> Any:
        """The layer's ``forward``."""
        paged = paged_of(arguments)
        if paged is None:
            return self._forward(hidden_states, residual, *args, **arguments)
        layer = self._layer
        query, key, value = layer._reshape(layer.query_key_value(hidden_states))
        call = AttentionCall(
            layer=layer.layer_idx,
            query=_heads(query),
            key=_heads(key),
            value=_heads(value),
            scale=layer.inv_norm_factor,
            slopes=self._slopes,
        )
        return residual + layer.dense(paged(call).flatten(1)[None]), None


class _Mpt:
    """MPT: ALiBi, by slopes of its own."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        layer.forward = self

    def __call__(self, hidden_states: Tensor, *args: Any, **arguments: Any) -> Any:
        """The layer's ``forward``."""
        paged = paged_of(arguments)
        if paged is None:
            return self._forward(hidden_states, *args, **arguments)
        layer = self._layer
        mixed = layer.Wqkv(hidden_states)
        if layer.clip_qkv:
            mixed = mixed.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
        shape = (mixed.shape[1], layer.n_heads, layer.head_dim)
        query, key, value = (part.reshape(shape) for part in mixed.chunk(3, dim=2))
        bias = arguments["position_bias"]  # [heads, 1, positions]
        call = AttentionCall(
            layer=layer.layer_idx,
            query=query,
            key=key,
            value=value,
            scale=float(layer.softmax_scale),
            slopes=(bias[:, 0, 1] - bias[:, 0, 0]).float(),
        )
        return layer.out_proj(paged(call).flatten(1)[None]), None


def _slopes_of(build_alibi_tensor: Callable[..., Tensor], layer: Any) -> Tensor:
    """ALiBi's slopes [heads], as transformers builds them: what it adds at position 1."""
    two_positions = torch.ones((1, 2), dtype=torch.long, device=layer.dense.weight.device)
    return build_alibi_tensor(two_positions, layer.num_heads, torch.float32)[:, 0, 1]


_BRIDGES: dict[str, Callable[[Any], object]] = {
    "GPTJAttention": _ByScores,
    "CodeGenAttention": _ByScores,
    "FalconAttention": _Falcon,
    "BloomAttention": _Bloom,
    "MptAttention": _Mpt,
}
"""By the class of the attention layer."""

OWN_ATTENTION = frozenset({"gptj", "codegen", "falcon", "bloom", "mpt"})
"""The model types of these."""
