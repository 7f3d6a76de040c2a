"""An exported model, run by ONNX Runtime in this process: an executor (``executors.py``)."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jitney.errors import CheckpointError
from jitney_server.standins.batch import BatchArrays, Batcher, ModelRequest
from jitney_server.standins.exchange import model_path
from jitney_server.standins.signature import Signature, TensorInfo

from jitney_jobs.job import Job
from jitney_jobs.tensors import Arrays, chosen_output

_ROWS = (8, 16, 32, 64, 128)
"""Batch sizes to try if rows are not padded: numbers of rows."""
_ELEMENTS = (512, 1024, 2048, 4096)
"""Batch sizes to try if rows are padded: numbers of elements in all inputs of all rows, padding
included. See :class:`OnnxExecutor`."""
_MEASURED = 3
"""So many full batches of each size are timed. The fastest of them counts, because the first ones
also allocate."""


class _Batch(NamedTuple):
    """A batch that runs."""

    keys: list[int]
    results: Future[list[Any]]


class OnnxExecutor:
    """Rows come sorted by length.

    If padding does not change the model's output, the size of a batch counts elements: a batch of
    short rows has more of them than one of long rows, and little padding. Otherwise nothing is
    padded, and a size counts rows. One batch runs in a thread while the next one is gathered.
    """

    def __init__(self, job: Job) -> None:
        """Raises a LoadError, and InvalidArgumentError for an output that the model lacks."""
        from jitney_server.standins.onnx_options import read_options
        from jitney_server.standins.onnx_session import OnnxSession  # onnxruntime may be missing

        # Threads of ONNX Runtime that wait may spin if the job has the cores for itself. On a
        # cluster it does not.
        may_spin = "1" if job.ray is None else "0"
        parameters = {"session.intra_op.allow_spinning": {"string_value": may_spin}}
        options = read_options({"parameters": parameters}, None)
        session = OnnxSession(_file_of(Path(str(job.model))), options)
        self.signature = _of_rows(session.signature)
        self._batcher = Batcher(session.run, session.signature, batching=True)
        self._output = chosen_output(job, self.signature)
        self._may_pad = _may_pad(self.signature, self._output)
        can_batch = session.signature.can_batch
        self._counts_rows = True
        """Whether the size of a batch is its number of rows, not of elements."""
        if job.batch_size is None and self._may_pad and can_batch:
            self._counts_rows = False
        self._sizes = BatchSizes(_sizes_to_try(job, can_batch, self._counts_rows))
        self._next: dict[int, Arrays] = {}
        """The rows of the next batch, by key."""
        self._most_elements = 1
        """Of a row of the next batch."""
        self._running: _Batch | None = None
        self._pool = ThreadPoolExecutor(1, "jitney-session")
        self.figures = dict.fromkeys(("steps", "rows_in_steps", "most_rows"), 0.0)

    @property
    def capacity(self) -> int:
        """The rows that run, and a full batch beside them."""
        running = 0 if self._running is None else len(self._running.keys)
        return running + self._rows_of_full_batch()

    def _rows_of_full_batch(self) -> int:
        """How many rows the next batch may have. It may have one row, however long that is."""
        if self._counts_rows:
            return self._sizes.now
        return max(1, self._sizes.now // self._most_elements)

    def rank(self, prepared: Arrays, is_last: bool) -> int:
        return _elements(prepared)

    def submit(self, key: int, prepared: Arrays) -> None:
        self._next[key] = prepared
        self._most_elements = max(self._most_elements, _elements(prepared))

    def step(self) -> list[tuple[int, Any]]:
        """Begin to run the next batch: together, or each row alone if that fails. Returns the
        results of the batch that the call before began."""
        ended = self._running
        self._running = self._begin_batch()
        self._next = {}
        self._most_elements = 1
        if ended is None:
            return []
        return list(zip(ended.keys, ended.results.result(), strict=True))

    def _begin_batch(self) -> _Batch | None:
        if not self._next:
            return None
        results = self._pool.submit(
            self._run,
            rows=list(self._next.values()),
            rows_of_full_batch=self._rows_of_full_batch(),
            size=self._sizes.now,
        )
        return _Batch(list(self._next), results)

    def _run(self, rows: list[Arrays], rows_of_full_batch: int, size: int) -> list[Any]:
        """In the pool's thread. Returns an answer for each row."""
        began = time.perf_counter()
        filled_up = _padded(rows) if self._may_pad else rows
        requests = [self._request_of(row) for row in filled_up]
        answers = self._batcher.execute(requests)
        # Only a full batch tells how fast its size is.
        if len(rows) >= rows_of_full_batch:
            elements = sum(map(_elements, rows))
            self._sizes.note(size, elements / (time.perf_counter() - began))
        figures = self.figures
        # `most_rows` is the mean, over all steps, of how many rows fitted into the step.
        fitting_rows_before = figures["most_rows"] * figures["steps"]
        figures["steps"] += 1
        figures["rows_in_steps"] += len(rows)
        # The batch may have more than that, if its last row is longer than those before.
        fitting_rows = fitting_rows_before + max(rows_of_full_batch, len(rows))
        figures["most_rows"] = fitting_rows / figures["steps"]
        return list(answers)

    def _request_of(self, row: Arrays) -> ModelRequest:
        """A batch of this one row."""
        inputs: BatchArrays = {name: array[None] for name, array in row.items()}
        return ModelRequest(inputs, (self._output,))

    def close(self) -> None:
        self._next.clear()
        self._pool.shutdown(cancel_futures=True)


class BatchSizes:
    """The size of a batch: each of a few in turn, then the fastest."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._rates: dict[int, list[float]] = {size: [] for size in sizes}
        self.now = sizes[0]

    def note(self, size: int, rate: float) -> None:
        """A full batch of that size ran at that rate."""
        if len(self._rates[size]) == _MEASURED:
            return
        self._rates[size].append(rate)
        unmeasured = [size for size, rates in self._rates.items() if len(rates) < _MEASURED]
        if unmeasured:
            self.now = unmeasured[0]
        else:
            self.now = max(self._rates, key=lambda size: max(self._rates[size]))


def _sizes_to_try(job: Job, can_batch: bool, counts_rows: bool) -> tuple[int, ...]:
    if not can_batch:
        return (1,)
    if job.batch_size is not None:
        return (job.batch_size,)
    return _ROWS if counts_rows else _ELEMENTS


def _may_pad(signature: Signature, output: str) -> bool:
    """Whether padding changes nothing: the model has a mask, which excludes it, and the output has
    a fixed shape."""
    is_masked = any(info.name == "attention_mask" for info in signature.inputs)
    (info,) = [info for info in signature.outputs if info.name == output]
    has_fixed_shape = min(info.dims, default=1) >= 0  # a free dimension is -1
    return is_masked and has_fixed_shape


def _elements(row: Arrays) -> int:
    return sum(array.size for array in row.values())


def _padded(rows: list[Arrays]) -> list[Arrays]:
    """Filled up with zeros to one length, which the mask excludes."""
    shapes = {name: np.max([row[name].shape for row in rows], axis=0) for name in rows[0]}
    return [{name: _filled_up(array, shapes[name]) for name, array in row.items()} for row in rows]


def _filled_up(array: np.ndarray, shape: np.ndarray) -> np.ndarray:
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def _of_rows(signature: Signature) -> Signature:
    """Without the first dimension, the batch's."""
    inputs = tuple(map(_of_a_row, signature.inputs))
    outputs = tuple(map(_of_a_row, signature.outputs))
    return Signature(inputs, outputs)


def _of_a_row(info: TensorInfo) -> TensorInfo:
    return info._replace(dims=info.dims[1:], symbols=info.symbols[1:])


def _file_of(model: Path) -> Path:
    """The model's file: itself, of a version's folder, or of a model's newest version."""
    if model.is_file():
        return model
    if not model.is_dir():
        raise CheckpointError(f"the model {model} is not there")
    return model_path(newest_version(model), "model.onnx")


def newest_version(model: Path) -> Path:
    """The folder of a model's newest version, or the folder itself if it has none."""
    versions = [folder for folder in model.glob("*/") if folder.name.isdigit()]
    return max(versions, key=lambda folder: int(folder.name), default=model)
