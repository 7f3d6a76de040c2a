"""What a language model says of itself. Pure."""

import msgspec


class ModelDescription(msgspec.Struct):
    """The answer to the task ``describe`` of docs/contract.md."""

    max_model_len: int
    max_n: int
    sampling_parameters: frozenset[str]
    sampling_defaults: dict[str, float] = {}
    """The checkpoint's own values of parameters that a client leaves unset."""
    chat_template: str | None = None
    tool_template: str | None = None
    """Of chats with tools, if they have one of their own."""
    chat_template_parameters: frozenset[str] | None = None
    """The parameters that clients may give the chat template. None: the model does not tell."""
    tool_format: str | None = None
    reasoning_format: str | None = None
    added_tokens: dict[str, int] = {}
    """Text of a special token -> its id."""
    adapters: list[str] = []
    """The values of ``lora_name``. Each is a model of the gateway."""
    tiers: list[str] = []
    """The values of ``tier``, the most urgent first."""
