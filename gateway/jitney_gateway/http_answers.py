"""Answers and errors as responses of HTTP."""

from collections.abc import Mapping

import msgspec
from fastapi import Response
from jitney.errors import JitneyError

from jitney_gateway.refusals import DescribeError, describe

RETRY_AFTER_S = 1


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
