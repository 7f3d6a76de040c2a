"""An exported model, run by ONNX Runtime: an executor (``executors.py``)."""

import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jitney.errors import CheckpointError, JitneyError
from jitney_server.standins.exchange import model_path
from jitney_server.standins.signature import Signature, TensorInfo

from jitney_jobs.background import SerialCalls
from jitney_jobs.job import Job
from jitney_jobs.onnx_session import ModelCallEnded, ModelSession, SessionApart, SessionHere
from jitney_jobs.tensors import Arrays, chosen_output

_ROWS = (8, 16, 32, 64, 128)
"""Batch sizes to try if rows are not padded: numbers of rows."""
_ELEMENTS = (512, 1024, 2048, 4096)
"""Batch sizes to try if rows are padded: numbers of elements in all inputs of all rows, padding
included. See :class:`OnnxExecutor`."""
_POLL_S = 0.2
"""Longest wait for a batch, in seconds: then the job's thread looks at signals again."""
_MEASURED = 3
"""So many full batches of each size are timed. The fastest of them counts, because the first ones
also allocate."""


@dataclass
class _Held:
    """A block of rows, as it was submitted. Batches take rows off its front."""

    key: int
    arrays: Arrays
    row_count: int
    begun: int = 0
    """Rows that are in batches, or were."""
    ended: list["_Slice"] = field(default_factory=list)
    """The slices of it that have ended, in the order of its rows."""

    @property
    def elements_of_row(self) -> int:
        return _elements(self.arrays) // self.row_count


class _Slice(NamedTuple):
    """Some rows of a block that are in a batch, or what has become of them."""

    held: _Held
    row_count: int
    arrays: Arrays | None
    """Before the run their inputs, after it their outputs. None if they failed."""
    error: JitneyError | None = None
    """Why they failed. Such a slice has one row."""


class _Batch(NamedTuple):
    """A batch that runs."""

    row_count: int
    ended: Future[list[_Slice]]
    """Its slices with their outputs."""


@dataclass
class BlockResult:
    """What an exported model answers for a block of rows."""

    arrays: Arrays | None
    """The outputs, with a row for each row that has no error. None if all have one."""
    errors: dict[int, JitneyError]
    """Index of a row in the block -> what went wrong."""


class OnnxExecutor:
    """Rows come in blocks, arrays whose first dimension is the rows; single rows are blocks of one,
    sorted by length. A batch has rows of one block or of several.

    If padding does not change the model's output, the size of a batch counts elements: a batch of
    short rows has more of them than one of long rows, and little padding. Otherwise nothing is
    padded, and a size counts rows. One batch runs in a thread while the next one is gathered.
    """

    def __init__(self, job: Job) -> None:
        """Raises a LoadError, and InvalidArgumentError for an output that the model lacks."""
        self._session = _session_of(job)
        session = self._session
        self.signature = _of_rows(session.signature)
        self._output = chosen_output(job, self.signature)
        self._may_pad = _may_pad(self.signature, self._output)
        can_batch = session.signature.can_batch
        self._counts_rows = True
        """Whether the size of a batch is its number of rows, not of elements."""
        if job.batch_size is None and self._may_pad and can_batch:
            self._counts_rows = False
        self._sizes = BatchSizes(_sizes_to_try(job, can_batch, self._counts_rows))
        self._waiting: deque[_Held] = deque()
        """Blocks with rows that are in no batch yet."""
        self._waiting_rows = 0
        self._held_rows = 0
        """Of all blocks that have not ended."""
        self._most_elements = 1
        """Of a row that waits."""
        self._running: _Batch | None = None
        """The batch that was begun last."""
        self._before: _Batch | None = None
        """The one before it, if that has not ended."""
        self._patience = 1.0
        """How many times as long as a row a batch may take. It grows with experience."""
        self._calls = SerialCalls()
        self.figures = dict.fromkeys(("steps", "rows_in_steps", "most_rows"), 0.0)

    @property
    def capacity(self) -> int:
        """So many rows that a full batch waits while another one runs."""
        return self._held_rows - self._waiting_rows + self._rows_of_full_batch()

    def _rows_of_full_batch(self) -> int:
        """How many rows the next batch may have. It may have one row, however long that is."""
        if self._counts_rows:
            return self._sizes.now
        return max(1, self._sizes.now // self._most_elements)

    def rank(self, prepared: Arrays, is_last: bool) -> int:
        first = next(iter(prepared.values()))
        return _elements(prepared) // len(first)

    def submit(self, key: int, prepared: Arrays) -> None:
        held = _Held(key, prepared, len(next(iter(prepared.values()))))
        self._waiting.append(held)
        self._waiting_rows += held.row_count
        self._held_rows += held.row_count
        self._most_elements = max(self._most_elements, held.elements_of_row)

    def step(self) -> list[tuple[int, BlockResult]]:
        """Begin to run the next batch, unless two are under way. Wait for a moment for the older
        one, and return the blocks whose last rows it had."""
        if self._before is None:
            self._before = self._running
            self._running = self._begin_batch()
        batch = self._before
        if batch is None or not wait([batch.ended], _POLL_S).done:
            return []
        self._before = None
        done = []
        for piece in batch.ended.result():
            held = piece.held
            held.ended.append(piece)
            rows_ended = sum(each.row_count for each in held.ended)
            if rows_ended == held.row_count:
                self._held_rows -= held.row_count
                done.append((held.key, _result_of(held.ended)))
        return done

    def _begin_batch(self) -> _Batch | None:
        if not self._waiting:
            return None
        most_rows = self._rows_of_full_batch()
        pieces: list[_Slice] = []
        row_count = 0
        while self._waiting and row_count < most_rows:
            held = self._waiting[0]
            end = min(held.row_count, held.begun + most_rows - row_count)
            arrays = {name: array[held.begun : end] for name, array in held.arrays.items()}
            pieces.append(_Slice(held, end - held.begun, arrays))
            row_count += end - held.begun
            held.begun = end
            if end == held.row_count:
                self._waiting.popleft()
        self._waiting_rows -= row_count
        self._most_elements = max([1, *(held.elements_of_row for held in self._waiting)])
        run = partial(self._run, pieces=pieces, rows_of_full_batch=most_rows, size=self._sizes.now)
        return _Batch(row_count, self._calls.submit(run))

    def _run(self, pieces: list[_Slice], rows_of_full_batch: int, size: int) -> list[_Slice]:
        """Run a batch; in a thread. Returns its pieces with their outputs. Rows that failed
        together are run one by one: they come back as a piece each."""
        began = time.perf_counter()
        blocks = [piece.arrays or {} for piece in pieces]
        if self._may_pad:
            blocks = _padded(blocks)
        row_count = sum(piece.row_count for piece in pieces)
        try:
            answers = self._session.run(blocks, self._output, self._patience)
        except ModelCallEnded as error:
            return self._run_alone(pieces, error)
        # Only a full batch tells how fast its size is.
        if row_count >= rows_of_full_batch:
            elements = sum(map(_elements, blocks))
            self._sizes.note(size, elements / (time.perf_counter() - began))
        figures = self.figures
        # `most_rows` is the mean, over all steps, of how many rows fitted into the step.
        fitting_rows_before = figures["most_rows"] * figures["steps"]
        figures["steps"] += 1
        figures["rows_in_steps"] += row_count
        # The batch may have more than that, if its last row is longer than those before.
        fitting_rows = fitting_rows_before + max(rows_of_full_batch, row_count)
        figures["most_rows"] = fitting_rows / figures["steps"]
        ended = []
        for piece, block, answer in zip(pieces, blocks, answers, strict=True):
            if not isinstance(answer, JitneyError):
                ended.append(piece._replace(arrays=answer))
            elif piece.row_count == 1:
                ended.append(piece._replace(arrays=None, error=answer))
            else:
                ended += self._run_each_row(piece, block)
        return ended

    def _run_alone(self, pieces: list[_Slice], error: ModelCallEnded) -> list[_Slice]:
        """For a batch that did not end: any of its rows may be why."""
        if sum(piece.row_count for piece in pieces) == 1:
            return [pieces[0]._replace(arrays=None, error=error)]
        ended = []
        for piece in pieces:
            ended += self._run_each_row(piece, piece.arrays or {})
        if all(each.error is None for each in ended):
            self._patience *= 2  # it was not stuck: so many rows take so long
        return ended

    def _run_each_row(self, piece: _Slice, block: Arrays) -> list[_Slice]:
        """For rows that failed together."""
        rows = []
        for index in range(piece.row_count):
            row = {name: array[index : index + 1] for name, array in block.items()}
            try:
                (answer,) = self._session.run([row], self._output)
            except ModelCallEnded as error:
                answer = error
            if isinstance(answer, JitneyError):
                rows.append(_Slice(piece.held, 1, None, answer))
            else:
                rows.append(_Slice(piece.held, 1, answer))
        return rows

    def close(self) -> None:
        self._waiting.clear()
        self._session.close()
        self._calls.close()


def _session_of(job: Job) -> ModelSession:
    """Raises a LoadError."""
    file = _file_of(Path(str(job.model)))
    # Threads of ONNX Runtime that wait may spin if the job has the cores for itself. On a cluster
    # it does not.
    may_spin = job.ray is None
    if job.row_timeout is None:
        return SessionHere(file, may_spin)
    return SessionApart(file, may_spin, job.row_timeout)


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


def _result_of(pieces: list[_Slice]) -> BlockResult:
    errors: dict[int, JitneyError] = {}
    good: list[Arrays] = []
    row = 0
    for piece in pieces:
        if piece.arrays is None:
            assert piece.error is not None, "rows that failed have an error"
            errors[row] = piece.error
        else:
            good.append(piece.arrays)
        row += piece.row_count
    if not good:
        return BlockResult(None, errors)
    if len(good) == 1:
        return BlockResult(good[0], errors)
    return BlockResult(_joined_results(good), errors)


def _joined_results(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _padded(blocks: list[Arrays]) -> list[Arrays]:
    """Filled up with zeros to one length, which the mask excludes."""
    shapes = {name: np.max([block[name].shape for block in blocks], axis=0) for name in blocks[0]}
    return [
        {name: _filled_up(array, shapes[name][1:]) for name, array in block.items()}
        for block in blocks
    ]


def _filled_up(array: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """``shape``: of a row."""
    if array.shape[1:] == tuple(shape):
        return array
    padded = np.zeros((len(array), *shape), array.dtype)
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
