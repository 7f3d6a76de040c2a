"""The part that is being filled: finished rows that are not yet written."""

import time
from collections.abc import Iterator, Sequence

from jitney_jobs.ended_rows import Ended
from jitney_jobs.job import Job
from jitney_jobs.part_maker import PartMaker

_PART_BYTES = 32 << 20
"""A part is written when its rows have so many bytes in memory: columns of the input that are
written, and the result's."""


class PartFiller:
    """Finished rows, until they are to be written."""

    def __init__(self, job: Job, maker: PartMaker) -> None:
        self._job = job
        self._maker = maker
        self._part: list[Ended] = []
        self._row_count = 0
        self._bytes = 0
        """Approximate size of its rows as they are written."""
        self._began = 0.0
        """When its first row came, in monotonic seconds."""

    def __len__(self) -> int:
        """Its rows."""
        return self._row_count

    def add(self, ended: Ended) -> Ended | None:
        """Add as many of the rows as there is room for, at least one. Returns the others."""
        if not self._part:
            self._began = time.monotonic()
        room = max(1, self._job.part_rows - self._row_count)
        taken = ended.slice(0, room)
        self._part.append(taken)
        self._row_count += len(taken.rows)
        self._bytes += taken.result_bytes + self._maker.written_bytes(taken)
        if room >= len(ended.rows):
            return None
        return ended.slice(room, len(ended.rows))

    @property
    def is_due(self) -> bool:
        """Whether it is full, or old enough to be written. As long as the columns are not known it
        waits for the rows that set them, and may get more rows than a part has. :func:`in_parts`
        divides it then."""
        if not self._part:
            return False
        if self._bytes >= _PART_BYTES:
            return True
        age = time.monotonic() - self._began
        if self._row_count < self._job.part_rows and age < self._job.part_seconds:
            return False
        return self._maker.columns.are_known(self._part)

    @property
    def rows(self) -> Sequence[Ended]:
        """The rows that are in it."""
        return self._part

    @property
    def waits_for_columns(self) -> bool:
        """Whether it has too few results to set the columns, which are not known."""
        return not self._maker.columns.are_known(self._part)

    def take(self) -> list[Ended]:
        """The rows of the part. The next one is empty."""
        part = self._part
        self._part = []
        self._row_count = 0
        self._bytes = 0
        return part


def in_parts(rows: Sequence[Ended], most_rows: int) -> Iterator[list[Ended]]:
    """The same rows, in parts of at most so many."""
    part: list[Ended] = []
    room = most_rows
    for ended in rows:
        first = 0
        while first < len(ended.rows):
            taken = ended.slice(first, min(first + room, len(ended.rows)))
            first += len(taken.rows)
            room -= len(taken.rows)
            part.append(taken)
            if not room:
                yield part
                part = []
                room = most_rows
    if part:
        yield part
