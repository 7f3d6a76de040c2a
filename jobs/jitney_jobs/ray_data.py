"""A run on a Ray cluster, as a Ray Data pipeline: tasks read files into blocks of Arrow, and a pool
of actors prepares and runs their rows and writes the parts (``ray_actor``). This process commits
the parts, which it finds on a board (``ray_board``).

Ray does again what was lost with a node. A part counts once the journal has it, and the journal
takes none that has a row of an earlier one: such a part is deleted. Rows that are missing then, in
the end, are read once more. So the cluster may die altogether, and the next run goes on.

The model, the input, the output and this package are needed on every node, under the same names.
"""

import contextlib
import copy
import logging
import os
import queue
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
from jitney.errors import InstallationError, JitneyError, UnavailableError, install_extra

from jitney_jobs.arrow import pa
from jitney_jobs.background import in_background
from jitney_jobs.committed_rows import CommittedRows
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.job_run import JobRun
from jitney_jobs.journal import FileRows, JobJournal, Record
from jitney_jobs.output import Output, write_errors
from jitney_jobs.part_maker import WrittenPart
from jitney_jobs.rows import Chunk, RowId
from jitney_jobs.run_figures import RunFigures
from jitney_jobs.tasks import make_task

# Threads of Ray Data would join the cluster again once this process has left it, and would end the
# process if the cluster is gone. Ray reads this when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
try:
    import ray
    import ray.data as ray_data
except ImportError:
    raise InstallationError(f"a job on a cluster needs Ray: {install_extra('ray')}") from None

from jitney_jobs.ray_actor import (
    CALLS_AT_ONCE,
    ClusterPlan,
    Reading,
    RowsActor,
    columns_of_first_rows,
    context_of,
    read,
)
from jitney_jobs.ray_blocks import block_of
from jitney_jobs.ray_board import Board, BoardMessage, Failure, LimitReached, Report, Taken

_RESUME = "`jitney batch resume` goes on, with --ray or without"
_POLL_S = 0.2
"""Longest wait for the cluster, in seconds: then the job's thread looks at signals again."""
_CONNECT_S = 10.0
"""Longest time to connect to the cluster's head."""
_LOOK_S = 2.0
"""The cluster's head, and Ray's process on this machine, are looked at so often."""
_LOOKS = 3
"""The cluster is gone if one of them does not answer so often in a row. Ray itself would end this
process some seconds later, without a word that helps."""
_STOP_S = 60.0
"""Longest time for the actors to write what has ended, when a run stops."""
_READ_TASKS = 500
"""Most tasks that the files are divided among."""
_CHUNK_ROWS = 1024
"""Most rows that a reader gives at a time."""
_BLOCK_ROWS = 4096
"""A block has about so many rows. A part has at most one block's."""
_BLOCK_PROMPTS = 256
"""The same for prompts of a language model, which take longer than to send them."""
_LEAST_BLOCK_BYTES = 64 << 10
_MOST_BLOCK_BYTES = 8 << 20
"""But a block has at least and at most so many bytes, about."""
_BLOCKS_OF_ACTOR = 8
"""Each actor has so many blocks to do, if the input is large enough: so all of them end at about
the same time."""
_SHARE = 0.2
"""CPUs that an actor asks Ray for. It uses all that the node has; with so small a share every node
can have one."""


class RayPipeline(JobRun):
    """A run on a cluster."""

    def __init__(
        self, job: Job, dataset: Dataset, journal: JobJournal, output: Output, closing: ExitStack
    ) -> None:
        """Join the cluster, which loads the model once, to know it. Raises UnavailableError if it
        is not there, and what loading raises."""
        self._cluster = _Cluster(str(job.ray), closing)
        context = self._cluster.call(context_of, job)
        context = output.maker.columns.completed(context)
        task = make_task(context)
        super().__init__(job, journal, output, task)
        dataset.set_schema(dataset.schema, output.maker.columns.to_read(task.columns))
        self._dataset = dataset
        self._board = Board()
        self._plan = ClusterPlan(
            job=job,
            dataset=dataset,
            context=context,
            schema=output.maker.columns.schema,
            number=f"{journal.record.next_number:05}",
            mark=journal.mark_of_run,
            repeated=frozenset(),
            sharers=self._cluster.actors_of_node,
            board=self._board,
        )
        if output.maker.columns.is_table and output.maker.columns.schema is None:
            schema = self._cluster.call(columns_of_first_rows, self._plan)
            if schema is not None:
                output.maker.columns.set_result(self._finisher.fields, schema)
                self._plan = replace(self._plan, schema=schema)
        self._committed = CommittedRows(journal.record.done)
        self._position_before = _share_done(dataset, journal.record)
        self._stream: _Stream | None = None
        """The pipeline of Ray's. None until the run begins."""
        self._taking: Any = None
        """A reference to what is on the board."""
        self._reports: dict[str, Report] = {}
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

    def refuse_repeated(self, rows: frozenset[RowId]) -> None:
        self._plan = replace(self._plan, repeated=rows)

    # ------------------------------------------------------------------ the run

    def _advance(self) -> bool:
        """Commit what the cluster has written, or wait a moment."""
        if self._stream is None:
            self._stream = self._begin_round()
        wait([self._stream.ended], _POLL_S)
        self._cluster.check()
        has_ended = self._stream.ended.done()
        self._look_at_board()
        if not has_ended:
            return True
        self._look_at_board_for_the_last_time()  # all messages came before the end
        # Nothing is in an actor's hands any more. Its last report may still count rows that are in
        # parts by now, or that were lost with it.
        done = {name: report._replace(ended=0, bad=0) for name, report in self._reports.items()}
        self._reports = done
        self._count()
        try:
            self._stream.ended.result()
        except ray.exceptions.RayError as error:
            raise _cause(error) from None
        return self._end_round()

    def _begin_round(self) -> "_Stream":
        """Have the rows read that are not committed."""
        record = copy.copy(self._journal.record)
        record.parts = []
        record.done = self._committed.ranges()
        rows_left = None
        if self._job.limit is not None:
            rows_left = max(0, self._job.limit - self._done_before - self._rows_in_parts)
        self._rows_before_round = self._rows_in_parts
        return _Stream(self._cluster, self._plan, record, self._bad_files.keys(), rows_left)

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
            came = self._done_before + self._rows_in_parts
            there = f"{came:,} of {record.total or 0:,} rows"
            raise UnavailableError(f"{there} came back from the cluster: resume the job")
        self._stream = self._begin_round()
        return True

    def _is_complete(self) -> bool:
        """Whether all rows are in parts that can be: those that the limit allows, and of a file
        that is damaged those that came."""
        if self._is_cut:
            return self._done_before + self._rows_in_parts >= (self._job.limit or 0)
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
            self._taking = self._board.begin_taking()
        ready, _ = ray.wait([self._taking], timeout=_CONNECT_S if waits else _POLL_S)
        if not ready:
            return
        try:
            taken: Taken = ray.get(self._taking)
        except ray.exceptions.RayError as error:
            raise _cause(error) from None
        finally:
            self._taking = None
        self._reports |= taken.reports
        for message in taken.messages:
            self._take(message)
        assert self._stream is not None, "the run has begun"
        for block in self._stream.take_answers():
            self._take_answer(block)
        self._count()

    def _take(self, message: BoardMessage) -> None:
        match message:
            case WrittenPart():
                self._commit(message)
            case FileRows() if message.why_bad is not None:
                self._bad_files[message.file] = message
            case FileRows():
                self._note(message)
            case LimitReached():
                self._is_cut = True
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

    def _commit(self, part: WrittenPart) -> None:
        """Unless a part with some of its rows is committed: then they came twice."""
        if self._committed.has_any_of(part.intervals):
            self._output.maker.remove(part.files)
            return
        with write_errors(self._job):
            self._output.commit(part, self._snapshot())
        self._committed.add(part.intervals)
        self._rows_in_parts += part.written + part.failed
        self._bad_in_parts += part.failed - part.misfits

    # ------------------------------------------------------------------ the end

    def _commit_due(self) -> None:
        """Nothing: a part is committed when it is found on the board."""

    def _commit_rest(self) -> None:
        """Have the actors write what has ended, if the run ends before its rows."""
        if self._stream is None or self._stream.ended.done():
            return
        self._board.stop()
        until = time.monotonic() + _STOP_S
        # If the cluster fails meanwhile, what is not committed is done by the next run.
        with contextlib.suppress(UnavailableError, ray.exceptions.RayError):
            while not self._stream.ended.done() and time.monotonic() < until:
                wait([self._stream.ended], _POLL_S)
                self._cluster.check()
                self._look_at_board()
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

    def _waits_for(self) -> str | None:
        errors = [report.waits_for for report in self._reports.values()]
        return next((error for error in errors if error), None)

    def _bad_example(self) -> str | None:
        examples = [report.bad_example for report in self._reports.values()]
        return next((example for example in examples if example), None)

    def _snapshot(self) -> dict[str, float]:
        figures = super()._snapshot()
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


# ------------------------------------------------------------------ Ray


class _Cluster:
    """The cluster that this process has joined."""

    def __init__(self, address: str, closing: ExitStack) -> None:
        """``local`` for one on this machine alone, which ends with ``closing``. Raises
        UnavailableError."""
        self.address = address
        _connect(address)
        closing.callback(self._leave)
        resources = ray.cluster_resources()
        # The head of a cluster may have no cores: then nothing runs there.
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [node for node in alive if node["Resources"].get("CPU")]
        self.gpus = int(resources.get("GPU", 0))
        self.nodes = max(1, len(nodes))
        self.actors = self.gpus or self.nodes
        self.actors_of_node = max(1, self.gpus // self.nodes)
        here = ray.get_runtime_context()
        host, _, port = here.gcs_address.rpartition(":")
        self._addresses = [(host, int(port))]
        """Of the head, and of Ray's process on this machine."""
        self._addresses += [
            (node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in alive
            if node["NodeID"] == here.get_node_id()
        ]
        self._looked_at = time.monotonic()
        self._looking: Future[bool] | None = None
        self._missed = 0
        """How often in a row one of them did not answer."""

    def call(self, function: Any, argument: Any) -> Any:
        """In a task of Ray's, which may need a GPU. Raises what the function raises."""
        task = ray.remote(num_cpus=_SHARE, num_gpus=min(1, self.gpus))(function)
        try:
            return ray.get(task.remote(argument))
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

    def check(self) -> None:
        """Raise UnavailableError if the cluster is gone."""
        if self._looking is None:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._looking = in_background(self._is_reachable)
            return
        if not self._looking.done():
            return
        self._missed = 0 if self._looking.result() else self._missed + 1
        self._looking = None
        self._looked_at = time.monotonic()
        if self._missed >= _LOOKS:
            raise UnavailableError(f"the Ray cluster at {self.address} is gone: {_RESUME}")

    def _is_reachable(self) -> bool:
        try:
            for address in self._addresses:
                socket.create_connection(address, _CONNECT_S).close()
        except OSError:
            return False
        return True

    def _leave(self) -> None:
        if self._missed < _LOOKS:
            ray.shutdown()


def _connect(address: str) -> None:
    """Join a Ray cluster, ``local`` for one on this machine alone. Raises UnavailableError."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    # A cluster of this machine alone does the job in the place of this process: with Ray's niceness
    # of 15 it would stand still beside other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's native part would print warnings that tell the user nothing.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        with _without_native_output():
            ray.init(
                address,
                ignore_reinit_error=True,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"Ray is not at {address}: {error}") from None


@contextlib.contextmanager
def _without_native_output() -> Iterator[None]:
    """While Ray starts: it would say at which level it logs. Its errors are Python's."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class _Stream:
    """A pipeline of Ray Data, which a thread runs to its end."""

    def __init__(
        self,
        cluster: _Cluster,
        plan: ClusterPlan,
        record: Record,
        without: Any,
        rows_left: int | None,
    ) -> None:
        """``without``: files that are not read."""
        self._answers: queue.SimpleQueue[pa.Table] = queue.SimpleQueue()
        files = range(len(plan.dataset.sizes))
        left = [file for file in files if file not in without and not record.is_done(file)]
        self.ended: Future[None] = Future()
        if not left:
            self.ended.set_result(None)
            return
        answers = _begin_pipeline(cluster, plan, record, left, rows_left)
        self.ended = in_background(lambda: self._pull(answers))

    def _pull(self, answers: Iterator[pa.Table]) -> None:
        for answer in answers:
            self._answers.put(answer)

    def take_answers(self) -> Iterator[pa.Table]:
        """Those that have come."""
        while not self._answers.empty():
            yield self._answers.get()


def _begin_pipeline(
    cluster: _Cluster,
    plan: ClusterPlan,
    record: Record,
    files: list[int],
    rows_left: int | None,
) -> Iterator[pa.Table]:
    """What the actors answer for each block."""
    settings = ray_data.DataContext.get_current()
    settings.enable_progress_bars = False
    settings.execution_options.preserve_order = plan.job.ordered
    settings.target_max_block_size = _block_bytes(cluster, plan, files)
    settings.issue_detectors_config.detectors = []
    shared = ray.put(plan)
    reading = ray.put(Reading(record, _CHUNK_ROWS, rows_left))
    # With a limit one task reads the files one after another, so that it finds the first rows.
    tasks = 1 if rows_left is not None else min(_READ_TASKS, len(files))
    blocks = ray_data.from_items(files, override_num_blocks=tasks).map_batches(
        read,  # type: ignore[arg-type]  # Ray's types know no further arguments
        fn_args=(shared, reading),
        batch_size=None,
        num_cpus=_SHARE / 2,
        compute=ray_data.TaskPoolStrategy(size=cluster.nodes),
    )
    answers = blocks.map_batches(
        RowsActor,
        fn_constructor_args=(shared,),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray_data.ActorPoolStrategy(
            min_size=1,
            max_size=cluster.actors,
            initial_size=cluster.actors,
            max_concurrent_calls_per_actor=CALLS_AT_ONCE,
            max_tasks_in_flight_per_actor=CALLS_AT_ONCE + 1,
            enable_true_multi_threading=True,
        ),
        num_cpus=_SHARE,
        num_gpus=min(1, cluster.gpus),
    )
    return iter(answers.iter_batches(batch_size=None, batch_format="pyarrow"))


def _block_bytes(cluster: _Cluster, plan: ClusterPlan, files: list[int]) -> int:
    """How large blocks are to be: Ray bounds them by bytes. What the first rows have tells."""
    job = plan.job
    most_rows = _BLOCK_PROMPTS if job.task == "generate" else _BLOCK_ROWS
    most_rows = max(1, min(most_rows, job.part_rows, job.in_flight // 2))
    chunks = plan.dataset.chunks(Record.empty(), _CHUNK_ROWS, files, skips_bad_files=True)
    chunk = next((entry for entry in chunks if isinstance(entry, Chunk)), None)
    if chunk is None:
        return _LEAST_BLOCK_BYTES
    row_bytes = block_of(chunk, 0.0).nbytes / len(chunk)
    # Of files that are rows, a block has only the names.
    read_bytes = max(row_bytes, chunk.read_bytes / len(chunk))
    rows = min(most_rows, _MOST_BLOCK_BYTES / read_bytes)
    sizes = plan.dataset.sizes
    share = sum(sizes[file] for file in files) / (cluster.actors * _BLOCKS_OF_ACTOR)
    if not plan.dataset.files_are_rows:
        rows = min(rows, max(share, _LEAST_BLOCK_BYTES) / read_bytes)
    return max(1, int(rows * row_bytes))


def _cause(error: BaseException) -> BaseException:
    """The JitneyError that an error of Ray's came from; if there is none, one that tells of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, JitneyError):
        # Ray has the error of a task in an attribute, which not all of its errors have.
        cause = getattr(cause, "cause", None) or cause.__cause__
    return cause or UnavailableError(f"the Ray cluster failed: {_RESUME}; Ray says: {error}")
