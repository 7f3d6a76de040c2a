"""Tasks of models that answer a row with tensors: embed, classify and score.

What a row becomes follows from the model's inputs: token ids, an image, a text, or numbers of a
column. The same tasks serve an exported model here and a model on a server.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jitney.errors import InstallationError, InvalidArgumentError, install_extra
from jitney_server.standins.batch import NUMPY_TYPES
from jitney_server.standins.signature import Signature, TensorInfo
from tokenizers import Tokenizer

from jitney_jobs.arrow import pa
from jitney_jobs.job import Job
from jitney_jobs.rows import RowValues, column_of
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
        self.columns: Sequence[str] = [info.name for info in self._inputs]
        if self._tokenizer is not None or len(self._inputs) == 1:
            self.columns = [job.column]

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
        values = result[self._output].ravel()
        if self._job.task == "embed":
            return {"embedding": values.astype(np.float32, copy=False)}
        if self._job.task == "score":
            if values.size != 1:
                bound = "1: score needs a model of one number"
                raise InvalidArgumentError.of(f"the size of {self._output}", values.size, bound)
            return {"score": float(values[0])}
        shares = values.astype(np.float64)
        if shares.min() < 0 or abs(shares.sum() - 1) > 1e-3:  # they are logits
            shares = np.exp(shares - shares.max())
            shares /= shares.sum()
        best = int(shares.argmax())
        return {"label": self._label_of(best), "score": float(shares[best])}

    def _label_of(self, index: int) -> str | int:
        """Raises InvalidArgumentError if the file of labels is too short."""
        if not self._labels:
            return index
        if index >= len(self._labels):
            bound = f"more than {index} lines: the model gave class {index}"
            raise InvalidArgumentError.of("labels", f"{len(self._labels)} lines", bound)
        return self._labels[index]


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
