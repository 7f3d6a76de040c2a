"""Which decoder layers of a model are alike, so that a trial of one of them is a trial of all.
Called by ``fuse``.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from jitney.execution.state_rows import RowForward

Likeness = tuple[object, ...]
"""Equal for layers that are alike."""

_PLAIN = (str, int, float, bool, type(None), torch.dtype)
_OF_ONE_LAYER = frozenset({"layer_idx", "layer_index", "layer_id"})
"""Attributes that say where a layer stands. What a layer makes of that is in its other attributes,
or in what it hands to attention, which is looked at in each layer (``AttentionForm``)."""


def likeness(layer: nn.Module, arguments: Mapping[str, Any]) -> Likeness:
    """What a layer computes with, but for the values of its weights: of each module inside, its
    class, its public attributes, the number of its hooks and the shapes of its tensors; and the
    ``arguments`` of its call. What is no plain value counts as the same only if it is one object,
    as the cos and sin of all layers that rotate alike are.
    """
    parts: list[object] = []
    for path, module in layer.named_modules():
        hooks = (len(module._forward_pre_hooks), len(module._forward_hooks))
        parts.append((path, type(module), hooks, _attributes(module), _shapes(module)))
    given = [(name, _comparable(value)) for name, value in sorted(arguments.items())]
    return (tuple(parts), tuple(given))


def _attributes(module: nn.Module) -> Likeness:
    return tuple(
        (name, _comparable(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _OF_ONE_LAYER
    )


def _shapes(module: nn.Module) -> Likeness:
    """Of its own parameters and buffers."""
    tensors: list[tuple[str, Tensor]] = [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _comparable(value: Any) -> object:
    # A module with states: its class's forward, in rows.
    if isinstance(value, RowForward) and isinstance(value.own_forward, MethodType):
        return (RowForward, id(value.own_forward.__func__))
    return value if isinstance(value, _PLAIN) else id(value)
