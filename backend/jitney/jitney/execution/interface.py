"""A loaded model, and the bridge between transformers' modules and our paged attention.

transformers looks attention functions up by name in its AttentionInterface. Ours is registered as
``jitney``; it keeps no state. The step reaches it as the keyword argument ``paged``, which
transformers hands from ``model(..., paged=...)`` down to each attention layer. ``paged`` is a
callable that takes one :class:`AttentionCall`: in service a :class:`PagedStep`, at load also a
recorder.

No mask function is registered under the name, so transformers builds no masks: the query at
position p sees what the block table holds up to p.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from jitney.execution.attention import AttentionMetadata
from jitney.execution.low_rank import AdapterSpan, BeginProducts, Hooks, Pack, Site, plain_products
from jitney.execution.state_rows import SlotCache
from jitney.execution.state_slots import StateLayout, StateSlots

NAME = "jitney"


class AttentionCall(NamedTuple):
    """One layer's call. T flattened tokens of all rows of the step.

    ``query``, ``key`` and ``value`` may have any strides.
    """

    layer: int
    query: Tensor
    """[T, heads, head size], after rotary embedding. Query head h reads KV head
    ``h // (heads // KV heads)``."""
    key: Tensor
    """[T, KV heads, head size], after rotary embedding."""
    value: Tensor
    """[T, KV heads, head size]"""
    scale: float
    """Scores are multiplied by it."""
    window: int | None = None
    """The query at position p sees keys max(0, p - window + 1) to p."""
    softcap: float | None = None
    """If set, scores become ``softcap * tanh(score / softcap)``."""
    sinks: Tensor | None = None
    """[heads]: one more score for each head, which counts in the denominator of the softmax."""
    mask: Tensor | None = None
    """Not served: the probe refuses a model that brings one."""
    extra: Mapping[str, Any] = MappingProxyType({})
    """All other keyword arguments that the layer gave. Attention ignores them, so the probe refuses
    those that would change its result. ``is_causal`` is always among them."""


PagedFunction = Callable[[AttentionCall], Tensor]


class LayerCache(NamedTuple):
    """One layer's part of the KV cache and the function that reads and writes it."""

    keys: Tensor
    """Its shape is :func:`attention.cache_shape`."""
    values: Tensor
    """As the keys."""
    attend: "AttentionFunction"
    key_scale: Tensor | None = None
    """float32 [KV heads], of a float8 cache that has scales. A key is what the cache holds, times
    the scale of its head."""
    value_scale: Tensor | None = None
    """The same for values."""


class KvScales(NamedTuple):
    """The scales of one layer's float8 cache, as :class:`LayerCache` has them."""

    key: Tensor
    value: Tensor


class AttentionFunction(Protocol):
    """Attention over paged caches. Belongs to one engine."""

    name: str

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write the new K and V to their slots, converted to the cache's dtype, then attend
        causally over each row's block table. Returns [T, heads, head size] of the query's dtype.
        """


StepFunction = Callable[[Tensor, Tensor, Tensor, PagedFunction], Tensor]
"""Called as ``forward(ids, positions, indices, paged)``: a forward pass over T flattened tokens.

``ids`` and ``positions`` are [T]. ``indices`` says which of the T tokens need logits; there is at
least one. All three are int64. Returns logits [len(indices), vocabulary]."""


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps in the cache and how it attends."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None

    @property
    def is_paged(self) -> bool:
        """Whether the layer keeps K and V: see :data:`UNPAGED`."""
        return self.num_kv_heads > 0


UNPAGED = LayerSpec(num_heads=0, num_kv_heads=0, head_size=0, window=None)
"""A layer that keeps nothing in blocks. Its caches are tensors without elements, so that a layer's
number is its index among the caches."""


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
    """Runs the module: :func:`forward_module`, or a faster form."""
    fused: bool = False
    """Whether ``forward`` is the fused form of the whole model."""
    sites: Mapping[str, Site] = field(default_factory=dict)
    """The linear layers that adapters may change, by their paths in the module as it was loaded.
    Empty without option ``adapters``."""
    pack: Pack | None = None
    """Turns an adapter's factors (``low_rank``) into the form that ``forward`` reads, which is kept
    as ``LowRank.packed``. None: ``forward`` reads the factors themselves."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's ``generation_config.json`` as it stands; empty if there is none."""
    cache_scales: Mapping[int, KvScales] = field(default_factory=dict)
    """By layer, the scales of a float8 cache that the checkpoint states, on the device. Layers for
    which it states none are missing."""
    states: StateLayout | None = None
    """What layers keep beside K and V, or in place of them."""


class PagedStep:
    """One step's attention: the metadata of its rows, and the caches by layer index. In a model
    with state layers also the states of its rows."""

    def __init__(
        self, layers: list[LayerCache], meta: AttentionMetadata, states: StateSlots | None = None
    ) -> None:
        self.layers = layers
        self.meta = meta
        self.cache: SlotCache | None = None
        """What a model with state layers is called with."""
        if states is not None:
            self.cache = SlotCache(states, meta.slots)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, head size]."""
        if self.cache is not None and self.cache.slots.layout.shares_attention:
            call = call._replace(layer=self.cache.attending)
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
    if "is_causal" not in extra:
        # Some architectures state it as an argument, others as an attribute of the layer.
        extra["is_causal"] = bool(vars(module).get("is_causal", True))
    # The cache of a layer has heads of one size. The values of latent attention (MLA) are narrower
    # than its keys: zeros fill them up, and the zeros that these give are cut off again.
    size = max(query.shape[-1], value.shape[-1])
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        query=_widened(query[0].transpose(0, 1), size),
        key=_widened(key[0].transpose(0, 1), size),
        value=_widened(value[0].transpose(0, 1), size),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or None,  # some architectures give 0 for no window
        softcap=softcap,
        sinks=s_aux,
        mask=attention_mask,
        extra=extra,
    )
    return paged(call)[..., : value.shape[-1]].unsqueeze(0), None


def _widened(heads: Tensor, size: int) -> Tensor:
    """``heads`` [T, heads, head size] with zeros up to ``size``."""
    missing = size - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads


def forward_module(
    module: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    indices: Tensor,
    paged: PagedFunction,
    begin_products: BeginProducts = plain_products,
) -> Tensor:
    """Run T flattened tokens through transformers' module. With the module bound, it is a
    :data:`StepFunction`.

    In a step with adapters, ``begin_products`` is called once, with the spans of tokens that are
    under one adapter each. It returns a function that adds (x A^T) B^T to the result of each linear
    layer that adapters change (see ``low_rank``).
    """
    # Only a step in service has adapters and states; a recorder has none.
    adapted: list[AdapterSpan] = []
    caches: dict[str, SlotCache] = {}
    if isinstance(paged, PagedStep):
        adapted = paged.meta.adapted
        if paged.cache is not None:
            caches[paged.cache.slots.layout.cache_argument] = paged.cache
    with torch.inference_mode(), Hooks(module, adapted, begin_products):
        output = module(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=indices,
            paged=paged,
            **caches,
        )
    return output.logits[0]
