"""Rows that the model is done with, until they are in a part."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jitney_jobs.arrow import pa
from jitney_jobs.rows import Chunk, RowValues
from jitney_jobs.tasks import MapResult


@dataclass(frozen=True)
class Ended:
    """Rows of one chunk that the model is done with."""

    chunk: Chunk
    rows: Sequence[int]
    """Their indices in the chunk."""
    columns: pa.RecordBatch | None = None
    """The result's columns, if the model gave columns."""
    results: Sequence[RowValues | MapResult] = ()
    """Otherwise what it gave for each row."""
    error: str | None = None
    """Why all of them are bad. Then there are no results."""
    answer: RowValues | None = None
    """Only if they are one bad line for OpenAI's API: the line that the service would write."""
    result_bytes: int = 0
    """Size of the results in memory, about."""
    is_long_text: bool = False
    """Only of one row: whether its text is longer than the encoder takes at once."""

    @property
    def replaced(self) -> int:
        """How many U+FFFD were put in place of what is no text in these rows."""
        counts = self.chunk.replaced
        return sum(counts.get(row, 0) for row in self.rows) if counts else 0

    def slice(self, first: int, end: int) -> "Ended":
        """The rows [first, end) of these."""
        if first == 0 and end >= len(self.rows):
            return self
        rows = self.rows[first:end]
        columns = None if self.columns is None else self.columns.slice(first, end - first)
        return replace(
            self,
            rows=rows,
            columns=columns,
            results=self.results[first:end],
            result_bytes=self.result_bytes * len(rows) // len(self.rows),
        )


def in_order(part: Iterable[Ended]) -> list[Ended]:
    """As their rows are in the input."""
    return sorted(part, key=lambda ended: (ended.chunk.first, ended.rows[0]))
