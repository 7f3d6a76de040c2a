"""Held requests: accepted, but without sequences yet, because each waits for a resource such as a
compiled grammar or an adapter.

They count towards the limit of the queue and end at their deadline, like requests that wait to run.
Owned by the scheduler. The engine knows what each request waits for. Once that is there, it passes
the request to ``Scheduler.submit``.
"""

from jitney.core.deadlines import Deadlines
from jitney.messages import Submit


class HeldRequests:
    """Held requests by key."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self._messages: dict[int, Submit] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._messages

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Submit) -> None:
        """Hold a request."""
        assert message.key not in self._messages, "a key was used twice"
        self._messages[message.key] = message
        self.deadlines.add(message)

    def get(self, key: int) -> Submit:
        """A held request."""
        return self._messages[key]

    def remove(self, key: int) -> Submit:
        """Hold a request no longer: it has ended, or its resources are there."""
        message = self._messages.pop(key)
        self.deadlines.remove(message)
        return message
