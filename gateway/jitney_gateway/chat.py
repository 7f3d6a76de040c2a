"""A chat as the model's input ``messages``: JSON in the form that chat templates expect."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import ContentPart, Message, Tool

Tensor = bytes | list[int] | bool
"""An input of the contract: text or JSON, token ids, a flag."""


def chat_input(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    parameters: Mapping[str, Any] | None,
    **named: object,
) -> bytes:
    """The input. ``parameters`` are the template's; so are ``named``, unless they are None. The
    model refuses those that are not on its list. Raises FieldError."""
    chat: dict[str, Any] = {"messages": []}
    for index, message in enumerate(messages):
        chat["messages"].append(_as_templates_expect(f"messages[{index}]", message))
    if tools:
        chat["tools"] = msgspec.to_builtins(tools)
    of_template = {name: value for name, value in named.items() if value is not None}
    of_template |= parameters or {}
    if of_template:
        chat["chat_template_parameters"] = of_template
    return encoded("messages", chat)


def _as_templates_expect(at: str, message: Message) -> dict[str, Any]:
    """Content as one text, the arguments of calls as objects, no roles but the usual ones."""
    made = msgspec.to_builtins(message)
    made.pop("annotations", None)
    if message.role == "developer":
        made["role"] = "system"
    if isinstance(message.content, list):
        made["content"] = _joined_text(at, message.content)
    elif message.content is None and message.tool_calls:
        made["content"] = ""
    for number, call in enumerate(message.tool_calls or []):
        field = f"{at}.tool_calls[{number}].function.arguments"
        arguments = arguments_of(field, call.function.arguments)
        made["tool_calls"][number]["function"]["arguments"] = arguments
    return made


def _joined_text(at: str, parts: Sequence[ContentPart]) -> str:
    texts = []
    for number, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            field = f"{at}.content[{number}]"
            said = f"{field} is of type {part.type[:64]!r}: only text is taken"
            raise FieldError(field, said)
        texts.append(part.text)
    return "\n".join(texts)


def arguments_of(field: str, text: str | None) -> dict[str, Any]:
    """The arguments of a call. Raises FieldError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise FieldError(field, f"{field} is not a JSON object") from None


def encoded(field: str, value: object) -> bytes:
    """UTF-8 of a text, JSON of anything else. Raises FieldError for an unpaired surrogate."""
    try:
        return value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise FieldError(field, f"{field} has an unpaired surrogate") from None
