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
from jitney.sampling_params import check_token_ids
from jitney.text.description import describe_model
from jitney.text.intake import encode_client_bytes
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
        description = msgspec.json.encode(describe_model(tokenizer, config, info))
        return [("text_output", string_array([description]))]
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
    tokenizer.check_takes("task detokenize")
    ids = request.prompt.tolist()
    check_token_ids("input_ids", ids, info.vocab_size)
    return [("text_output", string_array([tokenizer.decode(ids, skip_special_tokens=False)]))]
