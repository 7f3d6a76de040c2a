"""Priority queues whose members may leave from anywhere: the waiting sequences, the deadlines.

A heap cannot give up a member in its middle, so a member that leaves is only forgotten; its entry
stays until it comes to the top or until forgotten entries outnumber the members, when the heap is
rebuilt. So each operation costs O(log n) amortized and memory stays within twice the members. Each
entry has a number of its own: a member that comes back does not bring its forgotten entry back.
"""

import heapq
import itertools
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Members in rising order of ``rank``, a tuple; of equal ranks the one pushed first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], int, T]] = []
        self._number_of: dict[T, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, member: T) -> bool:
        return member in self._number_of

    def members(self) -> list[T]:
        """All members, in no order."""
        return list(self._number_of)

    def push(self, rank: tuple[Any, ...], member: T) -> None:
        """Add a member that is not here yet."""
        assert member not in self._number_of
        number = self._number_of[member] = next(self._numbers)
        heapq.heappush(self._heap, (rank, number, member))

    def first(self) -> T | None:
        """The member of the lowest rank. The top entry is never a forgotten one."""
        return self._heap[0][2] if self._heap else None

    def oldest(self) -> T | None:
        """The member pushed first."""
        return next(iter(self._number_of), None)

    def discard(self, member: T) -> None:
        """Take ``member`` out, if it is here."""
        if self._number_of.pop(member, None) is None:
            return
        if len(self._heap) > 2 * len(self._number_of) + 16:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)

    def check_integrity(self) -> None:
        """Assert that every member has its entry and that the top is a member."""
        current = [entry[2] for entry in self._heap if self._is_current(entry)]
        assert len(current) == len(set(current)) == len(self._number_of), "a member has no entry"
        assert not self._heap or self._is_current(self._heap[0]), "the top was forgotten"
        assert len(self._heap) <= 2 * len(self._number_of) + 16, "forgotten entries pile up"

    def _is_current(self, entry: tuple[tuple[Any, ...], int, T]) -> bool:
        return self._number_of.get(entry[2]) == entry[1]
