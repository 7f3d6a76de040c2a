"""What is written of rows that the model is done with, and why the bad ones are bad."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.arrow import pa
from jitney_jobs.column_names import result_names
from jitney_jobs.columns import taken
from jitney_jobs.ended_rows import Ended
from jitney_jobs.failures import JobRefusedError, RequestError
from jitney_jobs.job import Job
from jitney_jobs.onnx_executor import BlockResult
from jitney_jobs.prepare import Item
from jitney_jobs.rows import Chunk, reason
from jitney_jobs.tasks import MapResult, Task
from jitney_jobs.tensors import Tensors
from jitney_jobs.texts import TextResult


class Finisher:
    """Makes what is written of the rows of one task."""

    def __init__(self, job: Job, task: Task) -> None:
        self._job = job
        self._task = task
        self._result_names = result_names(job, task.fields)

    @property
    def fields(self) -> pa.Schema | None:
        """The result's columns as they are written. None if they are known only once there are
        rows."""
        fields = self._task.fields
        return None if fields is None else _renamed(fields, self._result_names)

    def ended(self, item: Item, result: Any) -> list[Ended]:
        """What is written of an item's rows, in their order. Raises UnavailableError and
        JobRefusedError, which end the job."""
        if isinstance(result, UnavailableError | JobRefusedError):
            raise result  # not the row's fault: the job ends, and can be resumed
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
        """The same rows, with the names that the job gives to the result's columns."""
        columns = ended.columns
        if columns is None:
            return ended
        renamed = columns.rename_columns(
            [self._result_names[name] for name in columns.schema.names]
        )
        return replace(ended, columns=renamed)


def _renamed(fields: pa.Schema, names: dict[str, str]) -> pa.Schema:
    renamed = [field.with_name(names[field.name]) for field in fields]
    return pa.schema(renamed, fields.metadata)


def _ended_of_block(
    chunk: Chunk, rows: Sequence[int], result: BlockResult, task: Task
) -> list[Ended]:
    """What is written of the ``rows`` of a chunk for which an exported model gave ``result``."""
    assert isinstance(task, Tensors), "only exported models answer blocks"
    errors = {index: reason(error) for index, error in result.errors.items()}
    ended = [Ended(chunk, [rows[index]], error=error) for index, error in errors.items()]
    # The arrays have rows only for those without an error.
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
