"""What a language model says of itself: the answer to the task ``describe`` (docs/contract.md)."""

from jitney.config import EngineConfig
from jitney.messages import ModelInfo
from jitney.sampling_params import NAMES
from jitney.text.intake import adapter_names
from jitney.text.tokenizer import Tokenizer


def describe_model(
    tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> dict[str, object]:
    """What a client may ask of this model, and how to read what it writes."""
    return {
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "max_n": config.max_n,
        "max_logprobs": config.max_logprobs,
        "max_queued": config.max_queued,
        "chat_template": tokenizer.data.chat_template,
        "tool_template": tokenizer.data.tool_template,
        "sampling_parameters": NAMES,
        "sampling_defaults": info.sampling_defaults,
        "chat_template_parameters": config.chat_template_parameters,
        "tool_format": config.tool_format,
        "reasoning_format": config.reasoning_format,
        "adapters": adapter_names(config),
        "tiers": [tier.name for tier in config.tiers],
        "added_tokens": tokenizer.added_tokens,
    }
