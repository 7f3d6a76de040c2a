"""The pipeline of a job on this machine: read, prepare, run, gather.

A thread reads chunks. Workers prepare them. The job's thread keeps the executor filled with what
they have prepared, and gathers the results into parts (``gathering``).

Each stage is ahead of the next one within a bound, so memory does not depend on the input:

- between reading and a part there are at most ``in_flight`` rows (:class:`Budget`);
- about half of these, at most, wait for the executor.
"""

import os
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from typing import Any, NamedTuple

from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import Models
from jitney_jobs.feeder import Feeder
from jitney_jobs.gathering import Gathering
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, JobJournal
from jitney_jobs.output import EndedRow, Output
from jitney_jobs.prepare import Item, Prepared, Workers, in_background, make_task
from jitney_jobs.rows import Chunk, reason

_POLL_S = 0.2
"""Longest wait for a chunk, in seconds: then the job's thread looks at signals again."""
_NEWS_S = 60.0
"""The user is told so often what the run waits for."""
_IN_FLIGHT_BYTES = 128 << 20
"""The bound of :class:`Budget`."""


class Budget:
    """How much may be in flight: between reading and a part.

    A chunk is read if at most ``most_rows`` rows are in flight with it, and if two estimates for
    the rows in flight are under 128 MiB:

    - their bytes as they were read;
    - their number, times the bytes of a row read and prepared. These are known once a chunk has
      been prepared; until then at most two chunks are being prepared.
    """

    def __init__(self, most_rows: int, chunk_rows: int) -> None:
        self.rows = 0
        """Rows in flight."""
        self._read_bytes = 0
        """Bytes of the rows in flight, as they were read."""
        self._row_bytes: float | None = None
        """Bytes of a row, read and prepared: the average of the last chunk that was prepared."""
        self._most_rows = most_rows
        self._chunk_rows = chunk_rows

    def may_read(self, chunks_preparing: int) -> bool:
        """Whether one more chunk may be read."""
        if self.rows + self._chunk_rows > self._most_rows:
            return False
        if self._row_bytes is None:
            return chunks_preparing < 2 and self._read_bytes < _IN_FLIGHT_BYTES
        return max(self._read_bytes, self.rows * self._row_bytes) < _IN_FLIGHT_BYTES

    def add(self, chunk: Chunk) -> None:
        """It was read."""
        self.rows += len(chunk.indices)
        self._read_bytes += len(chunk.indices) * chunk.row_bytes

    def measure(self, items: list[Item]) -> None:
        """They were prepared: all rows of a chunk."""
        nbytes = sum(item.read_bytes + item.prepared_bytes for item in items)
        self._row_bytes = nbytes / len(items)

    def remove(self, row: EndedRow) -> None:
        """It is in a part."""
        self.rows -= 1
        self._read_bytes -= row.read_bytes


class _Read(NamedTuple):
    """What the reader's thread gives at a time."""

    entry: Chunk | FileRows | None
    """None at the end of the input."""
    seconds: float


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
        super().__init__(job, journal, output, make_task(context))
        cores = len(os.sched_getaffinity(0))
        workers = max(1, cores // 2) if job.workers is None else job.workers
        if job.row_timeout is not None:
            workers = max(1, workers)  # a process can be ended, a thread cannot
        self._workers = Workers(context, workers)
        closing.callback(self._workers.close)
        self._workers_cpu_s = 0.0
        """CPU seconds of worker processes."""
        self._feeder = Feeder(self._executor, job.make_retry_policy())
        chunk_rows = max(1, min(256, job.in_flight // 8))
        self._budget = Budget(job.in_flight, chunk_rows)
        self._chunks = dataset.chunks(journal.record, chunk_rows)
        self._rows_left: int | None = None
        """Rows that may still be read, because of the setting ``limit``."""
        if job.limit is not None:
            self._rows_left = max(0, job.limit - self._done_before)
        self._reading: Future[_Read] | None = None
        self._input_ended = False
        self._told_at = -_NEWS_S
        """When the user was last told what the run waits for, in monotonic seconds."""
        self._preparing: deque[tuple[Chunk, Future[Prepared]]] = deque()

    def _advance(self) -> bool:
        self._read_ahead()
        self._feed_prepared()
        began = time.monotonic()
        all_are_fed = self._input_ended and not self._preparing
        if len(self._feeder):
            for item, result in self._feeder.step(has_input_ended=all_are_fed):
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
            _, future = self._preparing[0]
            coming.append(future)
        if self._reading is not None:
            coming.append(self._reading)
        wait(coming, _POLL_S, FIRST_COMPLETED)

    def _read_ahead(self) -> None:
        """Hand to the workers what is read, while the budget allows more."""
        while not self._input_ended:
            if self._reading is None:
                if not self._budget.may_read(len(self._preparing)):
                    return
                self._reading = in_background(self._read_next)
            if not self._reading.done():
                return
            read = self._reading.result()
            self._reading = None
            self._figures.read_s += read.seconds
            if isinstance(read.entry, Chunk):
                self._budget.add(read.entry)
                most = max(self._figures.most_in_flight, self._budget.rows)
                self._figures.most_in_flight = most
                self._preparing.append((read.entry, self._workers.submit(read.entry)))
            elif read.entry is not None:
                self._note(read.entry)
            else:
                self._input_ended = True

    def _read_next(self) -> _Read:
        """In the reader's thread."""
        began = time.monotonic()
        entry = None
        if self._rows_left != 0:
            entry = next(self._chunks, None)
        if isinstance(entry, Chunk) and self._rows_left is not None:
            entry = entry.first(self._rows_left)
            self._rows_left -= len(entry.indices)
        self._is_cut = self._rows_left == 0
        return _Read(entry, time.monotonic() - began)

    def _feed_prepared(self) -> None:
        """Give the feeder what is prepared, until half of ``in_flight`` rows wait there."""
        most_waiting = self._job.in_flight / 2
        while self._preparing and self._feeder.waiting < most_waiting:
            chunk, future = self._preparing[0]
            if not future.done():
                return
            self._preparing.popleft()
            prepared = future.result()
            self._figures.prepare_s += prepared.seconds
            self._workers_cpu_s += prepared.cpu_s
            self._figures.position = chunk.position
            self._budget.measure(prepared.items)
            for item in prepared.items:
                item.key = self._figures.taken
                self._figures.taken += 1
                self._feeder.add(item)

    def take_news(self) -> str | None:
        error = self._feeder.waits_for
        now = time.monotonic()
        if error is None or now - self._told_at < _NEWS_S:
            return None
        self._told_at = now
        return f"waits, and tries again: {reason(error)}"

    def _on_row_in_part(self, row: EndedRow) -> None:
        self._budget.remove(row)

    def _snapshot(self) -> dict[str, float]:
        self._figures.tries = self._feeder.tries
        figures = {**super()._snapshot(), **self._executor.figures}
        if self._workers.are_processes:  # this process' clock does not have their CPU time
            figures["cpu_s"] += self._workers_cpu_s
        return figures
