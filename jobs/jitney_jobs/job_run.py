"""One run of a job, from its first row to its end: what is the same on this machine (``pipeline``)
and on a cluster (``ray_pipeline``).

It watches what is bad, late or stuck, and notes in the journal that all is done.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from jitney.errors import CancelledError

from jitney_jobs.job import Job
from jitney_jobs.journal import End, JobJournal
from jitney_jobs.outcome import TooManyBadRows, check_files, error_limit
from jitney_jobs.output import Output, write_errors
from jitney_jobs.rows import RowId
from jitney_jobs.run_meter import RunMeter
from jitney_jobs.stop_signals import StopSignals
from jitney_jobs.watchdog import Watchdog

_NEWS_S = 60.0
"""Between two times at which the user is told what the run waits for."""


class RowPipeline(Protocol):
    """Reads the rows of a job, runs them, and commits them in parts. The job's thread calls it."""

    meter: RunMeter
    is_cut: bool
    """Whether rows were left out because of the setting ``limit``."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns of the input that the task reads. None: all."""

    def refuse_repeated(self, rows: frozenset[RowId]) -> None:
        """Before the run: rows that are bad, because they repeat the ``custom_id`` of an earlier
        one."""

    def advance(self) -> bool:
        """Work for a while, and finish the rows that have ended. Returns whether rows are in flight
        or still unread."""

    def commit_due(self) -> None:
        """Commit what is to be committed now. Raises what went wrong with an earlier part."""

    def commit_rest(self) -> None:
        """The run ends: commit all rows that have ended. Raises what went wrong."""

    def waits_for(self) -> str | None:
        """The error that rows wait for to pass. None if none does."""

    def bad_example(self) -> str | None:
        """One of the bad rows, for an error. None if there is none."""

    def snapshot(self) -> dict[str, float]:
        """The figures of this run so far, as the journal has them: those of the meter, with the CPU
        seconds of all processes that are known, and those of the executor."""


class JobRun:
    """Runs a pipeline to its end."""

    def __init__(
        self, job: Job, journal: JobJournal, output: Output, pipeline: RowPipeline
    ) -> None:
        self._job = job
        self._journal = journal
        self._output = output
        self._pipeline = pipeline
        self._meter = pipeline.meter
        self._error_limit = error_limit(job.max_errors)
        self._told_at = -_NEWS_S
        """When the user was last told what the run waits for, in monotonic seconds."""

    def run(
        self,
        on_progress: Callable[[dict[str, float]], None],
        wanted: Callable[[], bool],
        check_input: Callable[[], list[str]],
    ) -> bool:
        """Work until every row is in a committed part, or until SIGINT or SIGTERM; what is finished
        by then is committed. Returns whether the job is complete. A job with a ``limit`` ends after
        its first rows.

        ``on_progress`` is called with the figures often, and at the end. ``check_input`` is called
        at the end: it says how the input differs from what was read.

        Raises TooManyBadRows, UnavailableError if input, model or output are away or nothing moves,
        InvalidArgumentError if no file can be read, JobRefusedError, and CancelledError as soon as
        the job is not ``wanted``."""
        pipeline = self._pipeline
        watchdog = Watchdog(self._job.watchdog_s)
        with StopSignals() as signals, contextlib.closing(watchdog):
            try:
                more = True
                while more and not signals.is_stopped:
                    more = pipeline.advance()
                    self._check_bad_rows(has_ended=False)
                    if not wanted():
                        raise CancelledError("it was cancelled")
                    self._meter.sample()
                    figures = pipeline.snapshot()
                    on_progress(figures)
                    watchdog.check(figures)
                    pipeline.commit_due()
            finally:
                pipeline.commit_rest()
        if signals.is_stopped:
            return False
        self._check_bad_rows(has_ended=True)
        self._check_files()
        with write_errors(self._job):
            self._output.remove_strays()  # of a run that still lived when this one took over
        if not pipeline.is_cut:
            self._note_end(check_input())
        on_progress(pipeline.snapshot())
        return True

    def take_news(self) -> str | None:
        """What the run waits for, if the user has not been told lately. Else None."""
        error = self._pipeline.waits_for()
        now = time.monotonic()
        if error is None or now - self._told_at < _NEWS_S:
            return None
        self._told_at = now
        return f"waits, and tries again: {error}"

    def _note_end(self, input_changes: list[str]) -> None:
        record = self._journal.record
        rows = record.written + record.failed
        with write_errors(self._job):
            self._journal.append(End(at=time.time(), rows=rows, input_changes=input_changes))

    def _check_bad_rows(self, has_ended: bool) -> None:
        """Raise TooManyBadRows if more rows are bad than ``max_errors`` allows. ``has_ended``: no
        more rows come."""
        bad = self._meter.bad
        done = self._meter.done
        total = done if has_ended else self._journal.record.total
        if total is None:
            is_exceeded = self._error_limit.is_exceeded(
                bad, self._expected_rows(done), all_known=False
            )
        else:
            is_exceeded = self._error_limit.is_exceeded(bad, total, all_known=True)
        if not is_exceeded:
            return
        last = self._output.misfit or self._pipeline.bad_example()
        example = f"; one is {last}" if last else ""
        of_rows = done if total is None else total
        raise TooManyBadRows(
            f"{bad:,} of {of_rows:,} rows are bad, more than max_errors "
            f"({self._job.max_errors}) allows{example}"
        )

    def _expected_rows(self, done: int) -> float:
        """Rows of the input, estimated from the share of its bytes that was read. At least
        ``done``, those that have ended."""
        figures = self._meter.figures
        if not figures.position:
            return done
        expected = (self._meter.done_before + figures.taken) / figures.position
        if self._job.limit is not None:
            expected = min(expected, self._job.limit)
        return max(done, expected)

    def _check_files(self) -> None:
        """Raise InvalidArgumentError if no file could be read."""
        record = self._journal.record
        assert record.begin is not None, "the job has begun"
        if record.shard_rows is None:  # other shards may have read them: a merge knows
            check_files(record.bad_files, len(record.begin.files), record.written)
