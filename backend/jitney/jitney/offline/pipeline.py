"""The pipeline of a job: read, prepare, run, write, each ahead of the next within a bound.

A thread reads chunks; workers prepare them; this thread keeps the executor filled with what they
have prepared (``feeding.py``) and gathers results into parts (``gathering.py``); another thread
writes a part and notes it in the journal. At most ``in_flight`` rows are between reading and a
part, and half of them wait for the executor; a part has at most ``part_rows``, and one is written
while the next fills. So memory does not depend on the input.
"""

import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from jitney.offline.dataset import Chunk, Dataset
from jitney.offline.executors import Executor
from jitney.offline.feeding import Feeder
from jitney.offline.gathering import Gathering
from jitney.offline.job import Job
from jitney.offline.journal import FileRows, JobJournal
from jitney.offline.output import Output
from jitney.offline.prepare import Prepared, Task, Workers, in_background

_POLL_S = 0.2


class Pipeline(Gathering):
    """A run on this machine. Owns every row between the input and the journal."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        journal: JobJournal,
        output: Output,
        task: Task,
        workers: Workers,
        executor: Executor,
    ) -> None:
        super().__init__(job, journal, output, task)
        self._workers, self._executor = workers, executor
        self._feeder = Feeder(executor, job.retries)
        self._chunk_rows = max(1, min(256, job.in_flight // 8))
        self._chunks = dataset.chunks(journal.record, self._chunk_rows)
        self._reading: Future[Chunk | FileRows | None] | None = None
        self._input_ended = False
        self._preparing: deque[tuple[Chunk, Future[Prepared]]] = deque()

    @property
    def _has_work(self) -> bool:
        return not self._input_ended or bool(self._preparing or len(self._feeder))

    def _advance(self) -> None:
        self._read()
        self._take()
        began = time.monotonic()
        if len(self._feeder):
            for item, result in self._feeder.step(self._input_ended and not self._preparing):
                self._finish(item, result)
            self._counts["run_s"] += time.monotonic() - began
            return
        coming: list[Future[Any]] = [future for _, future in [*self._preparing][:1]]
        coming += [self._reading] if self._reading else []
        wait(coming, _POLL_S, FIRST_COMPLETED)
        self._counts["waited_s"] += time.monotonic() - began

    def _read(self) -> None:
        """Hand to the workers what is read, while there is room for more."""
        while not self._input_ended:
            if self._reading is None:
                if self._in_flight + self._chunk_rows > self._job.in_flight:
                    return
                self._reading = in_background(self._next_chunk)
            if not self._reading.done():
                return
            read, self._reading = self._reading.result(), None
            if isinstance(read, Chunk):
                self._in_flight += len(read.rows)
                most = max(self._counts["most_in_flight"], self._in_flight)
                self._counts["most_in_flight"] = most
                self._preparing.append((read, self._workers.submit(read)))
            elif read is not None:
                self._journal.append(read)
            else:
                self._input_ended = True

    def _next_chunk(self) -> Chunk | FileRows | None:
        """In the reader's thread."""
        began = time.monotonic()
        try:
            return next(self._chunks, None)
        finally:
            self._counts["read_s"] += time.monotonic() - began

    def _take(self) -> None:
        """Take what is prepared, while few rows wait."""
        while self._preparing and self._preparing[0][1].done():
            if 2 * self._feeder.waiting >= self._job.in_flight:
                return
            chunk, future = self._preparing.popleft()
            items, seconds = future.result()
            self._counts["prepare_s"] += seconds
            self._counts["position"] = chunk.position
            for item in items:
                item.key = int(self._counts["taken"])
                self._counts["taken"] += 1
                self._feeder.add(item)

    def _figures(self) -> dict[str, float]:
        figures = {**super()._figures(), **self._executor.figures, "tries": self._feeder.tries}
        figures["cpu_s"] += self._counts["prepare_s"] if self._workers.beside else 0.0
        return figures
