"""Requests that use an adapter make way for a request that needs room for another one."""

import time
from typing import Any

import pytest
from jitney.messages import Failed

from tests.adapters.adapter_house import (
    FAST,
    MAKES_WAY,
    TIERS,
    URGENT,
    House,
    house_with_a_long_request,
    load_order,
)


@pytest.mark.parametrize(("options", "urgent"), MAKES_WAY, ids=["priority", "tier"])
@pytest.mark.parametrize("overlap", [False, True])
def test_users_of_an_adapter_make_way_and_go_on_later(
    options: dict[str, Any], urgent: dict[str, Any], overlap: bool
) -> None:
    house = House(most=2, overlap=overlap, **options)
    a = [house.submit("a", max_tokens=60) for _ in range(2)]
    house.step()
    b = house.submit("b", max_tokens=60, priority=-1)
    while any(len(house.streams.get(key, [])) < 9 for key in [*a, b]):
        house.step()
    key = house.submit("urgent", **urgent)
    house.drain(key)
    assert not house.ends.keys() & {*a, b}, "they would have ended first otherwise"
    assert len(house.streams[b]) > len(house.streams[a[0]]), "those of the last rank made way"
    assert load_order(house) == ["a", "b", "urgent", "a"]
    assert [house.ends[each].timing.preemptions for each in [*a, b, key]] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "urgent"),
    [
        ({}, URGENT),
        ({"tiers": TIERS}, FAST),
        ({"priority_preempts": True, "eviction": "never"}, URGENT),
        ({"priority_preempts": True}, {}),
    ],
    ids=["no option", "no target", "no eviction", "no priority"],
)
def test_without_an_option_users_of_an_adapter_keep_it(
    options: dict[str, Any], urgent: dict[str, Any]
) -> None:
    house = House(most=1, **options)
    long = house.submit("a", max_tokens=30)
    while len(house.streams.get(long, [])) < 9:
        house.step()
    house.submit("urgent", **urgent)
    assert load_order(house) == ["a", "urgent"]
    assert house.ends[long].timing.preemptions == 0


def test_an_adapter_that_a_request_of_a_better_rank_uses_too_is_kept() -> None:
    house = House(most=1, priority_preempts=True)
    house.submit("a", max_tokens=60)
    better = house.submit("a", max_tokens=30, priority=-9)
    house.step()
    house.submit("urgent", **URGENT)
    while better not in house.ends:
        assert house.files.loads == ["a"]
        house.step()
    assert load_order(house) == ["a", "urgent", "a"]


@pytest.mark.parametrize(("options", "urgent"), MAKES_WAY, ids=["priority", "tier"])
def test_nobody_makes_way_for_an_adapter_that_cannot_be_loaded(
    options: dict[str, Any], urgent: dict[str, Any]
) -> None:
    house = House(most=1, **options)
    house.files.bad.add("bad")
    long = house.submit("a", max_tokens=60)
    while len(house.streams.get(long, [])) < 9:
        house.step()
    house.files.close("check bad")
    bad = house.submit("bad", **urgent)
    for _ in range(5):
        house.step()
    house.files.gates["check bad"].set()
    while not house.engine.inbox.has_items:
        time.sleep(0.001)
    house.drain(bad)
    end = house.ends[bad]
    assert isinstance(end, Failed)
    assert end.message == "lora_name 'bad' cannot be loaded: r is 0, but must be a number above 0"
    assert long not in house.ends, "it fails at once"
    house.drain()
    assert house.files.loads == ["a"]
    assert house.ends[long].timing.preemptions == 0
    assert not house.pool._checks._checks


def test_nobody_makes_way_whose_adapter_could_not_be_loaded_again() -> None:
    house, key = house_with_a_long_request()
    house.files.versions["a"] = "a, written anew"
    house.submit("urgent", **URGENT)
    assert load_order(house) == ["a", "urgent"]
    assert house.ends[key].timing.preemptions == 0


def test_all_users_of_an_adapter_make_way_or_none() -> None:
    """One of them came later than the urgent request, but has its priority."""
    house, long = house_with_a_long_request()
    house.files.close("check urgent")
    house.submit("urgent", **URGENT)
    house.step()
    house.now = 1.0
    late = house.submit("a", max_tokens=30, **URGENT)
    house.step()
    house.files.gates["check urgent"].set()
    while not house.engine.inbox.has_items:
        time.sleep(0.001)
    while late not in house.ends:
        assert house.files.loads == ["a"]
        house.step()
    assert long not in house.ends
    assert load_order(house) == ["a", "urgent", "a"]
    assert [house.ends[key].timing.preemptions for key in (long, late)] == [1, 0]
