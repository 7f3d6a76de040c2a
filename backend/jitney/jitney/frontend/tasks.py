"""The tasks besides generating: to tokenize, to detokenize, to describe the model.

Called by the service, in the threads that encode. Meant for clients that do not have the model's
tokenizer, such as the gateway.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from jitney.config import EngineConfig
from jitney.frontend.channel import NamedArray
from jitney.frontend.protocol import ClientRequest, string_array
from jitney.messages import ModelInfo
from jitney.sampling_params import NAMES, check_token_ids
from jitney.text.intake import adapter_names, encode_client_bytes
from jitney.text.tokenizer import Tokenizer


def perform(
    request: ClientRequest, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> Sequence[NamedArray]:
    """Do ``request.task`` and return the arrays of its only response. Their shapes: output_ids
    [number of tokens] for "tokenize", text_output [1] for "detokenize" and "describe".

    Raises InvalidArgumentError for a prompt that is too large or cannot be encoded, and for ids
    that the model does not have.
    """
    if request.task == "describe":
        return [("text_output", string_array([_describe(tokenizer, config, info)]))]
    if isinstance(request.prompt, bytes):
        assert request.task == "tokenize"  # a text or a chat
        prompt = encode_client_bytes(
            field=request.prompt_input,
            data=request.prompt,
            tokenizer=tokenizer,
            config=config,
            info=info,
        )
        return [("output_ids", np.array(prompt.ids, np.int32))]
    assert request.task == "detokenize"
    ids = request.prompt.tolist()
    check_token_ids("input_ids", ids, info.vocab_size)
    return [("text_output", string_array([tokenizer.decode(ids, skip_special_tokens=False)]))]


def _describe(tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo) -> bytes:
    """JSON of what a client may ask of this model, and of how to read what it writes."""
    description: dict[str, object] = {
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "max_n": config.max_n,
        "max_logprobs": config.max_logprobs,
        "max_queued": config.max_queued,
        "chat_template": tokenizer.data.chat_template,
        "sampling_parameters": NAMES,
        "chat_template_parameters": config.chat_template_parameters,
        "tool_format": config.tool_format,
        "reasoning_format": config.reasoning_format,
        "adapters": adapter_names(config),
        "tiers": [tier.name for tier in config.tiers],
        "added_tokens": tokenizer.added_tokens,
    }
    return msgspec.json.encode(description)
