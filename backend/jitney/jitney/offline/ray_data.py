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
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitney.errors import InstallationError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.offline.dataset import Chunk, Dataset, pause
from jitney.offline.executors import load
from jitney.offline.gathering import Gathering, Item, may_pass
from jitney.offline.job import Job
from jitney.offline.journal import FileRows, Journal, Record
from jitney.offline.output import Output
from jitney.offline.prepare import Background, Context, Workers, make_task

try:
    import ray
    import ray.data as ray_data
    from ray.data.block import BlockAccessor, BlockMetadata
except ImportError:
    raise InstallationError(
        "a job on a cluster needs Ray: pip install 'triton-jitney[ray]'"
    ) from None

Batch = dict[str, np.ndarray]
"""One column of Python's objects: chunks, rows on their way, files that were read, counts."""
_COLUMN = "thing"
_POLL_S = 0.2
_CONNECT_S = 10.0
_READ_TASKS = 500
_CHUNK_ROWS = 64
_BATCH_ROWS = 16
"""Rows that an engine's actor takes and gives back together; it holds several batches."""
_BLOCK_BYTES = 1 << 17
"""Of things that travel together, and are done again together: some hundred prompts."""
_SHARE = 0.2
"""CPUs that an actor asks Ray for. It takes what the node has, and finds a place on any node."""


@dataclass
class _Counts:
    """An engine's figures, of an actor of that name."""

    actor: str
    figures: dict[str, float]


class Cluster:
    """A connection to a Ray cluster, ``local`` for one on this machine alone."""

    def __init__(self, address: str) -> None:
        """Raises UnavailableError if it is not there."""
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
        resources = ray.cluster_resources()
        self.gpus = int(resources.get("GPU", 0))
        self.cpus = max(1, int(resources.get("CPU", 1)))
        self.nodes = sum(node["Alive"] for node in ray.nodes())

    def context(self, job: Job) -> Context:
        """What tasks must know of the model, which a node loads for that. Raises what loading
        raises."""
        made = ray.remote(num_cpus=_SHARE, num_gpus=min(1, self.gpus))(_context_of).remote(job)
        try:
            return ray.get(made)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None

    def close(self) -> None:
        """Leave it; a local one ends."""
        ray.shutdown()


class RayPipeline(Gathering):
    """A run on a cluster."""

    def __init__(
        self, job: Job, dataset: Dataset, journal: Journal, output: Output, cluster: Cluster
    ) -> None:
        """Loads the model once, to know it. Raises what loading raises."""
        context = cluster.context(job)
        task = make_task(context)
        output.expect(task.fields)
        super().__init__(job, journal, output, task)
        self._sizes = dataset.sizes
        self._rows = _stream(job, dataset, journal.record, context, cluster)
        self._puller = Background(1)
        self._pulling: Future[Batch | None] | None = None
        self._ended = False
        self._seen: dict[int, bytearray] = {}
        """File -> 1 for each of its rows that has come in this run."""
        self._next_key = 0
        self._of_actors: dict[str, dict[str, float]] = {}

    @property
    def _has_work(self) -> bool:
        return not self._ended

    def _advance(self) -> None:
        """Take what the cluster has finished, or wait a moment."""
        began = time.monotonic()
        if self._pulling is None:
            self._pulling = self._puller.submit(lambda: next(self._rows, None))
        wait([self._pulling], _POLL_S)
        self._counts["run_s"] += time.monotonic() - began
        if not self._pulling.done():
            return
        pulled, self._pulling = self._pulling, None
        try:
            batch = pulled.result()
        except ray.exceptions.RayError as error:
            raise _cause(error) from None
        if batch is None:
            self._ended = True
            self._check()
            return
        for thing in batch[_COLUMN]:
            if isinstance(thing, Item):
                self._take(thing)
            elif isinstance(thing, FileRows):
                self._journal.append(thing)
                self._counts["position"] += self._sizes[thing.file] / max(1, sum(self._sizes))
            else:
                self._of_actors[thing.actor] = thing.figures

    def _take(self, item: Item) -> None:
        file, row = item.place
        seen = self._seen.setdefault(file, bytearray())
        seen.extend(bytes(max(0, row + 1 - len(seen))))
        if seen[row]:
            return
        seen[row] = 1
        key, self._next_key = self._next_key, self._next_key + 1
        self._in_flight += 1
        self._counts["taken"] += 1
        self._finish(key, item, item.made)

    def _check(self) -> None:
        """Raise UnavailableError if a row is missing, which Ray does not promise to notice."""
        record = self._journal.record
        came = self._before[1] + self._counts["done"]
        if came != record.total:
            there = f"{came:,.0f} of {record.total or 0:,} rows"
            raise UnavailableError(f"{there} came back from the cluster: resume the job")

    def _close(self) -> None:
        self._puller.close()

    def _figures(self) -> dict[str, float]:
        figures = super()._figures()
        for name in {name for each in self._of_actors.values() for name in each}:
            values = [each.get(name, 0.0) for each in self._of_actors.values()]
            figures[name] = (
                max(values) if name == "most_rows" else figures.get(name, 0) + sum(values)
            )
        return figures


def _stream(
    job: Job, dataset: Dataset, record: Record, context: Context, cluster: Cluster
) -> Iterator[Batch]:
    """Batches of what became of rows, files that were read to their end, and counts."""
    settings = ray_data.DataContext.get_current()
    settings.enable_progress_bars = False
    settings.execution_options.preserve_order = job.ordered
    settings.target_max_block_size = _BLOCK_BYTES
    settings.issue_detectors_config.detectors = []
    engines = cluster.gpus or cluster.nodes
    preparers = max(1, cluster.cpus // 2) if job.workers is None else max(1, job.workers)
    files = _Files(dataset, record)
    rows = ray_data.read_datasource(
        files,
        ray_remote_args={"num_cpus": _SHARE / 2},
        concurrency=cluster.nodes,
        override_num_blocks=len(files.tasks),
    )
    rows = rows.map_batches(
        _Preparer,
        fn_constructor_args=(context,),
        batch_size=1,
        batch_format="numpy",
        compute=ray_data.ActorPoolStrategy(min_size=1, max_size=preparers),
        num_cpus=_SHARE,
        scheduling_strategy="SPREAD",
    )
    rows = rows.map_batches(
        _Engine,
        fn_constructor_args=(job,),
        batch_size=_BATCH_ROWS,
        batch_format="numpy",
        compute=ray_data.ActorPoolStrategy(min_size=1, max_size=engines),
        num_cpus=_SHARE,
        num_gpus=min(1, cluster.gpus),
        scheduling_strategy="SPREAD",
    )
    return iter(rows.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1))


class _Files(ray_data.Datasource):
    """The input, file by file."""

    def __init__(self, dataset: Dataset, record: Record) -> None:
        super().__init__()
        self._dataset = dataset
        self._record = ray.put(record)
        self._left = [i for i in range(len(dataset.sizes)) if not record.is_done(i)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.tasks

    @property
    def tasks(self) -> list[Any]:
        """At most so many, each with neighbouring files."""
        size = max(1, -(-len(self._left) // _READ_TASKS))
        starts = range(0, len(self._left), size)
        return [self._task(self._left[start : start + size]) for start in starts]

    def _task(self, files: list[int]) -> Any:
        dataset, record = self._dataset, self._record

        def read() -> Iterator[Any]:
            for chunk in dataset.chunks(ray.get(record), _CHUNK_ROWS, files):
                yield BlockAccessor.batch_to_block(_batch_of([chunk]))

        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return ray_data.ReadTask(read, unknown)


class _Preparer:
    """An actor that prepares chunks, in a process apart: a row may end it."""

    def __init__(self, context: Context) -> None:
        self._workers = Workers(context, 1)

    def __call__(self, batch: Batch) -> Batch:
        things: list[Any] = []
        for thing in batch[_COLUMN]:
            if isinstance(thing, Chunk):
                made, _ = self._workers.submit(thing).result()
                things += [Item((thing.file, number), row, ready) for number, row, ready in made]
            else:
                things.append(thing)
        return _batch_of(things)


class _Engine:
    """An actor that runs rows. Its batches come at the same time, so that the engine stays full."""

    def __init__(self, job: Job) -> None:
        self._retries = job.retries
        self._executor, _ = load(job)
        self._calls: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        self._name = f"{ray.get_runtime_context().get_actor_id()}"
        threading.Thread(target=self._work, daemon=True).start()

    async def __call__(self, batch: Batch) -> Batch:
        things = list(batch[_COLUMN])
        items = [each for each in things if isinstance(each, Item)]
        results = await asyncio.gather(*(self._run(item.made) for item in items))
        for item, result in zip(items, results, strict=True):
            item.made = result
        figures = {**self._executor.figures, "cpu_s": time.process_time()}
        return _batch_of([*things, _Counts(self._name, figures)])

    async def _run(self, prepared: Any) -> Any:
        if isinstance(prepared, JitneyError):
            return prepared
        result = await self._try(prepared)
        for tries in range(self._retries):
            if not may_pass(result):
                break
            await asyncio.sleep(pause(tries))
            result = await self._try(prepared)
        return result

    async def _try(self, prepared: Any) -> Any:
        future: Future[Any] = Future()
        self._calls.put((prepared, future))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        """The executor's thread. If it fails, so do the rows that it has, and with them the job."""
        executor, running = self._executor, dict[int, Future[Any]]()
        try:
            for key in itertools.count():
                if len(executor) and (len(executor) >= executor.capacity or self._calls.empty()):
                    for ended, result in executor.step():
                        running.pop(ended).set_result(result)
                    continue
                prepared, running[key] = self._calls.get()
                try:
                    executor.submit(key, prepared)
                except InvalidArgumentError as error:
                    running.pop(key).set_result(error)
        except Exception as error:
            for future in running.values():
                future.set_exception(error)
            raise


def _context_of(job: Job) -> Context:
    executor, context = load(job)
    executor.close()
    return context


def _batch_of(things: list[Any]) -> Batch:
    array = np.empty(len(things), object)
    for index, thing in enumerate(things):
        array[index] = thing
    return {_COLUMN: array}


def _cause(error: BaseException) -> BaseException:
    """Ours, if one of ours is behind it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, JitneyError):
        found = getattr(found, "cause", None) or found.__cause__
    return found or UnavailableError(f"the cluster failed: {error}")
