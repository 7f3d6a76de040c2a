"""The other way for a step to reach attention: as the cache that transformers hands down.

Some modules do not pass the keyword argument ``paged`` on to their attention layers (Nemotron,
StableLM). All hand ``past_key_values`` down. :func:`carry_in_cache` puts a :class:`StepCache`
there, which brings ``paged`` along. It also answers modules that ask the cache how many tokens came
before a step's (Llama 4 does, for the factor of its queries).

Called by ``read_model`` for modules that need it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from jitney.execution.interface import PagedFunction

_CACHE_NAMES = ("past_key_values", "layer_past")
"""What attention modules call the argument that has the cache."""

_PAGED = "jitney_paged"
"""The attribute of a cache of transformers that brings ``paged`` along."""
_CARRIED = "jitney_carried"
"""The attribute of a module that :func:`carry_in_cache` has changed."""


class StepCache(Cache):
    """Stands for transformers' cache in one step. It keeps nothing: our attention does."""

    def __init__(self, positions: Tensor) -> None:
        """``positions`` [1, T]: those of the step's tokens."""
        super().__init__(layers=[])
        self._positions = positions[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """A mask has the step's tokens alone."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As :meth:`get_mask_sizes`."""
        return 0

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """How many tokens came before those of the step. A layer that asks for itself adds its
        tokens' indices in the step to it: so it gets a tensor [T], and the sums are the positions.
        Others reserve memory of so many tokens, and need none."""
        if layer_idx is None:
            return 0
        indices = torch.arange(len(self._positions), device=self._positions.device)
        return self._positions - indices


def carry_in_cache(module: PreTrainedModel) -> None:
    """Let ``module`` take the argument ``paged`` to its attention layers in a :class:`StepCache`.
    Has no effect if it does so already."""
    if _CARRIED in vars(module):
        return
    vars(module)[_CARRIED] = True
    takes_more = _takes_any_argument(module)

    def put_cache(
        _: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        paged = arguments.get("paged")
        if paged is None:
            return None
        cache = arguments.get("past_key_values")
        if cache is None:
            cache = StepCache(arguments["position_ids"])
        setattr(cache, _PAGED, paged)
        more = {**arguments, "past_key_values": cache}
        if not takes_more:
            del more["paged"]
        return args, more

    module.register_forward_pre_hook(put_cache, with_kwargs=True)
    for layer in module.modules():
        if _is_attention(layer):
            layer.register_forward_pre_hook(_take_paged, with_kwargs=True)


def step_cache_for(module: PreTrainedModel, positions: Tensor) -> StepCache | None:
    """The cache from which transformers' own attention in ``module`` learns ``positions`` [1, T];
    None if it needs none."""
    return StepCache(positions) if _CARRIED in vars(module) else None


def paged_of(arguments: dict[str, Any]) -> PagedFunction | None:
    """``paged`` from the cache that a layer was given. None: this is no step of ours."""
    for name in _CACHE_NAMES:
        cache = arguments.get(name)
        if cache is not None and _PAGED in vars(cache):
            paged: PagedFunction = vars(cache)[_PAGED]
            return paged
    return None


def _is_attention(layer: nn.Module) -> bool:
    """Whether it is an attention layer of transformers."""
    if "layer_idx" not in vars(layer):
        return False
    names = inspect.signature(layer.forward).parameters
    takes_cache = any(name in names for name in _CACHE_NAMES)
    return takes_cache and _takes_any_argument(layer) and "Attention" in type(layer).__name__


def _takes_any_argument(module: nn.Module) -> bool:
    kinds = [each.kind for each in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _take_paged(
    _: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook of an attention layer: its argument ``paged``, from the cache."""
    paged = paged_of(arguments)
    return None if paged is None else (args, {**arguments, "paged": paged})
