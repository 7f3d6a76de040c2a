"""The rows that are in committed parts, while a run adds to them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from jitney_jobs.journal import Interval, Ranges


class CommittedRows:
    """Disjoint intervals of each file's rows, none of which touch."""

    def __init__(self, done: Ranges) -> None:
        self._firsts: dict[int, list[int]] = {}
        """By file, ascending."""
        self._ends: dict[int, list[int]] = {}
        """Where the interval at the same index of ``_firsts`` ends."""
        self.add(done.intervals)

    def has_any_of(self, intervals: Iterable[Interval]) -> bool:
        """Whether one row of these is here."""
        return any(map(self._touches, intervals))

    def _touches(self, interval: Interval) -> bool:
        ends = self._ends.get(interval.file, [])
        index = bisect_right(ends, interval.first)  # the first interval that ends behind it
        return index < len(ends) and self._firsts[interval.file][index] < interval.end

    def add(self, intervals: Iterable[Interval]) -> None:
        """Add intervals, of which no row is here."""
        for file, first, end in intervals:
            firsts = self._firsts.setdefault(file, [])
            ends = self._ends.setdefault(file, [])
            # The intervals that touch this one, at either side, become one with it.
            low = bisect_left(ends, first)
            high = bisect_right(firsts, end)
            touching = range(low, high)
            if touching:
                first = min(first, firsts[low])
                end = max(end, ends[high - 1])
            firsts[low:high] = [first]
            ends[low:high] = [end]

    def within(self, interval: Interval) -> Iterator[Interval]:
        """The rows of it that are here."""
        firsts = self._firsts.get(interval.file, [])
        ends = self._ends.get(interval.file, [])
        for index in range(bisect_right(ends, interval.first), bisect_left(firsts, interval.end)):
            first = max(firsts[index], interval.first)
            end = min(ends[index], interval.end)
            yield Interval(interval.file, first, end)

    def covers(self, file: int, row_count: int) -> bool:
        """Whether all rows of a file that has so many are here."""
        if not row_count:
            return True
        firsts = self._firsts.get(file, [])
        return firsts[:1] == [0] and self._ends[file][0] >= row_count

    def end_of(self, file: int) -> int:
        """Behind the last row of a file that is here. 0 if none is."""
        ends = self._ends.get(file, [])
        return ends[-1] if ends else 0

    def ranges(self) -> Ranges:
        """All of them, as they are now."""
        return Ranges(
            Interval(file, first, end)
            for file, firsts in self._firsts.items()
            for first, end in zip(firsts, self._ends[file], strict=True)
        )
