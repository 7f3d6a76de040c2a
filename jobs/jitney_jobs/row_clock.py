"""Which row of a chunk a worker process is at, and since when. The job's process, which is told so,
ends the worker if one row takes too long."""

import time
from typing import Protocol

from jitney.errors import InvalidArgumentError

_ROW = 0
"""The cell with the number of the row in its chunk."""
_SINCE = 1
"""The cell that says when the row began, in monotonic seconds; 0 if none is at work."""
NUM_CELLS = 2


class RowTimeoutError(InvalidArgumentError):
    """A row took longer than the setting ``row_timeout``. ``number``: of the row in its chunk."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__(f"it took longer than row_timeout ({seconds:g} s) to prepare")
        self.number = number


class Cells(Protocol):
    """Numbers in memory, of this process or of two."""

    def __setitem__(self, index: int, value: float) -> None: ...

    def __getitem__(self, index: int) -> float: ...


class RowClock:
    """One process writes it. It and others read it."""

    def __init__(self, cells: Cells | None = None) -> None:
        """``cells``: ``NUM_CELLS`` zeros that other processes see. None: nobody else looks."""
        self._cells: Cells = [0.0] * NUM_CELLS if cells is None else cells

    def begin(self, number: int) -> None:
        """A row begins."""
        self._cells[_ROW] = number
        self._cells[_SINCE] = time.monotonic()

    def stop(self) -> None:
        """No row is at work."""
        self._cells[_SINCE] = 0.0

    def check(self, most_s: float) -> None:
        """Raises RowTimeoutError if the row at work began longer ago."""
        since = self._cells[_SINCE]
        if since and time.monotonic() - since > most_s:
            raise RowTimeoutError(int(self._cells[_ROW]), most_s)
