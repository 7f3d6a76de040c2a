"""The gateway's own errors, and every error as the response that a client gets.

OpenAI's APIs and Anthropic's have error objects of different forms: ``describe`` and
``describe_for_messages`` make them.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi import Response
from jitney.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class FieldError(InvalidArgumentError):
    """A field of a request's body is at fault."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class UnknownModelError(JitneyError):
    """The server has no such model ready, or the model does not serve this endpoint."""

    code = "NOT_FOUND"


class StatusError(JitneyError):
    """A refusal with an HTTP status of its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ErrorAnswer(NamedTuple):
    """An error as a client gets it."""

    status: int
    body: dict[str, Any]


DescribeError = Callable[[JitneyError], ErrorAnswer]
"""Writes an error in the form of one API: ``describe`` or ``describe_for_messages``."""


class ErrorKind(NamedTuple):
    """The status and OpenAI's code for a type of error."""

    error: type[JitneyError]
    status: int
    code: str


_KINDS = (
    ErrorKind(UnknownModelError, 404, "model_not_found"),
    ErrorKind(InvalidArgumentError, 400, "invalid_value"),
    ErrorKind(DeadlineExceededError, 504, "deadline_exceeded"),
    ErrorKind(UnavailableError, 503, "unavailable"),
    ErrorKind(CancelledError, 499, "cancelled"),
    ErrorKind(JitneyError, 500, "internal_error"),
)
"""The first row that fits counts: the last one fits every error."""
_CODES = {
    401: "invalid_api_key", 403: "not_allowed", 404: "not_found", 405: "not_allowed",
    413: "too_large", 415: "unsupported_media_type",
}  # fmt: skip
"""Status of a StatusError -> OpenAI's code."""
_MESSAGES_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Status -> the type of Anthropic's error."""

_FIELD_AT_START = re.compile(r"([a-z_]+)[^\s:]*(?:: | (?:is|has|holds|do) )")
"""A model's refusal begins with the name of the field, such as ``n is 9, but …`` or
``messages[0].content is missing``. The group is the name without its path."""

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
        allowed = _ALLOWED_PARAMETERS.search(text)
        if name == "chat_template_parameters" and field != "chat_template_kwargs" and allowed:
            reason = f"the model's chat template takes only these parameters: {allowed[1]}"
            return FieldError(field, f"{field} is not supported: {reason}")
        return FieldError(field, _renamed(text, name, field, value))
    return error


def _fields_of_template_parameter(text: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that can have set the parameter of the chat template that the refusal ``text``
    names. ``values``: those of the body's fields."""
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


def describe(error: JitneyError) -> ErrorAnswer:
    """Status and body of an error, in OpenAI's form."""
    text = str(error)
    kind = next(kind for kind in _KINDS if isinstance(error, kind.error))
    status = kind.status
    code = kind.code
    if isinstance(error, StatusError):
        status = error.status
        code = _CODES.get(error.status, "refused")
    elif status == 503 and "queue is full" in text:
        # The model is there, but has too many requests: clients know 429 for that.
        status = 429
        code = "queue_full"
    field = _field_at_fault(error)
    details = {"message": text, "type": _type_of(status), "param": field, "code": code}
    return ErrorAnswer(status, {"error": details})


def _type_of(status: int) -> str:
    """The type of OpenAI's error."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 429 else "server_error"


def _field_at_fault(error: JitneyError) -> str | None:
    """The name of the field that the error is about; None if it is about none."""
    if isinstance(error, FieldError):
        return error.field or None
    if not isinstance(error, InvalidArgumentError):
        return None
    match = _FIELD_AT_START.match(str(error))
    return None if match is None else match[1]


def describe_for_messages(error: JitneyError) -> ErrorAnswer:
    """Status and body of an error, in Anthropic's form."""
    status, body = describe(error)
    default = "api_error" if status >= 500 else "invalid_request_error"
    details = {
        "type": _MESSAGES_TYPES.get(status, default),
        "message": body["error"]["message"],
    }
    return ErrorAnswer(status, {"type": "error", "error": details})


def unforeseen_error(request_id: str) -> JitneyError:
    """What a client is told of the exception that is being handled, which is logged in full."""
    _LOG.exception("request %s could not be answered", request_id)
    return JitneyError(f"request {request_id} could not be answered")


def error_response(error: JitneyError, describe_error: DescribeError = describe) -> Response:
    """The response for an error, in the form that ``describe_error`` writes."""
    answer = describe_error(error)
    headers = None
    if answer.status in (429, 503):
        headers = {"retry-after": str(RETRY_AFTER_S)}
    return as_json(answer.body, answer.status, headers)


def as_json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose body is ``body`` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
