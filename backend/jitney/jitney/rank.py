"""The order of requests that wait for a grammar or an adapter: by tier, and within a tier by rank.

The scheduler says the rank of a request. A request of a lower tier that has waited long enough has
*aged*: it may count as one of the first tier, so that it does not starve.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import NamedTuple

_TURNS_BEFORE_AGED = 4
"""When :class:`MakeQueue` takes an id, it is the *turn* of the tier of the first request. After a
turn of a lower tier, the tiers above it have so many turns. Only then may a request of the lower
tier count as aged again. So of five turns in a row, an aged backlog takes one."""


class Order(NamedTuple):
    """What requests are sorted by at one time, the lowest first."""

    level: int
    """The tier; 0 if the request has aged and counts as one of the first tier."""
    rank_s: float
    """See :class:`Rank`."""
    key: int


class Rank(NamedTuple):
    """The rank of one request. It never changes."""

    tier: int
    """Index among the option ``tiers``; 0 without."""
    rank_s: float
    """Arrival, plus what priority and tier add to it: seconds of the monotonic clock. Within a
    tier, the lowest comes first. It is also a point in time: from then on, the request has aged."""
    key: int
    """The request's."""

    def is_far_behind(self, other: "Rank", aging_s: float) -> bool:
        """Whether it is of a lower tier than another one, of a lower priority, or has come
        ``aging_s`` seconds later or more. A unit of priority weighs as much as ``aging_s``."""
        return self.tier > other.tier or self.rank_s - other.rank_s >= aging_s

    def has_aged(self, now: float) -> bool:
        """Whether it may count as one of the first tier."""
        return now >= self.rank_s

    def order(self, now: float) -> Order:
        """Its order: as one of the first tier if it has aged, else as one of its own.

        Callers ask this for only a few requests of each lower tier, and :meth:`order_in_tier` for
        the others. Otherwise a backlog of bulk requests, all of which have aged, would come before
        every new request of the first tier."""
        level = 0 if self.has_aged(now) else self.tier
        return Order(level, self.rank_s, self.key)

    def order_in_tier(self) -> Order:
        """Its order among the requests of its own tier, even if it has aged."""
        return Order(self.tier, self.rank_s, self.key)


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

    def lasts(self) -> list[Rank]:
        """The last of each tier."""
        return [queue[-1] for queue in self._of_tier.values() if queue]


class MakeQueue:
    """Ids of what is to be made, such as grammars to be compiled. The first is the one for which
    the first request by rank waits. It is found without looking at all ids or requests."""

    def __init__(self) -> None:
        # Id -> ranks of the requests that wait for it, by key.
        self._waiting: dict[Hashable, dict[int, Rank]] = {}
        # Key of such a request -> the id.
        self._id_of: dict[int, Hashable] = {}
        # All of these requests.
        self._requests = RankedQueue()
        # Lower tier -> turns that are left to the tiers above it. Until there are none, no request
        # of the lower tier counts as aged.
        self._turns_left: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, id: Hashable) -> None:
        """This is to be made. :meth:`join` follows: somebody waits for it."""
        self._waiting[id] = {}

    def join(self, id: Hashable, rank: Rank) -> None:
        """A request waits for this id. Ignored if the id is not in the queue, because it is being
        made."""
        waiting = self._waiting.get(id)
        if waiting is not None:
            waiting[rank.key] = rank
            self._id_of[rank.key] = id
            self._requests.add(rank)

    def leave(self, key: int) -> bool:
        """A request waits no longer. Ignored if it does not wait for anything in the queue. If
        nobody else waits for its id, the id is taken out. Returns whether it was."""
        id = self._id_of.pop(key, None)
        if id is None:
            return False
        waiting = self._waiting[id]
        self._requests.remove(waiting.pop(key))
        if waiting:
            return False
        del self._waiting[id]
        return True

    def take_first(self, now: float) -> Hashable | None:
        """Take the first id. None: there is none."""
        if not self._waiting:
            return None
        first = min(self._requests.firsts(), key=lambda rank: self._order(rank, now))
        self._count_turn(first.tier)
        id = self._id_of[first.key]
        for rank in self._waiting.pop(id).values():
            del self._id_of[rank.key]
            self._requests.remove(rank)
        return id

    def _order(self, rank: Rank, now: float) -> Order:
        """The order of the first request of a tier."""
        if self._turns_left.get(rank.tier, 0):
            return rank.order_in_tier()
        return rank.order(now)

    def _count_turn(self, tier: int) -> None:
        """It is the turn of a request of this tier."""
        for lower, left in self._turns_left.items():
            if lower > tier and left:
                self._turns_left[lower] = left - 1
        if tier > 0:
            self._turns_left[tier] = _TURNS_BEFORE_AGED


class Blocked(NamedTuple):
    """A request that waits until others release a resource."""

    first: Order
    """The first such request by rank."""
    users: list[list[Order]]
    """One list for each resource that can be released: the requests that use it."""
