"""Which rows of a run are committed, while parts come in any order."""

from hypothesis import given
from hypothesis import strategies as st
from jitney_jobs.committed_rows import CommittedRows
from jitney_jobs.journal import Interval, Ranges

intervals = st.builds(
    lambda file, first, count: Interval(file, first, first + count),
    st.integers(0, 1),
    st.integers(0, 30),
    st.integers(1, 6),
)


@given(st.lists(intervals, max_size=30), st.integers(0, 10))
def test_it_knows_the_rows_of_the_parts_that_it_took(parts: list[Interval], before: int) -> None:
    """Held against a set of rows."""
    done = Ranges([Interval(0, 0, before)] if before else [])
    committed = CommittedRows(done)
    rows = {(0, row) for row in range(before)}
    for part in parts:
        of_part = {(part.file, row) for row in range(part.first, part.end)}
        assert committed.has_any_of([part]) == bool(rows & of_part)
        if not rows & of_part:
            committed.add([part])
            rows |= of_part
        for file in (0, 1):
            of_file = {row for at, row in rows if at == file}
            assert committed.end_of(file) == max(of_file, default=-1) + 1
            for count in (0, 3, 7):
                assert committed.covers(file, count) == (set(range(count)) <= of_file)
            for first, end in ((0, 5), (4, 20), (10, 40)):
                within = committed.within(Interval(file, first, end))
                here = {row for each in within for row in range(each.first, each.end)}
                assert here == {row for row in of_file if first <= row < end}
    found = committed.ranges()
    assert found.twice is None
    assert {(i.file, row) for i in found.intervals for row in range(i.first, i.end)} == rows
