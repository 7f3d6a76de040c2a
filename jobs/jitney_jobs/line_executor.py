"""An executor whose rows are lines: each has one or several prompts or texts, which another
executor runs as if they were rows."""

import itertools
from collections import deque
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.executor_protocol import Executor
from jitney_jobs.openai_lines import LineParts, LineResult


class _OpenLine:
    """A line that has not ended."""

    def __init__(self, line: LineParts) -> None:
        self.line = line
        self.results: list[Any] = [None] * len(line.parts)
        self.num_open = len(line.parts)


class _Part(NamedTuple):
    key: int
    """The line's."""
    number: int
    """In the line."""


class LineExecutor:
    """Ends a line once all of its parts have ended, or one has failed. For one thread."""

    def __init__(self, executor: Executor) -> None:
        self.figures = executor.figures
        self._executor = executor
        self._lines: dict[int, _OpenLine] = {}
        self._waiting: deque[_Part] = deque()
        """Parts in line for the executor."""
        self._running: dict[int, _Part] = {}
        """Parts that the executor has, by a key of their own. The line of a part may have ended,
        with the error of another part."""
        self._keys = itertools.count()
        self._ended: list[tuple[int, Any]] = []

    @property
    def capacity(self) -> int:
        """No more lines are taken while parts wait."""
        return len(self._lines) if self._waiting else self._executor.capacity

    def rank(self, prepared: LineParts, is_last: bool) -> Any:
        return self._executor.rank(prepared.parts[0], is_last)

    def submit(self, key: int, prepared: LineParts) -> None:
        self._lines[key] = _OpenLine(prepared)
        self._waiting.extend(_Part(key, index) for index in range(len(prepared.parts)))
        self._fill()

    def step(self) -> list[tuple[int, Any]]:
        if self._running:
            for part_key, result in self._executor.step():
                self._take(self._running.pop(part_key), result)
        self._fill()
        ended = self._ended
        self._ended = []
        return ended

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._executor.capacity:
            part = self._waiting.popleft()
            if part.key not in self._lines:
                continue
            part_key = next(self._keys)
            try:
                prepared = self._lines[part.key].line.parts[part.number]
                self._executor.submit(part_key, prepared)
            except InvalidArgumentError as error:
                self._take(part, error)
            else:
                self._running[part_key] = part

    def _take(self, part: _Part, result: Any) -> None:
        open_line = self._lines.get(part.key)
        if open_line is None:
            return
        if isinstance(result, JitneyError):
            del self._lines[part.key]
            self._ended.append((part.key, result))
            return
        open_line.results[part.number] = result
        open_line.num_open -= 1
        if open_line.num_open == 0:
            del self._lines[part.key]
            whole = LineResult(open_line.results, open_line.line.num_tokens)
            self._ended.append((part.key, whole))

    def close(self) -> None:
        self._lines.clear()
        self._waiting.clear()
        self._running.clear()
        self._executor.close()
