"""One run of a job, from its first row to its end: what is the same on this machine (``pipeline``)
and on a cluster (``ray_pipeline``).

It watches what is bad, late or stuck, keeps the figures, and notes in the journal that all is done.
"""

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jitney.errors import CancelledError

from jitney_jobs.finished_rows import Finisher
from jitney_jobs.job import Job
from jitney_jobs.journal import End, Entry, JobJournal
from jitney_jobs.outcome import TooManyBadRows, check_files, error_limit
from jitney_jobs.output import Output, write_errors
from jitney_jobs.rows import RowId
from jitney_jobs.run_figures import RunFigures
from jitney_jobs.tasks import Task
from jitney_jobs.watchdog import Watchdog

_RECENT_S = 300.0
"""When a job will end is estimated from its rate in the last so many seconds."""
_SAMPLE_S = 2.0
"""Between two samples for that rate."""
_NEWS_S = 60.0
"""The user is told so often what the run waits for."""


class StopSignals:
    """While it is entered, SIGINT and SIGTERM only set ``is_stopped``. A second signal of the same
    kind does what it did before. Threads other than the main one get no signals."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._before: dict[int, Any] = {}
        """The handlers that are put back."""

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.is_stopped = True
        signal.signal(number, self._before[number])


class JobRun(ABC):
    """What every run does. A subclass reads the rows, runs them, and has their parts written."""

    def __init__(self, job: Job, journal: JobJournal, output: Output, task: Task) -> None:
        self._finisher = Finisher(job, task)
        output.set_columns(self._finisher.fields)
        self._figures = RunFigures(moved_at=time.time())
        self._began = time.monotonic()
        self._cpu_began = time.process_time()
        self._first_part = journal.record.next_number
        """The number of this run's first part. The journal knows the run by it."""
        self._job = job
        self._journal = journal
        self._output = output
        self._task = task
        self._error_limit = error_limit(job.max_errors)
        self._bad_before = journal.record.failed
        """Bad rows of the runs before."""
        self._done_before = journal.record.failed + journal.record.written
        """All rows of the runs before."""
        self._samples: deque[tuple[float, int]] = deque()
        """Seconds of this run and rows that had ended by then, of the last minutes."""
        self._is_cut = False
        """Whether rows were left out because of the setting ``limit``."""
        self._told_at = -_NEWS_S
        """When the user was last told what the run waits for, in monotonic seconds."""

    def run(
        self,
        on_progress: Callable[[dict[str, float]], None],
        wanted: Callable[[], bool],
        check_input: Callable[[], list[str]],
    ) -> bool:
        """Work until every row is in a committed part, or until SIGINT or SIGTERM; what is finished
        by then is committed. Returns whether the job is complete. ``on_progress`` is called with
        the figures often, and at the end. ``check_input`` is asked at the end how the input differs
        from what was read. A job with a ``limit`` ends with its first rows. Raises
        TooManyBadRows, UnavailableError if input, model or output are away or nothing moves,
        InvalidArgumentError if no file can be read, JobRefusedError, and CancelledError as soon as
        the job is not ``wanted``."""
        watchdog = Watchdog(self._job.watchdog_s)
        with StopSignals() as signals, contextlib.closing(watchdog):
            try:
                more = True
                while more and not signals.is_stopped:
                    more = self._advance()
                    self._check_bad_rows(has_ended=False)
                    if not wanted():
                        raise CancelledError("it was cancelled")
                    self._sample()
                    figures = self._snapshot()
                    on_progress(figures)
                    watchdog.check(figures)
                    self._commit_due()
            finally:
                self._commit_rest()
        if signals.is_stopped:
            return False
        self._check_bad_rows(has_ended=True)
        self._check_files()
        with write_errors(self._job):
            self._output.remove_strays()  # of a run that still lived when this one took over
        if not self._is_cut:
            record = self._journal.record
            rows = record.written + record.failed
            self._note(End(at=time.time(), rows=rows, input_changes=check_input()))
        on_progress(self._snapshot())
        return True

    @abstractmethod
    def refuse_repeated(self, rows: frozenset[RowId]) -> None:
        """Before :meth:`run`: rows that are bad, because they repeat the ``custom_id`` of an
        earlier one."""

    def take_news(self) -> str | None:
        """What the run waits for, if the user has not been told lately. Else None."""
        error = self._waits_for()
        now = time.monotonic()
        if error is None or now - self._told_at < _NEWS_S:
            return None
        self._told_at = now
        return f"waits, and tries again: {error}"

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns of the input that the task reads. None: all."""
        return self._task.columns

    @abstractmethod
    def _advance(self) -> bool:
        """Work for a while, and finish the rows that have ended. Returns whether rows are in flight
        or still unread."""

    @abstractmethod
    def _commit_due(self) -> None:
        """Commit what is to be committed now. Raises what went wrong with an earlier part."""

    @abstractmethod
    def _commit_rest(self) -> None:
        """The run ends: commit all rows that have ended. Raises what went wrong."""

    @abstractmethod
    def _waits_for(self) -> str | None:
        """The error that rows wait for to pass. None if none does."""

    @abstractmethod
    def _bad_example(self) -> str | None:
        """One of the bad rows, for an error. None if there is none."""

    def _note(self, entry: Entry) -> None:
        with write_errors(self._job):
            self._journal.append(entry)

    def _check_bad_rows(self, has_ended: bool) -> None:
        """Raise TooManyBadRows if more rows are bad than ``max_errors`` allows. ``has_ended``: no
        more rows come."""
        bad = self._bad_before + self._figures.bad + self._output.misfits
        done = self._done_before + self._figures.done
        total = done if has_ended else self._journal.record.total
        known = self._known_rows(done) if total is None else total
        if not self._error_limit.is_exceeded(bad, known, all_known=total is not None):
            return
        last = self._output.misfit or self._bad_example()
        example = f"; one is {last}" if last else ""
        ended = done if total is None else total
        raise TooManyBadRows(
            f"{bad:,} of {ended:,} rows are bad, more than max_errors "
            f"({self._job.max_errors}) allows{example}"
        )

    def _known_rows(self, done: int) -> float:
        """Rows of the input, as its size lets expect; at least those that have ended."""
        position = self._figures.position
        if not position:
            return done
        expected = (self._done_before + self._figures.taken) / position
        if self._job.limit is not None:
            expected = min(expected, self._job.limit)
        return max(done, expected)

    def _check_files(self) -> None:
        """Raise InvalidArgumentError if no file could be read."""
        record = self._journal.record
        assert record.begin is not None, "the job has begun"
        if record.shard_rows is None:  # other shards may have read them: a merge knows
            check_files(record.bad_files, len(record.begin.files), record.written)

    def _sample(self) -> None:
        """Note how far the run is, now and then."""
        seconds = time.monotonic() - self._began
        samples = self._samples
        if samples and seconds - samples[-1][0] < _SAMPLE_S:
            return
        samples.append((seconds, self._figures.done))
        while samples[0][0] < seconds - _RECENT_S:
            samples.popleft()

    def _snapshot(self) -> dict[str, float]:
        """The figures of this run so far, as the journal has them: those of :class:`RunFigures`,

        - ``run``: the number of its first part;
        - ``cpu_s``: CPU seconds of all processes, but not of the readers on a cluster;
        - ``seconds``, ``at``: how long the run has taken, and when that was;
        - ``recent_s``, ``recent_done``: the last minutes, and the rows that ended in them;
        - and those of the executor.
        """
        figures = self._figures.to_dict()
        figures["bad"] += self._output.misfits
        figures |= self._output.counts.to_dict()
        figures["run"] = self._first_part
        figures["cpu_s"] = time.process_time() - self._cpu_began
        figures["seconds"] = time.monotonic() - self._began
        figures["at"] = time.time()
        if self._samples:
            began_s, done = self._samples[0]
            figures["recent_s"] = figures["seconds"] - began_s
            figures["recent_done"] = figures["done"] - done
        return figures
