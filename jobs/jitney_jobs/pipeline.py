"""The pipeline of a job on this machine: read, prepare, run, gather.

A thread reads chunks. Workers prepare them. The job's thread keeps the executor filled with what
they have prepared, and gathers the results into parts (``gathering``).

Each stage is ahead of the next one within a bound, so memory does not depend on the input:

- between reading and a part there are at most ``in_flight`` rows, and between reading and a
  committed part at most so many bytes (:class:`Budget`);
- about half of these, at most, wait for the executor.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitney_jobs.background import settle
from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import Models
from jitney_jobs.feeder import Feeder
from jitney_jobs.gathering import Gathering
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, JobJournal
from jitney_jobs.output import Ended, Output
from jitney_jobs.prepare import MADE_BYTES, Item, Prepared
from jitney_jobs.prepare_workers import Workers
from jitney_jobs.rows import Chunk, RowId, reason
from jitney_jobs.tasks import Map, Task, make_task
from jitney_jobs.tensors import Tensors

_FEW_BYTES = 64 << 10
"""An input of no more bytes needs no worker process."""
_POLL_S = 0.2
"""Longest wait for a chunk, in seconds: then the job's thread looks at signals again."""
_ROWS = 256
"""Most rows of a chunk."""
_ROWS_OF_COLUMNS = 1024
"""The same for rows that are not looked at one by one, but taken as columns."""
_NEWS_S = 60.0
"""The user is told so often what the run waits for."""
_IN_FLIGHT_BYTES = 96 << 20
"""The bound of :class:`Budget`."""
_FIRST_CHUNKS = 2
"""So many chunks are prepared before it is known how large a row becomes."""


@dataclass
class _HeldChunk:
    """A chunk in memory. It is held as a whole until all its rows are in committed parts."""

    rows: int
    nbytes: int


class Budget:
    """How much may be in flight.

    A chunk is read if at most ``most_rows`` rows are between reading and a part with it, and if
    less than 96 MiB are in memory: chunks as they were read, what was prepared of them, and
    results, until the part that has them is committed. Chunks that are being prepared count as much
    as the last ones that were. Until one has been prepared, two are read.
    """

    def __init__(self, most_rows: int, chunk_rows: int) -> None:
        self.rows = 0
        """Rows between reading and a part."""
        self._most_rows = most_rows
        self._chunk_rows = chunk_rows
        self._chunks: dict[RowId, _HeldChunk] = {}
        """By their first rows."""
        self._bytes = 0
        self._made_bytes: float | None = None
        """Bytes that are made of a row: the average of the last chunk that was prepared."""

    def may_read(self, chunks_preparing: int) -> bool:
        """Whether one more chunk may be read."""
        if self.rows + self._chunk_rows > self._most_rows:
            return False
        if self._made_bytes is None and chunks_preparing >= _FIRST_CHUNKS:
            return False
        return not self.is_full(chunks_preparing)

    def is_full(self, chunks_preparing: int) -> bool:
        """Whether the bytes in memory, and those that will soon be, are as many as may be."""
        coming = chunks_preparing * self._chunk_rows * (self._made_bytes or 0.0)
        return self._bytes + min(coming, chunks_preparing * MADE_BYTES) >= _IN_FLIGHT_BYTES

    def add(self, chunk: Chunk) -> None:
        """It was read."""
        self.rows += len(chunk)
        self._hold(chunk)

    def _hold(self, chunk: Chunk) -> None:
        nbytes = chunk.read_bytes
        if chunk.columns is not None:
            nbytes += chunk.columns.nbytes
        self._chunks[chunk.first] = _HeldChunk(len(chunk), nbytes)
        self._bytes += nbytes

    def add_prepared(self, prepared: Prepared) -> None:
        """Rows of a chunk were prepared: it stands for these and those that are left now."""
        assert prepared.chunk is not None, "the chunk was put back"
        self._bytes -= self._chunks.pop(prepared.chunk.first).nbytes
        self._hold(prepared.chunk)
        if prepared.rest is not None:
            self._hold(prepared.rest)
        made = sum(item.nbytes for item in prepared.items)
        self._bytes += made
        if prepared.chunk.columns is not None:
            made += prepared.chunk.columns.nbytes
        self._made_bytes = made / len(prepared.chunk)

    def end_run(self, item: Item) -> None:
        """The executor is done with it."""
        self._bytes -= item.nbytes

    def add_to_part(self, ended: Ended) -> None:
        """Rows are in a part, with their results."""
        self.rows -= len(ended.rows)
        self._bytes += ended.result_bytes

    def remove(self, ended: Ended) -> None:
        """Their part is committed."""
        self._bytes -= ended.result_bytes
        held = self._chunks[ended.chunk.first]
        held.rows -= len(ended.rows)
        if not held.rows:
            self._bytes -= held.nbytes
            del self._chunks[ended.chunk.first]


class _Read(NamedTuple):
    """What the reader's thread gives at a time."""

    entry: Chunk | FileRows | None
    """None at the end of the input."""
    seconds: float


def _chunk_rows(job: Job, task: Task, dataset: Dataset) -> int:
    """Rows that are read and prepared together, if they are small."""
    are_columns = isinstance(task, Tensors) and task.takes_columns(dataset.schema)
    most = _ROWS_OF_COLUMNS if are_columns else _ROWS
    return max(1, min(most, job.in_flight // 8))


def worker_count(task: Task, dataset: Dataset) -> int:
    """Half of the cores, or none if a thread of this process does it in less time. Columns of
    numbers are only cast. A few texts take less than the start of a process, a CPU second; but
    pictures and the user's functions may crash, which only a process survives."""
    if isinstance(task, Tensors) and task.takes_columns(dataset.schema):
        return 0
    may_crash = isinstance(task, Map) or dataset.format == "image"
    if not may_crash and sum(file.size for file in dataset.files) <= _FEW_BYTES:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // 2)


class _Reader:
    """A thread that reads chunks, one each time it is asked. It lives as long as the process: if a
    read hangs, the process can end nevertheless."""

    def __init__(self, chunks: Iterator[Chunk | FileRows]) -> None:
        self._chunks = chunks
        self._calls: queue.SimpleQueue[Future[_Read] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def read(self) -> Future[_Read]:
        """The next chunk, or the number of rows of a file that has ended."""
        future: Future[_Read] = Future()
        self._calls.put(future)
        return future

    def close(self) -> None:
        """End the thread once it has read what it was asked for."""
        self._calls.put(None)

    def _work(self) -> None:
        while True:
            future = self._calls.get()
            if future is None:
                return
            settle(future, self._read_next)

    def _read_next(self) -> _Read:
        began = time.monotonic()
        entry = next(self._chunks, None)
        return _Read(entry, time.monotonic() - began)


class Pipeline(Gathering):
    """A run on this machine. Owns every row between the input and the journal."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        journal: JobJournal,
        output: Output,
        closing: ExitStack,
        models: Models,
    ) -> None:
        """Raises a LoadError, and InvalidArgumentError for a task that cannot be done."""
        self._executor, context = models.load(job)
        context = output.completed(context)
        task = make_task(context)
        super().__init__(job, journal, output, task)
        dataset.set_schema(dataset.schema, output.columns_to_read(task.columns))
        workers = job.workers
        if workers is None:
            workers = worker_count(task, dataset)
        if job.row_timeout is not None:
            workers = max(1, workers)  # a process can be ended, a thread cannot
        self._workers = Workers(context, workers, task.columns)
        closing.callback(self._workers.close)
        self._workers_cpu_s = 0.0
        """CPU seconds of worker processes."""
        self._feeder = Feeder(self._executor, job.make_retry_policy())
        self._next_item = 0
        """The key of the next item."""
        chunk_rows = _chunk_rows(job, task, dataset)
        self._budget = Budget(job.in_flight, chunk_rows)
        self._reader = _Reader(dataset.chunks(journal.record, chunk_rows))
        closing.callback(self._reader.close)
        self._reading: Future[_Read] | None = None
        self._input_ended = False
        self._rows_left: int | None = None
        """Rows that may still be read, because of the setting ``limit``."""
        if job.limit is not None:
            self._rows_left = max(0, job.limit - self._done_before)
        self._told_at = -_NEWS_S
        """When the user was last told what the run waits for, in monotonic seconds."""
        self._preparing: deque[Future[Prepared]] = deque()
        """Chunks with the workers, in the order of the input."""

    def _advance(self) -> bool:
        self._read_ahead()
        self._feed_prepared()
        began = time.monotonic()
        all_are_fed = self._input_ended and not self._preparing
        if len(self._feeder):
            for item, result in self._feeder.step(has_input_ended=all_are_fed):
                self._budget.end_run(item)
                self._finish(item, result)
            self._figures.run_s += time.monotonic() - began
        else:
            self._wait_for_rows()
            self._figures.waited_s += time.monotonic() - began
        return not all_are_fed or len(self._feeder) > 0

    def _wait_for_rows(self) -> None:
        """Until a chunk has been read or prepared, or for a moment."""
        coming: list[Future[Any]] = []
        if self._preparing:
            coming.append(self._preparing[0])
        if self._reading is not None:
            coming.append(self._reading)
        if not coming:
            self._make_room()
            return
        wait(coming, _POLL_S, FIRST_COMPLETED)

    def _read_ahead(self) -> None:
        """Hand to the workers what is read, while the budget allows more."""
        while not self._input_ended:
            if self._rows_left == 0:
                self._is_cut = True
                self._input_ended = True
                return
            if self._reading is None:
                if not self._budget.may_read(len(self._preparing)):
                    return
                self._reading = self._reader.read()
            if not self._reading.done():
                return
            read = self._reading.result()
            self._reading = None
            self._figures.read_s += read.seconds
            if isinstance(read.entry, Chunk):
                self._take_chunk(self._within_limit(read.entry))
            elif read.entry is not None:
                self._note(read.entry)
            else:
                self._input_ended = True

    def _take_chunk(self, chunk: Chunk) -> None:
        self._budget.add(chunk)
        self._figures.most_in_flight = max(self._figures.most_in_flight, self._budget.rows)
        self._preparing.append(self._workers.submit(chunk))

    def _within_limit(self, chunk: Chunk) -> Chunk:
        """The rows of it that may be read."""
        if self._rows_left is None:
            return chunk
        if len(chunk) > self._rows_left:
            chunk = chunk.slice(0, self._rows_left)
        self._rows_left -= len(chunk)
        return chunk

    def _feed_prepared(self) -> None:
        """Give the feeder what is prepared, until half of ``in_flight`` rows wait there, or until
        there is no room in memory."""
        most_waiting = self._job.in_flight / 2
        while self._preparing and self._feeder.waiting < most_waiting:
            is_full = self._budget.is_full(len(self._preparing))
            if is_full and self._feeder.waiting:
                return
            if not self._preparing[0].done():
                return
            prepared = self._preparing.popleft().result()
            assert prepared.chunk is not None, "the chunk was put back"
            if prepared.rest is not None:  # it comes before all other chunks
                self._preparing.appendleft(self._workers.submit(prepared.rest))
            self._figures.prepare_s += prepared.seconds
            self._workers_cpu_s += prepared.cpu_s
            self._figures.position = prepared.chunk.position
            self._budget.add_prepared(prepared)
            for item in prepared.items:
                item.key = self._next_item
                self._next_item += 1
                self._figures.taken += len(item.rows)
                self._refuse_if_repeated(item)
                self._feeder.add(item)

    def take_news(self) -> str | None:
        error = self._feeder.waits_for
        now = time.monotonic()
        if error is None or now - self._told_at < _NEWS_S:
            return None
        self._told_at = now
        return f"waits, and tries again: {reason(error)}"

    def _on_rows_in_part(self, ended: Ended) -> None:
        self._budget.add_to_part(ended)

    def _on_part_committed(self, part: list[Ended]) -> None:
        for ended in part:
            self._budget.remove(ended)

    def _snapshot(self) -> dict[str, float]:
        self._figures.tries = self._feeder.tries
        figures = {**super()._snapshot(), **self._executor.figures}
        figures["tries"] = self._feeder.tries + self._executor.figures.get("tries", 0.0)
        if self._workers.are_processes:  # this process' clock does not have their CPU time
            figures["cpu_s"] += self._workers_cpu_s
        return figures
