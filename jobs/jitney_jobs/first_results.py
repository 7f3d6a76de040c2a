"""The columns that ``map`` makes, learned from the first rows.

A run that divides its input among processes learns them first, so that all processes write the same
columns, and the same as a run that does not divide it.
"""

import contextlib
from collections.abc import Iterator

from jitney_jobs.dataset import Dataset
from jitney_jobs.journal import Record
from jitney_jobs.output_columns import OutputColumns, sample_of
from jitney_jobs.prepare_workers import Workers
from jitney_jobs.rows import Chunk
from jitney_jobs.tasks import Context, MapResult, make_task

_CHUNK_ROWS = 64
"""Rows that are given to ``map`` together."""


def columns_of_map(context: Context, dataset: Dataset, columns: OutputColumns) -> bytes | None:
    """The output's schema as the first results of ``map`` have it, which ``columns`` learns. None
    if there is no good row. Raises as the function's module does when it is imported."""
    job = context.job
    task = make_task(context)
    columns.set_result(task.fields)
    count = 1 if job.workers is None else min(1, job.workers)
    if job.row_timeout is not None:
        count = 1  # a process can be ended, a thread cannot
    with contextlib.closing(Workers(context, count, task.columns)) as workers:
        rows = sample_of(_results(dataset, workers))
    if not rows:
        return None
    columns.learn_from(rows)
    return columns.schema


def _results(dataset: Dataset, workers: Workers) -> Iterator[MapResult]:
    """Of the good rows, from the first on."""
    for entry in dataset.chunks(Record.empty(), _CHUNK_ROWS, skips_bad_files=True):
        left = entry if isinstance(entry, Chunk) else None
        while left is not None:
            prepared = workers.submit(left).result()
            left = prepared.rest
            for item in prepared.items:
                if item.error is None:
                    yield item.prepared
