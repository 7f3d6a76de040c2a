"""Who gets an adapter first: by tier, priority and age."""

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
