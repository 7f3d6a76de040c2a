"""The opaque kind of cache: transformers' own cache object, one for each sequence.

It takes whatever transformers can generate from with a cache: an attention of its own, relative
positions, a state, a convolution. A module is called as ``generate`` calls it, one sequence at a
time. What is in a cache object is not looked at, but for the size of its tensors.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from jitney.messages import Chunking

_CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""Names of the argument, and of the output's field, for the cache. The last two are those of Mamba
and RWKV."""

OpaqueCache = Any
"""A cache object of transformers; None is the cache of a sequence without tokens."""


class OpaqueTraits(NamedTuple):
    """What the trial at load has found out about a module with opaque caches."""

    chunking: Chunking
    vocab_size: int
    """Columns of the logits."""
    token_bytes: int
    """By which a cache object grows with each token."""
    fixed_bytes: int
    """What it takes beside that."""
    slowdown: float
    """How much longer eight sequences take one after the other than eight tokens in one pass."""


class CacheSizes(NamedTuple):
    """Bytes of a cache object."""

    of_token: int
    """By which it grows with each token."""
    fixed: int
    """What it takes beside that."""


class Computed(NamedTuple):
    """What a pass gave."""

    logits: Tensor
    """[tokens, vocabulary] of the last tokens, as many as were asked for."""
    cache: OpaqueCache
    """Of all tokens so far. It may be the object that was handed in, changed in place."""


class OpaqueModule:
    """A module of transformers, called with a cache object."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        parameters = inspect.signature(module.forward).parameters
        # The same condition as in transformers' ``generate``.
        self._takes_positions = "position_ids" in parameters and not bool(
            getattr(module.config, "is_encoder_decoder", False)
        )
        self.takes_num_logits = "logits_to_keep" in parameters
        """Whether it computes the logits of the last tokens alone. If not, those of all tokens."""
        names = [name for name in _CACHE_NAMES if name in parameters]
        self._cache_name = names[0] if names else None
        self.takes_caches = self._cache_name is not None
        """Whether there is an argument for them."""
        self.makes_caches = True
        """Whether the module makes a cache object if none is handed in. If it does not, it is given
        an empty one."""

    def after_each_layer(self, call: Callable[[], None]) -> None:
        """From now on call this whenever a layer of the module has been computed. Its layers are
        the longest list of modules that it has; a module without one never calls."""
        lists = [each for each in self.module.modules() if isinstance(each, nn.ModuleList)]
        for layer in max(lists, key=len, default=()):
            layer.register_forward_hook(lambda *_: call())

    def compute(self, ids: Tensor, start: int, cache: OpaqueCache, num_logits: int = 1) -> Computed:
        """Compute ``ids`` [T], the tokens at positions ``start`` and behind, over a cache of those
        before. Raises whatever transformers raises; the cache is of no use then."""
        options: dict[str, Any] = {}
        if cache is None and not self.makes_caches:
            cache = DynamicCache(config=self.module.config.get_text_config(decoder=True))
        if cache is not None:
            assert self._cache_name is not None
            options[self._cache_name] = cache
        if self.takes_num_logits:
            options["logits_to_keep"] = num_logits
        output = self._call(ids, start, use_cache=True, **options)
        return Computed(output.logits[0, -num_logits:], self._cache_of(output))

    def compute_without_cache(self, ids: Tensor) -> Tensor:
        """The logits [T, vocabulary] of a sequence that is computed in one pass."""
        logits: Tensor = self._call(ids, 0, use_cache=False).logits[0]
        return logits

    def _call(self, ids: Tensor, start: int, **options: Any) -> Any:
        if self._takes_positions:
            positions = torch.arange(start, start + len(ids), device=ids.device)
            options["position_ids"] = positions.unsqueeze(0)
        return self.module(input_ids=ids.unsqueeze(0), return_dict=True, **options)

    def _cache_of(self, output: Any) -> OpaqueCache:
        """The cache in a module's output; None if there is none."""
        if self._cache_name is None or self._cache_name not in output:
            return None
        return output[self._cache_name]

    def copy(self, cache: OpaqueCache) -> OpaqueCache:
        """An independent copy of a cache object."""
        config = self.module.config
        shared = {id(each): each for each in (config, config.get_text_config(decoder=True))}
        return copy.deepcopy(cache, shared)


def cache_bytes(cache: OpaqueCache) -> int:
    """Bytes of all tensors that a cache object holds, each memory counted once."""
    storages = {}
    for tensor in _tensors(cache, set()):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that can be reached from ``value``. ``seen``: ids of visited objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (nn.Module, PreTrainedConfig, type)):
        return
    seen.add(id(value))
    members: Any = ()
    if isinstance(value, dict):
        members = value.values()
    elif isinstance(value, (list, tuple, set)):
        members = value
    elif hasattr(value, "__dict__"):
        members = vars(value).values()
    for member in members:
        yield from _tensors(member, seen)
