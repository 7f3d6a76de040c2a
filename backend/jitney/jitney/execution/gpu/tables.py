"""Which device row holds which sequence's block table, and what of it stands there already.

The device keeps the block tables of many sequences, a row each; a step sends only what is new in
them. This is the host's half: pure bookkeeping, called by ``step`` once per step. A table is known
by the identity of the scheduler's list, which only grows while it is in use (``Row.block_table``),
so that its length alone tells which entries are new. A list is kept as long as its row, so that its
identity cannot pass to another. The row of the table that was longest not seen is reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class TableUpdates:
    """What the device must write before a step of R rows: arrays of int64 [R], and the entries."""

    places: np.ndarray
    """Device row of each row's table."""
    first: np.ndarray
    """Column of its first new entry: as many are there already."""
    counts: np.ndarray
    """Number of new entries."""
    offsets: np.ndarray
    """Where they begin in ``values``."""
    values: list[int]
    """New entries of all rows, row by row."""


class DeviceTables:
    """The device's rows. A step holds at most ``rows`` tables, none twice."""

    def __init__(self, rows: int) -> None:
        self._held: list[list[int] | None] = [None] * rows
        self._places: dict[int, int] = {}  # id of a held list -> device row
        self._written = np.zeros(rows, np.int64)
        self._seen = np.zeros(rows, np.int64)  # the last step with it; 0: free
        self._step = 0

    def update(self, tables: Sequence[list[int]]) -> TableUpdates:
        """Give every table a row and say what is new, taking it as written from now on. Whoever
        does not write it must call :meth:`forget`."""
        self._step += 1
        get = self._places.get
        found = [get(id(table), -1) for table in tables]
        places = np.array(found, np.int64)
        known = places >= 0
        self._seen[places[known]] = self._step
        if -1 in found:
            self._seat(tables, places, np.flatnonzero(~known))
        lengths = np.array([len(table) for table in tables], np.int64)
        first = self._written[places]
        counts = lengths - first
        values: list[int] = []
        if counts.any():
            assert counts.min() >= 0, "a block table shrank while in use"
            for r in np.flatnonzero(counts).tolist():
                values += tables[r][int(first[r]) :]
            self._written[places] = lengths
        return TableUpdates(places, first, counts, np.cumsum(counts) - counts, values)

    def forget(self) -> None:
        """Take nothing as written: every table is sent whole when it is next seen."""
        self._held = [None] * len(self._held)
        self._places.clear()
        self._written[:] = 0
        self._seen[:] = 0

    def _seat(self, tables: Sequence[list[int]], places: np.ndarray, new: np.ndarray) -> None:
        """Give the tables at ``new`` the rows that were longest not seen; those of this step are
        the last of them."""
        assert len(tables) <= len(self._held), "a step has more rows than the device"
        rows = np.argsort(self._seen, kind="stable")[: len(new)]
        for r, row in zip(new.tolist(), rows.tolist(), strict=True):
            old = self._held[row]
            if old is not None:
                del self._places[id(old)]
            self._held[row] = tables[r]
            self._places[id(tables[r])] = row
        places[new] = rows
        self._written[rows] = 0
        self._seen[rows] = self._step
