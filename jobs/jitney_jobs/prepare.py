"""What a job does with a row: prepared in worker processes, finished in the job's process.

A task is made in every process from the same :class:`Context`. Preparing is where CPU time goes:
decoding, templates, tokenizing. A chunk of rows is prepared at a time.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import pkgutil
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError
from jitney_server.standins.signature import Signature

from jitney_jobs.arrow import pa
from jitney_jobs.column_names import result_names
from jitney_jobs.columns import NonFinite, of_values
from jitney_jobs.failures import RequestError
from jitney_jobs.generate import (
    Encoder,
    Generate,
    GenerateOnServer,
    JobPrompt,
    LanguageModel,
)
from jitney_jobs.job import Job
from jitney_jobs.json_lines import check_no_common_name, columns_of_lines, encoded
from jitney_jobs.outcome import Trouble
from jitney_jobs.rows import LINES, Chunk, RowValues, reason
from jitney_jobs.storage import Storage
from jitney_jobs.tensors import Tensors
from jitney_jobs.texts import TokenizedText

_POLL_S = 0.2
"""How often the clock of a row is looked at, in seconds."""


@dataclass
class Item:
    """Rows of a chunk that go through the executor together: one row, or as many rows as a chunk
    has if an exported model takes them as they are."""

    rows: Sequence[int]
    """Their indices in the chunk, ascending."""
    chunk: Chunk | None = None
    """None on the way from a worker process, which need not send it back."""
    prepared: Any = None
    """What the executor takes. Of a block it is arrays whose first dimension is the rows."""
    error: JitneyError | None = None
    """Why it is bad, if it could not be prepared. Such an item has one row."""
    result: Any = None
    """Only on a cluster: the executor's result, or a JitneyError."""
    key: int = 0
    """Items of a run count from 0, in the order of the input."""
    trouble: Trouble = field(default_factory=Trouble)
    """Its errors that may pass."""
    nbytes: int = 0
    """Size of what was prepared."""


class Prepared(NamedTuple):
    """Rows of a chunk: all of them, or the first ones if what was made of them is large."""

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
"""A worker gives back what it has made once that is so large, though rows may be left."""


class Context(msgspec.Struct, frozen=True):
    """All that a task is made of. It is sent to the workers."""

    job: Job
    language_model: LanguageModel | None = None
    signature: Signature | None = None
    tokenizer: str | None = None
    takes_blocks: bool = False
    """Whether the executor takes arrays of many rows."""
    writes_table: bool = False
    """Whether the output has typed columns, and not lines of JSON."""
    kept: list[str] | None = None
    """The input's columns that are written, if they are known."""
    columns: Any = None
    """A pa.Schema, of what the workers make of lines or texts, to be written. None if they make
    nothing."""


class Task(Protocol):
    """What is done with each row."""

    @property
    def fields(self) -> pa.Schema | None:
        """The result's columns. None if they are known only once there are rows."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns of the input that it reads. None: all."""

    def prepare(self, row: RowValues) -> Any:
        """What the executor takes. Raises for a bad row, UnavailableError if the storage fails."""

    def finish(self, row: RowValues, result: Any) -> RowValues:
        """The result's columns. ``row`` has values only if the input is lines of OpenAI's
        service."""


class MapResult(NamedTuple):
    """The new columns of a row, as bytes: their size is known, and the job's process makes values
    of them only when it writes them."""

    data: bytes
    """JSON if the output is lines, else a pickled dict."""
    non_finite: int
    """How many values of JSON were NaN or infinite."""

    def values(self) -> RowValues:
        """Only if the output is a table."""
        row: RowValues = pickle.loads(self.data)
        return row


class Map:
    """A function of the user's: the whole of the work is done in the workers."""

    fields = None

    def __init__(self, context: "Context") -> None:
        job = context.job
        name = str(job.map)
        self.columns = job.map_column or None
        self._is_table = context.writes_table
        self._kept = context.kept if job.keep is None else job.keep
        self._non_finite = job.non_finite
        try:
            self._function: Callable[[RowValues], Any] = pkgutil.resolve_name(name)
        except Exception as error:  # the user's module may raise anything
            raise InvalidArgumentError(f"map {name!r} cannot be imported: {error}") from error
        if not callable(self._function):
            raise InvalidArgumentError.of("map", name, "a function")

    def prepare(self, row: RowValues) -> MapResult:
        names = list(row) if self._kept is None else self._kept
        if self.columns is not None:  # a line has them all
            row = {name: value for name, value in row.items() if name in self.columns}
        result = self._function(row)
        if not isinstance(result, Mapping):
            raise InvalidArgumentError.of("the result of map", result, "a dict of new columns")
        values = dict(result)
        check_no_common_name(names, list(values))
        if self._is_table:
            return MapResult(pickle.dumps(values, pickle.HIGHEST_PROTOCOL), 0)
        non_finite = NonFinite(self._non_finite)
        return MapResult(encoded(non_finite.replaced(values)), non_finite.count)

    def finish(self, row: RowValues, result: Any) -> RowValues:
        raise AssertionError("results of map are written as they are")


def make_task(context: Context) -> Task:
    """Raises InvalidArgumentError for a template, function or parameter that cannot be used."""
    job = context.job
    if job.task == "map":
        return Map(context)
    if job.input_format == "openai":
        return _make_line_task(context)
    if job.server is not None and job.task == "generate":
        return GenerateOnServer(job)
    if context.signature is not None:
        return Tensors(job, context.signature, context.tokenizer)
    assert context.language_model is not None, "a job that generates has a language model"
    return Generate(job, Encoder(context.language_model))


def _make_line_task(context: Context) -> Task:
    """The task of lines for OpenAI's API."""
    from jitney_jobs import openai_lines  # imports much of the gateway

    if context.job.server is not None:
        return openai_lines.OpenAiLinesOnServer(context.job)
    if context.signature is not None:
        return openai_lines.OpenAiEmbeddings(context.job, context.signature, context.tokenizer)
    assert context.language_model is not None, "a job that generates has a language model"
    return openai_lines.OpenAiLines(context.job, context.language_model)


class RowClock(Protocol):
    """Tells another process which row is at work, and since when."""

    def __setitem__(self, index: int, value: float) -> None: ...

    def __getitem__(self, index: int) -> float: ...


_ROW = 0
"""Item of a :class:`RowClock`: the number of the row in its chunk."""
_SINCE = 1
"""Item of a :class:`RowClock`: when the row began, in monotonic seconds; 0 if none is at work."""


class RowTimeoutError(InvalidArgumentError):
    """A row took longer than the setting ``row_timeout``. ``number``: of the row in its chunk."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__(f"it took longer than row_timeout ({seconds:g} s) to prepare")
        self.number = number


def make_preparer(context: Context, clock: RowClock | None = None) -> Preparer:
    """What prepares a chunk, in the caller's thread. It raises UnavailableError if the storage
    fails, and any error of reading the chunk's data as rows."""
    row_clock = [0.0, 0.0] if clock is None else clock
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
            row_clock[_SINCE] = 0.0
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
    """Prepares a chunk row by row, until what it has made is large."""

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
        schema = self._context.columns
        self._clock[_ROW] = 0
        self._clock[_SINCE] = time.monotonic()
        replaced_before = storage.replaced
        for index, row in enumerate(self._chunk.rows(storage)):
            if storage.replaced > replaced_before:
                self.replaced[index] = storage.replaced - replaced_before
                replaced_before = storage.replaced
            item = self._prepared(index, row)
            self._clock[_ROW] = index + 1
            self._clock[_SINCE] = time.monotonic()
            self.items.append(item)
            nbytes += item.nbytes
            self.row_count += 1
            if schema is not None:
                self._rows.append(self._written(row))
                if self._chunk.format == "text":
                    nbytes += len(self._rows[-1].get("text", ""))
            if nbytes >= MADE_BYTES:
                break
        if schema is not None:
            self._make_columns(schema)
        if self._context.takes_blocks:
            self.items = _joined(self.items)

    def _prepared(self, index: int, row: RowValues | Exception) -> Item:
        item = Item((index,))
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
        """Of lines, each of which states its columns."""
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
        """Rows that the schema does not hold become bad ones."""
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
    """Blocks of the rows whose arrays have the same shapes, and the bad rows."""
    joined: list[Item] = []
    rows: list[Item] = []
    for item in [*items, None]:
        ends = item is None or item.error is not None or not _are_alike(rows, item)
        if rows and ends:
            joined.append(_block_of(rows))
            rows = []
        if item is None:
            break
        if item.error is not None:
            joined.append(item)
        else:
            rows.append(item)
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


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread of its own. The process can end even if the call hangs, unlike with a
    thread of an executor."""
    future: Future[Any] = Future()
    threading.Thread(target=settle, args=(future, call), daemon=True).start()
    return future


def settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give a future what the call returns or raises."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class Workers:
    """Prepare chunks in the background: in ``count`` processes, or with 0 in a thread."""

    def __init__(self, context: Context, count: int, columns: Sequence[str] | None = None) -> None:
        """``columns``: of the chunks, those that the task reads. None: all."""
        self.are_processes = count > 0
        self._columns = columns
        self._processes = [_Process(context) for _ in range(count)]
        self._calls: queue.SimpleQueue[tuple[Chunk, Future[Prepared]] | None] = queue.SimpleQueue()
        self._preparers: list[Preparer] = [*self._processes] or [make_preparer(context)]
        # One thread for each worker. If each chunk had a thread, what they unpickle would be spread
        # over more of malloc's arenas.
        for prepare in self._preparers:
            threading.Thread(target=self._work, args=(prepare,), daemon=True).start()

    def submit(self, chunk: Chunk) -> Future[Prepared]:
        """The future raises UnavailableError if the storage failed."""
        future: Future[Prepared] = Future()
        self._calls.put((chunk, future))
        return future

    def _work(self, prepare: Preparer) -> None:
        """A thread."""
        while True:
            call = self._calls.get()
            if call is None:
                return
            chunk, future = call
            settle(future, partial(_prepare_chunk, prepare, chunk, self._columns))

    def close(self) -> None:
        """End the processes, whatever they do, and then the threads."""
        for process in self._processes:
            process.close()
        for _ in self._preparers:
            self._calls.put(None)


def _prepare_chunk(prepare: Preparer, chunk: Chunk, columns: Sequence[str] | None) -> Prepared:
    """Raises UnavailableError if the storage fails."""
    sent = chunk.with_only(columns)
    try:
        prepared = prepare(sent)
    except UnavailableError:
        raise
    except RowTimeoutError as error:
        prepared = _prepare_row_by_row(prepare, sent, late=error)
    except (Exception, SystemExit):
        prepared = _prepare_row_by_row(prepare, sent)
    rest = None
    if prepared.row_count < len(chunk):
        rest = chunk.slice(prepared.row_count, len(chunk))
        chunk = chunk.slice(0, prepared.row_count)
    replaced = {**chunk.replaced, **prepared.replaced}
    chunk = replace(chunk, columns=prepared.columns, replaced=replaced)
    for item in prepared.items:
        item.chunk = chunk
    return prepared._replace(chunk=chunk, rest=rest)


def _prepare_row_by_row(
    prepare: Preparer, chunk: Chunk, late: RowTimeoutError | None = None
) -> Prepared:
    """For a chunk that raised, or ended its process. A row that does so alone is bad; so is the one
    that is known to be ``late``."""
    items: list[Item] = []
    columns: list[pa.RecordBatch | None] = []
    seconds = 0.0
    cpu_s = 0.0
    replaced: dict[int, int] = {}
    for index in range(len(chunk)):
        of_row = None
        if late is not None and index == late.number:
            items.append(Item((index,), error=late))
            columns.append(None)
            continue
        try:
            prepared = prepare(chunk.slice(index, index + 1))
        except UnavailableError:
            raise
        except (Exception, SystemExit) as error:
            items.append(Item((index,), error=InvalidArgumentError(reason(error))))
        else:
            for item in prepared.items:
                item.rows = (index,)
            items += prepared.items
            of_row = prepared.columns
            if prepared.replaced:
                replaced[index] = sum(prepared.replaced.values())
            seconds += prepared.seconds
            cpu_s += prepared.cpu_s
        columns.append(of_row)
        if sum(item.nbytes for item in items) >= MADE_BYTES:
            break
    return Prepared(
        items=items,
        columns=_rows_as_columns(columns),
        row_count=len(columns),
        seconds=seconds,
        cpu_s=cpu_s,
        replaced=replaced,
    )


def _rows_as_columns(rows: list[pa.RecordBatch | None]) -> pa.RecordBatch | None:
    """Columns of all rows. A row that has none is null."""
    schemas = [row.schema for row in rows if row is not None]
    if not schemas:
        return None
    nulls = of_values([{}], schemas[0]).data
    return pa.concat_batches([nulls if row is None else row for row in rows])


class _Process:
    """A worker process, started when it is needed. Called by one thread at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pipe: Any = None
        self._process: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._timeout_s = context.job.row_timeout
        self._clock: RowClock = [0.0, 0.0]

    def __call__(self, chunk: Chunk) -> Prepared:
        """Raises InvalidArgumentError if the process dies, and RowTimeoutError if it was ended
        because of one row. The next call starts another one."""
        try:
            if self._process is None:
                self._start()
            self._pipe.send(chunk)
            self._wait_for_answer()
            answer: Prepared | Exception = self._pipe.recv()
        except (EOFError, OSError):
            self._process = None
            raise InvalidArgumentError("the process that prepared it died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _wait_for_answer(self) -> None:
        """Raises RowTimeoutError, after the end of the process, if one row takes too long."""
        if self._timeout_s is None:
            return
        while not self._pipe.poll(_POLL_S):
            since = self._clock[_SINCE]
            if since and time.monotonic() - since > self._timeout_s:
                number = int(self._clock[_ROW])
                self._process.kill()
                self._process.join()
                self._process = None
                raise RowTimeoutError(number, self._timeout_s)

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise UnavailableError("the job has ended")
            self._pipe, theirs = spawn.Pipe()
            self._clock = spawn.RawArray("d", 2)
            self._process = spawn.Process(target=_serve, args=(theirs, self._clock))
            self._process.start()
            theirs.close()  # so that an end of the process is an end of the pipe
        # Sent now, not given to Process(): `start` would then write it, and wait for ever if the
        # child has died.
        self._pipe.send(self._context)

    def close(self) -> None:
        """End it at once."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.join()


def _serve(pipe: Any, clock: RowClock) -> None:
    """The life of a worker process: until the job's process kills it, or has ended itself."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the job's process
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with_job, args=(parent.sentinel,), daemon=True).start()
    prepare = make_preparer(pipe.recv(), clock)
    while True:
        chunk = pipe.recv()
        try:
            pipe.send(prepare(chunk))
        except UnavailableError as error:
            pipe.send(error)
        except (Exception, SystemExit) as error:  # of reading the chunk, or of sending the rows
            pipe.send(InvalidArgumentError(reason(error)))


def _end_with_job(sentinel: int) -> None:
    """End this worker process once the job's process has ended, of which ``sentinel`` tells."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
