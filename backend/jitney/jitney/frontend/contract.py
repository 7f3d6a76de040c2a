"""The contract table as data: the tensors a client may send and receive, with their types.

Read by the server's auto-complete step (:func:`complete_config`) and the parser of requests.
Imports nothing heavy, because auto-completion runs in a process of its own that lives for a moment.
"""

from typing import Any

PROMPT_INPUTS = ("text_input", "input_ids", "messages")
"""A request gives exactly one of them; to ``describe`` the model, none."""

TASKS = {
    "generate": PROMPT_INPUTS,
    "tokenize": ("text_input", "messages"),
    "detokenize": ("input_ids",),
    "describe": (),
}
"""What a client may ask for -> the inputs of which one holds the prompt; empty: it needs none."""

OUTPUTS = {
    "text_output": ("TYPE_STRING", -1),
    "finish_reason": ("TYPE_STRING", -1),
    "stop_string": ("TYPE_STRING", -1),
    "cumulative_logprob": ("TYPE_FP32", -1),
    "logprobs": ("TYPE_STRING", -1),
    "prompt_logprobs": ("TYPE_STRING", 1),
    "num_input_tokens": ("TYPE_UINT32", 1),
    "num_output_tokens": ("TYPE_UINT32", -1),
    "output_ids": ("TYPE_INT32", -1),
    "timing": ("TYPE_STRING", 1),
}

_ALWAYS = ("text_output", "prompt_logprobs")
RETURN_FLAGS = tuple(f"return_{name}" for name in OUTPUTS if name not in _ALWAYS)
"""``return_X`` asks for the output X in every response (``timing``: in the last one)."""

INPUTS = {
    "text_input": ("TYPE_STRING", 1),
    "input_ids": ("TYPE_INT32", -1),
    "messages": ("TYPE_STRING", 1),
    "task": ("TYPE_STRING", 1),
    "stream": ("TYPE_BOOL", 1),
    "sampling_parameters": ("TYPE_STRING", 1),
    "exclude_input_in_output": ("TYPE_BOOL", 1),
    **dict.fromkeys(RETURN_FLAGS, ("TYPE_BOOL", 1)),
}
"""Name -> the server's name of the type, and the length of the only axis (-1: any length). To the
server all are optional; the parser checks which combinations make sense."""


def complete_config(config: Any) -> Any:
    """Fill the server's ``ModelConfig`` object: tensors, decoupled responses, no server batching.

    What ``config.pbtxt`` already says must agree with the table; the object raises ValueError with
    both sides otherwise, and the load fails with that text.
    """
    declared = {tensor["name"] for tensor in config.as_dict()["input"]}
    for name, (data_type, length) in INPUTS.items():
        tensor: dict[str, object] = {"name": name, "data_type": data_type, "dims": [length]}
        # config.pbtxt may declare an input of ours and not call it optional: then leave it so.
        if name not in declared:
            tensor["optional"] = True
        config.add_input(tensor)
    for name, (data_type, length) in OUTPUTS.items():
        config.add_output({"name": name, "data_type": data_type, "dims": [length]})
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    return config
