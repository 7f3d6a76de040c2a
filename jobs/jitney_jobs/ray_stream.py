"""The pipeline of Ray Data in one round of a run: readers and a pool of actors, with blocks between
them."""

import queue
from collections.abc import Container, Iterator
from concurrent.futures import Future

from jitney_jobs.arrow import pa
from jitney_jobs.background import in_background
from jitney_jobs.journal import Record
from jitney_jobs.ray_actor import CALLS_AT_ONCE, RowsActor
from jitney_jobs.ray_blocks import block_of
from jitney_jobs.ray_cluster import CPU_SHARE, Cluster
from jitney_jobs.ray_library import ray, ray_data
from jitney_jobs.ray_plan import ClusterPlan
from jitney_jobs.ray_reader import Reading, read
from jitney_jobs.rows import Chunk

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


class Stream:
    """A pipeline of Ray Data, which a thread runs to its end."""

    def __init__(
        self,
        cluster: Cluster,
        plan: ClusterPlan,
        record: Record,
        without: Container[int],
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
    cluster: Cluster,
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
        num_cpus=CPU_SHARE / 2,
        compute=ray_data.TaskPoolStrategy(size=cluster.nodes),
    )
    # `map_batches` refuses whole blocks for a GPU, whose batches are to have a size. Ours have: the
    # actor makes them of blocks.
    answers = blocks.map_batches_internal(
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
        num_cpus=CPU_SHARE,
        num_gpus=cluster.gpus_of_actor,
    )
    return iter(answers.iter_batches(batch_size=None, batch_format="pyarrow"))


def _block_bytes(cluster: Cluster, plan: ClusterPlan, files: list[int]) -> int:
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
