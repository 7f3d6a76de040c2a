"""Where a request stands among those that wait for something: by tier, and within a tier by rank.
The scheduler says the rank of a request; what waits for a grammar or an adapter is ordered by it.
"""

from bisect import bisect_left, insort
from typing import NamedTuple


class Order(NamedTuple):
    """What requests are sorted by at one time, the lowest first."""

    level: int
    """The tier, or 0 if the request counts as one of the first tier."""
    at: float
    key: int


class Rank(NamedTuple):
    """The rank of one request. It never changes."""

    tier: int
    """Index among the option ``tiers``; 0 without."""
    at: float
    """Arrival, plus what priority and tier add to it: seconds of the monotonic clock. The lowest
    comes first. At this time the request has *aged*: it counts as one of the first tier. Where a
    resource is scarce, only one aged request of each lower tier counts so, or a backlog that has
    aged would take all of it."""
    key: int
    """The request's."""

    def has_aged(self, now: float) -> bool:
        """Whether it counts as one of the first tier."""
        return now >= self.at

    def order(self, now: float) -> Order:
        """Its order if it counts as one of the first tier once it has aged."""
        level = 0 if self.has_aged(now) else self.tier
        return Order(level, self.at, self.key)

    def order_in_tier(self) -> Order:
        """Its order if it counts as one of its own tier even if it has aged."""
        return Order(self.tier, self.at, self.key)


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

    def first_of_tier(self, tier: int) -> Rank | None:
        """The first of a tier by rank, which is also the first to age."""
        queue = self._of_tier.get(tier)
        return queue[0] if queue else None

    def firsts(self) -> list[Rank]:
        """The first of each tier."""
        return [queue[0] for queue in self._of_tier.values() if queue]


class Blocked(NamedTuple):
    """A request that waits for room for its resource, while all that is there is in use."""

    first: Order
    users: list[list[Order]]
    """For each resource that could make room: the requests that use it."""
