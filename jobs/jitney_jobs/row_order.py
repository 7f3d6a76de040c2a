"""Rows in the order of the input, whichever of them end first."""

from jitney_jobs.ended_rows import Ended


class RowOrder:
    """Holds rows back that end before earlier ones."""

    def __init__(self) -> None:
        self._held: dict[int, list[Ended]] = {}
        """Rows that wait for earlier ones, by their item's key."""
        self._next_key = 0

    def in_turn(self, key: int, ended: list[Ended]) -> list[Ended]:
        """The rows whose turn it is, now that those of an item have ended. ``key``: the item's;
        keys count from 0 in the order of the input, and each comes once."""
        self._held[key] = ended
        found: list[Ended] = []
        while self._next_key in self._held:
            found += self._held.pop(self._next_key)
            self._next_key += 1
        return found
