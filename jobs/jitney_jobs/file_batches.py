"""Batches of rows, as the files of a job's input are read: what all formats have in common.

A file gives the same batches each time it is read, so that a reader who begins again can leave out
those that it has had. ``table_batches`` reads Parquet and Arrow, ``text_batches`` lines and CSV.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa
from jitney_jobs.journal import InputFile
from jitney_jobs.journal_entries import ReadStart
from jitney_jobs.rows import PATH, Unreadable

READ_ERRORS = (OSError, pa.ArrowInvalid, csv.Error)
"""What reading a file may raise, if the file is damaged or the storage fails."""
BUFFER_BYTES = 1 << 20
_BATCH_BYTES = 2 << 20
"""A batch ends when its rows have so many bytes. It has one row at least."""
BEGINNING = ReadStart(0, 0)
"""Of a file."""


@dataclass(frozen=True)
class Batch:
    """The rows [first, end) of a file."""

    first: int
    end: int
    data: pa.RecordBatch | None
    """None if all rows are committed: then they were not read."""
    share: float
    """How much of the file has been read at the end of this batch, 0 to 1."""
    nbytes: int = 0
    """Size of the rows as they were read."""
    offsets: Sequence[int] = ()
    """As in :class:`~jitney_jobs.rows.Chunk`; ``unreadable`` and ``replaced``, too."""
    unreadable: dict[int, Unreadable] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)


@dataclass
class RowCount:
    """Of a file, as far as it was read."""

    rows: int = 0
    starts: list[ReadStart] = field(default_factory=list)
    """Where a reader can begin, every few MB, ascending."""

    def begin_anew(self) -> None:
        self.rows = 0
        self.starts = []


def is_full(row_count: int, nbytes: int, size: int) -> bool:
    """Whether a batch that has so many rows and bytes takes no more. ``size``: most rows of a
    batch."""
    return row_count >= size or nbytes >= _BATCH_BYTES


def batch_rows(size: int, row_count: int, nbytes: int) -> int:
    """How many rows a batch takes of ``row_count`` rows that have ``nbytes`` together: ``size``, or
    what ``_BATCH_BYTES`` hold if that is fewer."""
    rows_of_most_bytes = _BATCH_BYTES * row_count // max(1, nbytes)
    return min(size, max(1, rows_of_most_bytes))


def path_batches(files: list[InputFile], size: int) -> Iterator[Batch]:
    """For files that are rows: their paths, in the column ``path``. The index of a file is the
    index of its row."""
    count = len(files)
    first = 0
    while first < count:
        nbytes = files[first].size  # a batch has one row at least
        end = first + 1
        while end < count and not is_full(end - first, nbytes, size):
            nbytes += files[end].size
            end += 1
        paths = [file.path for file in files[first:end]]
        data = pa.record_batch({PATH: pa.array(paths, pa.string())})
        yield Batch(first, end, data, end / count, nbytes)
        first = end


def check_names(names: Sequence[str], path: str) -> None:
    """Raises InvalidArgumentError if two columns have the same name: a row would have only one of
    them."""
    counts = Counter(names)
    for name in names:
        if counts[name] > 1:
            raise InvalidArgumentError(f"input {path} has two columns {name!r}")
