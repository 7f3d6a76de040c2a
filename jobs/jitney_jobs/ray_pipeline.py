"""A run on a Ray cluster, as a Ray Data pipeline (``ray_stream``): tasks read files into blocks of
Arrow (``ray_reader``), and a pool of actors prepares and runs their rows and writes the parts
(``ray_actor``). This process commits the parts, which it finds on a board (``ray_board``).

Ray does again what was lost with a node, but for rows that are committed by then. A part counts
once the journal has it, and the journal takes none that has a row of an earlier one: such a part is
deleted. Rows that are missing then, in the end, are read once more. So the cluster may die
altogether, and the next run goes on.

The model, the input, the output and this package are needed on every node, under the same names.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
from jitney.errors import UnavailableError

from jitney_jobs.arrow import pa
from jitney_jobs.committed_rows import CommittedRows
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, Interval, JobJournal, Record
from jitney_jobs.output import Output, write_errors
from jitney_jobs.part_maker import WrittenPart
from jitney_jobs.ray_board import Board, BoardMessage, Failure, LimitReached, Report, Taken
from jitney_jobs.ray_cluster import CONNECT_S, Cluster, WaitForRoom
from jitney_jobs.ray_errors import failure_of
from jitney_jobs.ray_library import ray
from jitney_jobs.ray_plan import ClusterPlan, columns_of_first_rows, context_of
from jitney_jobs.ray_stream import Stream
from jitney_jobs.rows import RowId
from jitney_jobs.run_figures import RunFigures
from jitney_jobs.run_meter import RunMeter
from jitney_jobs.run_task import RunTask, begin_task

_POLL_S = 0.2
"""Longest wait for the cluster, in seconds: then the job's thread looks at signals again."""
_MOST_STARTS = 4
"""An actor may begin so often without a part that is committed meanwhile."""
_STOP_S = 60.0
"""Longest time for the actors to write what has ended, when a run stops."""


class RayPipeline:
    """Of a run on a cluster (``job_run.RowPipeline``)."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        journal: JobJournal,
        output: Output,
        closing: ExitStack,
        say: Callable[[str], None],
    ) -> None:
        """Join the cluster, which loads the model once, to know it. ``say`` is told what the user
        should know. Raises UnavailableError if the cluster is not there, or has no room; and what
        loading raises."""
        self._cluster = Cluster(str(job.ray), closing)
        context = self._cluster.call(context_of, job, job.patience_s, say)
        run_task = begin_task(context, job, dataset, output)
        self._job = job
        self._journal = journal
        self._output = output
        self._task = run_task.task
        self.meter = RunMeter(journal.record, output)
        self.is_cut = False
        self._figures = self.meter.figures
        self._dataset = dataset
        self._board = Board()
        self._plan = self._make_plan(run_task, say)
        self._committed = CommittedRows(journal.record.done)
        self._committed_lately: list[Interval] = []
        """What the board has not been told."""
        self._position_before = _share_done(dataset, journal.record)
        self._stream: Stream | None = None
        """The pipeline of Ray's. None until the run begins."""
        self._taking: Any = None
        """A reference to what is on the board."""
        self._reports: dict[str, Report] = {}
        self._starts: dict[str, int] = {}
        """How often each actor has begun."""
        self._starts_before: dict[str, int] = {}
        """The same when a part was last committed."""
        self._waiting: WaitForRoom | None = None
        """None once an actor of this round has begun."""
        self._is_ending = False
        """Whether the run ends before its rows."""
        self._missing: str | None = None
        """What the cluster lacks, so that no actor has begun."""
        self._bad_files: dict[int, FileRows] = {}
        """Files that could not be read to their end. They are noted when all of their rows that
        were read are committed: until then it is not known how many these are."""
        self._has_lost_order = False
        """Whether a block was given up, so that those behind it must not be committed."""
        self._rows_in_parts = 0
        """Of this run."""
        self._rows_before_round = 0
        self._bad_in_parts = 0
        """Those of the bad rows that the model or its preparation refused."""

    def _make_plan(self, run_task: RunTask, say: Callable[[str], None]) -> ClusterPlan:
        """What tasks and actors must know. Its schema may need the results of the first rows."""
        columns = self._output.maker.columns
        record = self._journal.record
        plan = ClusterPlan(
            job=self._job,
            dataset=self._dataset,
            context=run_task.context,
            schema=columns.schema,
            number=f"{record.next_number:05}",
            mark=self._journal.mark_of_run,
            repeated=frozenset(),
            sharers=self._cluster.actors_of_node,
            board=self._board,
        )
        if not columns.is_table or columns.schema is not None:
            return plan
        schema = self._cluster.call(columns_of_first_rows, plan, self._job.patience_s, say)
        if schema is None:
            return plan
        columns.set_result(run_task.finisher.fields, schema)
        return replace(plan, schema=schema)

    @property
    def columns(self) -> Sequence[str] | None:
        return self._task.columns

    def refuse_repeated(self, rows: frozenset[RowId]) -> None:
        self._plan = replace(self._plan, repeated=rows)

    # ------------------------------------------------------------------ the run

    def advance(self) -> bool:
        """Commit what the cluster has written, or wait a moment."""
        if self._stream is None:
            self._stream = self._begin_round()
        wait([self._stream.ended], _POLL_S)
        self._cluster.check()
        self._missing = None if self._waiting is None else self._waiting.text()
        has_ended = self._stream.ended.done()
        self._look_at_board()
        if not has_ended:
            return True
        self._look_at_board_for_the_last_time()  # all messages came before the end
        # Nothing is in an actor's hands any more.
        self._board.end_round()
        self._look_at_board(waits=True)
        try:
            self._stream.ended.result()
        except Exception as error:  # Ray Data raises more than Ray's errors
            raise failure_of(error) from None
        return self._end_round()

    def _begin_round(self) -> Stream:
        """Have the rows read that are not committed."""
        record = copy.copy(self._journal.record)
        record.parts = []
        record.done = self._committed.ranges()
        rows_left = None
        if self._job.limit is not None:
            rows_left = max(0, self._job.limit - self.meter.done_before - self._rows_in_parts)
        self._rows_before_round = self._rows_in_parts
        self._waiting = WaitForRoom(self._cluster, self._job.patience_s)
        return Stream(self._cluster, self._plan, record, self._bad_files.keys(), rows_left)

    def _end_round(self) -> bool:
        """Note the bad files, and begin another round if rows are missing. Returns whether it did.
        Raises UnavailableError if that would not help."""
        record = self._journal.record
        for bad in self._bad_files.values():
            known = max(bad.row_count, self._committed.end_of(bad.file))
            self._note(msgspec.structs.replace(bad, row_count=known))
        if self._is_complete():
            return False
        # Nothing came in this round; or, if the order is kept, later rows are committed already.
        if self._rows_in_parts == self._rows_before_round or self._job.ordered:
            came = self.meter.done_before + self._rows_in_parts
            there = f"{came:,} of {record.total or 0:,} rows"
            raise UnavailableError(f"{there} came back from the cluster: resume the job")
        self._stream = self._begin_round()
        return True

    def _is_complete(self) -> bool:
        """Whether all rows are in parts that can be: those that the limit allows, and of a file
        that is damaged those that came."""
        if self.is_cut:
            return self.meter.done_before + self._rows_in_parts >= (self._job.limit or 0)
        record = self._journal.record
        if record.total is None:
            return False
        return all(
            file in record.bad_files or self._committed.covers(file, row_count)
            for file, row_count in record.row_counts.items()
        )

    def _look_at_board_for_the_last_time(self) -> None:
        if self._taking is not None:
            self._look_at_board(waits=True)
        self._look_at_board(waits=True)

    def _look_at_board(self, waits: bool = False) -> None:
        """Take what is there. Unless it ``waits``, what comes late is taken the next time."""
        if self._taking is None:
            self._taking = self._board.begin_taking(self._committed_lately)
            self._committed_lately = []
        ready, _ = ray.wait([self._taking], timeout=CONNECT_S if waits else _POLL_S)
        if not ready:
            return
        try:
            taken: Taken = ray.get(self._taking)
        except ray.exceptions.RayError as error:
            raise failure_of(error) from None
        finally:
            self._taking = None
        self._reports = taken.reports
        if sum(taken.starts.values()) > sum(self._starts.values()):
            self._waiting = None
        self._starts = taken.starts
        for message in taken.messages:
            self._take(message)
        assert self._stream is not None, "the run has begun"
        for block in self._stream.take_answers():
            self._take_answer(block)
        self._check_starts()
        self._count()

    def _check_starts(self) -> None:
        """Raise UnavailableError if an actor dies again and again."""
        for name, count in self._starts.items():
            if count - self._starts_before.get(name, 0) > _MOST_STARTS and not self._is_ending:
                self._is_ending = True
                self._board.end_actors()
                raise UnavailableError(
                    f"an actor of the Ray cluster has died {_MOST_STARTS} times since a part was "
                    f"last committed, of too little memory, or of a row; Ray's logs say more"
                )

    def _take(self, message: BoardMessage) -> None:
        match message:
            case WrittenPart():
                self._commit(message)
            case FileRows() if message.why_bad is not None:
                self._bad_files[message.file] = message
            case FileRows():
                self._note(message)
            case LimitReached():
                self.is_cut = True
            case Failure():
                raise message.error

    def _take_answer(self, answers: pa.Table) -> None:
        """What actors answer for blocks, in the order of the input if that is kept."""
        for answer in answers.to_pylist():
            for data in answer["parts"]:
                part = msgspec.json.decode(data, type=WrittenPart)
                if self._has_lost_order:
                    self._output.maker.remove(part.files)
                else:
                    self._commit(part)
            if not answer["is_whole"]:
                self._has_lost_order = True

    def _note(self, entry: FileRows) -> None:
        with write_errors(self._job):
            self._journal.append(entry)

    def _commit(self, part: WrittenPart) -> None:
        """Unless a part with some of its rows is committed: then they came twice."""
        if self._committed.has_any_of(part.intervals):
            self._output.maker.remove(part.files)
            return
        with write_errors(self._job):
            self._output.commit(part, self.snapshot())
        self._committed.add(part.intervals)
        self._committed_lately += part.intervals
        self._starts_before = self._starts
        self._rows_in_parts += part.written + part.failed
        self._bad_in_parts += part.failed - part.misfits

    # ------------------------------------------------------------------ the end

    def commit_due(self) -> None:
        """Nothing: a part is committed when it is found on the board."""

    def commit_rest(self) -> None:
        """Have the actors write what has ended, if the run ends before its rows."""
        if self._stream is None or self._stream.ended.done():
            return
        self._is_ending = True
        self._board.stop()
        until = time.monotonic() + _STOP_S
        # If the cluster fails meanwhile, what is not committed is done by the next run.
        with contextlib.suppress(UnavailableError, ray.exceptions.RayError):
            while not self._stream.ended.done() and time.monotonic() < until:
                wait([self._stream.ended], _POLL_S)
                self._cluster.check()
                self._look_at_board()
            if not self._stream.ended.done():
                # Its thread must end before this process leaves the cluster, which it may join
                # again for the next job.
                self._board.end_actors()
                wait([self._stream.ended], CONNECT_S)
            self._look_at_board_for_the_last_time()

    # ------------------------------------------------------------------ what is known of it

    def _count(self) -> None:
        """Have the figures say what the reports do."""
        totals = dict.fromkeys(RunFigures.__struct_fields__, 0.0)
        for report in self._reports.values():
            for name in totals:
                totals[name] += report.figures.get(name, 0.0)
        figures = self._figures
        for name in ("read_s", "prepare_s", "waited_s", "run_s", "write_s"):
            setattr(figures, name, totals[name])
        for name in ("taken", "most_in_flight"):
            setattr(figures, name, int(totals[name]))
        figures.position = min(1.0, self._position_before + totals["position"])
        done = self._rows_in_parts + sum(report.ended for report in self._reports.values())
        if done != figures.done:
            figures.moved_at = time.time()
        figures.done = done
        figures.bad = self._bad_in_parts + sum(report.bad for report in self._reports.values())

    def waits_for(self) -> str | None:
        errors = [self._missing, *(report.waits_for for report in self._reports.values())]
        return next((error for error in errors if error), None)

    def bad_example(self) -> str | None:
        examples = [report.bad_example for report in self._reports.values()]
        return next((example for example in examples if example), None)

    def snapshot(self) -> dict[str, float]:
        figures = self.meter.snapshot()
        for report in self._reports.values():
            for name, value in report.figures.items():
                if name == "most_rows":  # no count: how many rows fit into one actor's step
                    figures[name] = max(figures.get(name, 0.0), value)
                elif name == "cpu_s":
                    figures[name] += value
                elif name not in RunFigures.__struct_fields__ or name == "tries":
                    figures[name] = figures.get(name, 0.0) + value
        return figures


def _share_done(dataset: Dataset, record: Record) -> float:
    """The share of the input in files that are done, which are not read."""
    sizes = dataset.sizes
    done = sum(size for file, size in enumerate(sizes) if record.is_done(file))
    return done / max(1, sum(sizes))
