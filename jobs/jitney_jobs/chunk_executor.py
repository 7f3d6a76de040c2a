"""An executor of texts (``executors.py``): it runs their chunks one by one on another executor.

A text may have hundreds of chunks. They are handed over while the other executor has room, so that
its batches stay as small as it wants them.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from jitney.errors import JitneyError

from jitney_jobs.executor_protocol import Executor, Outcome
from jitney_jobs.onnx_executor import BlockResult
from jitney_jobs.rows import Arrays
from jitney_jobs.texts import TextResult, TokenizedText


@dataclass
class _Text:
    """A text that is held."""

    key: int
    """Its row's."""
    text: TokenizedText
    results: list[Any]
    """Of its chunks, in their order. None for those that have not ended."""
    missing: int
    """How many have not ended."""


@dataclass
class _Chunk:
    """A chunk of a text that is held."""

    text: _Text
    index: int


class ChunkExecutor:
    """Takes a TokenizedText for each row, and gives a TextResult."""

    def __init__(self, inner: Executor, in_blocks: bool) -> None:
        """``in_blocks``: the other executor takes blocks of rows (``onnx_executor.py``), of which a
        chunk is one of a single row. It does not join chunks: their lengths differ."""
        self._inner = inner
        self._in_blocks = in_blocks
        self.figures = inner.figures
        """Those of the other executor, whose rows are chunks here."""
        self._num_texts = 0
        """Texts that are held."""
        self._waiting: deque[_Chunk] = deque()
        self._running: dict[int, _Chunk] = {}
        """Chunks that the other executor has, by their keys there."""
        self._next_key = 0

    @property
    def capacity(self) -> int:
        """While chunks wait here, no more texts than are held."""
        chunks = len(self._running) + len(self._waiting)
        return self._num_texts + max(0, self._inner.capacity - chunks)

    def rank(self, prepared: TokenizedText, is_last: bool) -> Any:
        return self._inner.rank(self._given(prepared.chunks[0]), is_last)

    def _given(self, chunk: Arrays) -> Arrays:
        """As the other executor takes it."""
        if not self._in_blocks:
            return chunk
        return {name: array[None] for name, array in chunk.items()}

    def submit(self, key: int, prepared: TokenizedText) -> None:
        count = len(prepared.chunks)
        text = _Text(key, prepared, results=[None] * count, missing=count)
        self._num_texts += 1
        self._waiting.extend(_Chunk(text, index) for index in range(count))
        self._hand_over()

    def _hand_over(self) -> None:
        """Executors of tensors take every row: what cannot be run is an error among the results."""
        while self._waiting and len(self._running) < self._inner.capacity:
            chunk = self._waiting.popleft()
            arrays = self._given(chunk.text.text.chunks[chunk.index])
            self._inner.submit(self._next_key, arrays)
            self._running[self._next_key] = chunk
            self._next_key += 1

    def step(self) -> list[Outcome]:
        ended: list[Outcome] = []
        for key, result in self._inner.step():
            chunk = self._running.pop(key)
            text = chunk.text
            text.results[chunk.index] = _of_only_row(result)
            text.missing -= 1
            if text.missing == 0:
                self._num_texts -= 1
                ended.append((text.key, self._result_of(text)))
        self._hand_over()
        return ended

    def _result_of(self, text: _Text) -> TextResult | JitneyError:
        """The results of all chunks, or the first error among them."""
        for result in text.results:
            if isinstance(result, JitneyError):
                return result
        return TextResult(text.results, text.text.sizes, text.text.is_long)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._num_texts = 0
        self._inner.close()


def _of_only_row(result: Any) -> Any:
    """Of a block of one row, that row's arrays or its error."""
    if not isinstance(result, BlockResult):
        return result
    for error in result.errors.values():
        return error
    assert result.arrays is not None, "a row without an error has arrays"
    return {name: array[0] for name, array in result.arrays.items()}
