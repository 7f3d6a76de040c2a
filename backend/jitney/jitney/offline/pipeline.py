"""The pipeline of a job: read, prepare, run, write, each ahead of the next within a bound.

A thread reads chunks; workers prepare them; this thread keeps the executor filled with what they
have prepared and gathers results into parts (``gathering.py``); another thread writes a part and
notes it in the journal. At most ``in_flight`` rows are between reading and a part; a part has at
most ``part_rows``, and one is written while the next fills. So memory does not depend on the input.
"""

import heapq
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.offline.dataset import Chunk, Dataset, pause
from jitney.offline.executors import Executor
from jitney.offline.gathering import Gathering, Item, may_pass
from jitney.offline.job import Job
from jitney.offline.journal import FileRows, Journal
from jitney.offline.output import Output
from jitney.offline.prepare import Background, Prepared, Task, Workers

_POLL_S = 0.2


class Pipeline(Gathering):
    """A run on this machine. Owns every row between the input and the journal."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        journal: Journal,
        output: Output,
        task: Task,
        workers: Workers,
        executor: Executor,
    ) -> None:
        super().__init__(job, journal, output, task)
        self._workers, self._executor = workers, executor
        self._reader = Background(1)
        self._chunk_rows = max(1, min(256, job.in_flight // 8))
        self._chunks = dataset.chunks(journal.record, self._chunk_rows)
        self._reading: Future[Chunk | FileRows | None] | None = None
        self._input_ended = False
        self._preparing: deque[tuple[Chunk, Future[Prepared]]] = deque()
        self._items: dict[int, Item] = {}
        """Key -> the row, from its preparation to its end. Keys count from 0."""
        self._prepared: deque[int] = deque()
        self._retries: list[tuple[float, int]] = []
        self._next_key = 0

    @property
    def _has_work(self) -> bool:
        return not self._input_ended or bool(self._preparing or self._items)

    def _advance(self) -> None:
        self._read()
        self._feed()
        self._work()

    def _close(self) -> None:
        self._reader.close()

    def _read(self) -> None:
        """Hand to the workers what is read, while there is room for more."""
        while not self._input_ended:
            if self._reading is None:
                if self._in_flight + self._chunk_rows > self._job.in_flight:
                    return
                self._reading = self._reader.submit(self._next_chunk)
            if not self._reading.done():
                return
            item, self._reading = self._reading.result(), None
            if isinstance(item, Chunk):
                self._in_flight += len(item.rows)
                self._counts["most_in_flight"] = max(
                    self._counts["most_in_flight"], self._in_flight
                )
                self._preparing.append((item, self._workers.submit(item)))
            elif item is not None:
                self._journal.append(item)
            else:
                self._input_ended = True

    def _next_chunk(self) -> Chunk | FileRows | None:
        """In the reader's thread."""
        began = time.monotonic()
        try:
            return next(self._chunks, None)
        finally:
            self._counts["read_s"] += time.monotonic() - began

    def _feed(self) -> None:
        """Give the executor rows while it has room."""
        while self._retries and self._retries[0][0] <= time.monotonic():
            self._submit(heapq.heappop(self._retries)[1])
        while len(self._executor) < self._executor.capacity and (self._prepared or self._take()):
            if self._prepared:
                self._submit(self._prepared.popleft())

    def _take(self) -> bool:
        """Take the rows of the next chunk, if it is prepared; whether one was."""
        if not self._preparing or not self._preparing[0][1].done() or self._stop:
            return False
        chunk, future = self._preparing.popleft()
        made, seconds = future.result()
        self._counts["prepare_s"] += seconds
        self._counts["position"] = chunk.position
        self._counts["taken"] += len(made)
        for number, row, ready in made:
            self._items[self._next_key] = Item((chunk.file, number), row, ready)
            self._prepared.append(self._next_key)
            self._next_key += 1
        return True

    def _submit(self, key: int) -> None:
        prepared = self._items[key].made
        try:
            if isinstance(prepared, InvalidArgumentError):
                raise prepared
            self._executor.submit(key, prepared)
        except InvalidArgumentError as error:
            self._bad(key, self._items.pop(key), str(error))

    def _work(self) -> None:
        """A step of the executor; if it has nothing to do, wait until it may have."""
        began = time.monotonic()
        if len(self._executor):
            outcomes = self._executor.step()
            self._counts["run_s"] += time.monotonic() - began
            for key, result in outcomes:
                self._end(key, result)
        elif not self._prepared:
            due = min(_POLL_S, self._retries[0][0] - began if self._retries else _POLL_S)
            coming: list[Future[Any]] = [future for _, future in [*self._preparing][:1]]
            coming += [self._reading] if self._reading else []
            if coming:
                wait(coming, max(0.0, due), FIRST_COMPLETED)
            else:
                time.sleep(max(0.0, due))
            self._counts["waited_s"] += time.monotonic() - began

    def _end(self, key: int, result: Any) -> None:
        item = self._items[key]
        if may_pass(result) and item.tries < self._job.retries:
            self._counts["tries"] += 1
            heapq.heappush(self._retries, (time.monotonic() + pause(item.tries), key))
            item.tries += 1
        else:
            self._finish(key, self._items.pop(key), result)

    def _figures(self) -> dict[str, float]:
        figures = {**super()._figures(), **self._executor.figures}
        figures["cpu_s"] += self._counts["prepare_s"] if self._workers.beside else 0.0
        return figures
