"""What a step costs where requests wait for adapters: it grows with their number, not with its
square. Counted are the lines that it runs, as in tests/core/test_step_cost.py."""

from collections.abc import Callable

import jitney.adapters
import jitney.core
import jitney.engine
import pytest
from jitney.messages import Cancel

from tests.adapters.adapter_house import URGENT, House
from tests.lines_run import count_lines

_FILES = tuple(package.__path__[0] for package in (jitney.adapters, jitney.core, jitney.engine))


def many_that_wait_to_run(requests: int) -> House:
    """With the one adapter that there is room for. They are to make way."""
    house = House(most=1, max_num_seqs=4)
    for _ in range(requests):
        house.submit("a", max_tokens=90)
    while not house.streams:
        house.step()
    house.files.close("check b")
    house.submit("b", **URGENT)
    for _ in range(2):
        house.step()
    house.files.gates["check b"].set()
    while not house.engine.inbox.has_items:
        pass
    return house


def many_that_wait_for_room(requests: int) -> House:
    """All of them end at once."""
    house = House(most=1)
    house.submit("a", max_tokens=90)
    while not house.streams:
        house.step()
    keys = [house.submit(f"b{number}") for number in range(requests)]
    house.step()
    for key in keys:
        house.engine.send(Cancel(key))
    return house


def many_newcomers(requests: int) -> House:
    house = House(most=1)
    house.submit("a", max_tokens=90)
    while not house.streams:
        house.step()
    for number in range(requests):
        house.submit(f"b{number % 7}")
    return house


@pytest.mark.parametrize("make", [many_that_wait_to_run, many_that_wait_for_room, many_newcomers])
def test_a_step_of_twice_as_many_requests_costs_twice_as_much(
    make: Callable[[int], House],
) -> None:
    few, some, many = (count_lines(make(size).engine.step, _FILES) for size in (64, 128, 256))
    assert few > 10 * 64, "something was done for each request"
    assert some < 2.15 * few
    assert many < 2.15 * some
