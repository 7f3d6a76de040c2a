"""Deadlines of requests, the earliest first. The scheduler keeps those of its requests, the journal
those of all open requests, the front those of requests whose prompt is being encoded.
"""

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter
from typing import Protocol

from jitney.errors import DeadlineExceededError
from jitney.messages import Failed, Submit

_deadline = itemgetter(0)


class HasDeadline(Protocol):
    """A request, in any form."""

    @property
    def key(self) -> int:
        """Unique among the requests of one :class:`Deadlines`."""

    @property
    def deadline(self) -> float | None:
        """Seconds of the monotonic clock."""


class Deadlines:
    """When requests expire. A request without a deadline is left out."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int]] = []
        """Deadlines and keys, sorted."""

    def add(self, request: HasDeadline) -> None:
        """Note the deadline of a request."""
        if request.deadline is not None:
            insort(self.entries, (request.deadline, request.key))

    def remove(self, request: HasDeadline) -> None:
        """Forget the deadline of a request."""
        if request.deadline is not None:
            index = bisect_left(self.entries, (request.deadline, request.key))
            assert self.entries[index] == (request.deadline, request.key), (
                "its deadline was not noted"
            )
            del self.entries[index]

    @property
    def earliest(self) -> float | None:
        """The next deadline, in seconds of the monotonic clock."""
        return self.entries[0][0] if self.entries else None

    def reached(self, now: float) -> list[int]:
        """Keys of the requests whose deadline is reached, the earliest first."""
        count = bisect_right(self.entries, now, key=_deadline)
        return [key for _, key in self.entries[:count]]


def failed_by_deadline(message: Submit, where: str) -> Failed:
    """The event that ends a request without any token at its deadline. ``where``: where the request
    was then."""
    assert message.deadline is not None
    state = f"the request was still {where}"
    error = DeadlineExceededError.of_request(message.arrival, message.deadline, state)
    return Failed(message.key, error.code, str(error))
