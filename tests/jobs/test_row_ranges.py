"""Rows as intervals."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


@given(st.lists(st.integers(0, 40), unique=True), st.randoms())
def test_ranges_are_a_set_of_rows(rows: list[int], order: random.Random) -> None:
    intervals = Ranges(Interval(file, row, row + 1) for file in (0, 1) for row in rows).intervals
    order.shuffle(intervals)
    ranges = Ranges(intervals)
    assert sum(end - first for _, first, end in ranges.intervals) == 2 * len(rows)
    for first in range(40):
        end = first + order.randint(0, 4)
        assert ranges.covers(1, first, end) == (set(range(first, end)) <= set(rows))
