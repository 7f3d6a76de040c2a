"""Gathers the rows that a run has finished into parts, and has the parts written.

This is the half of a run that is the same on this machine (``pipeline``) and on a cluster
(``ray_data``). The job's thread gathers; another thread writes a part and notes it in the journal
while the next part fills. So at most two parts are in memory.
"""

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from jitney.errors import CancelledError, InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.arrow import pa
from jitney_jobs.background import in_background
from jitney_jobs.column_names import result_names
from jitney_jobs.columns import taken
from jitney_jobs.failures import JobRefusedError, RequestError
from jitney_jobs.job import Job
from jitney_jobs.journal import End, Entry, JobJournal
from jitney_jobs.onnx_executor import BlockResult
from jitney_jobs.outcome import TooManyBadRows, error_limit
from jitney_jobs.output import Ended, Output, write_errors
from jitney_jobs.prepare import Item
from jitney_jobs.rows import Chunk, RowId, reason
from jitney_jobs.tasks import MapResult, Task
from jitney_jobs.tensors import Tensors
from jitney_jobs.texts import TextResult
from jitney_jobs.watchdog import Watchdog

_PART_BYTES = 32 << 20
"""A part is written when its rows have so many bytes in memory: columns of the input that are
written, and the result's."""
_RECENT_S = 300.0
"""The rate of the last so many seconds tells when a job will end."""
_SAMPLE_S = 2.0
"""Between two samples for that rate."""


class RunFigures(msgspec.Struct, kw_only=True):
    """What one run has done so far. The job's thread owns it; other threads return their seconds.

    :meth:`Gathering._snapshot` adds what is known elsewhere.
    """

    read_s: float = 0.0
    """Seconds in which the reader's thread worked."""
    prepare_s: float = 0.0
    """Seconds in which workers prepared, added up over all of them."""
    waited_s: float = 0.0
    """Seconds in which the executor had nothing to do."""
    run_s: float = 0.0
    """Seconds in which the executor worked."""
    write_s: float = 0.0
    """Seconds in which parts were written."""
    done: int = 0
    """Rows that have ended, bad ones too."""
    bad: int = 0
    """The bad ones of these."""
    tries: int = 0
    """How often a row was tried again."""
    most_in_flight: int = 0
    """The most rows that were between reading and a part at a time."""
    taken: int = 0
    """Rows that were read and prepared."""
    replaced: int = 0
    """How many U+FFFD were put in place of what is no text, in the rows of this run's parts."""
    long_texts: int = 0
    """Texts in these rows that have more tokens than the encoder takes at once."""
    position: float = 0.0
    """The share of the whole input that has been read, 0 to 1."""
    moved_at: float
    """When a row last ended, or the run began; in seconds since 1970."""

    def to_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in msgspec.structs.asdict(self).items()}


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


class Gathering(ABC):
    """One run of a job: gathers ended rows into parts, and has the parts written."""

    def __init__(self, job: Job, journal: JobJournal, output: Output, task: Task) -> None:
        self._result_names = result_names(job, task.fields)
        output.set_columns(task.fields and _renamed(task.fields, self._result_names))
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
        self._held: dict[int, list[Ended]] = {}
        """Only if the order is kept: rows that ended before an earlier one, by their item's key."""
        self._next_key = 0
        """Only if the order is kept: the key of the next item of the part."""
        self._part: list[Ended] = []
        """The part that fills."""
        self._part_rows = 0
        self._part_bytes = 0
        """Approximate size of its rows as they are written."""
        self._part_began = 0.0
        self._writing: Future[float] | None = None
        """Of the part before. Gives the seconds that its writing took."""
        self._written: list[Ended] = []
        """The rows of that part."""
        self._last_bad: Ended | None = None
        self._has_lost_part = False
        """Whether a part could not be written."""
        self.repeated: frozenset[RowId] = frozenset()
        """Rows that are bad, because they repeat the ``custom_id`` of an earlier one."""
        self._samples: deque[tuple[float, int]] = deque()
        """Seconds of this run and rows that had ended by then, of the last minutes."""
        self._is_cut = False
        """Whether rows were left out because of the setting ``limit``."""

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
                    self._commit_if_due()
            finally:
                self._commit_rest()
        if signals.is_stopped:
            return False
        self._check_bad_rows(has_ended=True)
        self._check_bad_files()
        with write_errors(self._job):
            self._output.remove_strays()  # of a run that still lived when this one took over
        if not self._is_cut:
            record = self._journal.record
            rows = record.written + record.failed
            self._note(End(at=time.time(), rows=rows, input_changes=check_input()))
        on_progress(self._snapshot())
        return True

    def take_news(self) -> str | None:
        """What the user should know, and has not been told. For a run that waits for something."""
        return None

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns of the input that the task reads. None: all."""
        return self._task.columns

    @abstractmethod
    def _advance(self) -> bool:
        """Work for a while, and finish the rows that have ended. Returns whether rows are in flight
        or still unread."""

    @abstractmethod
    def _on_rows_in_part(self, ended: Ended) -> None:
        """Rows are in the part that fills."""

    @abstractmethod
    def _on_part_committed(self, part: list[Ended]) -> None:
        """The rows of a part need not be held any more."""

    def _refuse_if_repeated(self, item: Item) -> None:
        """Before an item is run. Each line is one."""
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

    def _finish(self, item: Item, result: Any) -> None:
        """The model is done with rows, for good."""
        if isinstance(result, UnavailableError | JobRefusedError):
            raise result  # not the row's fault: the job ends, and can be resumed
        ended = self._ended(item, result)
        self._figures.done += len(item.rows)
        self._figures.moved_at = time.time()
        for rows in ended:
            if rows.error is not None:
                self._figures.bad += len(rows.rows)
                self._last_bad = rows
        if not self._job.ordered:
            self._add_all_to_part(ended)
            return
        self._held[item.key] = ended
        while self._next_key in self._held:
            self._add_all_to_part(self._held.pop(self._next_key))
            self._next_key += 1

    def _ended(self, item: Item, result: Any) -> list[Ended]:
        """What is written of an item's rows, in their order."""
        chunk = item.chunk
        assert chunk is not None, "the chunk was put back"
        if isinstance(result, JitneyError):
            return [self._bad(chunk, row, result) for row in item.rows]
        if isinstance(result, BlockResult):
            ended = _ended_of_block(chunk, item.rows, result, self._task)
            return [self._with_names(rows) for rows in ended]
        rows = list(item.rows)
        if isinstance(result, MapResult):
            return [Ended(chunk, rows, results=[result], result_bytes=len(result.data))]
        try:
            given = chunk.given(rows[0]) if chunk.format == "openai" else {}
            finished = self._task.finish(given, result)
        except RequestError as error:
            return [self._bad(chunk, rows[0], error)]
        except Exception as error:  # a result may be anything
            return [self._bad(chunk, rows[0], InvalidArgumentError(reason(error)))]
        names = self._result_names
        values = {names.get(name, name): value for name, value in finished.items()}
        is_long_text = isinstance(result, TextResult) and result.is_long
        return [
            Ended(
                chunk,
                rows,
                results=[values],
                result_bytes=_size_of(values),
                is_long_text=is_long_text,
            )
        ]

    def _bad(self, chunk: Chunk, row: int, error: JitneyError) -> Ended:
        """``row``: its index in the chunk."""
        answer = None
        if chunk.format == "openai" and self._job.task != "map":
            from jitney_jobs.openai_lines import failure_of_line  # imports much of the gateway

            answer = failure_of_line(chunk.line_values(row), error)
        return Ended(chunk, [row], error=reason(error), answer=answer)

    def _with_names(self, ended: Ended) -> Ended:
        """With the result's columns called as the job says."""
        columns = ended.columns
        if columns is None:
            return ended
        renamed = columns.rename_columns([self._result_names[n] for n in columns.schema.names])
        return replace(ended, columns=renamed)

    def _add_all_to_part(self, ended: list[Ended]) -> None:
        for rows in ended:
            while True:
                room = max(1, self._job.part_rows - self._part_rows)
                self._add_to_part(rows.slice(0, room))
                if room >= len(rows.rows):
                    break
                rows = rows.slice(room, len(rows.rows))

    def _add_to_part(self, ended: Ended) -> None:
        if not self._part:
            self._part_began = time.monotonic()
        self._part.append(ended)
        self._part_rows += len(ended.rows)
        self._part_bytes += ended.result_bytes + self._output.written_bytes(ended)
        self._on_rows_in_part(ended)
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        """Have the part written if it is full or old. Raises what went wrong in writing the part
        before."""
        age = time.monotonic() - self._part_began
        is_old = age >= self._job.part_seconds and self._output.knows_columns(self._part)
        is_full = self._part_rows >= self._job.part_rows or self._part_bytes >= _PART_BYTES
        if self._part and (is_old or is_full):
            self._finish_writing()  # one part is written at a time
            self._begin_writing()
        elif self._writing is not None and self._writing.done():
            self._finish_writing()  # so that an error is raised as soon as it is known

    def _make_room(self) -> None:
        """The run cannot go on while so much is in memory: have it written, or wait until it is."""
        if self._writing is None and self._part:
            self._begin_writing()
        self._finish_writing()

    def _commit_rest(self) -> None:
        """Have all rows of the part written, and wait for that. Raises what went wrong."""
        self._finish_writing()
        # An earlier part that could not be written may be why the job ends. The next run writes its
        # rows, which would then come after these.
        is_out_of_order = self._job.ordered and self._has_lost_part
        if self._part and not is_out_of_order:
            self._begin_writing()
            self._finish_writing()

    def _begin_writing(self) -> None:
        part = self._part
        self._part = []
        self._part_rows = 0
        self._part_bytes = 0
        self._written = part
        # What is counted of committed rows alone is right after a crash, too.
        self._figures.replaced += sum(ended.replaced for ended in part)
        self._figures.long_texts += sum(1 for ended in part if ended.is_long_text)
        self._writing = in_background(partial(self._write, part, self._snapshot()))

    def _write(self, part: list[Ended], figures: dict[str, float]) -> float:
        """In a thread. Returns the seconds that it took."""
        began = time.monotonic()
        self._output.write(part, figures)
        return time.monotonic() - began

    def _finish_writing(self) -> None:
        """Wait until the part before is written. Raises what went wrong."""
        if self._writing is None:
            return
        writing = self._writing
        self._writing = None
        try:
            with write_errors(self._job):
                self._figures.write_s += writing.result()
        except BaseException:
            self._has_lost_part = True
            raise
        self._on_part_committed(self._written)
        self._written = []

    def _note(self, entry: Entry) -> None:
        with write_errors(self._job):
            self._journal.append(entry)

    def _check_bad_rows(self, has_ended: bool) -> None:
        """Raise TooManyBadRows if there are. ``has_ended``: no more rows come."""
        bad = self._bad_before + self._figures.bad + self._output.misfits
        done = self._done_before + self._figures.done
        total = done if has_ended else self._journal.record.total
        known = self._known_rows(done) if total is None else total
        if not self._error_limit.is_exceeded(bad, known, all_known=total is not None):
            return
        last = self._output.last_bad
        if last is None and self._last_bad is not None:
            bad_rows = self._last_bad
            last = self._output.bad_row(bad_rows.chunk, bad_rows.rows[-1], str(bad_rows.error))
        example = f"; one is row {last.row} of {last.file}: {last.error}" if last else ""
        raise TooManyBadRows(
            f"{bad:,} of {done:,} rows are bad, more than max_errors "
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

    def _check_bad_files(self) -> None:
        """Raise InvalidArgumentError if no file could be read."""
        record = self._journal.record
        assert record.begin is not None, "the job has begun"
        if record.shard_rows is not None:
            return  # other shards may have read them: a merge knows
        reasons = list(record.bad_files.values())
        if reasons and len(reasons) == len(record.begin.files) and not record.written:
            more = f"; so are all {len(reasons):,} files" if len(reasons) > 1 else ""
            raise InvalidArgumentError(f"{reasons[0]}{more}")

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
        - ``cpu_s``: CPU seconds of all processes; on a cluster without those that read and prepare;
        - ``seconds``, ``at``: how long the run has taken, and when that was;
        - ``recent_s``, ``recent_done``: the last minutes, and the rows that ended in them;
        - and those of the executor.
        """
        figures = self._figures.to_dict()
        figures["bad"] += self._output.misfits
        figures["non_finite"] = self._output.non_finite
        figures["run"] = self._first_part
        figures["cpu_s"] = time.process_time() - self._cpu_began
        figures["seconds"] = time.monotonic() - self._began
        figures["at"] = time.time()
        if self._samples:
            began_s, done = self._samples[0]
            figures["recent_s"] = figures["seconds"] - began_s
            figures["recent_done"] = figures["done"] - done
        return figures


def _renamed(fields: pa.Schema, names: dict[str, str]) -> pa.Schema:
    renamed = [field.with_name(names[field.name]) for field in fields]
    return pa.schema(renamed, fields.metadata)


def _ended_of_block(
    chunk: Chunk, rows: Sequence[int], result: BlockResult, task: Task
) -> list[Ended]:
    """``result``: for ``rows`` of the chunk."""
    assert isinstance(task, Tensors), "only exported models answer blocks"
    errors = {index: reason(error) for index, error in result.errors.items()}
    ended = [Ended(chunk, [rows[index]], error=error) for index, error in errors.items()]
    left = [row for index, row in enumerate(rows) if index not in errors]
    if result.arrays is None:
        return ended
    found = task.finish_columns(result.arrays)
    for index, error in found.errors.items():
        ended.append(Ended(chunk, [left[index]], error=error))
    good = [index for index in range(len(left)) if index not in found.errors]
    if good:
        data = taken(found.data, good)
        good_rows = [left[index] for index in good]
        ended.append(Ended(chunk, good_rows, columns=data, result_bytes=data.nbytes))
    return ended


_BYTES_OF_VALUE = 32
"""Of a number in a list or a dict of Python's, about."""


def _size_of(value: Any) -> int:
    """Bytes of a result in memory, about."""
    if isinstance(value, str | bytes):
        return _BYTES_OF_VALUE + len(value)
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size_of, value))
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return _BYTES_OF_VALUE
