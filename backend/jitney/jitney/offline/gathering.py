"""What has become of a job's rows goes into parts, and the job ends when all of them have ended.

Where rows are read, prepared and run is a subclass's: on this machine (``pipeline.py``) or on a
cluster (``ray_data.py``).
"""

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError
from jitney.offline.dataset import Row, reason
from jitney.offline.job import Job
from jitney.offline.journal import End, Journal
from jitney.offline.output import BadRow, Output, Parts, Place
from jitney.offline.prepare import Task

_JUDGED = 100
"""A share of bad rows ends the job once so many are done."""
_SECONDS = ("read_s", "prepare_s", "waited_s", "run_s")
"""``waited_s`` is the time in which the executor had nothing to do."""
_COUNTS = ("done", "bad", "tries", "most_in_flight", "taken", "position")
"""``position`` is the share of the input that has been read, and ``taken`` its rows."""


@dataclass
class Item:
    """A row on its way: with what was made of it for the executor, and then by the executor."""

    place: Place
    row: Row | None
    made: Any
    tries: int = 0


def may_pass(result: Any) -> bool:
    """Whether a result is an error that another try may not meet."""
    return isinstance(result, JitneyError) and result.code in ("UNAVAILABLE", "INTERNAL")


class Gathering(ABC):
    """One run of a job."""

    def __init__(self, job: Job, journal: Journal, output: Output, task: Task) -> None:
        self._counts = dict.fromkeys((*_SECONDS, *_COUNTS), 0.0)
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._run = journal.record.next_number
        self._job, self._journal, self._output, self._task = job, journal, output, task
        self._parts = Parts(job, output)
        self._in_flight = 0
        self._stop = False
        self._last_bad: BadRow | None = None
        self._before = journal.record.failed, journal.record.failed + journal.record.written
        """Bad rows, and all rows, of the runs before."""

    def run(self, show: Callable[[dict[str, float]], None]) -> bool:
        """Work until every row is in a committed part, or until SIGINT or SIGTERM; what is finished
        by then is committed. Returns whether the job is complete. ``show`` is called often. Raises
        InvalidArgumentError if too many rows are bad, UnavailableError if input or model are away.
        """
        signals = (signal.SIGINT, signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in signals if main}

        def stop(number: int, frame: object) -> None:
            """Between two steps; a second signal does what it did before."""
            self._stop = True
            signal.signal(number, handlers[signal.Signals(number)])

        for number in handlers:
            signal.signal(number, stop)
        try:
            while not self._stop and self._has_work:
                self._advance()
                self._judge()
                show(self._figures())
                self._note(self._parts.commit(self._figures))
        finally:
            self._close()
            self._note(self._parts.close(self._figures))
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._stop:
            return False
        self._judge()
        self._journal.append(End(time.time()))
        return True

    @property
    @abstractmethod
    def _has_work(self) -> bool:
        """Whether a row is on its way, or may come."""

    @abstractmethod
    def _advance(self) -> None:
        """Work for a while, and finish what has ended."""

    @abstractmethod
    def _close(self) -> None:
        """Read nothing more."""

    def _finish(self, key: int, item: Item, result: Any) -> None:
        """The model is done with a row, for good."""
        if isinstance(result, UnavailableError):
            raise result  # not the row's fault: the job ends, and can be resumed
        row = item.row or {}
        try:
            if isinstance(result, JitneyError):
                raise result
            made = self._output.merged(row, self._task.finish(row, result))
        except Exception as error:  # a user's function may raise anything
            self._bad(key, item, reason(error))
        else:
            self._settle(key, item.place, made)

    def _bad(self, key: int, item: Item, why: str) -> None:
        bad = self._output.bad_row(item.place, why, item.row)
        self._note([bad])
        self._settle(key, item.place, bad)

    def _settle(self, key: int, place: Place, ended: Row | BadRow) -> None:
        """A row has ended, one way or the other."""
        self._in_flight -= self._parts.add(key, place, ended)
        self._counts["done"] += 1
        self._note(self._parts.commit(self._figures))

    def _note(self, bad: list[BadRow]) -> None:
        self._counts["bad"] += len(bad)
        self._last_bad = bad[-1] if bad else self._last_bad

    def _judge(self) -> None:
        """Raise InvalidArgumentError if too many rows are bad."""
        number, share = self._job.most_errors
        failed, done = self._before[0] + self._counts["bad"], self._before[1] + self._counts["done"]
        over = share is not None and done >= _JUDGED and failed > share * done
        if over or (number is not None and failed > number):
            bad = self._last_bad
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
            "run": self._run,
            "write_s": self._parts.write_s,
            "cpu_s": time.process_time() - self._cpu,
            "seconds": time.monotonic() - self._began,
            "at": time.time(),
        }
