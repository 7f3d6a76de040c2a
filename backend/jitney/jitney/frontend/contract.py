"""The contract table as data: the tensors a client may send and receive, with their types.

Read by three: the server's auto-complete step (:func:`complete_config`), the
parser of requests and the writer of responses. Imports nothing heavy, because auto-completion runs
in a process of its own that lives for a moment.
"""

from typing import Any, NamedTuple


class TensorSpec(NamedTuple):
    """One tensor of the model's signature. ``dims`` are per request: the model does not batch."""

    name: str
    data_type: str
    """The server's name of it: ``TYPE_STRING``, ``TYPE_BOOL``, …"""
    dims: int
    """Elements of the only axis; -1: any number."""


PROMPT_INPUTS = ("text_input", "input_ids", "messages")
"""Exactly one of them is given."""

RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_timing",
)
"""``return_X`` asks for the output X in every response (``timing``: in the last one)."""

INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", 1),
    TensorSpec("input_ids", "TYPE_INT32", -1),
    TensorSpec("messages", "TYPE_STRING", 1),
    TensorSpec("stream", "TYPE_BOOL", 1),
    TensorSpec("sampling_parameters", "TYPE_STRING", 1),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", 1),
    *(TensorSpec(flag, "TYPE_BOOL", 1) for flag in RETURN_FLAGS),
)
"""All optional for the server; the parser checks which combinations make sense."""

OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", -1),
    TensorSpec("finish_reason", "TYPE_STRING", -1),
    TensorSpec("cumulative_logprob", "TYPE_FP32", -1),
    TensorSpec("logprobs", "TYPE_STRING", -1),
    TensorSpec("prompt_logprobs", "TYPE_STRING", 1),
    TensorSpec("num_input_tokens", "TYPE_UINT32", 1),
    TensorSpec("num_output_tokens", "TYPE_UINT32", -1),
    TensorSpec("output_ids", "TYPE_INT32", -1),
    TensorSpec("timing", "TYPE_STRING", 1),
)


def complete_config(config: Any) -> Any:
    """Fill the server's ``ModelConfig`` object: tensors, decoupled responses, no server batching.

    What ``config.pbtxt`` already says must agree with the table; the object raises ValueError with
    both sides otherwise, and the load fails with that text.
    """
    declared = {tensor["name"] for tensor in config.as_dict()["input"]}
    for spec in INPUTS:
        tensor: dict[str, object] = {**spec._asdict(), "dims": [spec.dims]}
        if spec.name not in declared:  # a config may insist on an input that we do not
            tensor["optional"] = True
        config.add_input(tensor)
    for spec in OUTPUTS:
        config.add_output({**spec._asdict(), "dims": [spec.dims]})
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    return config
