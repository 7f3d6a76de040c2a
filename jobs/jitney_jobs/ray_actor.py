"""Actors of a run on a cluster, which prepare and run rows and write the parts.

An actor is what a run on this machine has behind its reader (``row_runner``, ``part_filler``,
``part_maker``). Ray calls it with blocks, several at a time, so that the executor stays full. A
part has rows of one block only. If a block comes again, because its node was lost, its rows that
are committed by then are left out.
"""

import atexit
import contextlib
import functools
import queue
import secrets
import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from jitney.errors import JitneyError, UnavailableError

from jitney_jobs.arrow import pa
from jitney_jobs.ended_rows import Ended
from jitney_jobs.executors import load
from jitney_jobs.finished_rows import Finisher
from jitney_jobs.output import write_errors
from jitney_jobs.part_filler import PartFiller
from jitney_jobs.part_maker import PartMaker, WrittenPart
from jitney_jobs.prepare import Item
from jitney_jobs.ray_blocks import Portion, intervals_of, portions_of, without_rows
from jitney_jobs.ray_board import BoardMessage, Failure, Report
from jitney_jobs.ray_library import ray
from jitney_jobs.ray_plan import ClusterPlan
from jitney_jobs.row_runner import RowRunner, chunk_rows, workers_of
from jitney_jobs.rows import Chunk, RowId, reason
from jitney_jobs.run_figures import RunFigures
from jitney_jobs.tasks import make_task

CALLS_AT_ONCE = 4
"""Blocks that an actor works on at a time. While it waits for the slowest rows of one, those of the
others keep the executor full."""
_REPORT_S = 0.5
"""Between two reports of an actor."""
_POLL_S = 0.1
"""Longest wait for a block, in seconds."""
_RESULT = pa.schema([("is_whole", pa.bool_()), ("parts", pa.list_(pa.binary()))])
"""What an actor answers for a block. ``parts``: only if the order is kept."""


@dataclass
class _Call:
    """A block that an actor works on."""

    portions: list[Portion]
    part: PartFiller
    rows_left: int
    """Those that have not ended."""
    done: Future[bool] = field(default_factory=Future)
    """Whether all its rows are in parts that are on the board, or that it returns."""
    writing: int = 0
    """Parts that are being written."""
    held: dict[RowId, list[Ended]] = field(default_factory=dict)
    """Only if the order is kept: rows that have ended before an earlier one, by the first row of
    their item."""
    released: int = 0
    """Only if the order is kept: how many rows have left ``held``."""
    written: list[WrittenPart] = field(default_factory=list)
    """Only if the order is kept."""

    def release(self) -> list[Ended]:
        """The rows of ``held`` that no earlier one is missing before. An item has rows that follow
        one another."""
        released: list[Ended] = []
        while self.released < len(self.ids):
            ended = self.held.pop(self.ids[self.released], None)
            if ended is None:
                break
            released += ended
            self.released += sum(len(rows.rows) for rows in ended)
        return released

    @functools.cached_property
    def ids(self) -> list[RowId]:
        """Of all its rows, in the order of the input."""
        return [
            RowId(portion.chunk.file, index)
            for portion in self.portions
            for index in portion.chunk.indices
        ]

    def has(self, row: RowId) -> bool:
        """Whether the row is in the block."""
        for portion in self.portions:
            chunk = portion.chunk
            if chunk.first <= row <= chunk.id_of(len(chunk) - 1):
                return True
        return False


class _Writing(NamedTuple):
    """A part that is being written."""

    call: _Call
    rows: list[Ended]
    result: Future[WrittenPart]
    began: float


class RowsActor:
    """Prepares and runs the rows of blocks, and writes them."""

    def __init__(self, plan: Any) -> None:
        """``plan`` is a reference. Raises what loading the model raises, after it has told the
        job's process."""
        self._plan: ClusterPlan = ray.get(plan)
        self._name = str(ray.get_runtime_context().get_actor_id())
        self._plan.board.begin(self._name)
        try:
            self._load()
        except Exception as error:  # a model may raise anything
            # Ray would tell it with stack traces.
            self._plan.board.put(self._name, Report({}), [Failure(_failure_of(error))])
            raise
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._open: list[_Call] = []
        self._portions: deque[Portion] = deque()
        """Of the open calls, those that are not yet prepared."""
        self._writer = ThreadPoolExecutor(1, "jitney-parts")
        self._writing: deque[_Writing] = deque()
        self._messages: list[BoardMessage] = []
        """For the board."""
        self._reported_at = 0.0
        self._ended = 0
        """Rows that have ended, and are in no part that was written."""
        self._bad = 0
        """The bad ones of these."""
        self._bad_example: str | None = None
        self._is_stopping = False
        threading.Thread(target=self._work, daemon=True).start()

    def _load(self) -> None:
        job = self._plan.job
        executor, _ = load(job)
        context = msgspec.structs.replace(self._plan.context, job=job)
        task = make_task(context)
        dataset = self._plan.dataset
        self._finisher = Finisher(job, task)
        self._maker = PartMaker(job, dataset)
        self._maker.columns.set_result(self._finisher.fields, self._plan.schema)
        self._figures = RunFigures(moved_at=time.time())
        self._most_rows = chunk_rows(job, task, dataset)
        self._runner = RowRunner(
            executor,
            context,
            task,
            self._figures,
            workers=workers_of(job, task, dataset, self._plan.sharers),
            chunk_rows=self._most_rows,
        )
        self._runner.repeated = self._plan.repeated
        # Python would wait for the worker processes at its end, and these for the end of this one.
        atexit.register(self._runner.close)

    def __call__(self, block: pa.Table) -> pa.Table:
        """A block of rows. Ray calls it in several threads."""
        block = without_rows(block, self._plan.board.committed_of(intervals_of(block)))
        portions = list(portions_of(block, self._plan.dataset, self._most_rows))
        call = _Call(portions, PartFiller(self._plan.job, self._maker), block.num_rows)
        if not portions:
            call.done.set_result(True)
        else:
            self._calls.put(call)
        is_whole = call.done.result()
        parts = [msgspec.json.encode(part) for part in call.written]
        return pa.Table.from_pylist([{"is_whole": is_whole, "parts": parts}], _RESULT)

    # ------------------------------------------------------------------ the executor's thread

    def _work(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
            self._write_what_ended()
        except Exception as error:  # a model may raise anything
            self._fail(_failure_of(error))
        while True:  # the run stops: nothing more is done
            self._open.append(self._calls.get())
            self._give_up()

    def _turn(self) -> None:
        self._accept()
        while self._portions and self._runner.may_take:
            portion = self._portions.popleft()
            self._figures.position += portion.share
            self._runner.take(portion.chunk)
        self._runner.feed()
        began = time.monotonic()
        if self._runner.has_rows:
            for item, result in self._runner.step(has_input_ended=False):
                self._finish(item, result)
            self._figures.run_s += time.monotonic() - began
        else:
            self._wait()
            self._figures.waited_s += time.monotonic() - began
        self._write_due()
        self._end_writing()
        is_late = time.monotonic() - self._reported_at >= _REPORT_S
        if self._messages or (is_late and self._open):
            self._report()
        self._end_calls()

    def _accept(self) -> None:
        while not self._calls.empty():
            self._open_call(self._calls.get())

    def _open_call(self, call: _Call) -> None:
        self._open.append(call)
        self._portions += call.portions

    def _wait(self) -> None:
        """For what comes next, or for a moment."""
        coming: list[Future[Any]] = [writing.result for writing in self._writing]
        if self._runner.next_prepared is not None:
            coming.append(self._runner.next_prepared)
        elif self._portions and not self._writing:
            self._make_room()
            return
        if coming:
            wait(coming, _POLL_S, FIRST_COMPLETED)
            return
        with contextlib.suppress(queue.Empty):
            self._open_call(self._calls.get(timeout=_POLL_S))

    def _finish(self, item: Item, result: Any) -> None:
        assert item.chunk is not None, "the chunk was put back"
        call = self._call_of(item.chunk)
        call.rows_left -= len(item.rows)
        self._ended += len(item.rows)
        all_ended = self._finisher.ended(item, result)
        for ended in all_ended:
            if ended.error is not None:
                self._bad += len(ended.rows)
                bad = self._maker.bad_row(ended.chunk, ended.rows[-1], ended.error)
                self._bad_example = bad.text
            self._runner.note_in_part(ended)
        if self._plan.job.ordered:
            call.held[item.chunk.id_of(item.rows[0])] = all_ended
            all_ended = call.release()
        for ended in all_ended:
            self._add_to_part(call, ended)

    def _call_of(self, chunk: Chunk) -> _Call:
        return next(call for call in self._open if call.has(chunk.first))

    # ------------------------------------------------------------------ parts

    def _add_to_part(self, call: _Call, ended: Ended) -> None:
        rest: Ended | None = ended
        while rest is not None:
            rest = call.part.add(rest)
            if call.part.is_due:
                self._begin_writing(call)

    def _write_due(self) -> None:
        for call in self._open:
            if call.part.is_due or (not call.rows_left and len(call.part)):
                self._begin_writing(call)

    def _make_room(self) -> None:
        """No row can be taken while so much is in memory: have the largest part written."""
        largest = max(self._open, key=lambda call: len(call.part))
        if len(largest.part):
            self._begin_writing(largest)

    def _begin_writing(self, call: _Call) -> None:
        rows = call.part.take()
        first = min(RowId(each.chunk.file, each.chunk.indices[each.rows[0]]) for each in rows)
        mark = f"{self._plan.mark}-{secrets.token_hex(4)}"
        number = f"{self._plan.number}-{first.file:06}-{first.row:012}{mark}"
        result = self._writer.submit(self._maker.write, rows, number)
        self._writing.append(_Writing(call, rows, result, time.monotonic()))
        call.writing += 1

    def _end_writing(self) -> None:
        """Note the parts that have been written. Raises what went wrong."""
        while self._writing and self._writing[0].result.done():
            writing = self._writing.popleft()
            with write_errors(self._plan.job):
                part = writing.result.result()
            self._figures.write_s += time.monotonic() - writing.began
            self._runner.note_written(writing.rows)
            writing.call.writing -= 1
            self._ended -= part.written + part.failed
            self._bad -= part.failed - part.misfits
            if self._plan.job.ordered:
                writing.call.written.append(part)
            else:
                self._messages.append(part)

    def _end_calls(self) -> None:
        """Answer those whose rows are all in parts, which the board has."""
        left = []
        for call in self._open:
            if call.rows_left or len(call.part) or call.writing:
                left.append(call)
            else:
                call.done.set_result(True)
        self._open = left

    # ------------------------------------------------------------------ reports, and the end

    def _report(self) -> None:
        figures = self._figures.to_dict()
        for name in ("done", "bad", "moved_at"):
            del figures[name]
        figures |= self._runner.executor_figures
        figures["cpu_s"] = time.process_time() + self._runner.workers_cpu_s
        waits_for = self._runner.waits_for
        report = Report(
            figures=figures,
            ended=self._ended,
            bad=self._bad,
            bad_example=self._bad_example,
            waits_for=None if waits_for is None else reason(waits_for),
        )
        self._is_stopping = self._plan.board.put(self._name, report, self._messages)
        self._messages = []
        self._reported_at = time.monotonic()

    def _write_what_ended(self) -> None:
        """The run stops: rows that have ended are written, but for those that come after others
        that have not if the order is kept."""
        for call in self._open:
            if len(call.part):
                self._begin_writing(call)
        wait([writing.result for writing in self._writing])
        self._end_writing()
        self._report()
        self._end_calls()
        self._give_up()

    def _give_up(self) -> None:
        for call in self._open:
            call.done.set_result(False)
        self._open = []

    def _fail(self, error: JitneyError) -> None:
        """The job ends. What has ended before is written, if it can be."""
        self._messages.append(Failure(error))
        try:
            self._write_what_ended()
        except Exception:  # the error before is the one to tell
            self._report()
            self._give_up()


def _failure_of(error: Exception) -> JitneyError:
    """What the job ends with. Says on which node it happened: others may be well."""
    where = f"on the node {ray.util.get_node_ip_address()}"
    if isinstance(error, JitneyError):
        error.args = (f"{error} ({where})",)
        return error
    return UnavailableError(f"an actor of the cluster failed {where}: {reason(error)}")
