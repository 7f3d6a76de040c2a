"""The order in which grammars are compiled and adapters loaded, and what it costs to find it."""

from collections.abc import Callable
from functools import partial

import jitney.rank
import pytest
from jitney.rank import MakeQueue, Rank

from tests.lines_run import count_lines

FAST = 0
BULK = 1


def aged(key: int) -> Rank:
    return Rank(BULK, rank_s=1.0 + key, key=key)


def new(key: int) -> Rank:
    return Rank(FAST, rank_s=100.0 + key, key=key)


def queue_of(ranks: list[Rank]) -> MakeQueue:
    """A queue in which each request waits for an id of its own: its key."""
    queue = MakeQueue()
    for rank in ranks:
        queue.add(rank.key)
        queue.join(rank.key, rank)
    return queue


def take_all(queue: MakeQueue) -> list[object]:
    taken = []
    while queue:
        taken.append(queue.take_first(now=1000.0))
    return taken


def test_the_first_request_by_rank_comes_first() -> None:
    queue = queue_of([new(3), new(1), new(2)])
    assert take_all(queue) == [1, 2, 3]
    assert queue.take_first(now=0.0) is None


def test_an_id_is_as_urgent_as_the_first_request_that_waits_for_it() -> None:
    queue = queue_of([new(1), new(2), new(3)])
    queue.join(3, new(0))
    assert queue.take_first(now=0.0) == 3
    queue.join(2, new(-1))
    queue.leave(-1)
    assert take_all(queue) == [1, 2]


def test_an_id_for_which_nobody_waits_is_not_made() -> None:
    queue = queue_of([new(1), new(2)])
    queue.join(2, new(3))
    queue.join("it is being made", new(7))
    assert [queue.leave(key) for key in (1, 1, 3, 7)] == [True, False, False, False]
    assert take_all(queue) == [2]


def test_of_a_backlog_that_has_aged_one_id_in_five_comes_before_those_of_the_first_tier() -> None:
    queue = queue_of([*map(aged, range(4)), *map(new, range(10, 20))])
    assert take_all(queue) == [0, 10, 11, 12, 13, 1, 14, 15, 16, 17, 2, 18, 19, 3]


def test_after_a_turn_of_its_tier_an_aged_request_lets_new_ones_of_the_first_tier_pass() -> None:
    """However short the turn was: only one id is made at a time."""
    queue = queue_of([*map(aged, range(3))])
    assert queue.take_first(now=0.0) == 0, "nothing else waits, and nothing has aged"
    queue.add(9)
    queue.join(9, new(9))
    assert take_all(queue) == [9, 1, 2]


def operations(call: Callable[[], object]) -> int:
    """How many lines of the module a call runs, one for each turn of a loop."""
    return count_lines(call, jitney.rank.__file__)


@pytest.mark.parametrize("rank", [aged, new])
def test_to_take_the_first_costs_the_same_however_many_wait(rank: Callable[[int], Rank]) -> None:
    costs = []
    for size in (10, 1000):
        queue = queue_of([rank(key) for key in range(size)])
        costs.append(operations(partial(queue.take_first, now=1000.0)))
    assert costs[0] == costs[1]
