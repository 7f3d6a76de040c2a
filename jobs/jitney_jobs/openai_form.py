"""The lines of OpenAI's batch service: what a request must have, and results and failures in the
service's form."""

import hashlib
import re
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError, JitneyError
from jitney_gateway.refusals import describe

from jitney_jobs.failures import RequestError
from jitney_jobs.rows import RowValues

_URL = re.compile("/(?!/)[!-~]*")
"""What HTTP allows as the path of a request: printable ASCII without spaces. Two slashes would name
another server."""


class OpenAiRequest(NamedTuple):
    """What is sent for a line."""

    path: str
    body: bytes
    """JSON."""


def request_digest(custom_id: str) -> str:
    """What the ids of a line's answer are made of."""
    return hashlib.sha256(custom_id.encode(errors="surrogatepass")).hexdigest()[:24]


def check_line(row: RowValues) -> None:
    """Raise RequestError for what is no request. What is in its body is not looked at."""
    for name in ("custom_id", "url"):
        if not isinstance(row.get(name), str):
            raise line_error("missing_required_parameter", name, row.get(name), "a string")
    if not isinstance(row.get("body"), dict):
        raise line_error("missing_required_parameter", "body", row.get("body"), "an object")
    if _URL.fullmatch(row["url"]) is None:
        bound = "a path such as /v1/completions, of printable ASCII without spaces"
        raise line_error("invalid_url", "url", row["url"], bound)
    if row.get("method") != "POST":
        raise line_error("invalid_method", "method", row.get("method"), "POST")


def line_error(code: str, field: str, value: object, bound: str) -> RequestError:
    """A line that cannot be asked."""
    error = RequestError(str(InvalidArgumentError.of(field, value, bound)))
    error.error_code = code
    return error


def refused(error: JitneyError) -> RequestError:
    """What is wrong with a line's body, as the service answers it."""
    answer = describe(error)
    made = RequestError(str(error))
    made.status = answer.status
    made.body = answer.body
    return made


def result_line(row: RowValues, body: RowValues) -> RowValues:
    """The line of an answer."""
    return _line(row["custom_id"], 200, body, None)


def failure_line(row: RowValues | None, error: JitneyError) -> RowValues:
    """The line of a failure: with the answer that tells it, or else with a code and a message.
    ``row``: None if it could not be read."""
    custom_id = None if row is None else row.get("custom_id")
    if row is None:
        return _line(None, None, None, {"code": "invalid_json_line", "message": str(error)})
    if not isinstance(error, RequestError):
        error = refused(error)
    if error.body is not None and error.status is not None:
        return _line(custom_id, error.status, error.body, None)
    return _line(custom_id, None, None, {"code": error.error_code, "message": str(error)})


def _line(
    custom_id: Any, status: int | None, body: RowValues | None, error: RowValues | None
) -> RowValues:
    digest = request_digest(custom_id if isinstance(custom_id, str) else repr(custom_id))
    response = None
    if status is not None:
        response = {"status_code": status, "request_id": digest, "body": body}
    return {
        "id": f"batch_req_{digest}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
