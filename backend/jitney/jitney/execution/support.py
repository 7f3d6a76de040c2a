"""A checkpoint's configuration: what it says of the model, and what cannot run on a paged cache.

Every check here is made before any weight is read. What only a running module can show (layers that
do not call us, masks of their own, …) is ``probe``'s. Architectures that cannot be served are an
UnsupportedModelError with the model type and the reason.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from jitney.config import EngineConfig
from jitney.errors import (
    CheckpointError,
    ConfigError,
    InvalidArgumentError,
    UnsupportedModelError,
    first_line,
    show,
)
from jitney.execution.checkpoint import GENERATION_CONFIG, Checkpoint
from jitney.execution.interface import looks_up_attention
from jitney.execution.machine import DTYPES
from jitney.execution.own_attention import OWN_ATTENTION
from jitney.execution.position_offset import position_offset
from jitney.execution.text_half import text_part
from jitney.sampling_params import check_sampling_params, parse_sampling_params

_CHECKPOINT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LENGTH_NAMES = ("position", "length", "window", "chunk", "context", "floor_scale", "seq")
"""Parts of the names that configurations give to lengths, in tokens."""
_POSITION_NAMES = ("max_position_embeddings", "max_target_positions")
"""What configurations call the number of positions that a model has."""
_LENGTH_OF_TRAINING = ("max_seq_len", "seq_length", "context_length", "n_ctx")
"""What they call the length of the sequences that it was trained with."""
_UNSTATED_LENGTH = 32_768
"""``max_model_len`` by default where the checkpoint states neither. As a rule the model has no
positions: a state holds the past."""
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of ``generation_config.json`` that are sampling parameters."""
_PAGED_LAYER_TYPES = frozenset({
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
})  # fmt: skip
_STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Layers with states; the hybrid ones attend as well."""
_BARE_LAYER_TYPES = frozenset({"moe", "mlp"})
"""Layers that keep nothing."""
_CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""Names under which transformers' models take a cache."""
_SERVED_LAYER_TYPES = _PAGED_LAYER_TYPES | _STATE_LAYER_TYPES | _BARE_LAYER_TYPES


def unservable(model_type: str, reason: str) -> UnsupportedModelError:
    """The error for a model that cannot be served, for the caller to raise."""
    error = UnsupportedModelError(f"models of type {model_type} cannot be served: {reason}")
    error.reason = reason
    return error


def parse_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """``config.json`` as transformers reads it, once it has passed every check here. What
    transformers cannot read is a CheckpointError."""
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{checkpoint.config_name} does not name a model_type")
    if model_type not in CONFIG_MAPPING:
        reason = "config.json asks for code from the checkpoint (auto_map), and none is ever run"
        if not checkpoint.config.get("auto_map"):
            reason = "this version of transformers does not know it"
        raise unservable(model_type, reason)
    try:
        if checkpoint.gguf is not None:
            config = AutoConfig.for_model(**checkpoint.gguf.config)
        else:
            config = AutoConfig.from_pretrained(
                checkpoint.folder, local_files_only=True, trust_remote_code=False
            )
    except MemoryError:
        raise
    except Exception as error:  # validation errors come in many classes
        reason = first_line(error, checkpoint.folder)
        raise CheckpointError(f"{checkpoint.config_name} cannot be used: {reason}") from error
    has_model = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if getattr(config, "is_encoder_decoder", False) and not has_model:
        # Its decoder alone would read a second sequence all the same.
        raise unservable(config.model_type, "transformers has no causal language model of it")
    text = text_part(config)
    if text is None or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unservable(
            config.model_type,
            "transformers has no causal language model of it or of its text half",
        )
    if text is not config and checkpoint.config.get("quantization_config"):
        raise unservable(
            config.model_type,
            "its weights are quantized, and of a multi-modal model only plain weights are read",
        )
    return text


def context_length(
    config: EngineConfig, hf_config: PreTrainedConfig, *, is_draft: bool = False
) -> int:
    """``max_model_len``, or the checkpoint's. Raises ConfigError if it is beyond the latter.

    ``is_draft``: the checkpoint is a draft model or a head. Then ``max_model_len`` is the model's,
    and the user need not have set it.
    """
    asked = config.max_model_len
    stated = _stated_length(hf_config, _POSITION_NAMES)
    if stated is not None:
        stated -= position_offset(hf_config)
    if asked is None:
        # Without learned or rotary positions there is no end; this is what it was trained with.
        return stated or _stated_length(hf_config, _LENGTH_OF_TRAINING) or _UNSTATED_LENGTH
    if stated is not None and asked > stated:
        if is_draft:
            bound = f"a checkpoint made for at least {asked:,} tokens, not {stated:,}"
            way_out = f"or set max_model_len to at most {stated:,}"
            raise ConfigError.of("speculation.model", config.model, f"{bound}; {way_out}")
        raise ConfigError.of(
            "max_model_len", asked, f"at most {stated}, which the checkpoint was made for"
        )
    return asked


def _stated_length(config: PreTrainedConfig, names: Sequence[str]) -> int | None:
    """The length that a configuration, or the one of its text model, states under one of these
    names."""
    for source in (config, config.get_text_config(decoder=True)):
        for name in names:
            length = getattr(source, name, None)
            if isinstance(length, int) and length > 0:
                return length
    return None


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that most of the weights are stored in. For a quantized checkpoint it is the dtype
    that they had before, by its configuration; bfloat16, if that states none.

    Raises UnsupportedModelError for others than the three that are read."""
    if checkpoint.config.get("quantization_config"):
        return _dtype_before_quantization(checkpoint)
    try:
        return _CHECKPOINT_DTYPES[checkpoint.weights_dtype]
    except KeyError:
        reason = (
            f"its weights are stored as {checkpoint.weights_dtype}, and only F32, BF16 and F16 are "
            "read"
        )
        raise unservable(str(checkpoint.config["model_type"]), reason) from None


def _dtype_before_quantization(checkpoint: Checkpoint) -> torch.dtype:
    """See :func:`stored_dtype`."""
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if name is None:
        return torch.bfloat16
    dtype = DTYPES.get(str(name))
    if dtype is None:
        reason = f"its dtype is {show(name)}, but must be {' or '.join(DTYPES)}"
        raise unservable(str(checkpoint.config["model_type"]), reason)
    return dtype


def eos_ids(checkpoint: Checkpoint, vocab_size: int) -> frozenset[int]:
    """The tokens that end a sequence: those in ``generation_config.json`` and in ``config.json``.
    Raises CheckpointError for what is no token id."""
    ids: set[int] = set()
    text = checkpoint.config.get("text_config")
    sources = [checkpoint.generation_config, checkpoint.config]
    if isinstance(text, dict):
        sources.append(text)
    for source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise CheckpointError(f"eos_token_id is {show(value)}, which is not a token id")
            if 0 <= item < vocab_size:  # some configurations carry -1 for none
                ids.add(item)
    return frozenset(ids)


def sampling_defaults(
    generation_config: Mapping[str, Any], config: EngineConfig, vocab_size: int
) -> dict[str, float]:
    """The sampling parameters that a ``generation_config.json`` states, by our names; empty if
    option ``generation_config`` is none. Raises CheckpointError for one that no request may have.

    ``do_sample: false`` is a temperature of 0. Without ``do_sample`` the others count, as in vLLM.
    """
    if config.generation_config == "none":
        return {}
    stated = {name: generation_config.get(name) for name in _SAMPLING_DEFAULTS}
    given = {name: value for name, value in stated.items() if value is not None}
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        params = parse_sampling_params(given)
        check_sampling_params(params, config, vocab_size=vocab_size)
    except InvalidArgumentError as error:
        raise CheckpointError(
            f"{GENERATION_CONFIG} cannot be used: {error} (option generation_config 'none' leaves "
            "it out)"
        ) from None
    return {name: getattr(params, name) for name in given}


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer as the configuration states it, which is what transformers'
    own masks follow. None is full attention."""
    window: int | None = getattr(config, "sliding_window", None)
    is_used: bool | None = getattr(config, "use_sliding_window", None)  # few architectures have it
    if window == 0 or is_used is False:
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind in ("sliding_attention", "hybrid_sliding") else None for kind in types]


def has_state_layers(config: PreTrainedConfig) -> bool:
    """Whether layers keep states (see ``state_slots``)."""
    layer_types = getattr(config, "layer_types", None) or ()
    return any(kind in _STATE_LAYER_TYPES for kind in layer_types)


def attends_with_index(config: PreTrainedConfig) -> bool:
    """Whether layers attend to tokens that an index chooses (see ``token_index``)."""
    return getattr(config, "index_topk", None) is not None


def cache_argument(model: type[PreTrainedModel] | PreTrainedModel) -> str | None:
    """The name under which a model takes a cache of transformers; None if it takes none."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names), None)


def layer_chunks(config: PreTrainedConfig) -> list[int | None]:
    """The chunks of each layer in which it attends, in tokens. None: it has none."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return [None] * config.num_hidden_layers
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    return [chunk if kind == "chunked_attention" else None for kind in types]


def named_lengths(config: PreTrainedConfig, max_model_len: int) -> list[int]:
    """The lengths below ``max_model_len`` that the configuration names, such as
    ``original_max_position_embeddings``. A module may compute something else from there on."""
    found: set[int] = set()
    _collect_lengths(config.to_dict(), found)
    return sorted(length for length in found if 0 < length < max_model_len)


def _collect_lengths(fields: dict[Any, Any], found: set[int]) -> None:
    """Add the lengths in ``fields``, told by their names, to ``found``."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _collect_lengths(value, found)
        name = str(key)
        is_length = any(part in name for part in _LENGTH_NAMES) and "layers" not in name
        if is_length and isinstance(value, int) and not isinstance(value, bool):
            found.add(value)


def paged_obstacle(config: PreTrainedConfig) -> str | None:
    """The first reason why a model of this configuration, as transformers reads it, cannot run on
    a paged cache. None: whether it can shows once its module runs."""
    return next(_obstacles(config), None)


def _obstacles(config: PreTrainedConfig) -> Iterator[str]:
    """Each reason why a model of this configuration cannot run on a paged cache."""
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, whose decoder reads a second sequence"
    layer_types = getattr(config, "layer_types", None) or ()
    for index, kind in enumerate(layer_types):
        if kind not in _SERVED_LAYER_TYPES:
            yield (
                f"layer {index} is of type {kind!r}, and only attention, linear attention and "
                "convolutions are kept in blocks and slots"
            )
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # A class of hybrids may also have no recurrent layer in a checkpoint, as in Granite 4.0 Micro.
    is_known = layer_types and cache_argument(cls) is not None
    if getattr(cls, "_is_stateful", False) and not is_known:
        yield "it has recurrent layers, whose state is not in a cache of transformers"
    # Mamba has no attention at all.
    attends = looks_up_attention(cls) or config.model_type in OWN_ATTENTION
    if not attends and not has_state_layers(config):
        yield "its attention does not go through transformers' AttentionInterface"
    if getattr(config, "add_cross_attention", False):
        yield "it has cross-attention, which reads a second sequence"
    if not getattr(config, "is_causal", True):
        yield "its attention is not causal"
