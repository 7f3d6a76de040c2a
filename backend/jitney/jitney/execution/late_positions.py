"""A part of the proof at load: that a module counts positions by those that it is given. Called by
``read_model``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from jitney.execution.interface import AttentionCall, forward_module
from jitney.execution.probe import probe_ids
from jitney.execution.probe_tokens import ProbeTokens
from jitney.execution.state_rows import StatesCache
from jitney.execution.state_slots import StateLayout
from jitney.execution.support import unservable

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""The largest difference, relative to its norm, of what a layer hands to attention for a token when
the same module runs twice on the same tokens. On a CPU both runs round alike; on a GPU the order of
a sum may differ."""
_LEAST_NORM = 1e-20
"""Below it nothing is divided by: two zeros are the same."""


@torch.inference_mode()
def check_positions(
    module: PreTrainedModel, tokens: ProbeTokens, states: StateLayout | None = None
) -> None:
    """Refuse a module that counts positions by anything but ``position_ids``, as Llama 4 does: by
    the tokens in its cache, where it has one, and by a token's index in the step.

    Each late sequence runs twice, without attention. At first a cache says how many tokens came
    before, as in transformers' ``generate``. Then there is no cache, as in service. What layers
    hand to attention must be the same. Raises UnsupportedModelError."""
    for sequence, ids in zip(tokens.sequences, probe_ids(module, tokens), strict=True):
        if sequence.first_position == 0:
            continue
        positions = sequence.positions(ids.device)
        with_cache = _HandedOver()
        if states is None:
            cache = {"past_key_values": _make_late_cache(module.config, sequence.first_position)}
        else:
            cache = {states.cache_argument: _make_late_states(states, sequence.first_position)}
        module(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=states is None,  # else MiniMax wants a cache of its own
            paged=with_cache,
            **cache,
        )
        without = _HandedOver()
        forward_module(module, ids, positions, torch.arange(len(ids), device=ids.device), without)
        if not without.is_same_as(with_cache):
            raise unservable(
                module.config.model_type,
                f"its attention does not go by the positions that it is given, which shows at "
                f"position {sequence.first_position:,}",
            )


class _HandedOver:
    """A ``PagedFunction`` that keeps what layers hand to attention, and returns the query."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.tensors += [call.query, call.key, call.value]
        return functional.pad(call.query, (0, call.value_size - call.query.shape[-1]))

    def is_same_as(self, other: "_HandedOver") -> bool:
        """Whether it was the same, but for rounding, for most tokens: a router may send one of them
        to another expert after a rounding."""
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            right = its.float().flatten(1)
            norms = right.norm(dim=-1).clamp_min(_LEAST_NORM)
            difference = (mine.float().flatten(1) - right).norm(dim=-1) / norms
            # Not ``>``: that is false if it is NaN.
            if not bool(difference.median() <= _TOLERANCE[its.dtype]):
                return False
        return True


class _LateLayer(DynamicLayer):
    """Stands behind ``start`` tokens, whose keys and values it does not have."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def get_seq_length(self) -> int:
        return self._start + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def _make_late_cache(config: PreTrainedConfig, start: int) -> Cache:
    """An empty cache of a sequence that has ``start`` tokens already."""
    return Cache(layers=[_LateLayer(start) for _ in range(config.num_hidden_layers)])


class _LateHybridLayer(LinearAttentionAndFullAttentionLayer):
    """The same, of a layer that has states as well. Those begin here."""

    def __init__(self, start: int, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self._start = start

    def get_seq_length(self) -> int:
        return self._start + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = super().get_seq_length()
        return held + query_length, self._start


def _make_late_states(states: StateLayout, start: int) -> Cache:
    """The same for a model with state layers. Their states begin with the sequence's first token
    here."""
    layers: list[Any] = []
    for layer in states.empty_layers:
        attends = isinstance(layer, CacheLayerMixin)
        has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
        if attends and has_states:
            layers.append(_LateHybridLayer(start, layer.number_of_states))
        elif attends:
            layers.append(_LateLayer(start))
        elif has_states:
            layers.append(LinearAttentionLayer(layer.number_of_states))
        else:
            layers.append(DummyLayer())
    return StatesCache(layers=layers)
