"""Readers of a run on a cluster: tasks of Ray's that make blocks of the rows of some files."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jitney.errors import JitneyError

from jitney_jobs.arrow import pa
from jitney_jobs.journal import FileRows, Record
from jitney_jobs.ray_blocks import block_of
from jitney_jobs.ray_board import BoardMessage, Failure, LimitReached, Report
from jitney_jobs.ray_library import ray
from jitney_jobs.ray_plan import ClusterPlan

_REPORT_S = 0.5
"""Between two reports of a reader."""


class Reading(NamedTuple):
    """What a reader must know beside the plan."""

    record: Record
    """With the rows that need not be read."""
    chunk_rows: int
    rows_left: int | None
    """Rows that may still be read, because of the setting ``limit``."""


def read(batch: dict[str, Any], plan: Any, reading: Any) -> Iterator[pa.Table]:
    """A task of Ray's: the rows of some files, known by their indices in the column ``item``.
    ``plan`` and ``reading`` are references."""
    files = batch["item"].tolist()
    reader = _Reader(ray.get(plan), ray.get(reading), files)
    yield from reader.blocks()


class _Reader:
    """Of some files."""

    def __init__(self, plan: ClusterPlan, reading: Reading, files: list[int]) -> None:
        self._plan = plan
        self._reading = reading
        self._files = files
        self._name = f"reader of file {files[0]} and {len(files) - 1} more"
        self._position = 0.0
        """The share of the whole input that was read, beyond what the blocks tell."""
        self._read_s = 0.0
        self._messages: list[BoardMessage] = []
        self._reported_at = 0.0
        self._is_stopping = False

    def blocks(self) -> Iterator[pa.Table]:
        """Ends early if the run stops."""
        try:
            yield from self._blocks()
        except JitneyError as error:
            self._messages.append(Failure(error))
        self._report()

    def _blocks(self) -> Iterator[pa.Table]:
        record, most_rows, rows_left = self._reading
        position = 0.0
        entries = self._plan.dataset.chunks(record, most_rows, self._files)
        began = time.monotonic()
        for entry in entries:
            self._read_s += time.monotonic() - began
            if isinstance(entry, FileRows):
                self._messages.append(entry)
            elif rows_left == 0:
                self._messages.append(LimitReached())
                return
            else:
                chunk = entry
                if rows_left is not None:
                    chunk = chunk.slice(0, min(len(chunk), rows_left))
                    rows_left -= len(chunk)
                yield block_of(chunk, entry.position - position)
                if len(chunk) < len(entry):
                    self._messages.append(LimitReached())
                    return
                position = entry.position
            if time.monotonic() - self._reported_at >= _REPORT_S:
                self._report()
            if self._is_stopping:
                return
            began = time.monotonic()
        sizes = self._plan.dataset.sizes
        whole = sum(sizes[file] for file in self._files) / max(1, sum(sizes))
        self._position = max(0.0, whole - position)

    def _report(self) -> None:
        figures = {"read_s": self._read_s, "position": self._position}
        self._is_stopping = self._plan.board.put(self._name, Report(figures), self._messages)
        self._messages = []
        self._reported_at = time.monotonic()
