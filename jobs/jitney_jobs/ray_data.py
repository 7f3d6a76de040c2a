"""A run on a Ray cluster, as a Ray Data pipeline: tasks read files, one pool of actors prepares
rows and another runs them, and this process gathers what has become of them into parts.

Ray does again what was lost with a node, and the stages give the same rows in the same order when
they are asked twice. What counts is the journal here: a row that comes twice is dropped, and a job
that lacks one in the end is not complete. So the cluster may die altogether.

The model, the input and this package are needed on every node, under the same names.
"""

import asyncio
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from jitney.errors import InstallationError, JitneyError, UnavailableError, install_extra

from jitney_jobs.background import in_background
from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import load
from jitney_jobs.feeder import Feeder
from jitney_jobs.gathering import Gathering
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, JobJournal, Record
from jitney_jobs.output import Ended, Output
from jitney_jobs.prepare import Item
from jitney_jobs.prepare_workers import Workers
from jitney_jobs.rows import Chunk
from jitney_jobs.tasks import Context, make_task

try:
    import ray
    import ray.data as ray_data
except ImportError:
    raise InstallationError(f"a job on a cluster needs Ray: {install_extra('ray')}") from None


@dataclass(frozen=True)
class ActorFigures:
    """What an engine's actor has done so far."""

    actor: str
    figures: dict[str, float]


RayMessage = Chunk | Item | FileRows | ActorFigures
"""What the stages send: a chunk that was read; a row, prepared or with its result; a file that was
read to its end; counts of an actor."""
RayBatch = dict[str, np.ndarray]
"""A batch of Ray's. It has one column: messages, as Python's objects."""
_COLUMN = "message"
_POLL_S = 0.2
"""Longest wait for a batch, in seconds: then the job's thread looks at signals again."""
_CONNECT_S = 10.0
"""Longest time to connect to the cluster's head."""
_READ_TASKS = 500
"""Most tasks that the files are divided among."""
_CHUNK_ROWS = 64
"""Most rows of a chunk, which is prepared in one go."""
_BATCH_ROWS = 16
"""Rows that an engine's actor takes and gives back together."""
_CALLS_AT_ONCE = 4
"""So many calls of an engine's actor are under way at a time (max_concurrency). Each gives it a few
batches, and waits for the slowest row. Meanwhile the rows of the other calls keep the engine full.
"""
_BLOCK_BYTES = 1 << 17
"""Bytes of messages that Ray moves together, and makes again together if they are lost: those of
some hundred prompts."""
_SHARE = 0.2
"""CPUs that an actor asks Ray for. It uses all that the node has; with so small a share every node
can have one."""


class RayPipeline(Gathering):
    """A run on a cluster."""

    def __init__(
        self, job: Job, dataset: Dataset, journal: JobJournal, output: Output, closing: ExitStack
    ) -> None:
        """Join the cluster, which loads the model once, to know it. Raises UnavailableError if it
        is not there, and what loading raises."""
        _connect(str(job.ray))
        closing.callback(ray.shutdown)  # ends a cluster of this machine alone
        gpus = int(ray.cluster_resources().get("GPU", 0))
        load_once = ray.remote(num_cpus=_SHARE, num_gpus=min(1, gpus))(_context_of)
        try:
            context = ray.get(load_once.remote(job))
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        context = output.completed(context)
        super().__init__(job, journal, output, make_task(context))
        self._next_item = 0
        """The key of the next item."""
        self._sizes = dataset.sizes
        self._figures.position = self._share_read()
        self._batches = _stream(job, dataset, journal.record, context, gpus)
        self._pulling: Future[RayBatch | None] | None = None
        self._seen: dict[int, bytearray] = {}
        """By file: 1 for each of its rows that has come in this run."""
        self._figures_of_actors: dict[str, dict[str, float]] = {}

    def _advance(self) -> bool:
        """Take what the cluster has finished, or wait a moment."""
        began = time.monotonic()
        if self._pulling is None:
            self._pulling = in_background(lambda: next(self._batches, None))
        wait([self._pulling], _POLL_S)
        self._figures.run_s += time.monotonic() - began
        if not self._pulling.done():
            return True
        pulled = self._pulling
        self._pulling = None
        try:
            batch = pulled.result()
        except ray.exceptions.RayError as error:
            raise _cause(error) from None
        if batch is None:
            self._check_complete()
            return False
        for message in batch[_COLUMN]:
            self._take(message)
        return True

    def _take(self, message: RayMessage) -> None:
        match message:
            case Item():
                self._take_row(message)
            case FileRows():
                self._note(message)
                self._figures.position = self._share_read()
            case ActorFigures():
                self._figures_of_actors[message.actor] = message.figures
            case Chunk():
                raise AssertionError("chunks are prepared on the cluster")

    def _share_read(self) -> float:
        """The share of the input in files that this run or an earlier one has read to their end. A
        file counts once, though Ray may read it again."""
        read = sum(self._sizes[file] for file in self._journal.record.row_counts)
        return read / max(1, sum(self._sizes))

    def _take_row(self, item: Item) -> None:
        """Unless it has come before. Rows that came together come together again."""
        assert item.chunk is not None, "it came with its row"
        first = item.chunk.id_of(item.rows[0])
        last = item.chunk.id_of(item.rows[-1])
        seen = self._seen.setdefault(first.file, bytearray())
        if len(seen) <= last.row:
            seen.extend(bytes(last.row + 1 - len(seen)))
        if seen[first.row]:
            return
        for index in item.rows:
            seen[item.chunk.indices[index]] = 1
        item.key = self._next_item
        self._next_item += 1
        self._figures.taken += len(item.rows)
        self._refuse_if_repeated(item)
        self._finish(item, item.error or item.result)

    def _on_rows_in_part(self, ended: Ended) -> None:
        """Nothing: Ray bounds what is in flight."""

    def _on_part_committed(self, part: list[Ended]) -> None:
        """Nothing."""

    def _check_complete(self) -> None:
        """Raise UnavailableError if a row is missing, which Ray does not promise to notice."""
        record = self._journal.record
        came = self._done_before + self._figures.done
        if came != record.total:
            there = f"{came:,} of {record.total or 0:,} rows"
            raise UnavailableError(f"{there} came back from the cluster: resume the job")

    def _snapshot(self) -> dict[str, float]:
        figures = super()._snapshot()
        for of_actor in self._figures_of_actors.values():
            for name, value in of_actor.items():
                before = figures.get(name, 0.0)
                # `most_rows` is no count: it says how many rows fit into one actor's step.
                figures[name] = max(before, value) if name == "most_rows" else before + value
        return figures


def _connect(address: str) -> None:
    """Join a Ray cluster, ``local`` for one on this machine alone. Raises UnavailableError."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(
            address,
            ignore_reinit_error=True,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"Ray is not at {address}: {error}") from None


def _stream(
    job: Job, dataset: Dataset, record: Record, context: Context, gpus: int
) -> Iterator[RayBatch]:
    """Batches of rows with their results, of files that were read to their end, and of counts."""
    settings = ray_data.DataContext.get_current()
    settings.enable_progress_bars = False
    settings.execution_options.preserve_order = job.ordered
    settings.target_max_block_size = _BLOCK_BYTES
    settings.issue_detectors_config.detectors = []
    left = [i for i in range(len(dataset.sizes)) if not record.is_done(i)]
    shared = ray.put(record)
    if not left:
        return iter(())

    def read(batch: RayBatch) -> Iterator[RayBatch]:
        for chunk in dataset.chunks(ray.get(shared), _CHUNK_ROWS, batch["item"].tolist()):
            yield _batch_of([chunk])

    nodes = len([node for node in ray.nodes() if node["Alive"]])
    tasks = min(_READ_TASKS, len(left))
    files = ray_data.from_items(left, override_num_blocks=tasks)
    chunks = files.map_batches(read, batch_size=None, num_cpus=_SHARE / 2, concurrency=nodes)
    cores = int(ray.cluster_resources().get("CPU", 1))
    preparers = max(1, cores // 2 if job.workers is None else job.workers)
    rows = _apply(chunks, _Preparer, context, size=1, most=preparers)
    needs = {"num_gpus": min(1, gpus), "max_concurrency": _CALLS_AT_ONCE}
    rows = _apply(rows, _Engine, job, size=_BATCH_ROWS, most=gpus or nodes, **needs)
    return iter(rows.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1))


def _apply(rows: Any, actor: type, argument: Any, *, size: int, most: int, **needs: Any) -> Any:
    """Have a pool of at most so many actors work on ``rows``, in batches of that size."""
    return rows.map_batches(
        actor,
        fn_constructor_args=(argument,),
        batch_size=size,
        compute=ray_data.ActorPoolStrategy(min_size=1, max_size=most),
        num_cpus=_SHARE,
        scheduling_strategy="SPREAD",
        **needs,
    )


class _Preparer:
    """An actor that prepares chunks, in a process apart: a row may end it."""

    def __init__(self, context: Context) -> None:
        self._workers = Workers(context, 1)

    def __call__(self, batch: RayBatch) -> RayBatch:
        messages: list[RayMessage] = []
        for message in batch[_COLUMN]:
            if isinstance(message, Chunk):
                messages += self._items_of(message)
            else:
                messages.append(message)
        return _batch_of(messages)

    def _items_of(self, chunk: Chunk) -> list[Item]:
        """Each with a chunk of its own rows, which travels with it."""
        items: list[Item] = []
        rest: Chunk | None = chunk
        while rest is not None:
            prepared = self._workers.submit(rest).result()
            for item in prepared.items:
                assert item.chunk is not None, "the chunk was put back"
                if len(item.rows) == 1:
                    (row,) = item.rows
                    item.chunk = item.chunk.slice(row, row + 1)
                    item.rows = (0,)
                items.append(item)
            rest = prepared.rest
        return items


class _Engine:
    """An actor that runs rows. Its batches come at the same time, so that the engine stays full."""

    def __init__(self, job: Job) -> None:
        self._executor, _ = load(job)
        self._feeder = Feeder(self._executor, job.make_retry_policy())
        self._calls: queue.SimpleQueue[tuple[Item, Future[None]]] = queue.SimpleQueue()
        self._name = str(ray.get_runtime_context().get_actor_id())
        threading.Thread(target=self._work, daemon=True).start()

    async def __call__(self, batch: RayBatch) -> RayBatch:
        messages: list[RayMessage] = list(batch[_COLUMN])
        waiting = []
        for message in messages:
            if isinstance(message, Item):
                future: Future[None] = Future()
                self._calls.put((message, future))
                waiting.append(asyncio.wrap_future(future))
        await asyncio.gather(*waiting)
        figures = {**self._executor.figures, "cpu_s": time.process_time()}
        return _batch_of([*messages, ActorFigures(self._name, figures)])

    def _work(self) -> None:
        """The executor's thread: it takes all rows that have come, then lets the executor work
        until more come. If it fails, so do the rows that it has, and with them the job."""
        running: dict[int, Future[None]] = {}
        try:
            for key in itertools.count():
                self._step_until_a_row_comes(running)
                item, future = self._calls.get()
                running[key] = future
                item.key = key
                self._feeder.add(item)
        except Exception as error:
            for future in running.values():
                future.set_exception(error)
            raise

    def _step_until_a_row_comes(self, running: dict[int, Future[None]]) -> None:
        """Returns at once if there is nothing to do. Rows that end are taken out of ``running``."""
        while len(self._feeder) and self._calls.empty():
            for item, result in self._feeder.step(has_input_ended=False):
                item.prepared = None  # it need not be sent
                item.result = result
                running.pop(item.key).set_result(None)


def _context_of(job: Job) -> Context:
    """In a task of Ray's: what the job's tasks must know of the model."""
    executor, context = load(job)
    executor.close()
    return context


def _batch_of(messages: Sequence[RayMessage]) -> RayBatch:
    array = np.empty(len(messages), object)
    for index, message in enumerate(messages):
        array[index] = message
    return {_COLUMN: array}


def _cause(error: BaseException) -> BaseException:
    """The JitneyError that an error of Ray's came from; if there is none, one that tells of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, JitneyError):
        # Ray has the error of a task in an attribute, which not all of its errors have.
        cause = getattr(cause, "cause", None) or cause.__cause__
    return cause or UnavailableError(f"the cluster failed: {error}")
