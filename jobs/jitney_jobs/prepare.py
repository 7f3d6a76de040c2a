"""What a job does with a row: prepared in worker processes, finished in the job's own.

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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_server.standins.signature import Signature

from jitney_jobs.dataset import Chunk, Place, Row, Storage, reason
from jitney_jobs.generate import (
    Encoder,
    Generate,
    GenerateOnServer,
    Language,
    OpenAiLines,
    OpenAiLinesOnServer,
)
from jitney_jobs.job import Job
from jitney_jobs.tensors import Tensors


@dataclass
class Item:
    """A row on its way. ``made`` is what was prepared of it for the executor; on a cluster it is
    then the executor's result. Of a bad row it is an InvalidArgumentError."""

    place: Place
    row: Row | None
    made: Any
    key: int = 0
    """Of this run; rows count from 0 in the order of the input."""
    tries: int = 0
    nbytes: int = 0
    """About how many: first of the arrays that were made of it, then, in the pipeline, of the row
    as it was read."""


Prepared = tuple[list[Item], float]
"""And the seconds that it took."""
Preparer = Callable[[Chunk], Prepared]


class Context(msgspec.Struct, frozen=True):
    """All that a task is made of; goes to the workers."""

    job: Job
    language: Language | None = None
    signature: Signature | None = None
    tokenizer: str | None = None


class Task(Protocol):
    """``fields`` are the result's columns, None if only its rows tell."""

    fields: pa.Schema | None

    def prepare(self, row: Row) -> Any:
        """What the executor takes. Raises for a bad row, UnavailableError if the storage fails."""

    def finish(self, row: Row, result: Any) -> Row:
        """The result's columns."""


class Map:
    """A function of the user's: the whole of the work is done in the workers."""

    fields = None

    def __init__(self, name: str) -> None:
        try:
            self.prepare: Callable[[Row], Any] = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidArgumentError(f"map {name!r} cannot be imported: {error}") from None
        if not callable(self.prepare):
            raise InvalidArgumentError.of("map", name, "a function")

    def finish(self, row: Row, result: Any) -> Row:
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
        return (OpenAiLinesOnServer if lines else GenerateOnServer)(job)
    if context.signature is not None:
        return Tensors(job, context.signature, context.tokenizer)
    assert context.language is not None, "a job that generates has a language model"
    return (OpenAiLines if lines else Generate)(job, Encoder(context.language))


def make_preparer(context: Context) -> Preparer:
    """What prepares a chunk, in the caller's thread. It raises UnavailableError if the storage
    fails, and whatever is raised outside of the work on a single row."""
    task = make_task(context)
    storage = Storage(context.job)

    def prepare(chunk: Chunk) -> Prepared:
        began = time.perf_counter()
        items = []
        for number, raw in zip(chunk.rows, chunk.items(), strict=True):
            item = Item((chunk.file, number), None, None)
            items.append(item)
            try:
                item.row = chunk.row(raw, storage)
                item.made = made = task.prepare(item.row)
                if isinstance(made, dict):
                    arrays = [each for each in made.values() if isinstance(each, np.ndarray)]
                    item.nbytes = sum(array.nbytes for array in arrays)
            except UnavailableError:
                raise
            except (Exception, SystemExit) as error:  # of a user's function or template
                item.made = InvalidArgumentError(reason(error))
        return items, time.perf_counter() - began

    return prepare


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
    """Prepare chunks in the background: so many processes, or with none a thread."""

    def __init__(self, context: Context, count: int) -> None:
        self.beside = count > 0
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
        while call := self._calls.get():
            settle(call[1], partial(_prepare_apart, prepare, call[0]))

    def close(self) -> None:
        """End the processes, whatever they do, and then the threads."""
        for process in self._processes:
            process.close()
        for _ in self._preparers:
            self._calls.put(None)


def _prepare_apart(prepare: Preparer, chunk: Chunk, alone: bool = False) -> Prepared:
    """If a chunk raises, or ends its process, each of its rows is prepared alone: the one that does
    so again is bad."""
    try:
        return prepare(chunk)
    except UnavailableError:
        raise
    except (Exception, SystemExit) as error:
        if alone:
            bad = InvalidArgumentError(reason(error))
            return [Item((chunk.file, chunk.rows[0]), None, bad)], 0.0
        made = [_prepare_apart(prepare, chunk.only(i), True) for i in range(len(chunk.rows))]
        return [item for items, _ in made for item in items], sum(seconds for _, seconds in made)


class _Process:
    """A worker process, started when it is needed. Called by one thread at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pipe: Any = None
        self._process: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, chunk: Chunk) -> Prepared:
        """Raises InvalidArgumentError if the process dies, and then starts another one."""
        try:
            if self._process is None:
                self._start()
            self._pipe.send(chunk)
            made: Prepared | Exception = self._pipe.recv()
        except (EOFError, OSError):
            self._process = None
            raise InvalidArgumentError("the process that prepared it died") from None
        if isinstance(made, Exception):
            raise made
        return made

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise UnavailableError("the job has ended")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()  # so that an end of the process is an end of the pipe
        # Not as an argument of the process: `start` would wait for ever if that has died.
        self._pipe.send(self._context)

    def close(self) -> None:
        """End it at once."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.join()


def _serve(pipe: Any) -> None:
    """The life of a worker process. The job's own process decides when it ends; if that is killed,
    it leaves no worker behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    prepare = make_preparer(pipe.recv())
    while True:
        chunk = pipe.recv()
        try:
            pipe.send(prepare(chunk))
        except UnavailableError as error:
            pipe.send(error)
        except (Exception, SystemExit) as error:  # what was made may be impossible to send
            pipe.send(InvalidArgumentError(reason(error)))


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
