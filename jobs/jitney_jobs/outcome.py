"""What becomes of a row, of a file and of a job: everything that can go wrong is judged here.

- *row error*, a value that the model cannot take: the row is bad. ``_errors`` has its reason and
  what was read.
- *file error*, a file that is damaged, gone, or not allowed to be read: it is listed, and the other
  files are done.
- *passing error*, an engine or a storage that is away or busy: it is tried again within a time,
  the setting ``patience``. Requests to a server are judged by ``patience.py`` before they come
  here: what comes is the row's, or ends the job.
- *job error*, a setting, a column or a model that is wrong: the job ends and says what to change.

A row error, a file error and a job error have the class InvalidArgumentError; a row error may be a
RequestError, and a job error a LoadError or a JobRefusedError. A passing error is an
UnavailableError, or an InternalError of the engine.
A passing error that outlasts its time is a row error if other rows end well meanwhile. Otherwise
it ends the job, which can be resumed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError

_LONGEST_PAUSE_S = 60.0
_ROWS_OF_A_SHARE = 100
"""While the number of rows of the input is not known, it counts as this or more."""


class ExitStatus(IntEnum):
    """Of ``jitney batch run``, ``resume`` and ``merge``. Schedulers try a job again after 1 only; a
    merge also after 6."""

    COMPLETE = 0
    JOB_ERROR = 1
    COMMAND_LINE = 2
    BAD_ROWS = 3
    """Complete, but rows or files are bad. This goes before LATE."""
    LATE = 4
    TOO_MANY_BAD = 5
    SHARDS_MISSING = 6
    """Only of ``jitney batch merge``: shards are not complete."""
    STOPPED = 130
    """What shells expect of an interrupted command."""


class SettingsError(InvalidArgumentError):
    """The command line or the job file is wrong."""

    exit_status = ExitStatus.COMMAND_LINE


class TooManyBadRows(InvalidArgumentError):
    """More rows are bad than ``max_errors`` allows."""

    exit_status = ExitStatus.TOO_MANY_BAD


class ShardsMissingError(UnavailableError):
    """Shards are not complete, so that they cannot be merged."""

    exit_status = ExitStatus.SHARDS_MISSING


def final_status(bad: int, bad_files: int, late: bool) -> ExitStatus:
    """Of a job that is complete."""
    if bad or bad_files:
        return ExitStatus.BAD_ROWS
    return ExitStatus.LATE if late else ExitStatus.COMPLETE


def check_files(reasons: Mapping[int, str], file_count: int, written: int) -> None:
    """Raises InvalidArgumentError if no file of a job could be read. ``reasons``: why a file could
    not be read to its end, by the file's index. ``file_count``: files of the input. ``written``:
    rows that were written."""
    if written or not reasons or len(reasons) < file_count:
        return
    first_reason = next(iter(reasons.values()))
    more = f"; so are all {len(reasons):,} files" if len(reasons) > 1 else ""
    raise InvalidArgumentError(f"{first_reason}{more}")


def is_worth_another_try(error: BaseException) -> bool:
    """Whether a job that ended with this error may end otherwise if it is run again, unchanged. So
    it is for passing errors, and for errors that nobody foresaw."""
    if isinstance(error, JitneyError):
        return isinstance(error, UnavailableError | InternalError)
    return True


# ------------------------------------------------------------------ passing errors


def may_pass(result: Any) -> bool:
    """Whether a row's result is an error that another try may not meet."""
    return isinstance(result, JitneyError) and result.code in ("UNAVAILABLE", "INTERNAL")


def pause(tries: int) -> float:
    """Seconds before the next try, if there were ``tries`` tries after the first one."""
    return min(_LONGEST_PAUSE_S, float(2 ** min(tries, 16)))


class RetryPolicy:
    """How often, and how long, passing errors are tried again."""

    def __init__(self, seconds: float, retries: int) -> None:
        """``seconds``: how long after its first failure something is tried again. ``retries``: how
        often, after an error that is no UnavailableError, since the row may be at fault."""
        self._seconds = seconds
        self._retries = retries

    def pause_after(self, trouble: "Trouble", error: Exception, now: float) -> float | None:
        """Note that what is in trouble failed with a passing error. Returns the seconds before its
        next try, or None if it is not tried again. ``now``: in monotonic seconds."""
        if trouble.since is None:
            trouble.since = now
        tries = trouble.tries
        trouble.tries += 1
        if not isinstance(error, UnavailableError):
            return pause(tries) if tries < self._retries else None
        left_s = trouble.since + self._seconds - now
        return min(pause(tries), left_s) if left_s > 0 else None


@dataclass
class Trouble:
    """The passing errors in a row of something: of one row, or of a file that is read."""

    since: float | None = None
    """When the first of them came, in monotonic seconds. None: there is none."""
    tries: int = 0
    """How often it was tried again since."""

    def wait(
        self, policy: RetryPolicy, error: JitneyError, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Wait until the next try. Raises ``error`` if it does not pass, or has lasted too long."""
        pause_s = policy.pause_after(self, error, time.monotonic()) if may_pass(error) else None
        if pause_s is None:
            raise error
        sleep(pause_s)


# ------------------------------------------------------------------ how many rows may be bad


@dataclass(frozen=True)
class ErrorLimit:
    """How many rows of a job may be bad: a number, or a share of the rows that are known."""

    rows: int | None = None
    share: float | None = None

    def is_exceeded(self, bad: int, known: float, all_known: bool) -> bool:
        """Whether ``bad`` rows are more than allowed. ``known``: rows of the input, or unless
        ``all_known`` an estimate. An estimate counts as ``_ROWS_OF_A_SHARE`` at least: a few rows
        say nothing of a share."""
        if self.rows is not None:
            return bad > self.rows
        assert self.share is not None, "a limit is a number or a share"
        rows = known if all_known else max(known, _ROWS_OF_A_SHARE)
        return bad > self.share * rows


def error_limit(max_errors: str | float) -> ErrorLimit:
    """The setting ``max_errors``. Raises InvalidArgumentError."""
    text = str(max_errors)
    refusal = InvalidArgumentError.of("max_errors", text, "a number, or a share from 0 to 100%")
    try:
        if text.endswith("%"):
            limit = ErrorLimit(share=float(text.rstrip("%")) / 100)
        elif "." in text or "e" in text:  # a small share may be written as 1e-05
            limit = ErrorLimit(share=float(text))
        else:
            limit = ErrorLimit(rows=int(text))
    except ValueError:
        raise refusal from None
    if limit.share is not None and not 0 <= limit.share <= 1:
        raise refusal
    if limit.rows is not None and limit.rows < 0:
        raise refusal
    return limit
