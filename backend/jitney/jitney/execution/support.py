"""Which architectures can run on a paged cache: the refusals that a configuration alone decides.

Every check here is made before any weight is read. What only a running module can show (layers that
do not call us, masks of their own, …) is ``probe``'s. All raise UnsupportedModelError with the
model type and the reason.
"""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from jitney.errors import CheckpointError, UnsupportedModelError

# Rotary scalings whose factors depend on the longest sequence of the whole batch: what a request
# gets would depend on its neighbours, and keys cached before a change would be wrong after it.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refuse(model_type: str, reason: str) -> UnsupportedModelError:
    """The error for an architecture that cannot be served."""
    return UnsupportedModelError(f"models of type {model_type} cannot be served: {reason}")


def check_raw_config(config: dict[str, Any], known_types: set[str]) -> None:
    """Checks on ``config.json`` as it stands, before transformers interprets it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json does not name a model_type")
    if model_type not in known_types:
        if config.get("auto_map"):
            raise refuse(
                model_type,
                "config.json asks for code from the checkpoint (auto_map), and none is ever run",
            )
        raise refuse(model_type, "this version of transformers does not know it")


def check_config(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Checks on the configuration; returns the class that will be loaded."""
    name = config.model_type
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(name, "it is an encoder-decoder, whose decoder reads a second sequence")
    if text is not config:
        raise refuse(name, "it is a multi-modal model, and only text models are served")
    _check_layer_types(config)
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise refuse(
                name,
                f"its rotary scaling is {rope_type!r}, whose factors depend on the longest "
                "sequence of a batch",
            )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refuse(name, "transformers has no causal language model of it")
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(cls, "_is_stateful", False):
        raise refuse(name, "it has recurrent layers, whose state is not kept in a paged cache")
    if not getattr(cls, "_supports_attention_backend", False):
        raise refuse(name, "its attention does not go through transformers' AttentionInterface")
    if getattr(config, "add_cross_attention", False):
        raise refuse(name, "it has cross-attention, which reads a second sequence")
    if not getattr(config, "is_causal", True):
        raise refuse(name, "its attention is not causal")
    return cls


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer as the configuration states it, which is what transformers'
    own masks follow. None is full attention."""
    window = getattr(config, "sliding_window", None) or None
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _check_layer_types(config: PreTrainedConfig) -> None:
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _PAGED_LAYER_TYPES:
            raise refuse(
                config.model_type,
                f"layer {index} is of type {kind!r}, and only full and sliding attention are kept "
                "in a paged cache",
            )


def _rope_types(parameters: object) -> Iterator[str]:
    """Every ``rope_type`` in ``rope_parameters``, which may be nested by layer type."""
    if isinstance(parameters, dict):
        kind = parameters.get("rope_type")
        if isinstance(kind, str):
            yield kind
        for value in parameters.values():
            yield from _rope_types(value)
