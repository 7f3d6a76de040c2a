"""From a text to the token ids that an encoder takes, and what is done with a text that is longer.

Setting ``truncate`` decides: ``end`` cuts the text, ``error`` makes its row a bad one, and
``chunk-mean`` runs it as several chunks (``chunk_executor.py``), whose vectors are averaged here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jitney.errors import InvalidArgumentError
from jitney_server.standins.batch import NUMPY_TYPES
from jitney_server.standins.signature import TensorInfo
from tokenizers import Encoding, Tokenizer

from jitney_jobs.arrow import pa
from jitney_jobs.job import Job
from jitney_jobs.rows import Arrays, RowValues

_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of a model that takes token ids."""
_UNIT_TOLERANCE = 1e-3
"""Vectors whose lengths differ by less from 1 count as normalized."""


class TokenizedText(NamedTuple):
    """A text, ready for an executor."""

    chunks: list[Arrays]
    """One; with ``chunk-mean`` as many as the text needs."""
    sizes: list[int]
    """Tokens of each chunk, without special ones."""
    is_long: bool
    """Whether the text has more tokens than the encoder takes at once."""

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for chunk in self.chunks for array in chunk.values())


class TextResult(NamedTuple):
    """What the model made of a text."""

    chunks: list[Arrays]
    sizes: list[int]
    is_long: bool
    """As in :class:`TokenizedText`."""


class TextEncoder:
    """Texts for one model that takes token ids."""

    def __init__(self, job: Job, inputs: Sequence[TensorInfo], tokenizer: str | None) -> None:
        """Raises InvalidArgumentError for inputs that are no token ids, a tokenizer that cannot be
        read, or ``chunk-mean`` for an encoder that states no longest input."""
        for info in inputs:
            if info.name not in _TOKEN_INPUTS:
                bound = f"one of {', '.join(_TOKEN_INPUTS)}"
                raise InvalidArgumentError.of("an input of the model", info.name, bound)
        self._inputs = inputs
        self._column = job.column
        self._truncate = job.truncate
        self._tokenizer = _load_tokenizer(tokenizer)
        truncation = self._tokenizer.truncation
        self._limit = None if truncation is None else truncation["max_length"]
        """Most tokens that the encoder takes at once, special ones too."""
        if self._limit is None and job.truncate == "chunk-mean":
            bound = (
                "end or error: the tokenizer states no longest input; the max_seq_length of a "
                "sentence_bert_config.json beside it would"
            )
            raise InvalidArgumentError.of("truncate", job.truncate, bound)

    @property
    def fields(self) -> dict[str, pa.DataType]:
        """The columns that tell of long texts."""
        if self._truncate == "chunk-mean":
            return {"chunks": pa.int64()}
        if self._truncate == "end":
            return {"truncated": pa.bool_()}
        return {}

    def encode(self, text: Any) -> TokenizedText:
        """Raises InvalidArgumentError."""
        if not isinstance(text, str):
            raise InvalidArgumentError.of(self._column, text, "a text")
        encoding = self._tokenizer.encode_batch_fast([text])[0]
        rest = encoding.overflowing
        if rest and self._truncate == "error":
            size = sum(map(_size_of, (encoding, *rest)))
            bound = f"of at most {self._limit} tokens, special ones included"
            raise InvalidArgumentError.of(self._column, f"a text of {size:,} tokens", bound)
        run = [encoding]
        if self._truncate == "chunk-mean":
            run += rest
        chunks = [self._arrays_of(each) for each in run]
        return TokenizedText(chunks, list(map(_size_of, run)), is_long=len(rest) > 0)

    def _arrays_of(self, encoding: Encoding) -> Arrays:
        parts = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        return {
            info.name: np.array(parts[info.name], NUMPY_TYPES[info.data_type])
            for info in self._inputs
        }

    def columns_of(self, result: TextResult) -> RowValues:
        """Those of :attr:`fields`."""
        if self._truncate == "chunk-mean":
            return {"chunks": len(result.chunks)}
        if self._truncate == "end":
            return {"truncated": result.is_long}
        return {}


def merged_output(result: TextResult, output: str) -> np.ndarray:
    """An output of the model for a whole text: of its only chunk, or the mean of its chunks'
    vectors, weighted by their tokens. The mean is normalized if all vectors are. Raises
    InvalidArgumentError for outputs of different shapes."""
    vectors = [chunk[output] for chunk in result.chunks]
    if len(vectors) == 1:
        return vectors[0]
    shapes = {vector.shape for vector in vectors}
    if len(shapes) > 1:
        bound = "the same for each chunk of a text, for truncate chunk-mean"
        raise InvalidArgumentError.of(f"the shape of {output}", sorted(shapes), bound)
    stacked = np.stack(vectors).astype(np.float64)
    mean = np.average(stacked, axis=0, weights=result.sizes)
    lengths = np.linalg.norm(stacked.reshape(len(stacked), -1), axis=1)
    length = np.linalg.norm(mean)
    if np.abs(lengths - 1).max() < _UNIT_TOLERANCE and length > 0:
        mean /= length
    return mean.astype(vectors[0].dtype)


def _size_of(encoding: Encoding) -> int:
    """Its tokens, without special ones."""
    return len(encoding.ids) - sum(encoding.special_tokens_mask)


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
