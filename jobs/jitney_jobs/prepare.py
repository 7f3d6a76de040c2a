"""Prepares a chunk of rows, in whichever process: from what was read to what an executor takes.

Preparing is where CPU time goes: decoding, templates, tokenizing. ``prepare_workers`` has the
processes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.arrow import pa
from jitney_jobs.column_names import result_names
from jitney_jobs.columns import of_values
from jitney_jobs.failures import RequestError
from jitney_jobs.generate import JobPrompt
from jitney_jobs.json_lines import check_no_common_name, columns_of_lines
from jitney_jobs.outcome import Trouble
from jitney_jobs.row_clock import RowClock
from jitney_jobs.rows import LINES, Chunk, RowValues, reason
from jitney_jobs.storage import Storage
from jitney_jobs.tasks import Context, MapResult, Task, make_task
from jitney_jobs.tensors import Tensors
from jitney_jobs.texts import TokenizedText


@dataclass
class Item:
    """Rows of a chunk that go through the executor together: one row, or for an exported model a
    block of several."""

    rows: Sequence[int]
    """Their indices in the chunk, ascending."""
    chunk: Chunk | None = None
    """None on the way from a worker process, which need not send it back."""
    prepared: Any = None
    """What the executor takes. Of a block it is arrays whose first dimension is the rows."""
    error: JitneyError | None = None
    """Why it is bad, if it could not be prepared. Such an item has one row."""
    key: int = 0
    """Items of a run count from 0, in the order of the input."""
    trouble: Trouble = field(default_factory=Trouble)
    """Its errors that may pass."""
    nbytes: int = 0
    """Size of what was prepared."""


class Prepared(NamedTuple):
    """Rows of a chunk: all of them, or the first ones if what was made of them is large, or has
    taken long."""

    items: list[Item]
    columns: pa.RecordBatch | None
    """What is written of these rows, if the worker makes it: of lines and of texts."""
    row_count: int
    seconds: float
    """How long it took."""
    cpu_s: float
    """CPU seconds that the process had meanwhile."""
    chunk: Chunk | None = None
    """A chunk of these rows, with the columns. None on the way from a worker process."""
    rest: Chunk | None = None
    """The rows that are left to prepare."""
    replaced: Mapping[int, int] = {}
    """As in :class:`~jitney_jobs.rows.Chunk`, of files that are texts."""


Preparer = Callable[[Chunk], Prepared]


MADE_BYTES = 4 << 20
"""A worker returns what it has prepared once it is so large, although rows of the chunk are
left."""
_MADE_S = 2.0
"""Or after so many seconds: what it has not returned is lost if the job stops."""


def make_preparer(context: Context, clock: RowClock | None = None) -> Preparer:
    """What prepares a chunk, in the caller's thread. It raises UnavailableError if the storage
    fails, and any error of reading the chunk's data as rows."""
    row_clock = RowClock() if clock is None else clock
    task = make_task(context)
    storage = Storage(context.job)

    def prepare(chunk: Chunk) -> Prepared:
        began = time.perf_counter()
        cpu_began = time.process_time()
        replaced: dict[int, int] = {}
        block = None
        if context.takes_blocks and isinstance(task, Tensors):
            block = _whole_block(task, chunk)
        if block is not None:
            items = [block]
            columns = None
            row_count = len(chunk)
        else:
            making = _Making(context, task, chunk, row_clock)
            making.prepare_rows(storage)
            row_clock.stop()
            items = making.items
            columns = making.columns
            row_count = making.row_count
            replaced = making.replaced
        seconds = time.perf_counter() - began
        return Prepared(
            items=items,
            columns=columns,
            row_count=row_count,
            seconds=seconds,
            cpu_s=time.process_time() - cpu_began,
            replaced=replaced,
        )

    return prepare


def _whole_block(task: Tensors, chunk: Chunk) -> Item | None:
    """All rows together, if their columns can be taken as they are."""
    if chunk.format in LINES or chunk.format in ("text", "image") or chunk.unreadable:
        return None
    arrays = task.prepare_columns(chunk.data)
    if arrays is None:
        return None
    return Item(range(len(chunk)), prepared=arrays, nbytes=size_of(arrays))


class _Making:
    """Prepares a chunk row by row, until what it has made is large, or has taken long."""

    def __init__(self, context: Context, task: Task, chunk: Chunk, clock: RowClock) -> None:
        self._context = context
        self._clock = clock
        self._names = list(result_names(context.job, task.fields).values())
        """Of the result's columns, as they are written."""
        self._task = task
        self._chunk = chunk
        self.items: list[Item] = []
        self.columns: pa.RecordBatch | None = None
        self.row_count = 0
        self.replaced: dict[int, int] = {}
        self._rows: list[RowValues] = []
        """What is written of each row: empty for a bad one. Only if columns are made of them."""

    def prepare_rows(self, storage: Storage) -> None:
        """Raises UnavailableError if the storage fails, and any exception if Python has not all
        values of the chunk."""
        nbytes = 0
        began = time.monotonic()
        schema = self._context.columns
        self._clock.begin(0)
        replaced_before = storage.replaced
        for index, row in enumerate(self._chunk.rows(storage)):
            if storage.replaced > replaced_before:
                self.replaced[index] = storage.replaced - replaced_before
                replaced_before = storage.replaced
            item = self._item_of(index, row)
            self._clock.begin(index + 1)
            self.items.append(item)
            nbytes += item.nbytes
            self.row_count += 1
            if schema is not None:
                self._rows.append(self._written(row))
                if self._chunk.format == "text":
                    nbytes += len(self._rows[-1].get("text", ""))
            if nbytes >= MADE_BYTES or time.monotonic() - began >= _MADE_S:
                break
        if schema is not None:
            self._make_columns(schema)
        if self._context.takes_blocks:
            self.items = _joined(self.items)

    def _item_of(self, index: int, row: RowValues | Exception) -> Item:
        item = Item((index,))
        known = self._chunk.results.get(index)
        if known is not None:
            item.prepared = known
            item.nbytes = size_of(known)
            return item
        try:
            if isinstance(row, Exception):
                raise row
            self._check_names(row)
            item.prepared = self._task.prepare(row)
            item.nbytes = size_of(item.prepared)
        except UnavailableError:
            raise
        except RequestError as error:
            item.error = error.detached()
        except (Exception, SystemExit) as error:  # of a user's function or template
            item.error = InvalidArgumentError(reason(error))
        return item

    def _check_names(self, row: RowValues) -> None:
        """Raises InvalidArgumentError if a line has a column that the result has too."""
        keep = self._context.job.keep
        if self._names and self._chunk.format in LINES:
            check_no_common_name(list(row) if keep is None else keep, self._names)

    def _written(self, row: RowValues | Exception) -> RowValues:
        """The columns of the row that are kept."""
        if isinstance(row, Exception):
            return {}
        keep = self._context.job.keep
        return row if keep is None else {name: row.get(name) for name in keep}

    def _make_columns(self, schema: pa.Schema) -> None:
        """Make columns of what is written of the rows. Rows that do not fit the schema become
        bad."""
        rows = self._rows
        if self._chunk.format == "text":
            found = of_values(rows, schema)
        else:
            are_whole = self._context.job.keep is None and not self._chunk.further
            lines = self._chunk.lines()[: self.row_count]
            all_are_rows = not any(item.error is not None for item in self.items)
            found = columns_of_lines(lines, rows, schema, are_whole and all_are_rows)
        self.columns = found.data
        for index, error in found.errors.items():
            item = self.items[index]
            if item.error is None:
                self.items[index] = Item((index,), error=InvalidArgumentError(error))


def _joined(items: list[Item]) -> list[Item]:
    """The same rows in their order: successive rows whose arrays have the same shapes as one block,
    each bad row alone."""
    joined: list[Item] = []
    rows: list[Item] = []
    for item in items:
        if rows and (item.error is not None or not _are_alike(rows, item)):
            joined.append(_block_of(rows))
            rows = []
        if item.error is not None:
            joined.append(item)
        else:
            rows.append(item)
    if rows:
        joined.append(_block_of(rows))
    return joined


def _are_alike(rows: list[Item], item: Item) -> bool:
    if not rows:
        return True
    first = rows[0].prepared
    return all(first[name].shape == array.shape for name, array in item.prepared.items())


def _block_of(rows: list[Item]) -> Item:
    names = rows[0].prepared
    arrays = {name: np.stack([item.prepared[name] for item in rows]) for name in names}
    indices = [index for item in rows for index in item.rows]
    return Item(indices, prepared=arrays, nbytes=sum(item.nbytes for item in rows))


_BYTES_OF_TOKEN = 40
"""Of a token id in a list: the number, and its place."""


def size_of(prepared: Any) -> int:
    """Bytes in memory of what was prepared, about."""
    if isinstance(prepared, JobPrompt):
        return _BYTES_OF_TOKEN * len(prepared.ids)
    if isinstance(prepared, MapResult):
        return len(prepared.data)
    if isinstance(prepared, TokenizedText):
        return prepared.nbytes
    if isinstance(prepared, dict):
        return sum(map(_array_bytes, prepared.values()))
    if isinstance(prepared, bytes):
        return len(prepared)
    if isinstance(prepared, tuple | list):  # a request, or the parts of a line
        return sum(map(size_of, prepared))
    return 0


def _array_bytes(array: Any) -> int:
    if not isinstance(array, np.ndarray):
        return 0
    if array.dtype == object:
        return sum(len(text) for text in array.ravel())
    return array.nbytes
