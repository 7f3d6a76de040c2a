"""The processes that prepare chunks of rows, with ``prepare`` in each.

If a process dies, or takes longer for a row than ``row_timeout`` allows, one row is lost: the other
rows of its chunk are prepared again, one by one.

pebble's pool bounds and isolates tasks too, but not what is inside of one. If each row were a task,
sending it would take longer than preparing it. If each chunk were one, nobody would know which row
took so long. So each process here has a clock, in memory that the job's process reads: it says
which row is being prepared, and since when.
"""

import multiprocessing
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.arrow import pa
from jitney_jobs.background import settle
from jitney_jobs.child_process import live_as_child
from jitney_jobs.columns import of_values
from jitney_jobs.prepare import (
    MADE_BYTES,
    Item,
    Prepared,
    Preparer,
    make_preparer,
)
from jitney_jobs.row_clock import NUM_CELLS, Cells, RowClock, RowTimeoutError
from jitney_jobs.rows import Chunk, reason
from jitney_jobs.tasks import Context

_POLL_S = 0.2
"""How often the clock of a row is looked at, in seconds."""


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
    """For a chunk that raised an error, or whose process died. A row that does so alone is bad, and
    so is the row that is known to be ``late``."""
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
        self._clock = RowClock()

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
            try:
                self._clock.check(self._timeout_s)
            except RowTimeoutError:
                self._process.kill()
                self._process.join()
                self._process = None
                raise

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise UnavailableError("the job has ended")
            self._pipe, theirs = spawn.Pipe()
            cells = spawn.RawArray("d", NUM_CELLS)
            self._clock = RowClock(cells)
            self._process = spawn.Process(target=_serve, args=(theirs, cells))
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


def _serve(pipe: Any, cells: Cells) -> None:
    """The life of a worker process: until the job's process kills it, or has ended itself."""
    live_as_child()
    prepare = make_preparer(pipe.recv(), RowClock(cells))
    while True:
        chunk = pipe.recv()
        try:
            pipe.send(prepare(chunk))
        except UnavailableError as error:
            pipe.send(error)
        except (Exception, SystemExit) as error:  # of reading the chunk, or of sending the rows
            pipe.send(InvalidArgumentError(reason(error)))
