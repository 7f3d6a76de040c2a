"""Who gets an adapter first: by tier, priority and age."""

import threading
from typing import Any

import pytest

from tests.adapters.adapter_house import (
    FAST,
    TIERS,
    URGENT,
    House,
    house_with_an_aged_backlog,
    load_order,
)


@pytest.mark.parametrize(
    ("options", "urgent"), [({}, URGENT), ({"tiers": TIERS}, FAST)], ids=["priority", "tier"]
)
def test_who_waits_for_room_is_ranked_by_tier_and_priority(
    options: dict[str, Any], urgent: dict[str, Any]
) -> None:
    house = House(most=1, aging_s=50.0, **options)
    house.submit("a", max_tokens=9)
    for name in "bcd":
        house.submit(name)
    house.step()
    house.submit("urgent", **urgent)
    assert load_order(house) == ["a", "urgent", "b", "c", "d"]


def test_one_that_has_aged_comes_before_a_newcomer_of_the_first_tier() -> None:
    house = House(most=1, tiers=TIERS)
    house.submit("a", max_tokens=9)
    house.submit("old")
    house.step()
    house.now = 51.0
    house.submit("new", **FAST)
    assert load_order(house) == ["a", "old", "new"]


def test_an_urgent_request_whose_adapter_is_in_memory_passes_one_that_has_waited_long() -> None:
    house = House(most=1, aging_s=1.0)
    long = house.submit("a", max_tokens=40)
    house.drain(house.submit("a"))
    house.submit("b")
    house.step()
    house.now = 5.0
    urgent = house.submit("a", priority=-50)
    house.drain(urgent)
    assert long not in house.ends
    assert load_order(house) == ["a", "b"]


def test_adapters_are_loaded_by_rank() -> None:
    """One after the other: an urgent one does not wait for those that came before it."""
    house = House(most=8)
    house.files.close("a")
    plain = house.submit(None)
    for name in "abcd":
        house.submit(name)
    house.drain(plain)
    house.submit("urgent", **URGENT)
    house.submit(None)
    house.step()
    house.files.gates["a"].set()
    assert load_order(house) == ["a", "urgent", "b", "c", "d"]


def test_an_aged_backlog_does_not_come_before_a_request_of_the_first_tier() -> None:
    house, _ = house_with_an_aged_backlog()
    house.submit("urgent", **FAST)
    loads = load_order(house)
    assert loads[2] == "urgent"
    assert sorted(loads[3:]) == [*"bcdef"]


def test_the_first_aged_request_of_a_tier_does_not_make_way() -> None:
    house, (first, second) = house_with_an_aged_backlog()
    urgent = [house.submit(name, **FAST) for name in ("urgent", "other")]
    house.drain(*urgent)
    house.drain()
    house.check()
    assert [house.ends[key].timing.preemptions for key in (first, second)] == [0, 1]


def test_an_aged_backlog_does_not_hold_up_a_request_whose_adapter_is_in_memory() -> None:
    house, running = house_with_an_aged_backlog()
    urgent = house.submit("a", **FAST)
    house.drain(urgent)
    assert not house.ends.keys() & set(running)
    assert house.files.loads == ["a", "b"]
    house.drain()
    house.check()


WITHOUT_PREEMPTION = [({}, URGENT), ({"eviction": "never"}, URGENT), ({"tiers": TIERS}, FAST)]


@pytest.mark.parametrize(
    ("options", "urgent"), WITHOUT_PREEMPTION, ids=["priority", "no eviction", "tier"]
)
@pytest.mark.parametrize("most", [1, 2])
def test_who_waits_to_run_makes_way_for_an_urgent_request(
    options: dict[str, Any], urgent: dict[str, Any], most: int
) -> None:
    """Although nobody who runs does. It would wait for all others otherwise, however many."""
    house = House(most=most, max_num_seqs=2, **options)
    bulk = [house.submit("ac"[key % most], max_tokens=20) for key in range(20)]
    while not house.streams:
        house.step()
    running = set(house.streams)
    key = house.submit("b", **urgent)
    house.drain(key)
    assert house.ends.keys() <= running | {key}
    house.drain()
    house.check()
    assert [house.ends[each].timing.preemptions for each in bulk] == [0] * 20


@pytest.mark.parametrize(
    ("options", "urgent"), WITHOUT_PREEMPTION, ids=["priority", "no eviction", "tier"]
)
def test_newcomers_do_not_pass_an_urgent_request(
    options: dict[str, Any], urgent: dict[str, Any]
) -> None:
    """Although their adapter is in memory: it would stay in use for ``aging_s`` otherwise."""
    house = House(most=1, max_num_seqs=4, **options)
    for _ in range(2):
        house.submit("a", max_tokens=20)
    while not house.streams:
        house.step()
    key = house.submit("b", **urgent)
    while key not in house.ends:
        house.now += 0.01
        house.submit("a", max_tokens=20)
        house.step()
        assert house.now < 1.0
    assert len(house.ends) == 3, "those that ran, and the urgent one"
    house.drain()
    house.check()


def test_newcomers_queue_while_an_urgent_request_is_checked() -> None:
    """Nobody makes way before its adapter has been checked: those that ran by then would go on."""
    house = House(most=1, max_num_seqs=4)
    running = house.submit("a", max_tokens=20)
    while not house.streams:
        house.step()
    check = threading.Event()
    house.files.gates["check b"] = check
    key = house.submit("b", **URGENT)
    for _ in range(5):
        house.submit("a", max_tokens=20)
        house.step()
    assert house.streams.keys() == {running}
    check.set()
    house.drain(key)
    assert house.ends.keys() <= {running, key}
    house.drain()
    house.check()


def test_nobody_is_looked_at_while_nobody_can_make_way() -> None:
    """Most of the time somebody waits for room, where adapters are many: a step costs no more."""
    house = House(most=1)
    house.submit("a", max_tokens=9)
    while not house.streams:
        house.step()
    house.submit("b")
    house.step()
    assert house.pool._queue
    assert house.pool.blocked(house.now, may_preempt=False) is None
    assert house.pool.blocked(house.now, may_preempt=True) is not None
