"""A chat as the model's input ``messages``: JSON in the form that chat templates expect."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jitney_gateway.older_functions import with_tool_messages
from jitney_gateway.partial_json import complete_members
from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import Message, Tool

ARGUMENTS = "messages[].tool_calls[].function.arguments"
"""Where the arguments of earlier calls stand in a chat."""
OLDER_ARGUMENTS = "messages[].function_call.arguments"
"""Where they stand in OpenAI's older form."""
_PARTS_OF_TEXT = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text: the second and third are those of ``/v1/responses``."""
_MAY_BE_EMPTY = ("assistant", "tool")
"""Roles whose messages may have no text."""
_PARTS_OF_REASONING = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts in which other servers send reasoning. They are left out, because chat templates
leave out the reasoning of earlier turns."""


def chat_input(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    template_parameters: Mapping[str, Any] | None,
    *,
    continues: bool | None = None,
    **more_parameters: object,
) -> bytes:
    """The input ``messages``. ``continues``: the answer continues the last one.

    The chat template gets two kinds of parameters: ``template_parameters``, and those of
    ``more_parameters`` that are not None. If a name is in both, the former counts. The model
    refuses a parameter that it does not know. Raises FieldError.
    """
    chat: dict[str, Any] = {"messages": []}
    for index, message in enumerate(with_tool_messages(messages)):
        chat["messages"].append(_as_templates_expect(f"messages[{index}]", message))
    if tools:
        chat["tools"] = msgspec.to_builtins(tools)
    parameters = {name: value for name, value in more_parameters.items() if value is not None}
    parameters |= template_parameters or {}
    if continues:
        chat["continue_final_message"] = True
        if parameters.get("add_generation_prompt") is False:
            del parameters["add_generation_prompt"]  # it says the same, and may not be allowed
    if parameters:
        chat["chat_template_parameters"] = parameters
    return encoded("messages", chat)


def _as_templates_expect(path: str, message: Message) -> dict[str, Any]:
    """The message with one text as its content, with objects as arguments of calls, and with
    ``system`` in place of OpenAI's role ``developer``. ``path`` leads to it in the body."""
    expected = msgspec.to_builtins(message)
    expected.pop("refusal", None)
    if message.role == "developer":
        expected["role"] = "system"
    if isinstance(message.content, list):
        expected["content"] = _joined_parts(path, message)
    elif message.content is None and message.role in _MAY_BE_EMPTY:
        expected["content"] = message.refusal or ""
    if not message.tool_calls:
        # Some templates take an empty list for a call.
        expected.pop("tool_calls", None)
    for index, call in enumerate(message.tool_calls or []):
        arguments = parsed_arguments(call.function.arguments)
        expected["tool_calls"][index]["type"] = "function"
        expected["tool_calls"][index]["function"]["arguments"] = arguments
    return expected


def _joined_parts(path: str, message: Message) -> str:
    """The text of a message whose content is a list, to which ``path`` leads in the body."""
    texts = []
    for index, part in enumerate(message.content or ()):
        if isinstance(part, str):
            texts.append(part)
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in _PARTS_OF_REASONING:
            continue
        field = f"{path}.content[{index}]"
        if part.type not in _PARTS_OF_TEXT:
            reason = f"{field} is of type {part.type[:64]!r}: only text is taken"
            raise FieldError(field, reason)
        if text is None and message.role not in _MAY_BE_EMPTY:
            raise FieldError(f"{field}.text", f"{field}.text is missing")
        if text is None:
            continue
        texts.append(text)
    return "\n".join(texts)


def parsed_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a call, from their JSON. If the call was cut, only the complete ones."""
    if isinstance(text, dict):
        return text
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return complete_members(text)


def has_whole_arguments(text: str | dict[str, Any] | None) -> bool:
    """Whether the arguments of a call are an object, or the JSON of one."""
    if isinstance(text, dict):
        return True
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def encoded(field: str, value: object) -> bytes:
    """UTF-8 of a text, JSON of anything else. Raises FieldError for an unpaired surrogate."""
    try:
        if isinstance(value, str):
            return value.encode()
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise FieldError(field, f"{field} has an unpaired surrogate") from None
