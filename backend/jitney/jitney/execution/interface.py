"""A loaded model, and the bridge between transformers' modules and our paged attention.

transformers looks attention functions up by name in its AttentionInterface. Ours is registered as
``jitney``; it keeps no state. What it needs of a step travels as the keyword argument ``paged``
through ``model(..., paged=...)`` down to each attention layer: a callable that takes one
:class:`AttentionCall`, the :class:`PagedStep` of this module in service or a recorder at load.

No mask function is registered under the name, so transformers builds no masks: the query at
position p sees what the block table holds up to p.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from jitney.execution.attention import AttentionMetadata
from jitney.execution.low_rank import Hooks, Pack, Site

NAME = "jitney"


class AttentionCall(NamedTuple):
    """One layer's call. T flattened tokens of all rows of the step."""

    layer: int
    query: Tensor
    """[T, heads, head size], after rotary embedding; any strides, as are the next two. Query head h
    reads KV head ``h // (heads // KV heads)``."""
    key: Tensor
    """[T, KV heads, head size], after rotary embedding."""
    value: Tensor
    scale: float
    window: int | None = None
    """The query at position p sees keys max(0, p - window + 1) to p."""
    softcap: float | None = None
    """Maps scores to ``softcap * tanh(score / softcap)``."""
    sinks: Tensor | None = None
    """[heads]: one more logit per head, in the denominator of the softmax."""
    mask: Tensor | None = None
    """Not served: the probe refuses a model that brings one."""
    extra: Mapping[str, Any] = MappingProxyType({})
    """Every other keyword argument of the call, and ``is_causal``; the probe judges them."""


PagedFunction = Callable[[AttentionCall], Tensor]


class LayerCache(NamedTuple):
    """One layer's part of the KV cache and the function that reads and writes it."""

    keys: Tensor
    """Its shape is :func:`attention.cache_shape`."""
    values: Tensor
    """As the keys."""
    attend: "AttentionFunction"
    key_scale: Tensor | None = None
    """float32 [KV heads] of a float8 cache: an element stands for itself times its head's scale."""
    value_scale: Tensor | None = None


class AttentionFunction(Protocol):
    """Attention over paged caches. Belongs to one engine."""

    name: str

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write the new K and V to their slots, converted to the cache's dtype, then attend
        causally over each row's block table. Returns [T, heads, head size] of the query's dtype.
        """


StepFunction = Callable[[Tensor, Tensor, Tensor, PagedFunction], Tensor]
"""(ids [T], positions [T], indices, attention) -> logits [len(indices), vocabulary] of the tokens
with these indices among the T, at least one. All three tensors are int64."""


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps in the cache and how it attends."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode and what the runner must know of it."""

    module: PreTrainedModel
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    layers: list[LayerSpec]
    eos_ids: frozenset[int]
    max_model_len: int
    """Prompt and output together: the option, or what the checkpoint was made for."""
    vocab_size: int
    """Rows of the embedding."""
    num_parameters: int
    """Values of all weights; tied ones count once."""
    weight_bytes: int
    forward: StepFunction
    """Through transformers (:func:`forward`), or the fused form of the whole model."""
    fused: bool = False
    """Whether ``forward`` is the fused form of the whole model."""
    sites: Mapping[str, Site] = field(default_factory=dict)
    """What adapters may change, by the layers' paths in the module as it was loaded."""
    pack: Pack | None = None
    """Makes ``LowRank.packed``, if ``forward`` needs it."""
    cache_scales: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer, what a float8 cache's keys and values are multiplied by when they are read, as the
    checkpoint states it: float32 [KV heads], on the device. Empty if it does not."""


class PagedStep:
    """One step's attention: the metadata of its rows, and the caches by layer index."""

    def __init__(self, layers: list[LayerCache], meta: AttentionMetadata) -> None:
        self.layers = layers
        self.meta = meta

    def __call__(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, head size]."""
        cache = self.layers[call.layer]
        return cache.attend(call, cache, self.meta)


def register() -> None:
    """Make ``attn_implementation="jitney"`` known to transformers. Idempotent: the registry belongs
    to the process, and every load registers the same stateless function."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedFunction | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: query, key and value are [1, heads, T, head size].

    Returns ([1, T, heads, head size], None), as every function of the AttentionInterface does.
    Raises TypeError if the module lost ``paged`` on the way.
    """
    if paged is None:
        raise TypeError("the module does not pass keyword arguments on to its attention")
    if "is_causal" not in extra:  # else transformers' call says it; here, the layer itself may
        extra["is_causal"] = bool(vars(module).get("is_causal", True))
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or None,  # 0 stands for none, as None does
        softcap=softcap,
        sinks=s_aux,
        mask=attention_mask,
        extra=extra,
    )
    return paged(call).unsqueeze(0), None


def forward(
    module: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    indices: Tensor,
    paged: PagedFunction,
) -> Tensor:
    """Run T flattened tokens through transformers' module: a :data:`StepFunction` of it.

    Where a step's tokens are under adapters, the linear layers add what these give.
    """
    adapted = paged.meta.adapted if isinstance(paged, PagedStep) else []
    with torch.inference_mode(), Hooks(module, adapted):
        output = module(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=indices,
            paged=paged,
        )
    return output.logits[0]
