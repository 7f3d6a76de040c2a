"""The pool under an engine: who waits for an adapter holds up nobody else."""

import threading
import time

import pytest
from jitney.adapters.checks import AdapterId
from jitney.errors import InternalError
from jitney.messages import Cancel, Failed
from jitney.rank import Rank

from tests.adapters.adapter_house import House
from tests.solo_stream import solo_stream


def test_who_waits_for_an_adapter_holds_up_nobody() -> None:
    house = House()
    house.files.close("slow")
    slow, quick, plain = house.submit("slow"), house.submit("quick"), house.submit(None)
    house.drain(plain)
    assert slow not in house.ends
    assert slow in house.engine.pending.waiting
    house.now = 5.0
    house.files.gates["slow"].set()
    house.drain(slow, quick)
    house.check()
    assert (house.loads, house.hits, house.resident) == (2, 0, 2)
    assert house.waited == 10.0  # quick's is behind slow's in the pool's one thread
    house.drain(house.submit("slow"))
    assert (house.loads, house.hits) == (2, 1)


def test_adapters_in_use_stay_and_the_oldest_unused_one_goes() -> None:
    house = House(most=2)
    house.drain(house.submit("a"))
    house.drain(house.submit("b"))
    house.drain(house.submit("a"))
    house.drain(house.submit("c"))  # in b's place
    house.drain(house.submit("a"))
    assert house.files.loads == ["a", "b", "c"]
    long_a, long_c = house.submit("a", max_tokens=30), house.submit("c", max_tokens=30)
    house.step()
    waits = house.submit("b")
    while len(house.streams.get(long_a, [])) < 20:
        house.step()
    assert waits in house.engine.pending.waiting
    assert house.files.loads == ["a", "b", "c"]
    house.drain(long_a, long_c, waits)
    assert house.files.loads == ["a", "b", "c", "b"]
    house.check()


def test_an_adapter_counts_as_used_until_its_last_request_ends() -> None:
    house = House(most=2)
    house.drain(house.submit("a"), house.submit("b"))
    long = house.submit("a", max_tokens=30)
    house.step()
    house.drain(house.submit("b"))
    assert long not in house.ends
    house.drain(long)
    house.drain(house.submit("c"))  # in b's place: a was claimed before b, but used longer
    house.drain(house.submit("a"))
    assert house.files.loads == ["a", "b", "c"]
    house.check()


def test_a_request_that_waits_for_room_is_not_passed_for_ever() -> None:
    house = House(most=1, aging_s=1.0)
    first = house.submit("a", max_tokens=40)
    while not house.streams.get(first):
        house.step()
    waits = house.submit("b")
    house.step()
    passes = house.submit("a", max_tokens=40)  # it may, for a while
    house.step()
    house.now = 2.0
    late = house.submit("a")
    house.drain(first, passes, waits)
    assert late not in house.ends
    house.drain(late)
    assert house.files.loads == ["a", "b", "a"]
    house.check()


def test_a_failed_load_fails_the_request_alone_and_is_tried_again() -> None:
    house = House()
    house.files.bad.add("bad")
    bad, good = house.submit("bad"), house.submit("good")
    house.drain()
    end = house.ends[bad]
    assert isinstance(end, Failed)
    assert end.code == "INVALID_ARGUMENT"
    assert end.message == "lora_name 'bad' cannot be loaded: r is 0, but must be a number above 0"
    assert house.streams[good] == solo_stream(house.submits[good])
    house.files.bad.clear()
    again = house.submit("bad")
    house.drain(again)
    assert house.streams[again] == solo_stream(house.submits[again])


def test_one_that_is_being_loaded_keeps_its_place() -> None:
    house = House(most=1)
    house.files.close("a")
    gone = house.submit("a")
    house.engine._take_inbox()
    house.engine.send(Cancel(gone))
    house.step()
    keys = house.submit("b"), house.submit("a")
    house.engine._take_inbox()
    house.files.gates["a"].set()
    house.drain(*keys)
    assert house.files.loads == ["a", "b"]


def test_an_adapter_that_nobody_waits_for_any_more_takes_no_room() -> None:
    """Its load has not begun, because another one takes long."""
    pool = House(most=2).pool
    for key, name in enumerate("abc"):
        pool.claim(Rank(tier=0, rank_s=0.0, key=key), name, arrival=0.0, now=0.0)
    first = pool.take_id_to_make(now=0.0)
    pool.release([1], now=0.0)
    second = pool.take_id_to_make(now=0.0)
    assert isinstance(first, AdapterId)
    assert isinstance(second, AdapterId)
    assert (first.name, second.name) == ("a", "c")
    assert not pool.has_ids_to_make


def test_beyond_max_queued_a_request_that_waits_for_room_is_refused() -> None:
    """It counts as queued, like one that waits for a place in the batch."""
    house = House(most=1, max_queued=1, max_num_seqs=1)
    first = house.submit("a", max_tokens=40)
    while not house.streams.get(first):
        house.step()
    waits, refused = house.submit("b"), house.submit("c")
    house.step()
    end = house.ends[refused]
    assert isinstance(end, Failed)
    assert end.code == "UNAVAILABLE"
    assert "1 requests wait, and at most 1 may (max_queued)" in end.message
    house.drain(first, waits)
    assert house.files.loads == ["a", "b"]
    assert house.streams[waits] == solo_stream(house.submits[waits])


def test_cancel_and_deadline_end_a_request_that_waits() -> None:
    house = House(most=1)
    holds = house.submit("a", max_tokens=50)
    while not house.streams.get(holds):
        house.step()
    cancelled, late = house.submit("b"), house.submit("c", deadline_ms=1000.0)
    house.step()
    assert set(house.engine.pending.waiting) == {cancelled, late}
    house.engine.send(Cancel(cancelled))
    house.step()
    assert cancelled in house.ends
    assert late not in house.ends
    house.now = 1.5
    house.step()
    assert late in house.ends
    assert not house.engine.pending.waiting
    house.drain(holds)
    assert house.files.loads == ["a"]
    assert not house.engine.has_work


def test_a_deadline_ends_the_wait_of_an_idle_engine() -> None:
    """Nothing else wakes it."""
    house = House(most=1)
    house.files.close("a")
    key = house.submit("a", deadline_ms=50.0)
    clock = iter(range(1_000_000))
    house.engine._clock = lambda: next(clock) / 100
    house.drain(key)
    assert key not in house.streams
    house.files.gates["a"].set()


def test_blocks_of_one_adapter_serve_no_other() -> None:
    house = House()
    prompt = list(range(1, 14))

    def cached(name: str | None) -> int:
        key = house.submit(name, prompt)
        house.drain(key)
        return house.ends[key].timing.cached_prompt_tokens

    assert [cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [cached(name) for name in (None, "a", "b")] == [12, 12, 12]
    house.files.versions["a"] = "a, written anew"
    assert [cached(name) for name in (None, "a", "a")] == [12, 0, 12]
    del house.files.versions["a"]
    assert cached("a") == 12


def test_rows_carry_their_adapter() -> None:
    house = House()
    house.drain(house.submit("a"), house.submit(None), house.submit("b"))
    assert {name for step in house.adapters for name in step} == {"a", None, "b"}


@pytest.mark.parametrize("most", [3, 8])
def test_hundreds_in_rotation(most: int) -> None:
    house = House(most=most, max_num_seqs=16)
    keys = [house.submit(f"a{n % 40}") for n in range(300)]
    house.drain(*keys)
    house.check()
    assert house.resident <= most
    assert house.loads + house.hits <= 300
    assert not house.engine.pending.waiting
    assert not house.pool._requests


def test_what_is_open_when_the_engine_stops_is_released() -> None:
    house = House(most=1)
    house.files.close("a")
    keys = [house.submit("a"), house.submit("b")]
    thread = threading.Thread(target=house.engine.run, args=(_Outbox(house),))
    thread.start()
    while set(house.engine.pending.waiting) != set(keys):
        time.sleep(0.001)
    house.engine.stop()
    thread.join()
    assert {house.ends[key].code for key in keys} == {"UNAVAILABLE"}
    assert not house.engine.pending.waiting
    house.files.gates["a"].set()


class _Outbox:
    def __init__(self, house: House) -> None:
        self.house = house

    def put(self, report) -> None:
        for event in report.events:
            self.house.ends[event.key] = event


def test_what_was_reported_failed_does_not_run() -> None:
    """Even if its adapter came just before."""
    house = House()
    for end in (lambda: house.engine._fail_open(InternalError("")), house.engine.reset):
        name = f"a{len(house.submits)}"
        house.files.close(name)
        key = house.submit(name)
        house.engine._take_inbox()
        house.files.gates[name].set()
        while not house.engine.inbox.has_items:
            time.sleep(0.001)
        end()
        later = house.submit(None)
        house.drain(later)
        assert key not in house.streams
        assert not house.pool._requests
