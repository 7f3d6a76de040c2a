"""Which load comes next: up while it pays, down while the bounds are broken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.tune.ladder import Seen, next_load, refined

SEEN = st.builds(Seen, st.booleans(), st.floats(0, 1000))


def climb(truth: list[Seen], start: int, patience: int) -> list[int]:
    seen: dict[int, Seen] = {}
    while (number := next_load(len(truth), start, seen, patience)) is not None:
        assert number not in seen
        seen[number] = truth[number]
    return list(seen)


def server(*met: float, broken: int = 0) -> list[Seen]:
    return [Seen(True, each) for each in met] + [Seen(False, 1.0)] * broken


@pytest.mark.parametrize(
    ("truth", "start", "patience", "loads"),
    [
        (server(10, 20, 40, broken=3), 0, 2, [0, 1, 2, 3, 4]),
        (server(10, 20, 40, broken=3), 2, 1, [2, 3]),
        (server(10, 20, broken=4), 4, 1, [4, 3, 2, 1]),
        (server(broken=3), 2, 1, [2, 1, 0]),
        (server(broken=3), 0, 2, [0, 1]),
        (server(10, 20, 40, 40, 40, 40), 0, 2, [0, 1, 2, 3, 4]),
        (server(10, 20, 40, 40, 40, 40), 2, 1, [2, 3]),
        (server(10, 20, 40), 0, 2, [0, 1, 2]),
        ([Seen(True, 10), Seen(False, 15), Seen(True, 30)], 0, 2, [0, 1, 2]),
    ],
    ids=["until two break", "from the best load on", "down", "down to the end", "none", "until it "
         "is full", "full already", "to the top", "one noisy load is borne with"],
)  # fmt: skip
def test_ladders(truth: list[Seen], start: int, patience: int, loads: list[int]) -> None:
    assert climb(truth, start, patience) == loads


@settings(deadline=None)
@given(st.lists(SEEN, min_size=1, max_size=8), st.data(), st.integers(1, 3))
def test_it_ends_and_skips_nothing(truth: list[Seen], data: st.DataObject, patience: int) -> None:
    start = data.draw(st.integers(0, len(truth) - 1))
    loads = climb(truth, start, patience)
    assert loads[0] == start
    assert sorted(loads) == list(range(min(loads), max(loads) + 1))
    if not any(truth[number].meets for number in loads):
        assert min(loads) == 0, "every lower load was tried before it is said that none meets"


@pytest.mark.parametrize(
    ("levels", "best", "whole", "made"),
    [
        ((1, 2, 4, 8), 4, True, (1, 2, 3, 4, 6, 8)),
        ((1, 2), 1, True, (1, 2)),
        ((16,), 16, True, (16,)),
        ((10, 20), 20, False, (10, 14.1, 20)),
    ],
)
def test_halfway_loads(
    levels: tuple[float, ...], best: float, whole: bool, made: tuple[float, ...]
) -> None:
    assert refined(levels, best, whole=whole) == made
