"""What a run does with its rows, once the model is known. Called by both pipelines."""

from typing import NamedTuple

from jitney_jobs.dataset import Dataset
from jitney_jobs.finished_rows import Finisher
from jitney_jobs.job import Job
from jitney_jobs.output import Output
from jitney_jobs.tasks import Context, Task, make_task


class RunTask(NamedTuple):
    """The task of a run, and what its results become."""

    context: Context
    task: Task
    finisher: Finisher


def begin_task(context: Context, job: Job, dataset: Dataset, output: Output) -> RunTask:
    """The task for a model's ``context``. From now on the output knows its columns, and the dataset
    reads those that the task or the output needs."""
    columns = output.maker.columns
    context = columns.completed(context)
    task = make_task(context)
    finisher = Finisher(job, task)
    output.set_columns(finisher.fields)
    dataset.set_schema(dataset.schema, columns.to_read(task.columns))
    return RunTask(context=context, task=task, finisher=finisher)
