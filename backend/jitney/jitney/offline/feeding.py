"""Prepared rows in front of an executor: in an order that suits it, and tried again.

Looks ahead: rows go in generations. When all rows of one have gone, those that came meanwhile are
sorted by the executor's rank: so prompts with a common prefix follow one another, and rows of like
length meet. No row is passed by more than those of one generation, which its caller bounds. Once
the input has ended, all that is left is one generation, long outputs first.
"""

import heapq
import time
from collections import deque
from typing import Any

from jitney.errors import InvalidArgumentError, JitneyError
from jitney.offline.dataset import pause
from jitney.offline.executors import Executor
from jitney.offline.prepare import Item

_POLL_S = 0.1


class Feeder:
    """For one thread."""

    def __init__(self, executor: Executor, retries: int) -> None:
        self.tries = 0
        """Rows that were tried again."""
        self._executor, self._retries = executor, retries
        self._items: dict[int, Item] = {}
        """By its key: all that have not ended."""
        self._new: list[int] = []
        self._sorted: deque[int] = deque()
        self._down = self._ending = False
        self._again: list[tuple[float, int]] = []
        """A heap: from when on a row may be tried again, and its key."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def waiting(self) -> int:
        """Rows that the executor has not been given."""
        return len(self._new) + len(self._sorted)

    def add(self, item: Item) -> None:
        """Take a row, whose key is its own."""
        self._items[item.key] = item
        self._new.append(item.key)

    def step(self, ending: bool) -> list[tuple[Item, Any]]:
        """Fill the executor, and let it work for a while. The rows that have ended, with result or
        JitneyError. ``ending``: no more rows come."""
        if ending and not self._ending:
            self._ending = True
            self._new += self._sorted
            self._sorted.clear()
        if self._again and not self.waiting and not len(self._executor):
            time.sleep(max(0.0, min(_POLL_S, self._again[0][0] - time.monotonic())))
        while self._again and self._again[0][0] <= time.monotonic():
            self._sorted.appendleft(heapq.heappop(self._again)[1])
        ended: list[tuple[Item, Any]] = []
        while self.waiting and len(self._executor) < self._executor.capacity:
            if not self._sorted:
                self._look_ahead()
            key = self._sorted.popleft()
            try:
                if isinstance(self._items[key].made, InvalidArgumentError):
                    raise self._items[key].made
                self._executor.submit(key, self._items[key].made)
            except InvalidArgumentError as error:
                ended.append((self._items.pop(key), error))
        for key, result in self._executor.step() if len(self._executor) else ():
            tries = self._items[key].tries
            if _may_pass(result) and tries < self._retries:
                self._items[key].tries += 1
                self.tries += 1
                heapq.heappush(self._again, (time.monotonic() + pause(tries), key))
            else:
                ended.append((self._items.pop(key), result))
        return ended

    def _look_ahead(self) -> None:
        """Begin a generation. Upwards and downwards in turn: where two meet, rows are alike."""

        def rank(key: int) -> Any:
            made = self._items[key].made
            bad = isinstance(made, InvalidArgumentError)
            return (0,) if bad else (1, self._executor.rank(made, self._ending))

        self._sorted.extend(sorted(self._new, key=rank, reverse=self._down and not self._ending))
        self._new.clear()
        self._down = not self._down


def _may_pass(result: Any) -> bool:
    """Whether a result is an error that another try may not meet."""
    return isinstance(result, JitneyError) and result.code in ("UNAVAILABLE", "INTERNAL")
