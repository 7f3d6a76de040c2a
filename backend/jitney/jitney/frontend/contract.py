"""The contract table as data: the tensors a client may send and receive, with their types.

Read by the server's auto-complete step (:func:`complete_config`) and the parser of requests.
Imports nothing heavy, because auto-completion runs in a process of its own that lives for a moment.
"""

from typing import Any, NamedTuple


class TensorType(NamedTuple):
    """What a tensor of the contract holds. All have one axis."""

    data_type: str
    """The server's name of the type."""
    length: int
    """Of the axis; -1: any length."""


PROMPT_INPUTS = ("text_input", "input_ids", "messages")
"""A request gives exactly one of these inputs, or none if its task is ``describe``."""

TASKS = {
    "generate": PROMPT_INPUTS,
    "tokenize": ("text_input", "messages"),
    "detokenize": ("input_ids",),
    "describe": (),
}
"""What a client may ask for -> the inputs that may hold the prompt. Empty: there is no prompt."""

OUTPUTS = {
    "text_output": TensorType("TYPE_STRING", -1),
    "finish_reason": TensorType("TYPE_STRING", -1),
    "stop_string": TensorType("TYPE_STRING", -1),
    "cumulative_logprob": TensorType("TYPE_FP32", -1),
    "logprobs": TensorType("TYPE_STRING", -1),
    "prompt_logprobs": TensorType("TYPE_STRING", 1),
    "num_input_tokens": TensorType("TYPE_UINT32", 1),
    "num_output_tokens": TensorType("TYPE_UINT32", -1),
    "output_ids": TensorType("TYPE_INT32", -1),
    "timing": TensorType("TYPE_STRING", 1),
}

_WITHOUT_FLAG = ("text_output", "prompt_logprobs")
RETURN_FLAGS = tuple(f"return_{name}" for name in OUTPUTS if name not in _WITHOUT_FLAG)
"""Inputs by which a client asks for an optional output: ``return_timing`` for ``timing``, …"""

INPUTS = {
    "text_input": TensorType("TYPE_STRING", 1),
    "input_ids": TensorType("TYPE_INT32", -1),
    "messages": TensorType("TYPE_STRING", 1),
    "task": TensorType("TYPE_STRING", 1),
    "stream": TensorType("TYPE_BOOL", 1),
    "sampling_parameters": TensorType("TYPE_STRING", 1),
    "exclude_input_in_output": TensorType("TYPE_BOOL", 1),
    **dict.fromkeys(RETURN_FLAGS, TensorType("TYPE_BOOL", 1)),
}
"""They are optional for the server, unless ``config.pbtxt`` declares one as required. The parser of
requests checks which combinations make sense."""


def complete_config(config: Any) -> Any:
    """Fill the server's ``ModelConfig`` object: tensors, decoupled responses, no server batching.

    What ``config.pbtxt`` already declares must agree with this table. If it does not, ``config``
    raises a ValueError that shows both, and the load fails with its text.
    """
    declared = {tensor["name"] for tensor in config.as_dict()["input"]}
    for name, kind in INPUTS.items():
        tensor = _described(name, kind)
        # An input that config.pbtxt declares keeps what is said there, "required" included.
        if name not in declared:
            tensor["optional"] = True
        config.add_input(tensor)
    for name, kind in OUTPUTS.items():
        config.add_output(_described(name, kind))
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    return config


def _described(name: str, kind: TensorType) -> dict[str, object]:
    """A tensor in the form that the server's object takes."""
    return {"name": name, "data_type": kind.data_type, "dims": [kind.length]}
