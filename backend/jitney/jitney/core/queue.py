"""Priority queues whose members may leave from anywhere: the waiting sequences, the deadlines.

A heap cannot give up a member in its middle, so a member that leaves is only forgotten; its entry
stays until it comes to the top or until forgotten entries outnumber the members, when the heap is
rebuilt. So each operation costs O(log n) amortized and memory stays within twice the members.
"""

import heapq
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Members in rising order of ``rank``. Ranks are unique tuples: members are not compared."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], T]] = []
        self._rank_of: dict[T, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, member: T) -> bool:
        return member in self._rank_of

    def members(self) -> list[T]:
        """All members, in no order."""
        return list(self._rank_of)

    def push(self, rank: tuple[Any, ...], member: T) -> None:
        """Add a member that is not here yet."""
        assert member not in self._rank_of
        self._rank_of[member] = rank
        heapq.heappush(self._heap, (rank, member))

    def first(self) -> T | None:
        """The member of the lowest rank. The top entry is never a forgotten one."""
        return self._heap[0][1] if self._heap else None

    def first_rank(self) -> tuple[Any, ...] | None:
        """The lowest rank."""
        return self._heap[0][0] if self._heap else None

    def discard(self, member: T) -> None:
        """Take ``member`` out, if it is here."""
        if self._rank_of.pop(member, None) is None:
            return
        if len(self._heap) > 2 * len(self._rank_of) + 16:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)

    def check_integrity(self) -> None:
        """Assert that every member has its entry and that the top is a member."""
        current = [member for rank, member in self._heap if self._rank_of.get(member) == rank]
        assert len(current) == len(set(current)) == len(self._rank_of), "a member has no entry"
        assert not self._heap or self._is_current(self._heap[0]), "the top was forgotten"
        assert len(self._heap) <= 2 * len(self._rank_of) + 16, "forgotten entries pile up"

    def _is_current(self, entry: tuple[tuple[Any, ...], T]) -> bool:
        return self._rank_of.get(entry[1]) == entry[0]
