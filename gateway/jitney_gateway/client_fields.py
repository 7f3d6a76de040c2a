"""Names the field at fault as the client's body has it. Pure.

The gateway makes a chat of some bodies, and inputs and parameters for the model of all of them. A
refusal may name one of these. ``gateway.py`` asks here for the same refusal with the name of the
client's own field.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_gateway.refusals import FieldError

_CLIENT_FIELDS = {
    "text_input": ("prompt",),
    "input_ids": ("prompt", "tokens"),
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "stop": ("stop_sequences",),
    "cache_salt": ("prompt_cache_key",),
    "priority": ("service_tier",),
    "tier": ("service_tier",),
    "messages": ("input",),
    "structured_outputs": (
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "response_format", "text", "output_config", "function_call", "tool_choice", "tools",
        "thinking_token_budget", "thinking",
    ),
}  # fmt: skip
"""An input or parameter of the model -> the fields of a client's body that can set it."""
_CLIENT_FIELDS_OF_TEMPLATE = {
    "add_generation_prompt": ("add_generation_prompt",),
    "enable_thinking": ("thinking",),
    "reasoning_effort": ("reasoning_effort", "reasoning", "output_config"),
    "verbosity": ("verbosity", "text"),
}
"""A parameter of the chat template -> the fields that can set it. So can ``chat_template_kwargs``,
which has any parameter."""
_TEMPLATE_PARAMETER = re.compile(r"chat_template_parameters(?: has '([^']*)'|\.(\w+))")
"""How a model's refusal names a parameter of its chat template: ``chat_template_parameters has 'a',
but …`` or ``chat_template_parameters.a is …``."""
_CLIENT_FIELDS_OF_CHAT: dict[str, tuple[str, ...]] = {
    "messages": ("input",),
    "continue_final_message": ("continue_final_message", "messages"),
    "response_format": ("text", "output_config"),
    "thinking_token_budget": ("thinking",),
}
"""A field of a chat -> the fields that can set it in the body of ``/v1/responses`` or
``/v1/messages``, from which the gateway made the chat."""
_ALLOWED_PARAMETERS = re.compile(r", but only these are allowed: (.*)", re.DOTALL)
"""How a model's refusal of a parameter of its chat template ends."""
_OBJECTS_SENT_ON = ("structured_outputs", "chat_template_kwargs")
"""Fields whose objects a model gets with the client's own keys."""


def name_clients_field(error: InvalidArgumentError, body: msgspec.Struct) -> InvalidArgumentError:
    """The same refusal, with the name that the field has in the client's ``body``.

    A model names its own inputs and parameters, and a FieldError may name a field of the chat that
    the gateway made of the body.
    """
    text = str(error)
    values = msgspec.structs.asdict(body)
    if isinstance(error, FieldError):
        name = _first_word(error.field)
        client_fields = _CLIENT_FIELDS_OF_CHAT.get(name, ())
    else:
        name = _first_word(text)
        if name in values.get("params", {}):
            # The client has set the parameter itself, by the name that the model uses. That wins
            # over any field that stands for it.
            return error
        client_fields = _CLIENT_FIELDS.get(name, ())
        if name == "chat_template_parameters":
            client_fields = _fields_of_template_parameter(text, values)
    for field in client_fields:
        value = values.get(field)
        if value is None:
            continue
        if name == "structured_outputs" and not _constrains_answer(field, value):
            continue
        return FieldError(field, _text_for_client(text, name, field, value))
    return error


def _text_for_client(text: str, name: str, field: str, value: Any) -> str:
    """The refusal ``text`` of the model's ``name``, for the client's ``field`` with that value."""
    allowed = _ALLOWED_PARAMETERS.search(text)
    is_template_parameter = name == "chat_template_parameters" and field != "chat_template_kwargs"
    if is_template_parameter and allowed is not None:
        # The client has not named the parameter: its field stands for it.
        reason = f"the model's chat template takes only these parameters: {allowed[1]}"
        return f"{field} is not supported: {reason}"
    return _renamed(text, name, field, value)


def _fields_of_template_parameter(text: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The refusal ``text`` names a parameter of the chat template. These fields can have set it.
    ``values``: those of the body's fields."""
    match = _TEMPLATE_PARAMETER.match(text)
    parameter = "" if match is None else match[1] or match[2]
    if parameter in (values.get("chat_template_kwargs") or {}):
        return ("chat_template_kwargs",)  # it wins over the other fields
    return _CLIENT_FIELDS_OF_TEMPLATE.get(parameter, ("chat_template_kwargs",))


def _constrains_answer(field: str, value: Any) -> bool:
    """Whether a field, with that value, sets ``structured_outputs``. ``text`` and ``output_config``
    may have no format, a format may allow any text, and a choice of tools may force no call."""
    if field in ("tool_choice", "function_call"):
        return value not in ("auto", "none")
    if field not in ("response_format", "text", "output_config"):
        return True
    answer_format = value if field == "response_format" else value.format
    return answer_format is not None and answer_format.type != "text"


def _renamed(text: str, name: str, field: str, value: Any) -> str:
    """The refusal ``text`` with the client's ``field`` in place of ``name``.

    ``structured_outputs.regex is …`` becomes ``guided_regex is …``: the key ``regex`` is left out,
    unless the client's own object, ``value``, has that key.
    """
    own_keys = msgspec.to_builtins(value) if field in _OBJECTS_SENT_ON else {}

    def clients_name(match: re.Match[str]) -> str:
        key = match[1]
        return f"{field}.{key}" if key in own_keys else field

    return re.sub(rf"{name}(?:\.(\w+))?", clients_name, text, count=1)


def _first_word(text: str) -> str:
    return re.split("[^a-z_]", text)[0]
