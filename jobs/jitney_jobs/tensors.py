"""Tasks of models that answer a row with tensors: embed, classify and score.

What a row becomes follows from the model's inputs: token ids, an image, a text, or numbers of a
column. The same tasks serve an exported model here and a model on a server.
"""

from typing import Any

import numpy as np
from jitney.errors import InvalidArgumentError
from jitney_server.standins.batch import NUMPY_TYPES
from jitney_server.standins.signature import Signature, TensorInfo

from jitney_jobs.arrow import pa
from jitney_jobs.job import Job
from jitney_jobs.rows import Arrays, RowValues, column_of
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
        self.fields = pa.schema({**kinds[job.task], **of_texts})

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
        if isinstance(result, TextResult):
            assert self._texts is not None, "a model that takes token ids has texts"
            columns = self._columns_of(merged_output(result, self._output))
            return {**columns, **self._texts.columns_of(result)}
        return self._columns_of(result[self._output])

    def _columns_of(self, output: np.ndarray) -> RowValues:
        values = output.ravel()
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


def takes_token_ids(signature: Signature) -> bool:
    """If so, an executor gets texts (``texts.py``)."""
    return any(info.name == "input_ids" for info in signature.inputs)


def chosen_output(job: Job, signature: Signature) -> str:
    """The model's output that is taken: the one named, else probabilities, else the first. Raises
    InvalidArgumentError."""
    names = [info.name for info in signature.outputs]
    if job.result is not None and job.result not in names:
        raise InvalidArgumentError.of("result", job.result, f"one of {', '.join(names)}")
    if job.result is None and job.task == "classify" and "probabilities" in names:
        return "probabilities"
    return job.result or names[0]
