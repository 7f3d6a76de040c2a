"""Prepared rows in front of an executor: in an order that suits it, and tried again after errors
that may pass."""

import heapq
import time
from collections import deque
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.executor_protocol import Executor
from jitney_jobs.outcome import RetryPolicy, may_pass
from jitney_jobs.prepare import Item

_POLL_S = 0.1


class _Retry(NamedTuple):
    """A row that waits for its next try."""

    at: float
    """When it may be tried again, in monotonic seconds."""
    key: int
    item: Item


class Feeder:
    """Hands rows to an executor, and takes their results. For one thread. Rows come as items: most
    of one row, some of many, which stay together.

    1. Rows that arrive are gathered.
    2. When the executor has been given all rows of a generation, those that arrived meanwhile are
       the next one. They are sorted by the executor's rank, so that prompts with a common prefix
       follow one another, and rows of like length meet. Generations ascend and descend in turn, so
       that rows are alike where one ends and the next begins.
    3. The executor gets rows while it holds fewer than its capacity.
    4. Results are given back. A row whose error may pass waits, and is put before all others then.
       If the error lasts too long although other rows end well, it is the row's own.
    5. Once the input has ended, all rows that are left are one generation, which ascends.

    A row is overtaken by rows of its own generation only. The caller bounds how many wait here.
    """

    def __init__(self, executor: Executor, policy: RetryPolicy) -> None:
        self.tries = 0
        """How often a row was tried again."""
        self._executor = executor
        self._retry_policy = policy
        self._last_trouble: JitneyError | None = None
        self._last_good_at: float | None = None
        """When a row last ended well, in monotonic seconds."""
        self._arrived: list[Item] = []
        """Rows that are in no generation yet."""
        self._generation: deque[Item] = deque()
        self._is_descending = False
        """Whether the next generation descends."""
        self._has_input_ended = False
        self._running: dict[int, Item] = {}
        """What the executor has, by key."""
        self._waiting_rows = 0
        """Rows in ``_arrived`` and ``_generation``."""
        self._running_rows = 0
        self._waiting_retries: list[_Retry] = []
        """A heap."""

    def __len__(self) -> int:
        """0 if and only if no row is here."""
        return self._waiting_rows + self._running_rows + len(self._waiting_retries)

    @property
    def waiting(self) -> int:
        """Rows in line for the executor. Those that wait for another try do not count."""
        return self._waiting_rows

    @property
    def waits_for(self) -> JitneyError | None:
        """The last error that rows wait for to pass. None if none does."""
        return self._last_trouble if self._waiting_retries else None

    def add(self, item: Item) -> None:
        """Nothing else here has the same key."""
        self._arrived.append(item)
        self._waiting_rows += len(item.rows)

    def step(self, has_input_ended: bool) -> list[tuple[Item, Any]]:
        """Fill the executor, and let it work for a while. Returns the rows that have ended, each
        with its result or a JitneyError. ``has_input_ended``: no more rows come."""
        if has_input_ended and not self._has_input_ended:
            self._has_input_ended = True
            self._arrived += self._generation
            self._generation.clear()
        self._wake_retries()
        ended = self._fill()
        ended += self._collect()
        return ended

    def _wake_retries(self) -> None:
        """Put rows whose pause is over before all others. If there is nothing else to do, wait a
        moment for the first."""
        if not self._waiting_retries:
            return
        if not self.waiting and not self._running:
            pause_s = self._waiting_retries[0].at - time.monotonic()
            time.sleep(max(0.0, min(_POLL_S, pause_s)))
        while self._waiting_retries and self._waiting_retries[0].at <= time.monotonic():
            item = heapq.heappop(self._waiting_retries).item
            self._generation.appendleft(item)
            self._waiting_rows += len(item.rows)

    def _fill(self) -> list[tuple[Item, Any]]:
        """Returns the rows that cannot be run."""
        refused: list[tuple[Item, Any]] = []
        while self.waiting and self._running_rows < self._executor.capacity:
            if not self._generation:
                self._begin_generation()
            item = self._generation.popleft()
            self._waiting_rows -= len(item.rows)
            if item.error is not None:
                refused.append((item, item.error))
                continue
            try:
                self._executor.submit(item.key, item.prepared)
            except InvalidArgumentError as error:
                refused.append((item, error))
            else:
                self._running[item.key] = item
                self._running_rows += len(item.rows)
        return refused

    def _collect(self) -> list[tuple[Item, Any]]:
        """Let the executor work. Returns the rows that have ended for good."""
        ended: list[tuple[Item, Any]] = []
        if not self._running:
            return ended
        for key, result in self._executor.step():
            item = self._running.pop(key)
            self._running_rows -= len(item.rows)
            now = time.monotonic()
            if not isinstance(result, JitneyError):
                self._last_good_at = now
            if not may_pass(result):
                ended.append((item, result))
                continue
            pause_s = self._retry_policy.pause_after(item.trouble, result, now)
            if pause_s is None:
                ended.append((item, self._final(item, result)))
                continue
            self._last_trouble = result
            heapq.heappush(self._waiting_retries, _Retry(now + pause_s, key, item))
            self.tries += 1
        return ended

    def _final(self, item: Item, error: JitneyError) -> JitneyError:
        """Whose fault an error is that has not passed: the row's, if other rows have ended well
        since it came first, or if all others have ended."""
        if not isinstance(error, UnavailableError) or self._last_good_at is None:
            return error
        assert item.trouble.since is not None, "it has failed"
        if self._last_good_at > item.trouble.since or len(self) == 0:
            return InvalidArgumentError(str(error))
        return error

    def _begin_generation(self) -> None:
        is_descending = self._is_descending and not self._has_input_ended
        self._generation.extend(sorted(self._arrived, key=self._rank, reverse=is_descending))
        self._arrived.clear()
        self._is_descending = not self._is_descending

    def _rank(self, item: Item) -> tuple[Any, ...]:
        """Bad rows, which have no rank, come together."""
        if item.error is not None:
            return (0,)
        return (1, self._executor.rank(item.prepared, self._has_input_ended))
