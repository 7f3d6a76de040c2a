"""Rows of a job's input as intervals: those that are committed, and those of one shard."""

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from jitney_jobs.journal_entries import Interval, ReadStart, RowRange


class Ranges:
    """Rows as disjoint intervals, sorted."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self.intervals: list[Interval] = []
        self.twice: Interval | None = None
        """The first rows that were in two of the given intervals. None if no row was."""
        for interval in sorted(intervals):
            self._append(interval)

    def _append(self, interval: Interval) -> None:
        """Add an interval that begins no earlier than the last one. They are joined if they
        touch."""
        last = self.intervals[-1] if self.intervals else None
        if last is None or last.file != interval.file or last.end < interval.first:
            self.intervals.append(interval)
            return
        if last.end > interval.first and self.twice is None:
            self.twice = interval._replace(end=min(last.end, interval.end))
        self.intervals[-1] = last._replace(end=max(last.end, interval.end))

    def without(self, taken: Iterable[Interval]) -> "Ranges":
        """These rows, but for ``taken``, whose intervals are disjoint."""
        left: list[Interval] = []
        holes = deque(sorted(taken))
        for interval in self.intervals:
            first = interval.first  # of the rows of this interval that are not yet looked at
            while holes and holes[0] < (interval.file, interval.end, 0):
                hole = holes[0]
                if hole.file == interval.file and hole.end > first:
                    if hole.first > first:
                        left.append(Interval(interval.file, first, hole.first))
                    first = hole.end
                    if hole.end > interval.end:
                        break  # the next interval may have more of its rows
                holes.popleft()
            if first < interval.end:
                left.append(Interval(interval.file, first, interval.end))
        return Ranges(left)

    def covers(self, file: int, first: int, end: int) -> bool:
        """Whether every row of [first, end) is here."""
        if first >= end:
            return True
        # If an interval has all of the rows, it is the last one that begins at `first` or before.
        index = bisect_right(self.intervals, (file, first, sys.maxsize)) - 1
        if index < 0:
            return False
        before = self.intervals[index]
        return before.file == file and before.end >= end

    def last_of(self, file: int) -> Interval | None:
        """The last rows of a file that are here."""
        index = bisect_right(self.intervals, (file, sys.maxsize, sys.maxsize)) - 1
        if index < 0 or self.intervals[index].file != file:
            return None
        return self.intervals[index]

    def touches(self, file: int) -> bool:
        """Whether any row of the file is here."""
        index = bisect_right(self.intervals, (file, -1, -1))
        return index < len(self.intervals) and self.intervals[index].file == file


class ShardRows:
    """The rows of one shard: at most one range of each file."""

    def __init__(self, ranges: Sequence[RowRange]) -> None:
        """``ranges``: by file, ascending."""
        self.ranges = {each.file: each for each in ranges}
        """By file."""
        self._replaced: set[int] = set()
        """Files that have changed since the job was divided."""

    @property
    def files(self) -> list[int]:
        """Those of which it has rows, ascending."""
        return list(self.ranges)

    def start_in(self, file: int) -> ReadStart | None:
        """Where the file is read from. None: from its beginning."""
        return None if file in self._replaced else self.ranges[file].start

    def end_in(self, file: int) -> int | None:
        """The end of its rows in the file. None: that of the file."""
        found = self.ranges[file]
        return None if found.is_open else found.end

    def note_replaced(self, file: int) -> None:
        """A file has changed: it is read from its beginning."""
        self._replaced.add(file)

    @property
    def outside(self) -> list[Interval]:
        """The rows of other shards in the files of this one."""
        found = []
        for each in self.ranges.values():
            if each.first > 0:
                found.append(Interval(each.file, 0, each.first))
            if not each.is_open:
                found.append(Interval(each.file, each.end, sys.maxsize))
        return found

    def within(self, row_counts: Mapping[int, int]) -> list[Interval] | None:
        """The rows of the shard that the files really have. ``row_counts``: rows of the files that
        were read, as far as they can be read. None if it is not yet known how many there are."""
        found = []
        for each in self.ranges.values():
            if each.is_open and each.file not in row_counts:
                return None
            end = row_counts.get(each.file, each.end)
            if end > each.first:
                found.append(Interval(each.file, each.first, end))
        return found

    def total(self, row_counts: Mapping[int, int]) -> int | None:
        """How many rows :meth:`within` gives. None if that is not yet known."""
        found = self.within(row_counts)
        return None if found is None else row_count_of(found)

    def share_before(self, file: int, row: int) -> float:
        """The share of the shard's rows that comes before a row, 0 to 1."""
        rows_before = 0
        total = 0
        for each in self.ranges.values():
            rows = each.end - each.first
            total += rows
            if each.file < file:
                rows_before += rows
            elif each.file == file:
                rows_before += max(0, min(rows, row - each.first))
        return rows_before / max(1, total)


def row_count_of(ranges: Iterable[Interval | RowRange]) -> int:
    """How many rows disjoint intervals, or the ranges of a shard, have."""
    return sum(each.end - each.first for each in ranges)
