"""A loaded model, and the bridge between transformers' modules and our paged attention.

transformers looks attention functions up by name in its AttentionInterface. Ours is registered as
``jitney``; it keeps no state. The step reaches it as the keyword argument ``paged``, which
transformers hands from ``model(..., paged=...)`` down to each attention layer. ``paged`` is a
callable that takes one :class:`AttentionCall`: in service a :class:`PagedStep`, at load also a
recorder.

No mask function is registered under the name, so transformers builds no masks: the query at
position p sees what the block table holds up to p.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from jitney.execution.attention import AttentionMetadata
from jitney.execution.low_rank import AdapterSpan, Pack, Site, hook_layers
from jitney.execution.opaque import OpaqueModule, OpaqueTraits
from jitney.execution.state_rows import SlotCache
from jitney.execution.state_slots import StateLayout, StateSlots

NAME = "jitney"
LATENTS = "jitney_latents"
"""The attribute of an attention module that says how it makes keys and values of latents. Set by
``latents.use_latents``."""


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
    slopes: Tensor | None = None
    """float32 [heads]: ALiBi. A score becomes larger by its head's slope, times the key's position
    less the query's."""
    latents: "Latents | None" = None
    """If set, ``key`` [T, 1, rank + rotary] is what the cache keeps of each token, and ``value`` is
    its first ``rank`` elements. ``query`` is as for keys that are made of it (:class:`Latents`)."""
    token_index: "TokenIndex | None" = None
    """With latents: which of the tokens before it each query sees. None: all."""
    extra: Mapping[str, Any] = MappingProxyType({})
    """All other keyword arguments that the layer gave. Attention ignores them, so the probe refuses
    those that would change its result. ``is_causal`` is always among them."""

    @property
    def value_size(self) -> int:
        """The last dimension of the result, which is [T, heads, value size]."""
        return self.value.shape[-1] if self.latents is None else self.latents.value_size

    @property
    def index_key_size(self) -> int:
        """Elements of the key that the cache keeps for each token beside its latent."""
        index = self.token_index
        if index is None or index.is_shared(self.layer):
            return 0
        return index.key_size


class Latents(Protocol):
    """How one layer of latent attention (MLA, https://arxiv.org/abs/2405.04434) makes keys and
    values of a token's latent, [rank], and its rotary part, which all heads share."""

    rank: int
    rotary_size: int
    value_size: int
    """Of one head."""
    key_up: Tensor
    """[heads, head size - rotary size, rank]: head h's key is ``key_up[h] @ latent``, then the
    rotary part."""
    value_up: Tensor
    """[heads, rank, value size]: head h's value is ``latent @ value_up[h]``."""


class TokenIndex(Protocol):
    """Chooses, within one step, the tokens that each query attends to (DeepSeek Sparse Attention).

    Layers may share the choice of a layer before them."""

    key_size: int

    def is_shared(self, layer: int) -> bool:
        """Whether ``layer`` takes the choice of a layer before it, and so keeps no keys."""

    def choose(
        self, row: int, tokens: slice, context: int, exchange: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The tokens that a row's queries see, among those up to their own: int64 [queries, k],
        indices in the row's ``context``.

        ``tokens`` are the row's in the step. ``exchange`` writes their keys [queries, key size] to
        the cache, and returns those of the whole context."""


PagedFunction = Callable[[AttentionCall], Tensor]


class LayerCache(NamedTuple):
    """One layer's part of the KV cache and the function that reads and writes it."""

    keys: Tensor
    """Its shape is :func:`attention.cache_shape`. With latents it holds these."""
    values: Tensor
    """As the keys. With latents it holds the keys of the layer's :class:`TokenIndex`, if any."""
    attend: "AttentionFunction"
    key_scale: Tensor | None = None
    """float32 [KV heads], of a float8 cache that has scales. A key is what the cache holds, times
    the scale of its head."""
    value_scale: Tensor | None = None
    """The same for values."""
    again: int | None = None
    """The number of the cache for this layer's next call in the same step. None: it has no more."""


class KvScales(NamedTuple):
    """The scales of one layer's float8 cache, as :class:`LayerCache` has them."""

    key: Tensor
    value: Tensor


class AttentionFunction(Protocol):
    """Attention over paged caches. Belongs to one engine."""

    name: str

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write the new K and V to their slots, converted to the cache's dtype, then attend
        causally over each row's block table. Returns [T, heads, value size] of the query's dtype.
        """


StepFunction = Callable[[Tensor, Tensor, Tensor, PagedFunction], Tensor]
"""Called as ``forward(ids, positions, indices, paged)``: a forward pass over T flattened tokens.

``ids`` and ``positions`` are [T]. ``indices`` says which of the T tokens need logits; there is at
least one. All three are int64. Returns logits [len(indices), vocabulary]."""


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps in the cache and how it attends.

    A layer that attends more than once in a pass has a specification, and a cache, for each time:
    the first stands at the layer's own number, the others behind those of all layers."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """Of the keys."""
    window: int | None
    value_size: int | None = None
    """Of the values in the cache. None: that of the keys."""
    chunk: int | None = None
    """The query at position p sees no key before ``p // chunk * chunk``."""
    has_slopes: bool = False
    """Whether it attends with ALiBi."""
    has_latents: bool = False
    """Whether it keeps latents: one row a token, of ``head_size``. ``value_size`` is that of the
    keys of its index."""
    again: int | None = None
    """See :class:`LayerCache`."""

    @property
    def cached_value_size(self) -> int:
        """Of the values in the cache."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def has_index(self) -> bool:
        """Whether it keeps latents, and keys of an index beside them."""
        return self.has_latents and self.cached_value_size > 0

    @property
    def is_paged(self) -> bool:
        """Whether the layer keeps K and V: see :data:`UNPAGED`."""
        return self.num_kv_heads > 0


UNPAGED = LayerSpec(num_heads=0, num_kv_heads=0, head_size=0, window=None)
"""A layer that keeps nothing in blocks. Its caches are tensors without elements, so that a layer's
number is its index among the caches."""


def kind_of_cache(layers: Sequence[LayerSpec], *, has_states: bool) -> str:
    """``ModelInfo.cache`` of a model that is not opaque."""
    kinds = []
    if any(layer.has_index for layer in layers):
        kinds.append("indexed")
    elif any(layer.has_latents for layer in layers):
        kinds.append("latents")
    if any(layer.is_paged and not layer.has_latents for layer in layers):
        kinds.append("paged")
    if has_states:
        kinds.append("state")
    return "+".join(kinds)


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
    sites: Mapping[str, Site] = field(default_factory=dict)
    """The linear layers that adapters may change, by their paths in the module as it was loaded.
    Empty without option ``adapters``."""
    pack: Pack | None = None
    """Turns an adapter's factors (``low_rank``) into the form that ``forward`` reads, which is kept
    as ``LowRank.packed``. None: ``forward`` reads the factors themselves."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's ``generation_config.json`` as it stands; empty if there is none."""
    opaque: OpaqueModule | None = None
    """Set if sequences keep their past in opaque caches (see ``opaque``). Then there are no
    ``layers``, and ``forward`` is not called."""
    opaque_traits: OpaqueTraits | None = None
    """What is known of these caches."""
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
        self._next: dict[int, int] = {}
        """By layer, for those that attend again: the number of the cache of the next call."""
        self.cache: SlotCache | None = None
        """What a model with state layers is called with."""
        if states is not None:
            self.cache = SlotCache(states, meta.slots)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, value size]."""
        layer = call.layer
        if self.cache is not None and self.cache.slots.layout.shares_attention:
            layer = self.cache.attending
        cache = self.take_cache(layer)
        return cache.attend(call, cache, self.meta)

    def take_cache(self, layer: int) -> LayerCache:
        """The cache for the layer's next call in this step."""
        cache = self.layers[self._next.get(layer, layer)]
        if cache.again is not None:
            self._next[layer] = cache.again
        return cache


def first_attention(cls: type[PreTrainedModel]) -> str:
    """The attention function that a module of this class is made with: ours, if the class allows
    it. :func:`set_attention` may change it afterwards."""
    if cls._supports_attention_backend:
        return NAME
    # transformers' own choice. Falcon's eager attention adds its ALiBi twice.
    return "sdpa" if cls._supports_sdpa else "eager"


def looks_up_attention(cls: type[PreTrainedModel]) -> bool:
    """Whether modules of this class look their attention function up. Some do, although
    transformers does not know it (StableLM, BioGPT)."""
    names = vars(sys.modules[cls.__module__])
    return bool(cls._supports_attention_backend) or "ALL_ATTENTION_FUNCTIONS" in names


def set_attention(module: PreTrainedModel, name: str) -> None:
    """Let ``module`` look up this attention function. Without effect for one that looks up none."""
    if module._supports_attention_backend:
        module.set_attn_implementation(name)
    elif looks_up_attention(type(module)):
        module.config._attn_implementation_internal = name


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
    latents: Latents | None = vars(module).get(LATENTS)
    if latents is not None:
        index: TokenIndex | None = extra.pop("indices", None)
        # The layer hands over latents and their rotary parts, each as one head (``latents``).
        row = torch.cat((key[0], value[0]), dim=-1).transpose(0, 1)
        call = AttentionCall(
            layer=module.layer_idx,  # type: ignore[arg-type]
            query=query[0].transpose(0, 1),
            key=row,
            value=row[..., : latents.rank],
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window or None,
            softcap=softcap,
            sinks=s_aux,
            # A layer with an index folds it into a mask, which our index takes the place of.
            mask=attention_mask if index is None else None,
            latents=latents,
            token_index=index,
            extra=extra,
        )
        return paged(call).unsqueeze(0), None
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
    module: PreTrainedModel, ids: Tensor, positions: Tensor, indices: Tensor, paged: PagedFunction
) -> Tensor:
    """Run T flattened tokens through transformers' module. With the module bound, it is a
    :data:`StepFunction`. In a step with adapters, hooks add what these give (see ``low_rank``)."""
    # Only a step in service has adapters; a recorder has none.
    adapted: list[AdapterSpan] = []
    if isinstance(paged, PagedStep):
        adapted = paged.meta.adapted
    with hook_layers(module, adapted):
        return call_module(module, ids, positions, indices, paged)


def call_module(
    module: PreTrainedModel, ids: Tensor, positions: Tensor, indices: Tensor, paged: PagedFunction
) -> Tensor:
    """As :func:`forward_module`, without regard to adapters."""
    # Only a step in service has states.
    caches: dict[str, SlotCache] = {}
    if isinstance(paged, PagedStep) and paged.cache is not None:
        caches[paged.cache.slots.layout.cache_argument] = paged.cache
    with torch.inference_mode():
        output = module(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=indices,
            paged=paged,
            **caches,
        )
    return output.logits[0]
