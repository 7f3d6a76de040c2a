"""Lines of several parts on an executor of rows: each line ends once, with all of its results or
with the first error."""

from typing import Any

import pytest
from jitney.errors import InvalidArgumentError, JitneyError
from jitney_jobs.line_executor import LineExecutor
from jitney_jobs.openai_lines import LineParts, LineResult


class Doubling:
    """Takes two rows at a time, and ends one of them in each step. It refuses "no", and fails at
    "bad"."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.capacity = 2
        self.held: dict[int, str] = {}
        self.most_held = 0

    def rank(self, prepared: str, is_last: bool) -> str:
        return prepared

    def submit(self, key: int, prepared: str) -> None:
        if prepared == "no":
            raise InvalidArgumentError("no")
        self.held[key] = prepared
        self.most_held = max(self.most_held, len(self.held))

    def step(self) -> list[tuple[int, Any]]:
        key = max(self.held)
        word = self.held.pop(key)
        return [(key, JitneyError(word) if word == "bad" else word * 2)]

    def close(self) -> None:
        self.held.clear()


def run(*lines: list[str]) -> tuple[dict[int, Any], Doubling]:
    inner = Doubling()
    executor = LineExecutor(inner)
    waiting = list(enumerate(lines))
    held = 0
    ended: dict[int, Any] = {}
    while waiting or held:
        while waiting and held < executor.capacity:
            key, parts = waiting.pop(0)
            executor.submit(key, LineParts(list(parts), num_tokens=len(parts)))
            held += 1
        for key, result in executor.step():
            assert key not in ended
            ended[key] = result
            held -= 1
    return ended, inner


def test_every_line_has_the_results_of_its_parts_in_their_order() -> None:
    ended, inner = run(["a"], list("bcdefg"), ["h", "i"])
    assert ended == {
        0: LineResult(["aa"], 1),
        1: LineResult(["bb", "cc", "dd", "ee", "ff", "gg"], 6),
        2: LineResult(["hh", "ii"], 2),
    }
    assert inner.most_held == 2


@pytest.mark.parametrize("wrong", ["no", "bad"])
def test_a_part_that_fails_ends_its_line_alone(wrong: str) -> None:
    ended, _ = run(["a", wrong, "b", wrong, "c"], ["d"], [wrong], ["e", "f"])
    assert str(ended[0]) == wrong
    assert str(ended[2]) == wrong
    assert ended[1] == LineResult(["dd"], 1)
    assert ended[3] == LineResult(["ee", "ff"], 2)
