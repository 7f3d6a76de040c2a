"""Tasks of models that answer a row with tensors: embed, classify and score.

What a row becomes follows from the model's inputs: token ids, an image, a text, or numbers of a
column. The same tasks serve an exported model here and a model on a server.
"""

import math
from typing import Any

import numpy as np
from jitney.errors import InvalidArgumentError
from jitney_server.standins.batch import NUMPY_TYPES
from jitney_server.standins.signature import Signature, TensorInfo

from jitney_jobs.arrow import pa, pc
from jitney_jobs.columns import Columns
from jitney_jobs.job import Job
from jitney_jobs.rows import Arrays, RowValues, column_of, columns_named
from jitney_jobs.schemas import is_list
from jitney_jobs.storage import Storage
from jitney_jobs.texts import TextEncoder, TextResult, TokenizedText, merged_output


class Tensors:
    """The tasks, on a model of ``signature``, which has no dimension of the batch."""

    def __init__(self, job: Job, signature: Signature, tokenizer: str | None) -> None:
        self._job = job
        self._inputs = signature.inputs
        self._storage = Storage(job)
        self._texts: TextEncoder | None = None
        """Only for a model that takes token ids."""
        if takes_token_ids(signature):
            self._texts = TextEncoder(job, self._inputs, tokenizer)
        elif job.truncate != "end":
            bound = "end: the model takes no token ids, so that nothing is cut here"
            raise InvalidArgumentError.of("truncate", job.truncate, bound)
        self._output = chosen_output(job, signature)
        self._labels = (job.labels or "").splitlines()
        label = pa.string() if self._labels else pa.int64()
        of_texts = {} if self._texts is None else self._texts.fields
        kinds = {
            "embed": {"embedding": pa.list_(pa.float32())},
            "classify": {"label": label, "score": pa.float64()},
            "score": {"score": pa.float64()},
        }
        self._columns_of_output = pa.schema(kinds[job.task])
        """Those that are made of the model's output."""
        self.fields = pa.schema([*self._columns_of_output, *pa.schema(of_texts)])
        named = [job.column, "path"]
        if len(self._inputs) > 1 and self._texts is None:
            named = [info.name for info in self._inputs]
        self.columns = columns_named(named)

    # ------------------------------------------------------------------ row to tensors

    def prepare(self, row: RowValues) -> Arrays | TokenizedText:
        if self._texts is not None:
            return self._texts.encode(column_of(row, self._job.column))
        if len(self._inputs) == 1:
            (info,) = self._inputs
            column = self._job.column
            if column not in row and "path" in row:
                column = "path"  # of a folder of images
            return {info.name: self._array(info, column_of(row, column))}
        # Each input has a column of its name.
        return {info.name: self._array(info, column_of(row, info.name)) for info in self._inputs}

    def prepare_columns(self, data: pa.RecordBatch) -> Arrays | None:
        """Rows whose columns are numbers, all of them together: arrays whose first dimension is the
        rows. None if a row has to be looked at by itself."""
        if self._texts is not None:
            return None
        arrays: Arrays = {}
        for info in self._inputs:
            name = self._job.column if len(self._inputs) == 1 else info.name
            if name not in data.schema.names or min(info.dims, default=1) < 1:
                return None
            array = _numbers(data.column(name), math.prod(info.dims))
            if array is None or info.data_type == "TYPE_STRING":
                return None
            shaped = array.reshape(len(data), *info.dims)
            arrays[info.name] = shaped.astype(NUMPY_TYPES[info.data_type], copy=False)
        return arrays

    def takes_columns(self, schema: pa.Schema | None) -> bool:
        """Whether rows of these columns are numbers as :meth:`prepare_columns` takes them."""
        if schema is None or self._texts is not None:
            return False
        for info in self._inputs:
            name = self._job.column if len(self._inputs) == 1 else info.name
            if name not in schema.names or not _is_of_numbers(schema.field(name).type):
                return False
        return True

    def _array(self, info: TensorInfo, value: Any) -> np.ndarray:
        """A row of an input: a text, an image, or numbers."""
        if info.data_type == "TYPE_STRING":
            data = value if isinstance(value, bytes) else str(value).encode()
            return np.array([data], np.object_)
        if isinstance(value, (str, bytes)):
            return self._image(info, value)
        try:
            return np.asarray(value).astype(NUMPY_TYPES[info.data_type]).reshape(info.dims)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"input {info.name} cannot be made: {error}") from None

    def _image(self, info: TensorInfo, value: str | bytes) -> np.ndarray:
        """Decoded, resized to the model's input, and normalized: channels first or last."""
        from jitney_jobs.pictures import pixels_of  # Pillow may be missing

        if len(info.dims) != 3 or min(info.dims) < 1:
            bound = "an image's: three dimensions of fixed size"
            raise InvalidArgumentError.of(f"the shape of input {info.name}", info.dims, bound)
        channels_first = info.dims[0] in (1, 3)
        if channels_first:
            channels, height, width = info.dims
        else:
            height, width, channels = info.dims
        if channels not in (1, 3):
            bound = "an image's: with 1 channel (grey) or 3 (RGB), which are first or last"
            raise InvalidArgumentError.of(f"the shape of input {info.name}", info.dims, bound)
        data = value if isinstance(value, bytes) else self._storage.read(value)
        pixels = pixels_of(data, width=width, height=height, channels=channels)
        array = (pixels.astype(np.float32) / 255 - self._job.mean) / self._job.std
        if channels_first:
            array = array.transpose(2, 0, 1)
        return np.ascontiguousarray(array, NUMPY_TYPES[info.data_type])

    # ------------------------------------------------------------------ tensors to columns

    def finish(self, row: RowValues, result: Arrays | TextResult) -> RowValues:
        """Of one row."""
        if isinstance(result, TextResult):
            assert self._texts is not None, "a model that takes token ids has texts"
            columns = self._columns_of_row(merged_output(result, self._output))
            return {**columns, **self._texts.columns_of(result)}
        return self._columns_of_row(result[self._output])

    def _columns_of_row(self, output: np.ndarray) -> RowValues:
        found = self.finish_columns({self._output: output[None]})
        for error in found.errors.values():
            raise InvalidArgumentError(error)
        (columns,) = found.data.to_pylist()
        return columns

    def finish_columns(self, result: Arrays) -> Columns:
        """The columns that are made of the output of many rows. ``result``: arrays whose first
        dimension is the rows."""
        values = result[self._output]
        row_count = len(values)
        values = values.reshape(row_count, -1)
        if self._job.task == "embed":
            offsets = pa.array(np.arange(row_count + 1) * values.shape[1], pa.int32())
            numbers = pa.array(values.astype(np.float32, copy=False).ravel())
            vectors = pa.ListArray.from_arrays(offsets, numbers)
            data = pa.RecordBatch.from_arrays([vectors], schema=self._columns_of_output)
            return Columns(data, {})
        if self._job.task == "score":
            if values.shape[1] != 1:
                bound = "1: score needs a model of one number"
                error = InvalidArgumentError.of(
                    f"the size of {self._output}", values.shape[1], bound
                )
                nulls = pa.RecordBatch.from_pylist([{}] * row_count, self._columns_of_output)
                return Columns(nulls, dict.fromkeys(range(row_count), str(error)))
            scores = pa.array(values[:, 0].astype(np.float64))
            return Columns(pa.RecordBatch.from_arrays([scores], schema=self._columns_of_output), {})
        shares = _as_shares(values.astype(np.float64))
        best = shares.argmax(axis=1)
        errors: dict[int, str] = {}
        labels: list[str | int | None] = []
        for row, index in enumerate(best.tolist()):
            try:
                labels.append(self._label_of(index))
            except InvalidArgumentError as error:
                errors[row] = str(error)
                labels.append(None)
        columns = [
            pa.array(labels, self._columns_of_output.field("label").type),
            pa.array(shares[np.arange(row_count), best]),
        ]
        return Columns(pa.RecordBatch.from_arrays(columns, schema=self._columns_of_output), errors)

    def _label_of(self, index: int) -> str | int:
        """Raises InvalidArgumentError if the file of labels is too short."""
        if not self._labels:
            return index
        if index >= len(self._labels):
            bound = f"more than {index} lines: the model gave class {index}"
            raise InvalidArgumentError.of("labels", f"{len(self._labels)} lines", bound)
        return self._labels[index]


def _is_of_numbers(kind: pa.DataType) -> bool:
    if is_list(kind):
        return _is_of_numbers(kind.value_type)
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def takes_token_ids(signature: Signature) -> bool:
    """If so, an executor gets texts (``texts.py``)."""
    return any(info.name == "input_ids" for info in signature.inputs)


def _numbers(column: pa.Array, count: int) -> np.ndarray | None:
    """Rows of so many numbers each. None if a row has not so many, or a null."""
    types = pa.types
    row_count = len(column)
    if column.null_count:
        return None
    if is_list(column.type):
        if not types.is_fixed_size_list(column.type):
            lengths = column.value_lengths()
            if len(column) and (pc.min(lengths).as_py(), pc.max(lengths).as_py()) != (count, count):
                return None
        column = column.flatten()
    if not _is_of_numbers(column.type) or column.null_count or len(column) != row_count * count:
        return None
    return column.to_numpy(zero_copy_only=False)


def _as_shares(values: np.ndarray) -> np.ndarray:
    """Of each row. Those that are no shares are logits."""
    are_logits = (values.min(axis=1) < 0) | (abs(values.sum(axis=1) - 1) > 1e-3)
    logits = values[are_logits]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    values[are_logits] = shares / shares.sum(axis=1, keepdims=True)
    return values


def chosen_output(job: Job, signature: Signature) -> str:
    """The model's output that is taken: the one named, else probabilities, else the first. Raises
    InvalidArgumentError."""
    names = [info.name for info in signature.outputs]
    if job.result is not None and job.result not in names:
        raise InvalidArgumentError.of("result", job.result, f"one of {', '.join(names)}")
    if job.result is None and job.task == "classify" and "probabilities" in names:
        return "probabilities"
    return job.result or names[0]
