"""Where a request stands among those that wait for something: by tier, and within a tier by rank.
The scheduler says the rank of a request; what waits for a grammar or an adapter is ordered by it.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

_Order = tuple[int, float, int]


class Rank(NamedTuple):
    """The rank of one request. It never changes."""

    tier: int
    """Index among the option ``tiers``; 0 without."""
    at: float
    """Arrival, plus what priority and tier add to it: seconds of the monotonic clock. The lowest
    comes first. At this time the request has *aged*: it counts as one of the first tier."""
    key: int
    """The request's."""

    def order(self, now: float) -> _Order:
        """What requests are sorted by at the time ``now``, the lowest first."""
        level = 0 if now >= self.at else self.tier
        return (level, self.at, self.key)


class RankedQueue:
    """Requests that wait. The first one is found without looking at all of them."""

    def __init__(self) -> None:
        self._of_tier: dict[int, list[Rank]] = {}  # each list is sorted

    def __bool__(self) -> bool:
        return any(self._of_tier.values())

    def add(self, rank: Rank) -> None:
        """A request waits."""
        insort(self._of_tier.setdefault(rank.tier, []), rank)

    def remove(self, rank: Rank) -> None:
        """A request waits no longer."""
        queue = self._of_tier[rank.tier]
        index = bisect_left(queue, rank)
        assert queue[index] == rank, "it does not wait"
        del queue[index]

    def first(self, now: float) -> Rank:
        """The first of them; there is one."""
        # Within a tier the first by rank is also the first to age.
        firsts = [queue[0] for queue in self._of_tier.values() if queue]
        return min(firsts, key=lambda rank: rank.order(now))


class Blocked(NamedTuple):
    """A request that waits for room for its resource, while all that is there is in use."""

    key: int
    users: list[list[int]]
    """For each resource that could make room: the keys of the requests that use it."""
