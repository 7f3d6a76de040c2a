"""The gateway's own errors, and every error as the status and the body that a client gets. Pure;
``http_answers.py`` makes the response.

OpenAI's APIs and Anthropic's have error objects of different forms: ``describe`` and
``describe_for_messages`` make them.
"""

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jitney.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)


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
