"""The pipeline of a job on this machine: read, prepare, run, gather.

A thread reads chunks. Workers prepare them, and the job's thread runs their rows (``row_runner``).
It gathers the results into parts. Another thread writes a part and notes it in the journal while
the next part fills, so at most two parts are in memory.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from jitney_jobs.background import in_background, settle
from jitney_jobs.dataset import Dataset
from jitney_jobs.ended_rows import Ended
from jitney_jobs.executors import Models
from jitney_jobs.held_results import HeldResults
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, JobJournal
from jitney_jobs.output import Output, write_errors
from jitney_jobs.part_filler import PartFiller, in_parts
from jitney_jobs.prepare import Item
from jitney_jobs.row_order import RowOrder
from jitney_jobs.row_runner import RowRunner, chunk_rows, workers_of
from jitney_jobs.rows import Chunk, RowId, reason
from jitney_jobs.run_meter import RunMeter
from jitney_jobs.run_task import begin_task

_POLL_S = 0.2
"""Longest wait for a chunk, in seconds: then the job's thread looks at signals again."""


class _Read(NamedTuple):
    """What the reader's thread gives each time that it is asked."""

    entry: Chunk | FileRows | None
    """None at the end of the input."""
    seconds: float


class _Reader:
    """A thread that reads a chunk each time it is asked. It is a daemon: if a read hangs, the
    process can end nevertheless."""

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


class Pipeline:
    """Of a run on this machine (``job_run.RowPipeline``). Owns every row between the input and the
    journal."""

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
        executor, context = models.load(job)
        context, task, self._finisher = begin_task(context, job, dataset, output)
        self._job = job
        self._journal = journal
        self._output = output
        self._task = task
        self.meter = RunMeter(journal.record, output)
        self.is_cut = False
        most_rows = chunk_rows(job, task, dataset)
        self._runner = RowRunner(
            executor,
            context,
            task,
            self.meter.figures,
            workers=workers_of(job, task, dataset),
            chunk_rows=most_rows,
        )
        closing.callback(self._runner.close)
        self._reader = _Reader(dataset.chunks(journal.record, most_rows))
        closing.callback(self._reader.close)
        self._reading: Future[_Read] | None = None
        self._input_ended = False
        self._all_ended = False
        """Whether no row is left to do."""
        self._rows_left: int | None = None
        """Rows that may still be done, because of the setting ``limit``."""
        if job.limit is not None:
            self._rows_left = max(0, job.limit - self.meter.done_before)
        self._order = RowOrder() if job.ordered else None
        self._part = PartFiller(job, output.maker)
        with write_errors(job):
            assert journal.record.begin is not None, "the job has begun"
            self._held_results = HeldResults(output.maker, journal.record.begin)
        self._writing: Future[float] | None = None
        """Of the part before. Gives the seconds that its writing took."""
        self._in_writing: list[Ended] = []
        """The rows of that part."""
        self._last_bad: Ended | None = None
        self._has_lost_part = False
        """Whether a part could not be written."""

    def advance(self) -> bool:
        self._read_ahead()
        figures = self.meter.figures
        figures.position = self._runner.feed() or figures.position
        began = time.monotonic()
        if self._runner.has_rows:
            for item, result in self._runner.step(self._input_ended):
                self._finish(item, result)
            figures.run_s += time.monotonic() - began
        else:
            self._wait_for_rows()
            figures.waited_s += time.monotonic() - began
        all_are_fed = self._input_ended and self._runner.next_prepared is None
        self._all_ended = all_are_fed and not self._runner.has_rows
        return not self._all_ended

    def _wait_for_rows(self) -> None:
        """Until a chunk has been read or prepared, or for a moment."""
        coming: list[Future[Any]] = []
        if self._runner.next_prepared is not None:
            coming.append(self._runner.next_prepared)
        if self._reading is not None:
            coming.append(self._reading)
        if not coming:
            self._make_room()
            return
        wait(coming, _POLL_S, FIRST_COMPLETED)

    def _read_ahead(self) -> None:
        """Hand to the workers what is read, while the budget allows more."""
        while not self._input_ended:
            if self._reading is None:
                if not self._runner.may_take:
                    return
                self._reading = self._reader.read()
            if not self._reading.done():
                return
            read = self._reading.result()
            self._reading = None
            self.meter.figures.read_s += read.seconds
            if isinstance(read.entry, Chunk):
                chunk = self._within_limit(read.entry)
                if chunk is not None:
                    self._runner.take(self._held_results.put_into(chunk))
            elif read.entry is not None:
                with write_errors(self._job):
                    self._journal.append(read.entry)
            else:
                self._input_ended = True

    def _within_limit(self, chunk: Chunk) -> Chunk | None:
        """The rows of it that may be done. None if none may. If not all of them may, nothing more
        is read."""
        rows_left = self._rows_left
        if rows_left is None:
            return chunk
        if len(chunk) <= rows_left:
            self._rows_left = rows_left - len(chunk)
            return chunk
        self.is_cut = True
        self._input_ended = True
        return chunk.slice(0, rows_left) if rows_left else None

    @property
    def columns(self) -> Sequence[str] | None:
        return self._task.columns

    def refuse_repeated(self, rows: frozenset[RowId]) -> None:
        self._runner.repeated = rows

    def waits_for(self) -> str | None:
        error = self._runner.waits_for
        return None if error is None else reason(error)

    # ------------------------------------------------------------------ parts

    def _finish(self, item: Item, result: Any) -> None:
        """The model is done with rows, for good."""
        ended = self._finisher.ended(item, result)
        figures = self.meter.figures
        figures.done += len(item.rows)
        figures.moved_at = time.time()
        for rows in ended:
            if rows.error is not None:
                figures.bad += len(rows.rows)
                self._last_bad = rows
        if self._order is not None:
            ended = self._order.in_turn(item.key, ended)
        self._add_all_to_part(ended)

    def _add_all_to_part(self, ended: list[Ended]) -> None:
        for rows in ended:
            self._runner.note_in_part(rows)
            rest: Ended | None = rows
            while rest is not None:
                rest = self._part.add(rest)
                self.commit_due()

    def commit_due(self) -> None:
        """Have the part written if it is full or old. Raises what went wrong in writing the part
        before."""
        if self._part.is_due:
            self._finish_writing()  # one part is written at a time
            self._begin_writing(self._part.take())
        elif self._writing is not None and self._writing.done():
            self._finish_writing()  # so that an error is raised as soon as it is known
        if self._part.waits_for_columns:
            with write_errors(self._job):
                self._held_results.save_each(self._job.part_seconds, self._part.rows)

    def _make_room(self) -> None:
        """Nothing can be read or run because the memory is full: have the part written, and wait
        for that."""
        if self._writing is None and self._part:
            self._begin_writing(self._part.take())
        self._finish_writing()

    def commit_rest(self) -> None:
        """Have the rows of the part written, and wait for that. Raises what went wrong."""
        self._finish_writing()
        # If an earlier part could not be written, the next run writes its rows: they would come
        # after these.
        is_out_of_order = self._job.ordered and self._has_lost_part
        if is_out_of_order:
            return
        part = self._last_part()
        if part:
            self._begin_writing(part)
            self._finish_writing()

    def _last_part(self) -> list[Ended]:
        """The rows that are left to write. If they are too few to set the columns, only the bad
        ones: the columns must not depend on when a run is stopped."""
        has_too_few = self._part.waits_for_columns
        part = self._part.take()
        is_whole = self._all_ended and not self.is_cut
        if is_whole or not has_too_few:
            return part
        with write_errors(self._job):
            self._held_results.save(part)
        if self._all_ended:
            # The user wants to see these rows. A run without the limit writes them again.
            self._output.maker.columns.are_final = False
            return part
        return [rows for rows in part if rows.error is not None]

    def _begin_writing(self, part: list[Ended]) -> None:
        self._in_writing = part
        self._writing = in_background(partial(self._write, part, self.snapshot()))

    def _write(self, part: list[Ended], figures: dict[str, float]) -> float:
        """In a thread. Returns the seconds that it took."""
        began = time.monotonic()
        self._output.maker.columns.learn(part)
        for rows in in_parts(part, self._job.part_rows):
            self._output.write(rows, figures)
        columns = self._output.maker.columns
        if columns.known is not None and columns.are_final:
            self._held_results.remove()
        return time.monotonic() - began

    def _finish_writing(self) -> None:
        """Wait until the part before is written. Raises what went wrong."""
        if self._writing is None:
            return
        writing = self._writing
        self._writing = None
        try:
            with write_errors(self._job):
                self.meter.figures.write_s += writing.result()
        except BaseException:
            self._has_lost_part = True
            raise
        self._runner.note_written(self._in_writing)
        self._in_writing = []

    def bad_example(self) -> str | None:
        bad = self._last_bad
        if bad is None:
            return None
        return self._output.maker.bad_row(bad.chunk, bad.rows[-1], str(bad.error)).text

    def snapshot(self) -> dict[str, float]:
        figures = self.meter.snapshot() | self._runner.executor_figures
        figures["cpu_s"] += self._runner.workers_cpu_s
        return figures
