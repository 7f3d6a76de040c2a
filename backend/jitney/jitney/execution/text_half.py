"""The language model of a checkpoint that also has eyes or ears: served without its towers.

transformers describes such a checkpoint by a configuration of several parts. One is the text's,
which most often is a type of its own (``gemma3`` holds a ``gemma3_text``). The module is made of
that part alone. The files name its tensors by their place in the whole, so their names are mapped.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)

from jitney.execution.checkpoint import Checkpoint

KEY_MAPPING = {
    r"^(?:model\.)?language_model\.model\.": "model.",
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
"""From names of tensors in the whole checkpoint to those in its text half, as regular expressions.
Names in a checkpoint that is text alone match none of them."""


def text_part(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The configuration of the text half; None if transformers has no language model of it.

    A configuration that is of text alone is its own text half, and so is that of an encoder with a
    decoder, which are never taken apart.
    """
    if config.is_encoder_decoder:
        return config if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None
    try:
        part: PreTrainedConfig = config.get_text_config(decoder=True)
    except ValueError:  # it has several, and transformers does not choose
        return None
    if type(part) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        cls = _class_of(part, is_whole=part is config)
        if cls is None:
            return None
        # ``exist_ok``: else transformers ignores a class for a configuration of its own.
        AutoModelForCausalLM.register(type(part), cls, exist_ok=True)
    if part is not config and getattr(part, "eos_token_id", None) is None:
        part.eos_token_id = getattr(config, "eos_token_id", None)
    return part


def is_text_half(checkpoint: Checkpoint, config: PreTrainedConfig) -> bool:
    """Whether ``config`` describes a part of the checkpoint only."""
    return bool(checkpoint.config["model_type"] != config.model_type)


def _class_of(part: PreTrainedConfig, *, is_whole: bool) -> Any:
    """The causal language model of a text part that AutoModelForCausalLM does not list; None if
    there is none. ``is_whole``: the part is all of the checkpoint's configuration."""
    listed = _listed_for_the_whole(part)
    if listed is not None:
        return listed
    # A bare decoder: Qwen 3 VL, for one, has its head on the whole only.
    if is_whole or type(part) not in MODEL_MAPPING:
        return None
    decoder: Any = MODEL_MAPPING[type(part)]
    return type(f"{decoder.__name__}ForCausalLM", (_DecoderWithHead,), _facts_of(decoder))


def _listed_for_the_whole(part: PreTrainedConfig) -> Any:
    """The class that is listed for a sibling of the part's type but is made of the part:
    ``MllamaForCausalLM`` is listed for ``mllama``. None if there is none."""
    package = type(part).__module__.split(".")[-2]
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type_to_module_name(model_type) != package:
            continue
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
        if cls.config_class is type(part):
            return cls
    return None


def _facts_of(decoder: Any) -> dict[str, Any]:
    """What transformers asks a class for, and what a head does not change."""
    names = (
        "config_class",
        "_supports_attention_backend",
        "_supports_sdpa",
        "_is_stateful",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
    )
    return {name: getattr(decoder, name) for name in names if hasattr(decoder, name)}


class _DecoderWithHead(PreTrainedModel, GenerationMixin):
    """A decoder of transformers with a head of logits, as its own causal language models are."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **decoder_inputs: Any,
    ) -> CausalLMOutputWithPast:
        """``input_ids`` is [rows, tokens]; logits are [rows, kept, vocabulary]. ``logits_to_keep``
        counts from the end (0: all), or is the indices of tokens."""
        outputs = self.model(input_ids=input_ids, **decoder_inputs)
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
            hidden = hidden[:, kept]
        else:
            hidden = hidden[:, logits_to_keep]
        return CausalLMOutputWithPast(
            logits=self.lm_head(hidden),
            past_key_values=outputs.past_key_values,
        )
