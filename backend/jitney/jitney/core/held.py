"""Requests that the scheduler has accepted, but that it does not have yet: each waits for a
resource, such as a compiled grammar or an adapter.

They count towards the limit of the queue, and they end at their deadline, like those that wait for
a place in the batch. Owned by the scheduler, whose ``submit`` takes a request over once its
resources are there. What a request waits for, only the engine knows.
"""

from jitney.core.deadlines import Deadlines
from jitney.messages import Submit


class HeldRequests:
    """Held requests by key."""

    def __init__(self, num_tiers: int) -> None:
        self.num_queued = [0] * num_tiers
        """By tier."""
        self.deadlines = Deadlines()
        self._requests: dict[int, tuple[Submit, int]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, message: Submit, tier: int) -> None:
        """Hold a request of this tier."""
        assert message.key not in self._requests, "a key was used twice"
        self._requests[message.key] = (message, tier)
        self.num_queued[tier] += 1
        self.deadlines.add(message)

    def get(self, key: int) -> Submit:
        """A held request."""
        message, _ = self._requests[key]
        return message

    def remove(self, key: int) -> Submit:
        """A held request has ended, or its resources are there."""
        message, tier = self._requests.pop(key)
        self.num_queued[tier] -= 1
        self.deadlines.remove(message)
        return message
