"""Tasks of models that answer a row with tensors: embed, classify and score.

What a row becomes follows from the model's inputs: token ids, an image, a text, or numbers of a
column. The same tasks serve an exported model here and a model on a server.
"""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from jitney.errors import InstallationError, InvalidArgumentError, install_extra
from jitney_server.standins.batch import NUMPY_TYPES
from jitney_server.standins.signature import Signature, TensorInfo
from tokenizers import Tokenizer

from jitney_jobs.arrow import pa, pc
from jitney_jobs.columns import Columns
from jitney_jobs.job import Job
from jitney_jobs.rows import RowValues, column_of, columns_named
from jitney_jobs.schemas import is_list
from jitney_jobs.storage import Storage

Arrays = dict[str, np.ndarray]
"""Of one row: without the dimension of the batch."""
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of a model that takes token ids."""


class Tensors:
    """The tasks, on a model of ``signature``, which has no dimension of the batch."""

    def __init__(self, job: Job, signature: Signature, tokenizer: str | None) -> None:
        self._job = job
        self._inputs = signature.inputs
        self._storage = Storage(job)
        self._tokenizer = None
        if any(info.name == "input_ids" for info in self._inputs):
            self._tokenizer = _load_tokenizer(tokenizer)
            for info in self._inputs:
                if info.name not in _TOKEN_INPUTS:
                    bound = f"one of {', '.join(_TOKEN_INPUTS)}"
                    raise InvalidArgumentError.of("an input of the model", info.name, bound)
        self._output = chosen_output(job, signature)
        self._labels = (job.labels or "").splitlines()
        label = pa.string() if self._labels else pa.int64()
        kinds = {
            "embed": {"embedding": pa.list_(pa.float32())},
            "classify": {"label": label, "score": pa.float64()},
            "score": {"score": pa.float64()},
        }
        self.fields = pa.schema(kinds[job.task])
        named = [job.column, "path"]
        if len(self._inputs) > 1 and self._tokenizer is None:
            named = [info.name for info in self._inputs]
        self.columns = columns_named(named)

    # ------------------------------------------------------------------ row to tensors

    def prepare(self, row: RowValues) -> Arrays:
        if self._tokenizer is not None:
            return self._tokens(column_of(row, self._job.column))
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
        if self._tokenizer is not None:
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
        if schema is None or self._tokenizer is not None:
            return False
        for info in self._inputs:
            name = self._job.column if len(self._inputs) == 1 else info.name
            if name not in schema.names or not _is_of_numbers(schema.field(name).type):
                return False
        return True

    def _tokens(self, text: Any) -> Arrays:
        if not isinstance(text, str):
            raise InvalidArgumentError.of(self._job.column, text, "a text")
        assert self._tokenizer is not None
        encoded = self._tokenizer.encode_batch_fast([text])[0]
        parts = {
            "input_ids": encoded.ids,
            "attention_mask": encoded.attention_mask,
            "token_type_ids": encoded.type_ids,
        }
        return {
            info.name: np.array(parts[info.name], NUMPY_TYPES[info.data_type])
            for info in self._inputs
        }

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
        try:
            from PIL import Image
        except ImportError:
            raise InstallationError(f"images need pillow: {install_extra('jobs')}") from None
        if len(info.dims) != 3 or min(info.dims) < 1:
            bound = "an image's: three dimensions of fixed size"
            raise InvalidArgumentError.of(f"the shape of input {info.name}", info.dims, bound)
        channels_first = info.dims[0] in (1, 3)
        if channels_first:
            channels, height, width = info.dims
        else:
            height, width, channels = info.dims
        data = value if isinstance(value, bytes) else self._storage.read(value)
        with Image.open(io.BytesIO(data)) as image:
            pixels = image.convert("L" if channels == 1 else "RGB").resize((width, height))
        array = np.asarray(pixels, np.float32).reshape(height, width, channels) / 255
        array = (array - self._job.mean) / self._job.std
        if channels_first:
            array = array.transpose(2, 0, 1)
        return np.ascontiguousarray(array, NUMPY_TYPES[info.data_type])

    # ------------------------------------------------------------------ tensors to columns

    def finish(self, row: RowValues, result: Arrays) -> RowValues:
        """Of one row."""
        of_rows = {name: array[None] for name, array in result.items()}
        found = self.finish_columns(of_rows)
        for error in found.errors.values():
            raise InvalidArgumentError(error)
        (columns,) = found.data.to_pylist()
        return columns

    def finish_columns(self, result: Arrays) -> Columns:
        """The result's columns of many rows. ``result``: arrays whose first dimension is the
        rows."""
        values = result[self._output]
        row_count = len(values)
        values = values.reshape(row_count, -1)
        if self._job.task == "embed":
            offsets = pa.array(np.arange(row_count + 1) * values.shape[1], pa.int32())
            numbers = pa.array(values.astype(np.float32, copy=False).ravel())
            vectors = pa.ListArray.from_arrays(offsets, numbers)
            return Columns(pa.RecordBatch.from_arrays([vectors], schema=self.fields), {})
        if self._job.task == "score":
            if values.shape[1] != 1:
                bound = "1: score needs a model of one number"
                error = InvalidArgumentError.of(
                    f"the size of {self._output}", values.shape[1], bound
                )
                nulls = pa.RecordBatch.from_pylist([{}] * row_count, self.fields)
                return Columns(nulls, dict.fromkeys(range(row_count), str(error)))
            scores = pa.array(values[:, 0].astype(np.float64))
            return Columns(pa.RecordBatch.from_arrays([scores], schema=self.fields), {})
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
            pa.array(labels, self.fields.field("label").type),
            pa.array(shares[np.arange(row_count), best]),
        ]
        return Columns(pa.RecordBatch.from_arrays(columns, schema=self.fields), errors)

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


def _load_tokenizer(path: str | None) -> Tokenizer:
    if path is None:
        raise InvalidArgumentError(
            "the model takes token ids: name its tokenizer.json as tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except Exception as error:  # a broken file can raise anything
        raise InvalidArgumentError(f"tokenizer {path} cannot be read: {error}") from None
    tokenizer.no_padding()
    # sentence-transformers cuts a text to the length that stands in this file. So do we.
    limits = Path(path).with_name("sentence_bert_config.json")
    if limits.is_file():
        tokenizer.enable_truncation(json.loads(limits.read_text("utf-8"))["max_seq_length"])
    return tokenizer
