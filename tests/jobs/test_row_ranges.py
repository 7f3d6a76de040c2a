"""Rows as intervals."""

import pytest
from jitney_jobs.journal import Interval, Ranges


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ([], [(0, 0, 10), (1, 5, 9)]),
        ([(0, 3, 4)], [(0, 0, 3), (0, 4, 10), (1, 5, 9)]),
        ([(0, 0, 1), (0, 9, 10), (1, 5, 9)], [(0, 1, 9)]),
        ([(0, 0, 20), (2, 0, 5)], [(1, 5, 9)]),
        ([(1, 0, 7)], [(0, 0, 10), (1, 7, 9)]),
    ],
)
def test_ranges_without_others(
    taken: list[tuple[int, int, int]], left: list[tuple[int, int, int]]
) -> None:
    rows = Ranges([Interval(0, 0, 10), Interval(1, 5, 9)])
    assert rows.without(Interval(*each) for each in taken).intervals == left
