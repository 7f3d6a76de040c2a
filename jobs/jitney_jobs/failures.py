"""What the failure of a request to a server means: for its row, and for the job.

``openai_server.py`` and ``remote.py`` make a :class:`RequestError` of every failure.
``patience.py`` decides what comes next.
"""

import email.utils
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from jitney.errors import JitneyError, UnavailableError


class Meaning(StrEnum):
    """What a failure tells."""

    ROW = "row"
    """The row is at fault: another try would meet the same."""
    FAULT = "fault"
    """A fault that may be of the row or of the moment. After ``retries`` more tries it is the
    row's."""
    PASSING = "passing"
    """The server or a proxy before it is not well. It may be the row that it cannot stand: that is
    so if other rows get through."""
    SLOW = "slow"
    """It took longer than the setting ``row_timeout``. The row is at fault, unless nothing gets
    through: then the server is not well."""
    BUSY = "busy"
    """The server takes no more requests now."""
    AWAY = "away"
    """Nothing answers at the address."""
    BEGINNING = "beginning"
    """The row is at fault, but if nothing has got through so far, the job is."""
    JOB = "job"
    """No row can get through until something is changed: the key, or a certificate."""


class RequestError(JitneyError):
    """A request has failed. If it is what a row ends with, the row is bad."""

    code = "REQUEST_FAILED"
    meaning = Meaning.ROW
    status: int | None = None
    """HTTP's, if there was an answer."""
    body: dict[str, Any] | None = None
    """Of that answer, in the form of OpenAI's errors."""
    retry_after_s: float | None = None
    """How long the server asks to wait."""
    error_code = "request_failed"
    """What a line of OpenAI's batch service says of a failure without an answer."""

    @classmethod
    def of_meaning(cls, meaning: Meaning, text: str) -> Self:
        """One without an answer."""
        error = cls(text)
        error.meaning = meaning
        return error


class ServerAwayError(UnavailableError):
    """The job's patience with the server is at its end. The job ends, and can be resumed."""

    code = "SERVER_AWAY"  # another code than UNAVAILABLE: it was tried again often enough


class JobRefusedError(JitneyError):
    """The server lets none of the job's requests through. The job ends, and another try would end
    so, too."""

    code = "JOB_REFUSED"


_MEANINGS: Mapping[int, Meaning] = {
    401: Meaning.JOB,
    402: Meaning.JOB,
    403: Meaning.BEGINNING,
    407: Meaning.JOB,
    408: Meaning.PASSING,
    425: Meaning.PASSING,
    429: Meaning.BUSY,
    500: Meaning.FAULT,
    501: Meaning.ROW,
    504: Meaning.FAULT,
    505: Meaning.ROW,
}
"""Those of HTTP's statuses that are not as their hundred: a redirect is BEGINNING, another status
below 500 is ROW, one above is PASSING."""


def meaning_of_status(status: int) -> Meaning:
    """What a status other than 200 means."""
    if status in _MEANINGS:
        return _MEANINGS[status]
    if status < 400:
        return Meaning.BEGINNING
    return Meaning.ROW if status < 500 else Meaning.PASSING


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: a number of them, or a date. None if it says nothing that
    can be read."""
    in_ms = _number(headers.get("retry-after-ms"))
    if in_ms is not None:
        return in_ms / 1000
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        at = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, at.timestamp() - time.time())


def _number(text: str | None) -> float | None:
    """A time in a header, 0 or more. None if it is none."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None
