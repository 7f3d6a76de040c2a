"""The deadlines of open requests, the earliest first: the scheduler's, live and held ones."""

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter

from jitney.messages import Submit

_deadline = itemgetter(0)


class Deadlines:
    """When requests expire. Requests without a deadline are not here."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int]] = []
        """Deadlines and keys, sorted."""

    def add(self, message: Submit) -> None:
        """Time a request."""
        if message.deadline is not None:
            insort(self.entries, (message.deadline, message.key))

    def remove(self, message: Submit) -> None:
        """Time a request no longer."""
        if message.deadline is not None:
            index = bisect_left(self.entries, (message.deadline, message.key))
            assert self.entries[index] == (message.deadline, message.key), "it was not timed"
            del self.entries[index]

    @property
    def earliest(self) -> float | None:
        """The next deadline, in seconds of the monotonic clock."""
        return self.entries[0][0] if self.entries else None

    def reached(self, now: float) -> list[int]:
        """Keys of the requests whose deadline is reached, the earliest first."""
        count = bisect_right(self.entries, now, key=_deadline)
        return [key for _, key in self.entries[:count]]
