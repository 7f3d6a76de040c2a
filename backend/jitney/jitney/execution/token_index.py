"""The index of DeepSeek Sparse Attention: which of the tokens before it each query attends to.

A layer of transformers asks its ``indexer`` for them, which keeps a key of its own for each token.
That module runs here as it is, for one row after the other, over keys that a paged cache holds.
:func:`use_index` lets it hand over its arguments first (:class:`Deferred`): not before attention is
called does it run, because only then the rows are known.

Called by ``latents``.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jitney.execution.interface import NAME


def use_index(attention: Any) -> None:
    """Let the indexer of an attention module of transformers run over a paged cache, if it has one.
    transformers' own attention still works."""
    if "indexer" not in attention._modules:
        return
    # It slices the mask for its indexer. Our steps have none.
    attention.register_forward_pre_hook(_give_mask, with_kwargs=True)
    if attention.indexer is not None:
        attention.indexer.forward = _Defer(attention)


def _give_mask(
    attention: Any, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook: in our steps, a mask that stands for none."""
    if attention.config._attn_implementation != NAME:
        return None
    return args, {**arguments, "attention_mask": torch.zeros(1, 1, 1, 1)}


class _Defer:
    """Takes the place of an indexer's ``forward``."""

    def __init__(self, attention: Any) -> None:
        self._config = attention.config
        self._layer: int = attention.layer_idx
        self._key_size: int = attention.indexer.head_dim
        self._forward: Callable[..., Tensor] = attention.indexer.forward
        self._signature = inspect.signature(self._forward)

    def __call__(self, *args: Any, **more: Any) -> "Tensor | Deferred":
        """The index of our step; for transformers' own attention, its result."""
        if self._config._attn_implementation != NAME:
            return self._forward(*args, **more)
        bound = self._signature.bind(*args, **more)
        return Deferred(self._layer, self._key_size, self._forward, bound.arguments)


class Deferred:
    """An ``interface.TokenIndex``: a call of an indexer for all tokens of a step."""

    def __init__(
        self,
        layer: int,
        key_size: int,
        forward: Callable[..., Tensor],
        arguments: dict[str, Any],
    ) -> None:
        self.key_size = key_size
        self._layer = layer
        self._forward = forward
        self._arguments = arguments
        self._chosen: dict[int, Tensor] = {}
        """By row: what was chosen, for layers that share it."""

    def is_shared(self, layer: int) -> bool:
        """See :class:`interface.TokenIndex`."""
        return layer != self._layer

    def choose(
        self, row: int, tokens: slice, context: int, exchange: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See :class:`interface.TokenIndex`."""
        if row not in self._chosen:
            self._chosen[row] = self._choose(tokens, context, exchange)
        return self._chosen[row]

    def _choose(self, tokens: slice, context: int, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the indexer for one row."""
        arguments = {name: _part(value, tokens) for name, value in self._arguments.items()}
        positions = torch.arange(context, device=self._arguments["hidden_states"].device)
        num_tokens = tokens.stop - tokens.start
        arguments["attention_mask"] = (positions <= positions[-num_tokens:, None])[None]
        arguments["past_key_values"] = _RowKeys(exchange)
        return self._forward(**arguments)[0].long()


class _RowKeys:
    """Stands for transformers' cache where an indexer runs for one row."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        self._exchange = exchange

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Keep ``keys`` [1, n, key size]; those of the whole context [1, context, key size]."""
        return self._exchange(keys[0])[None]


def _part(value: Any, tokens: slice) -> Any:
    """These ``tokens`` of an argument: a tensor [1, T, …], or a tuple of such."""
    if isinstance(value, tuple):
        return tuple(_part(each, tokens) for each in value)
    if isinstance(value, Tensor):
        return value[:, tokens]
    return value
