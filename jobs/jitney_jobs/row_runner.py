"""Rows between reading and a part: workers prepare chunks, and an executor runs their rows.

Each stage is ahead of the next one within a bound, so memory does not depend on the input:

- at most ``in_flight`` rows are between reading and a part, and between reading and a committed
  part at most so many bytes (:class:`Budget`);
- about half of these, at most, wait for the executor.

A run on this machine has one :class:`RowRunner`, a run on a cluster one in each actor.
"""

import os
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jitney.errors import JitneyError

from jitney_jobs.dataset import Dataset
from jitney_jobs.ended_rows import Ended
from jitney_jobs.executor_protocol import Executor
from jitney_jobs.feeder import Feeder
from jitney_jobs.job import Job
from jitney_jobs.prepare import MADE_BYTES, Item, Prepared
from jitney_jobs.prepare_workers import Workers
from jitney_jobs.rows import Chunk, RowId
from jitney_jobs.run_figures import RunFigures
from jitney_jobs.tasks import Context, Map, Task
from jitney_jobs.tensors import Tensors

_FEW_BYTES = 64 << 10
"""An input of no more bytes needs no worker process."""
_ROWS = 256
"""Most rows of a chunk."""
_ROWS_OF_COLUMNS = 1024
"""The same for rows that are not looked at one by one, but taken as columns."""
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

    One more chunk is read if both bounds allow that:

    - With it at most ``most_rows`` rows are between reading and a part.
    - Less than 96 MiB are in memory: chunks as they were read, what was prepared of them, and
      results, until the part that has them is committed. Chunks that are being prepared count with
      what the last prepared chunk became. Until one has been prepared, only two are read.
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
        """Bytes that preparing makes of a row, on average in the last chunk that was prepared."""

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
        """A chunk was read."""
        self.rows += len(chunk)
        self._hold(chunk)

    def _hold(self, chunk: Chunk) -> None:
        nbytes = chunk.read_bytes
        if chunk.columns is not None:
            nbytes += chunk.columns.nbytes
        self._chunks[chunk.first] = _HeldChunk(len(chunk), nbytes)
        self._bytes += nbytes

    def add_prepared(self, prepared: Prepared) -> None:
        """Rows of a chunk were prepared. From now on they are held as one chunk, and the rows that
        are left as another one."""
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


def chunk_rows(job: Job, task: Task, dataset: Dataset) -> int:
    """Rows that are read and prepared together, if they are small."""
    are_columns = isinstance(task, Tensors) and task.takes_columns(dataset.schema)
    most = _ROWS_OF_COLUMNS if are_columns else _ROWS
    return max(1, min(most, job.in_flight // 8))


def worker_count(task: Task, dataset: Dataset) -> int:
    """How many processes prepare rows: half as many as there are cores. 0, a thread of this
    process, where that is faster: columns of numbers are only cast, and a few texts take less time
    than a process needs to start, a CPU second. Pictures and the user's functions get processes
    always: they may crash."""
    if isinstance(task, Tensors) and task.takes_columns(dataset.schema):
        return 0
    may_crash = isinstance(task, Map) or dataset.format == "image"
    if not may_crash and sum(file.size for file in dataset.files) <= _FEW_BYTES:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // 2)


def workers_of(job: Job, task: Task, dataset: Dataset, sharers: int = 1) -> int:
    """How many processes prepare rows: as the job says, else as :func:`worker_count`. So many
    ``sharers`` divide the cores among them."""
    count = job.workers
    if count is None:
        whole = worker_count(task, dataset)
        count = max(1, whole // sharers) if whole else 0
    if job.row_timeout is not None:
        return max(1, count)  # a process can be ended, a thread cannot
    return count


class RowRunner:
    """Has chunks prepared, and runs their rows. For one thread."""

    def __init__(
        self,
        executor: Executor,
        context: Context,
        task: Task,
        figures: RunFigures,
        *,
        workers: int,
        chunk_rows: int,
    ) -> None:
        """``figures`` are counted up. ``chunk_rows``: most rows of the chunks that come."""
        job = context.job
        self._job = job
        self._executor = executor
        self._workers = Workers(context, workers, task.columns)
        self._feeder = Feeder(executor, job.make_retry_policy())
        self._figures = figures
        self._workers_cpu_s = 0.0
        self._next_item = 0
        """The key of the next item."""
        self._preparing: deque[Future[Prepared]] = deque()
        """Chunks with the workers, in the order of the input."""
        self.budget = Budget(job.in_flight, chunk_rows)
        self.repeated: frozenset[RowId] = frozenset()
        """Rows that are bad, because they repeat the ``custom_id`` of an earlier one."""

    # ------------------------------------------------------------------ chunks

    @property
    def may_take(self) -> bool:
        """Whether there is room for one more chunk."""
        return self.budget.may_read(len(self._preparing))

    def take(self, chunk: Chunk) -> None:
        """Have a chunk prepared."""
        self.budget.add(chunk)
        self._figures.most_in_flight = max(self._figures.most_in_flight, self.budget.rows)
        self._preparing.append(self._workers.submit(chunk))

    @property
    def next_prepared(self) -> Future[Prepared] | None:
        """The first chunk that is with the workers. None if no chunk is."""
        return self._preparing[0] if self._preparing else None

    def feed(self) -> float | None:
        """Give the feeder what is prepared, until half of ``in_flight`` rows wait there, or until
        there is no room in memory. Returns the position of the last chunk of which rows were fed.
        """
        position = None
        most_waiting = self._job.in_flight / 2
        while self._preparing and self._feeder.waiting < most_waiting:
            is_full = self.budget.is_full(len(self._preparing))
            if is_full and self._feeder.waiting:
                break
            if not self._preparing[0].done():
                break
            prepared = self._preparing.popleft().result()
            assert prepared.chunk is not None, "the chunk was put back"
            if prepared.rest is not None:  # it comes before all other chunks
                self._preparing.appendleft(self._workers.submit(prepared.rest))
            self._figures.prepare_s += prepared.seconds
            self._workers_cpu_s += prepared.cpu_s
            position = prepared.chunk.position
            self.budget.add_prepared(prepared)
            for item in prepared.items:
                item.key = self._next_item
                self._next_item += 1
                self._figures.taken += len(item.rows)
                self._refuse_if_repeated(item)
                self._feeder.add(item)
        return position

    def _refuse_if_repeated(self, item: Item) -> None:
        """Make the item bad if its line repeats a ``custom_id``. Each line is one item."""
        if not self.repeated:
            return
        chunk = item.chunk
        assert chunk is not None, "the chunk was put back"
        row = item.rows[0]
        if chunk.id_of(row) not in self.repeated:
            return
        values = chunk.line_values(row)
        if values is not None:
            from jitney_jobs.openai_form import line_error  # imports some of the gateway

            bound = "that of no earlier line"
            given = values.get("custom_id")
            item.error = line_error("duplicate_custom_id", "custom_id", given, bound)

    # ------------------------------------------------------------------ rows

    @property
    def has_rows(self) -> bool:
        """Whether prepared rows wait for the executor, or are with it."""
        return len(self._feeder) > 0

    def step(self, has_input_ended: bool) -> list[tuple[Item, Any]]:
        """Let the executor work for a while. Returns the rows that have ended, each with its result
        or a JitneyError. ``has_input_ended``: no more chunks come."""
        is_last = has_input_ended and not self._preparing
        ended = self._feeder.step(is_last)
        for item, _ in ended:
            self.budget.end_run(item)
        return ended

    def note_in_part(self, ended: Ended) -> None:
        """Rows are in a part, with their results."""
        self.budget.add_to_part(ended)

    def note_written(self, part: list[Ended]) -> None:
        """The rows of a part need not be held any more."""
        for ended in part:
            self.budget.remove(ended)

    # ------------------------------------------------------------------ what is known of them

    @property
    def waits_for(self) -> JitneyError | None:
        """The last error that rows wait for to pass. None if none does."""
        return self._feeder.waits_for

    @property
    def executor_figures(self) -> dict[str, float]:
        """As :class:`~jitney_jobs.executor_protocol.Executor` has them. ``tries``: of rows too."""
        figures = dict(self._executor.figures)
        figures["tries"] = self._feeder.tries + figures.get("tries", 0.0)
        return figures

    @property
    def workers_cpu_s(self) -> float:
        """CPU seconds of worker processes, which the clock of this process does not have."""
        return self._workers_cpu_s if self._workers.are_processes else 0.0

    def close(self) -> None:
        """End the workers."""
        self._workers.close()
