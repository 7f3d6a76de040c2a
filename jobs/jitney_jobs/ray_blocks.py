"""Rows between the stages of Ray Data, as Arrow's blocks.

A row of a block is a row of the input: its file and its index there, what is known of it, and in
the column ``values`` the input's columns that the job reads. Ray may cut blocks and join them.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jitney_jobs.arrow import pa
from jitney_jobs.dataset import Dataset
from jitney_jobs.journal import Interval
from jitney_jobs.rows import Chunk, Unreadable

_FIXED = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("offset", pa.int64()),  # null for formats that have none
        ("error", pa.string()),  # why the row is none, else null
        ("raw", pa.binary()),  # what was read of such a row
        ("read_bytes", pa.float64()),  # its share of those of its chunk
        ("replaced", pa.int64()),  # how many U+FFFD were put in place of what is no text
        ("share", pa.float64()),  # what the row is of the whole input
    ]
)


class Portion(NamedTuple):
    """Some rows that came in a block."""

    chunk: Chunk
    share: float
    """Of the whole input, 0 to 1."""


def block_of(chunk: Chunk, share: float) -> pa.Table:
    """``share``: what the chunk is of the whole input, 0 to 1."""
    count = len(chunk)
    unreadable = chunk.unreadable
    if unreadable:
        rows = [unreadable.get(index, Unreadable(None, None)) for index in range(count)]  # type: ignore[arg-type]
        errors = pa.array([row.error for row in rows], pa.string())
        raw = pa.array([row.raw for row in rows], pa.binary())
    else:
        errors = pa.nulls(count, pa.string())
        raw = pa.nulls(count, pa.binary())
    fixed = [
        pa.array(np.full(count, chunk.file, np.int32)),
        pa.array(np.asarray(chunk.indices, np.int64)),
        pa.array(chunk.offsets, pa.int64()) if chunk.offsets else pa.nulls(count, pa.int64()),
        errors,
        raw,
        pa.array(np.full(count, chunk.read_bytes / count)),
        pa.array([chunk.replaced.get(index, 0) for index in range(count)], pa.int64()),
        pa.array(np.full(count, share / count)),
    ]
    values = chunk.data.to_struct_array()
    return pa.Table.from_arrays([*fixed, values], [*_FIXED.names, "values"])


def intervals_of(block: pa.Table) -> list[Interval]:
    """The rows of a block, and perhaps some between them: from the first to the last one of each
    file."""
    files = block.column("file").to_numpy()
    rows = block.column("row").to_numpy()
    intervals = []
    for file in np.unique(files).tolist():
        of_file = rows[files == file]
        intervals.append(Interval(file, int(of_file.min()), int(of_file.max()) + 1))
    return intervals


def without_rows(block: pa.Table, taken: Iterable[Interval]) -> pa.Table:
    """The rows of a block that are in none of these intervals."""
    files = block.column("file").to_numpy()
    rows = block.column("row").to_numpy()
    is_left = np.ones(block.num_rows, bool)
    for file, first, end in taken:
        is_left[(files == file) & (rows >= first) & (rows < end)] = False
    return block if is_left.all() else block.filter(pa.array(is_left))


def portions_of(block: pa.Table, dataset: Dataset, most_rows: int) -> Iterator[Portion]:
    """Chunks of at most so many rows."""
    for batch in block.combine_chunks().to_batches():
        files = batch.column("file").to_numpy()
        starts = np.flatnonzero(np.diff(files, prepend=-1))
        ends = [*starts[1:].tolist(), len(files)]
        for start, end in zip(starts.tolist(), ends, strict=True):
            for first in range(start, end, most_rows):
                rows = batch.slice(first, min(most_rows, end - first))
                yield _portion_of(rows, dataset)


def _portion_of(rows: pa.RecordBatch, dataset: Dataset) -> Portion:
    file = rows.column("file")[0].as_py()
    offsets = rows.column("offset")
    replaced = rows.column("replaced").to_pylist()
    unreadable: dict[int, Unreadable] = {}
    errors = rows.column("error")
    if errors.null_count < len(errors):
        raw = rows.column("raw")
        for index in range(len(rows)):
            if errors[index].is_valid:
                unreadable[index] = Unreadable(errors[index].as_py(), raw[index].as_py())
    chunk = Chunk(
        file=file,
        indices=rows.column("row").to_pylist(),
        format=dataset.format,
        data=pa.RecordBatch.from_struct_array(rows.column("values")),
        further=dataset.further_columns_of(file),
        offsets=() if offsets.null_count else offsets.to_pylist(),
        unreadable=unreadable,
        read_bytes=int(rows.column("read_bytes").to_numpy().sum()),
        replaced={index: count for index, count in enumerate(replaced) if count},
    )
    return Portion(chunk, float(rows.column("share").to_numpy().sum()))
