"""The gateway's own errors, and every error as a status and OpenAI's error object."""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

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
Describe = Callable[[JitneyError], tuple[int, dict[str, Any]]]
"""Status and body of an error's response."""


class FieldError(InvalidArgumentError):
    """A field of a body is at fault."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class UnknownModelError(JitneyError):
    """No such model is ready on the server, or not for this use."""

    code = "NOT_FOUND"


class StatusError(JitneyError):
    """A refusal with a status of its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


_ASKED_BY = {
    "text_input": ("prompt",),
    "input_ids": ("prompt", "tokens"),
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "stop": ("stop_sequences",),
    "cache_salt": ("prompt_cache_key",),
    "priority": ("service_tier",),
    "tier": ("service_tier",),
    "chat_template_parameters": (
        "reasoning_effort", "verbosity", "reasoning", "output_config", "thinking",
        "chat_template_kwargs", "text",
    ),
    "messages": ("input",),
    "structured_outputs": (
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "response_format", "text", "output_config", "tool_choice",
    ),
}  # fmt: skip
"""What a model calls a thing -> the fields of a body that may stand for it."""
_OF_A_CHAT: dict[str, tuple[str, ...]] = {
    "messages": ("input",),
    "response_format": ("text", "output_config"),
}
"""Likewise of a field of a chat that another endpoint's body was made into."""
_STATUS: tuple[tuple[type[JitneyError], int, str], ...] = (
    (UnknownModelError, 404, "model_not_found"),
    (InvalidArgumentError, 400, "invalid_value"),
    (DeadlineExceededError, 504, "deadline_exceeded"),
    (UnavailableError, 503, "unavailable"),
    (CancelledError, 499, "cancelled"),
    (JitneyError, 500, "internal_error"),
)
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "not_allowed", 413: "too_large"}


_OF_MESSAGES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
"""Status -> the type of Anthropic's error."""


def name_clients_field(error: InvalidArgumentError, body: object) -> InvalidArgumentError:
    """A model's refusal in the words of ``body``."""
    text = str(error)
    if isinstance(error, FieldError):
        # Of the chat that the body was made into.
        word = _first_word(error.field)
        names = _OF_A_CHAT.get(word, ())
    else:
        word = _first_word(text)
        names = _ASKED_BY.get(word, ())
    for field in names:
        if getattr(body, field, None) is not None:
            return FieldError(field, re.sub(rf"{word}(\.\w+)?", field, text, count=1))
    return error


def _first_word(text: str) -> str:
    return re.split("[^a-z_]", text)[0]


def describe(error: JitneyError) -> tuple[int, dict[str, Any]]:
    """Status and body. The text of a model's refusal opens with the name of the field."""
    status, code = next(found[1:] for found in _STATUS if isinstance(error, found[0]))
    text = str(error)
    field = None
    if isinstance(error, StatusError):
        status = error.status
        code = _CODES.get(error.status, "refused")
    elif isinstance(error, FieldError):
        field = error.field or None
    elif status == 400:
        named = re.match(r"([a-z_]+)[^\s:]*(?:: | (?:is|has|holds|do) )", text)
        field = named[1] if named else None
    elif status == 503 and "queue is full" in text:
        status = 429
        code = "queue_full"
    kind = "invalid_request_error" if status < 429 else "server_error"
    return status, {"error": {"message": text, "type": kind, "param": field, "code": code}}


def describe_for_messages(error: JitneyError) -> tuple[int, dict[str, Any]]:
    """Status and body, as Anthropic's object."""
    status, body = describe(error)
    kind = _OF_MESSAGES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    said = {"type": kind, "message": body["error"]["message"]}
    return status, {"type": "error", "error": said}


def fault(id_: str) -> JitneyError:
    """Of a request, for an exception that nobody foresaw, which is logged."""
    _LOG.exception("request %s could not be answered", id_)
    return JitneyError(f"request {id_} could not be answered")


def refusal(error: JitneyError, tell: Describe = describe) -> Response:
    """An error's response."""
    status, body = tell(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else None
    return as_json(body, status, headers)


def as_json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
