"""The pipeline of a job: read, prepare, run, write, each ahead of the next within a bound.

A thread reads chunks; workers prepare them; this thread keeps the executor filled with what they
have prepared and gathers results into parts; another thread writes a part and notes it in the
journal. At most ``in_flight`` rows are between reading and a part, and half of them wait for the
executor; a part has at most ``part_rows``, and one is written while the next fills. So memory does
not depend on the input. On a cluster (``ray_data.py``) only the gathering is done here.
"""

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.dataset import Chunk, Dataset, reason
from jitney_jobs.executors import Feeder, Models
from jitney_jobs.job import Job
from jitney_jobs.journal import End, FileRows, JobJournal
from jitney_jobs.output import Ended, Output
from jitney_jobs.prepare import (
    Item,
    Prepared,
    Task,
    Workers,
    in_background,
    make_task,
)

_POLL_S = 0.2
_IN_FLIGHT_BYTES = 128 << 20
"""No chunk is read while the rows on their way have more bytes: as they were read, or as they were
read and with what was made of them."""
_PART_BYTES = 64 << 20
"""A part is written when its rows had so many bytes as they were read."""
_JUDGED = 100
"""Rows that must be done before a share of bad ones can end the job."""
_SECONDS = ("read_s", "prepare_s", "waited_s", "run_s", "write_s")
"""``waited_s`` is the time in which the executor had nothing to do."""
_COUNTS = ("done", "bad", "tries", "most_in_flight", "taken", "position")
"""``position`` is the share of the input that has been read, and ``taken`` its rows."""


class Gathering(ABC):
    """One run of a job."""

    def __init__(self, job: Job, journal: JobJournal, output: Output, task: Task) -> None:
        output.expect(task.fields)
        self._counts = {**dict.fromkeys((*_SECONDS, *_COUNTS), 0.0), "moved_at": time.time()}
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self._run = journal.record.next_number
        self._job = job
        self._journal = journal
        self._output = output
        self._task = task
        self._in_flight = 0
        """Rows between reading and a part."""
        self._bytes = self._part_bytes = 0
        """Of rows on their way, and of those that have ended since the last part."""
        self._stop = False
        self._before = journal.record.failed, journal.record.failed + journal.record.written
        """Bad rows, and all rows, of the runs before."""
        self._held: dict[int, Ended] = {}
        """By key: rows that have ended before an earlier one has, if the order is kept."""
        self._next_key = 0
        self._part: list[Ended] = []
        self._part_began = 0.0
        self._writing: Future[None] | None = None
        """Of the part before."""

    def run(self, show: Callable[[dict[str, float]], None]) -> bool:
        """Work until every row is in a committed part, or until SIGINT or SIGTERM; what is finished
        by then is committed. Returns whether the job is complete. ``show`` is called often, and at
        the end. Raises InvalidArgumentError if too many rows are bad, UnavailableError if input or
        model are away.
        """
        signals = (signal.SIGINT, signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in signals if main}

        def stop(number: int, frame: object) -> None:
            """Stop between two steps. A second signal does what it did before this run."""
            self._stop = True
            signal.signal(number, handlers[signal.Signals(number)])

        for number in handlers:
            signal.signal(number, stop)
        try:
            more = True
            while more and not self._stop:
                more = self._advance()
                self._judge()
                show(self._figures())
                self._commit()
        finally:
            self._commit(all_rows=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._stop:
            return False
        self._judge()
        self._journal.append(End(time.time()))
        show(self._figures())
        return True

    @abstractmethod
    def _advance(self) -> bool:
        """Work for a while, and finish what has ended. Whether a row is on its way, or may come."""

    def _finish(self, item: Item, result: Any) -> None:
        """The model is done with a row, for good."""
        if isinstance(result, UnavailableError):
            raise result  # not the row's fault: the job ends, and can be resumed
        row = item.row or {}
        ended: Any
        try:
            if isinstance(result, JitneyError):
                raise result
            ended = self._output.merged(row, self._task.finish(row, result))
        except Exception as error:  # a user's function may raise anything
            ended = self._output.bad_row(item.place, reason(error), item.row)
            self._counts["bad"] += 1
        self._bytes -= item.nbytes
        self._part_bytes += item.nbytes
        self._counts["done"] += 1
        self._counts["moved_at"] = time.time()
        self._held[item.key] = item.place, ended
        # In order: all rows without a gap before them. Otherwise this one, the only one held.
        key = self._next_key if self._job.ordered else item.key
        while key in self._held:
            self._part_began = self._part_began if self._part else time.monotonic()
            self._part.append(self._held.pop(key))
            self._in_flight -= 1
            key += 1
        self._next_key = key
        self._commit()

    def _commit(self, *, all_rows: bool = False) -> None:
        """Have the part written if it is full or old. Waits while the one before it is still being
        written; with ``all_rows`` until nothing is left. Raises what went wrong in writing."""
        old = time.monotonic() - self._part_began >= self._job.part_seconds
        full = len(self._part) >= self._job.part_rows or self._part_bytes >= _PART_BYTES
        due = self._part and (all_rows or old or full)
        # One part is written at a time. That its writing failed is raised as soon as it is known.
        if self._writing is not None and (due or all_rows or self._writing.done()):
            writing = self._writing
            self._writing = None
            writing.result()
        if due:
            part = self._part
            self._part = []
            self._part_bytes = 0
            self._writing = in_background(partial(self._write, part, self._figures()))
            if all_rows:
                self._writing.result()

    def _write(self, part: list[Ended], figures: dict[str, float]) -> None:
        """In a thread."""
        began = time.monotonic()
        self._output.write(part, figures)
        self._counts["write_s"] += time.monotonic() - began

    def _judge(self) -> None:
        """Raise InvalidArgumentError if too many rows are bad."""
        number, share = self._job.most_errors
        failed = self._before[0] + self._counts["bad"] + self._output.misfits
        done = self._before[1] + self._counts["done"]
        over = share is not None and done >= _JUDGED and failed > share * done
        if over or (number is not None and failed > number):
            bad = self._output.last_bad
            one = f"; one is row {bad.row} of {bad.file}: {bad.error}" if bad else ""
            raise InvalidArgumentError(
                f"{failed:,.0f} of {done:,.0f} rows are bad, more than max_errors "
                f"({self._job.max_errors}) allows{one}"
            )

    def _figures(self) -> dict[str, float]:
        """For the journal: of this run so far. ``run`` is the number of its first part, and
        ``cpu_s`` of all processes."""
        return {
            **self._counts,
            "bad": self._counts["bad"] + self._output.misfits,
            "run": self._run,
            "cpu_s": time.process_time() - self._cpu,
            "seconds": time.monotonic() - self._began,
            "at": time.time(),
        }


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
        self._workers = Workers(context, workers)
        closing.callback(self._workers.close)
        self._feeder = Feeder(self._executor, job.retries)
        self._chunk_rows = max(1, min(256, job.in_flight // 8))
        self._chunks = dataset.chunks(journal.record, self._chunk_rows)
        self._reading: Future[Chunk | FileRows | None] | None = None
        self._input_ended = False
        self._row_bytes = 0.0
        """Of a row as it was read and prepared, on average: that of the last chunk taken."""
        self._preparing: deque[tuple[Chunk, Future[Prepared]]] = deque()

    def _advance(self) -> bool:
        self._read()
        self._take()
        began = time.monotonic()
        if len(self._feeder):
            for item, result in self._feeder.step(self._input_ended and not self._preparing):
                self._finish(item, result)
            self._counts["run_s"] += time.monotonic() - began
        else:
            coming: list[Future[Any]] = [future for _, future in [*self._preparing][:1]]
            coming += [self._reading] if self._reading else []
            wait(coming, _POLL_S, FIRST_COMPLETED)
            self._counts["waited_s"] += time.monotonic() - began
        return not self._input_ended or bool(self._preparing or len(self._feeder))

    def _read(self) -> None:
        """Hand to the workers what is read, while there is room for more."""
        while not self._input_ended:
            if self._reading is None:
                full = self._in_flight + self._chunk_rows > self._job.in_flight
                # Two chunks tell how large a row is; before, no more are read.
                early = len(self._preparing) > 1 and not self._row_bytes
                nbytes = max(self._bytes, self._row_bytes * self._in_flight)
                if full or early or nbytes >= _IN_FLIGHT_BYTES:
                    return
                self._reading = in_background(self._next_chunk)
            if not self._reading.done():
                return
            read = self._reading.result()
            self._reading = None
            if isinstance(read, Chunk):
                self._in_flight += len(read.rows)
                # What its rows take off again: each has a whole number of bytes (`_take`).
                self._bytes += read.nbytes // len(read.rows) * len(read.rows)
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
            nbytes = chunk.nbytes
            made = sum(item.nbytes for item in items)
            self._row_bytes = max(1, nbytes + made) / len(items)
            for item in items:
                item.key = int(self._counts["taken"])
                item.nbytes = nbytes // len(items)
                self._counts["taken"] += 1
                self._feeder.add(item)

    def _figures(self) -> dict[str, float]:
        figures = {**super()._figures(), **self._executor.figures, "tries": self._feeder.tries}
        # This process' clock does not have the CPU time of worker processes.
        figures["cpu_s"] += self._counts["prepare_s"] if self._workers.beside else 0.0
        return figures
