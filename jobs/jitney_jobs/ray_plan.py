"""What every process of a run on a cluster must know of the run, and the tasks that find it out
before the run begins."""

from dataclasses import dataclass

from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import load
from jitney_jobs.first_results import columns_of_map
from jitney_jobs.job import Job
from jitney_jobs.output_columns import OutputColumns
from jitney_jobs.ray_board import Board
from jitney_jobs.rows import RowId
from jitney_jobs.tasks import Context


@dataclass(frozen=True)
class ClusterPlan:
    """Sent to every process once."""

    job: Job
    dataset: Dataset
    """With the schema."""
    context: Context
    schema: bytes | None
    """Of the parts, as the journal has it."""
    number: str
    """How the numbers of the run's parts begin."""
    mark: str
    """What their numbers end with, before what an actor adds."""
    repeated: frozenset[RowId]
    """Rows that repeat the ``custom_id`` of an earlier one."""
    sharers: int
    """Actors that share a machine."""
    board: Board


def context_of(job: Job) -> Context:
    """In a task of Ray's: what the job's tasks must know of the model. Raises what loading it
    raises."""
    executor, context = load(job)
    executor.close()
    return context


def columns_of_first_rows(plan: ClusterPlan) -> bytes | None:
    """In a task of Ray's: :func:`~jitney_jobs.first_results.columns_of_map`. These rows are run
    once more later."""
    return columns_of_map(plan.context, plan.dataset, OutputColumns(plan.job, plan.dataset))
