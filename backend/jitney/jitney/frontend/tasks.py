"""What a client may ask of a model besides generating: its tokenizer, and what it can do.

Called by the service, in the threads that encode. Meant for clients that do not have the model's
tokenizer, such as the gateway.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from jitney.config import EngineConfig
from jitney.frontend.channel import NamedArray
from jitney.frontend.protocol import ClientRequest, strings
from jitney.messages import ModelInfo
from jitney.sampling_params import NAMES, check_token_ids
from jitney.text.intake import adapter_names, encode_input
from jitney.text.tokenizer import Tokenizer


def perform(
    request: ClientRequest, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> Sequence[NamedArray]:
    """The arrays of the only response. tokenize: output_ids [number of tokens]; detokenize and
    describe: text_output [1]. Raises InvalidArgumentError for a prompt that "generate" would refuse
    too."""
    if request.task == "describe":
        return [("text_output", strings([_describe(tokenizer, config, info)]))]
    if isinstance(request.prompt, bytes):  # tokenize: a text or a chat
        ids, _ = encode_input(request.prompt_input, request.prompt, tokenizer, config, info)
        return [("output_ids", np.array(ids, np.int32))]
    ids = request.prompt.tolist()  # detokenize
    check_token_ids("input_ids", ids, info.vocab_size)
    return [("text_output", strings([tokenizer.decode(ids, skip_special_tokens=False)]))]


def _describe(tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo) -> bytes:
    """JSON: limits, the sampling parameters and template parameters that are taken, the chat
    template, adapters, tiers, added tokens, the names of the formats of what it writes."""
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
