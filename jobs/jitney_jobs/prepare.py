"""What a job does with a row: prepared in worker processes, finished in the job's process.

A task is made in every process from the same :class:`Context`. Preparing is where CPU time goes:
decoding, templates, tokenizing. A chunk of rows is prepared at a time.
"""

import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_server.standins.signature import Signature

from jitney_jobs.arrow import pa
from jitney_jobs.generate import (
    Encoder,
    Generate,
    GenerateOnServer,
    LanguageModel,
    OpenAiLines,
    OpenAiLinesOnServer,
)
from jitney_jobs.job import Job
from jitney_jobs.outcome import Trouble
from jitney_jobs.rows import Chunk, RowId, RowValues, reason
from jitney_jobs.storage import Storage
from jitney_jobs.tensors import Tensors

_POLL_S = 0.2
"""How often the clock of a row is looked at, in seconds."""


@dataclass
class Item:
    """A row in flight."""

    id: RowId
    row: RowValues | None = None
    """None if it could not be read."""
    prepared: Any = None
    """What the executor takes."""
    error: InvalidArgumentError | None = None
    """Why it is bad, if it could not be prepared."""
    result: Any = None
    """Only on a cluster: the executor's result, or a JitneyError."""
    key: int = 0
    """Rows of a run count from 0, in the order of the input."""
    trouble: Trouble = field(default_factory=Trouble)
    """Its errors that may pass."""
    read_bytes: int = 0
    """Approximate size of the row as it was read."""
    prepared_bytes: int = 0
    """Size of the arrays that were prepared. 0 for a prompt, which is as small as the row."""


class Prepared(NamedTuple):
    """The rows of a chunk."""

    items: list[Item]
    seconds: float
    """How long it took."""
    cpu_s: float
    """CPU seconds that the process had meanwhile."""


Preparer = Callable[[Chunk], Prepared]


class Context(msgspec.Struct, frozen=True):
    """All that a task is made of. It is sent to the workers."""

    job: Job
    language_model: LanguageModel | None = None
    signature: Signature | None = None
    tokenizer: str | None = None


class Task(Protocol):
    """What is done with each row."""

    fields: pa.Schema | None
    """The result's columns. None if they are known only once there are rows."""
    columns: Sequence[str]
    """Columns of the input that the model needs. ``column_names.py`` has those that the job
    names."""

    def prepare(self, row: RowValues) -> Any:
        """What the executor takes. Raises for a bad row, UnavailableError if the storage fails."""

    def finish(self, row: RowValues, result: Any) -> RowValues:
        """The result's columns."""


class Map:
    """A function of the user's: the whole of the work is done in the workers."""

    fields = None
    columns: Sequence[str] = ()

    def __init__(self, name: str) -> None:
        try:
            self._function: Callable[[RowValues], Any] = pkgutil.resolve_name(name)
        except Exception as error:  # the user's module may raise anything
            raise InvalidArgumentError(f"map {name!r} cannot be imported: {error}") from error
        if not callable(self._function):
            raise InvalidArgumentError.of("map", name, "a function")

    def prepare(self, row: RowValues) -> Any:
        return self._function(row)

    def finish(self, row: RowValues, result: Any) -> RowValues:
        if not isinstance(result, Mapping):
            raise InvalidArgumentError.of("the result of map", result, "a dict of new columns")
        return dict(result)


def make_task(context: Context) -> Task:
    """Raises InvalidArgumentError for a template, function or parameter that cannot be used."""
    job = context.job
    if job.task == "map":
        return Map(str(job.map))
    lines = job.input_format == "openai"
    if job.server is not None and job.task == "generate":
        return OpenAiLinesOnServer(job) if lines else GenerateOnServer(job)
    if context.signature is not None:
        return Tensors(job, context.signature, context.tokenizer)
    assert context.language_model is not None, "a job that generates has a language model"
    encoder = Encoder(context.language_model)
    return OpenAiLines(job, encoder) if lines else Generate(job, encoder)


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
        items: list[Item] = []
        for index, raw in zip(chunk.indices, chunk.raw_rows(), strict=True):
            row_clock[_ROW] = len(items)
            row_clock[_SINCE] = time.monotonic()
            item = Item(RowId(chunk.file, index))
            items.append(item)
            try:
                item.row = chunk.row(raw, storage)
                item.prepared = task.prepare(item.row)
                item.prepared_bytes = _array_bytes(item.prepared)
            except UnavailableError:
                raise
            except (Exception, SystemExit) as error:  # of a user's function or template
                item.error = InvalidArgumentError(reason(error))
        row_clock[_SINCE] = 0.0
        seconds = time.perf_counter() - began
        return Prepared(items, seconds, time.process_time() - cpu_began)

    return prepare


def _array_bytes(prepared: Any) -> int:
    if not isinstance(prepared, dict):
        return 0
    return sum(value.nbytes for value in prepared.values() if isinstance(value, np.ndarray))


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

    def __init__(self, context: Context, count: int) -> None:
        self.are_processes = count > 0
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
            settle(future, partial(_prepare_chunk, prepare, chunk))

    def close(self) -> None:
        """End the processes, whatever they do, and then the threads."""
        for process in self._processes:
            process.close()
        for _ in self._preparers:
            self._calls.put(None)


def _prepare_chunk(prepare: Preparer, chunk: Chunk) -> Prepared:
    """Raises UnavailableError if the storage fails."""
    try:
        prepared = prepare(chunk)
    except UnavailableError:
        raise
    except RowTimeoutError as error:
        prepared = _prepare_row_by_row(prepare, chunk, late=error)
    except (Exception, SystemExit):
        prepared = _prepare_row_by_row(prepare, chunk)
    read_bytes = chunk.row_bytes
    for item in prepared.items:
        item.read_bytes = read_bytes
    return prepared


def _prepare_row_by_row(
    prepare: Preparer, chunk: Chunk, late: RowTimeoutError | None = None
) -> Prepared:
    """For a chunk that raised, or ended its process. A row that does so alone is bad; so is the one
    that is known to be ``late``."""
    items: list[Item] = []
    seconds = 0.0
    cpu_s = 0.0
    for number, index in enumerate(chunk.indices):
        if late is not None and number == late.number:
            items.append(Item(RowId(chunk.file, index), error=late))
            continue
        try:
            prepared = prepare(chunk.only(number))
        except UnavailableError:
            raise
        except (Exception, SystemExit) as error:
            bad = InvalidArgumentError(reason(error))
            items.append(Item(RowId(chunk.file, index), error=bad))
        else:
            items += prepared.items
            seconds += prepared.seconds
            cpu_s += prepared.cpu_s
    return Prepared(items, seconds, cpu_s)


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
