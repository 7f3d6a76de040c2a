"""A chat's messages and template parameters, from a client's JSON or a caller's list.

Called by the front and the offline class; the tokenizer applies the template.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError, nearest
from jitney.text.chat_template import REASONING_KEYS
from jitney.text.tokenizer import check_text

_MAX_DEPTH = 32
"""Most levels of nesting in a message, a tool or a template parameter."""

_PARAMETERS_KEYS = ("chat_template_parameters", "chat_template_kwargs")
"""Two names of the same: ours and vLLM's."""
_CONTINUE = "continue_final_message"
_KEYS = ("messages", "tools", _CONTINUE, *_PARAMETERS_KEYS)
_INSTEAD_OF_CONTENT = ("tool_calls", *REASONING_KEYS)
"""A message that has one of these needs no content."""


class Chat(msgspec.Struct, frozen=True):
    """A checked chat. The content of a message is a string or a list of parts
    ``{"type": "text", "text": …}``, or there is none."""

    messages: list[dict[str, Any]]
    parameters: dict[str, Any] = {}
    """Variables for the chat template, all on the allow-list."""
    tools: list[dict[str, Any]] = []
    """Functions that the model may call, as the chat template shows them."""
    continues: bool = False
    """Whether the model continues the text of the last message, which is the assistant's."""


def parse_chat(text: str, config: EngineConfig) -> Chat:
    """Read JSON: a list of messages, or an object with ``messages`` and optionally ``tools``,
    ``continue_final_message`` and ``chat_template_parameters``, which may also be called
    ``chat_template_kwargs``, as in vLLM.

    Raises InvalidArgumentError for anything else.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"messages is not JSON: {error}") from None
    if not isinstance(value, dict):
        return make_chat(value, {}, config)
    for key in value:
        if key not in _KEYS:
            raise InvalidArgumentError(
                f"messages has the unknown key {key[:64]!r}{nearest(key[:64], _KEYS)}"
            )
    if "messages" not in value:
        raise InvalidArgumentError("messages is an object without the key 'messages'")
    if all(key in value for key in _PARAMETERS_KEYS):
        raise InvalidArgumentError(
            "messages has both chat_template_parameters and chat_template_kwargs, which are the "
            "same"
        )
    parameters: object = {}
    for key in _PARAMETERS_KEYS:
        if value.get(key) is not None:
            parameters = value[key]
    chat = make_chat(value["messages"], parameters, config, tools=value.get("tools"))
    continues = value.get(_CONTINUE)
    if continues is None:
        return chat
    if not isinstance(continues, bool):
        raise InvalidArgumentError.of(f"messages.{_CONTINUE}", continues, "true or false")
    if continues:
        _check_continued(chat)
    return msgspec.structs.replace(chat, continues=continues)


def make_chat(
    messages: object, parameters: object, config: EngineConfig, tools: object = None
) -> Chat:
    """Check decoded messages, template parameters and tools. Raises InvalidArgumentError."""
    if not isinstance(messages, list):
        raise InvalidArgumentError.of("messages", messages, "a list of messages")
    if not messages:
        raise InvalidArgumentError("messages is empty, but must hold at least one message")
    return Chat(
        messages=[_message(f"messages[{i}]", each) for i, each in enumerate(messages)],
        parameters=_parameters(parameters, config),
        tools=_tools(tools),
    )


def _check_continued(chat: Chat) -> None:
    """Check that the last message is one that the model can continue."""
    last = chat.messages[-1]
    is_text = bool(last.get("content")) and not last.get("tool_calls")
    if last["role"] != "assistant" or not is_text:
        raise InvalidArgumentError(
            f"messages[{len(chat.messages) - 1}] cannot be continued: the last message must be a "
            "text of the assistant, without calls"
        )
    if chat.parameters.get("add_generation_prompt"):
        raise InvalidArgumentError(
            f"messages has {_CONTINUE}, which excludes add_generation_prompt"
        )


def _message(field: str, message: object) -> dict[str, Any]:
    """A checked message. Its content is not None: a template would write that as a word."""
    if not isinstance(message, dict):
        raise InvalidArgumentError.of(field, message, 'an object such as {"role":…, "content":…}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgumentError.of(f"{field}.role", role, "a string such as 'user'")
    _check_plain(field, message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_text_of(f"{field}.content[{n}]", part) for n, part in enumerate(content)]
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    if content is None:
        if not any(message.get(key) for key in _INSTEAD_OF_CONTENT):
            raise InvalidArgumentError(f"{field}.content is missing")
        if "content" in message:
            return {**message, "content": ""}
    elif not isinstance(content, str):
        raise InvalidArgumentError.of(f"{field}.content", content, "a string or a list of parts")
    return message


def _text_of(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidArgumentError.of(field, part, 'of the kind {"type": "text", "text": …}')
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgumentError.of(f"{field}.text", text, "a string")
    return text


def _tools(tools: object) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidArgumentError.of("tools", tools, "a list of objects")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidArgumentError.of(f"tools[{i}]", tool, "an object")
        _check_plain(f"tools[{i}]", tool)
    return tools


def _parameters(parameters: object, config: EngineConfig) -> dict[str, Any]:
    field = "chat_template_parameters"
    if not isinstance(parameters, Mapping):
        raise InvalidArgumentError.of(field, parameters, "an object")
    allowed = config.chat_template_parameters
    for name, value in parameters.items():
        if name not in allowed:
            shown = ", ".join(allowed) or "none"
            raise InvalidArgumentError(
                f"{field} has {str(name)[:64]!r}, but only these are allowed: {shown}"
            )
        if name == "add_generation_prompt" and not isinstance(value, bool):
            raise InvalidArgumentError.of(f"{field}.{name}", value, "true or false")
        _check_plain(f"{field}.{name}", value)
    return dict(parameters)


def _check_plain(field: str, value: object) -> None:
    """Raise InvalidArgumentError unless ``value`` holds only what JSON has, in strings that are
    text, and is not nested too deep. A caller may give any Python object, and the template could
    reach whatever belongs to it."""
    # No recursion: a value that is nested too deep would exhaust it.
    unchecked = [(value, 1)]
    while unchecked:
        each, depth = unchecked.pop()
        if depth > _MAX_DEPTH and isinstance(each, (dict, list)):
            raise InvalidArgumentError(f"{field} is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(each, dict):
            parts = [*each.keys(), *each.values()]
            unchecked.extend((part, depth + 1) for part in parts)
        elif isinstance(each, list):
            unchecked.extend((part, depth + 1) for part in each)
        elif isinstance(each, str):
            check_text(field, each)
        elif each is not None and not isinstance(each, (bool, int, float)):
            raise InvalidArgumentError.of(field, each, "made of what JSON has")
