"""What becomes of a request that has made way for one that needs room for its adapter."""

import pytest
from jitney.errors import UnavailableError
from jitney.execution.low_rank import LowRank
from jitney.messages import Cancel, Failed, Finish, Finished

from tests.adapters.adapter_house import (
    FAST,
    TARGET,
    URGENT,
    House,
    LoadsAtOnce,
    house_with_a_long_request,
    load_order,
    take_back,
)
from tests.fake_grammar import FakeGrammar


@pytest.mark.parametrize("end", ["cancel", "deadline", "stop"])
def test_one_that_was_taken_back_may_end_while_it_waits(end: str) -> None:
    house = House(most=1, priority_preempts=True)
    deadline = {"deadline_ms": 1000} if end == "deadline" else {}
    key = house.submit("a", max_tokens=30, **deadline)
    while len(house.streams.get(key, [])) < 9:
        house.step()
    house.files.close("urgent")
    urgent = house.submit("urgent", **URGENT)
    house.submit(None)
    while key not in house.engine.pending.waiting:
        house.step()
    if end == "deadline":
        house.now = 2.0
    if end == "cancel":
        house.engine.send(Cancel(key))
    if end == "stop":
        house.engine.send(Finish(key, 0))
    house.submit(None)
    house.step()
    house.files.gates["urgent"].set()
    house.drain()
    assert len(house.streams[urgent]) == 3
    assert 9 <= len(house.streams[key]) < 30
    assert not house.engine.has_work


def test_a_request_does_not_go_on_with_another_version_of_its_adapter() -> None:
    house, key = house_with_a_long_request()
    take_back(house, key)
    house.files.versions["a"] = "a, written anew"
    house.files.gates["urgent"].set()
    house.drain()
    said = "the files of lora_name 'a' have changed while the request waited"
    assert house.ends[key] == Failed(key, "INVALID_ARGUMENT", said)


def test_a_load_that_fails_is_tried_again_for_a_request_that_made_way() -> None:
    house, key = house_with_a_long_request()
    urgent = take_back(house, key)
    load = house.pool._load

    def fail(name: str) -> LowRank:
        raise UnavailableError("no memory")

    house.pool._load = fail
    house.files.gates["urgent"].set()
    while urgent not in house.ends or not house.engine.pending._retries:
        assert key not in house.ends
        house.step()
    house.pool._load = load
    house.now += 6.0
    assert load_order(house) == ["a", "urgent", "a"]


def test_a_load_is_tried_again_even_if_the_request_made_way_before_its_first_token() -> None:
    house = House(most=1, priority_preempts=True)
    key = house.submit("a", prompt=[7] * 800)  # more than fit into a step
    while not any(house.adapters):
        house.step()
    load = house.pool._load

    def fail_once(name: str) -> LowRank:
        if name == "a":
            house.pool._load = load
            raise UnavailableError("no memory")
        return load(name)

    house.pool._load = fail_once
    house.submit("urgent", **URGENT)
    while not house.engine.pending._retries:
        assert key not in house.ends
        house.step()
    house.now += 6.0
    assert load_order(house) == ["a", "urgent", "a"]


def test_a_request_that_waits_to_try_again_may_end() -> None:
    house, key = house_with_a_long_request(deadline_ms=2000)
    house.pool._load = lambda name: LowRank(name, {}) if name == "urgent" else 1 // 0
    house.files.close("urgent")
    house.drain(house.submit("urgent", **URGENT))
    while not house.engine.pending._retries:
        assert key not in house.ends
        house.step()
    house.now = 3.0
    house.drain()
    assert not isinstance(house.ends[key], Failed)
    assert not house.engine.has_work
    house.now = 9.0
    house.drain(house.submit(None))
    assert not house.engine.pending._retries


def test_a_request_that_makes_way_keeps_its_grammar() -> None:
    """Though others have come since, and the cache has dropped it."""
    compiled: list[str] = []

    def compile_grammar(text: str) -> FakeGrammar:
        compiled.append(text)
        return FakeGrammar(text)

    house = House(most=1, priority_preempts=True, grammar_cache=1)
    house.engine.pending._grammars._compile = compile_grammar
    key = house.submit("a", max_tokens=60, grammar="0,2,5:40")
    while len(house.streams.get(key, [])) < 9:
        house.step()
    house.drain(house.submit(None, grammar="1,3:9"))
    urgent = house.submit("urgent", **URGENT)
    house.drain(urgent)
    assert key not in house.ends
    house.drain()
    house.check()
    assert compiled == ["0,2,5:40", "1,3:9"]


def test_a_stop_string_ends_a_request_that_waits_at_once() -> None:
    """It needs no adapter for that."""
    house, key = house_with_a_long_request(n=2)
    urgent = take_back(house, key)
    house.engine.send(Finish(key, 1))
    house.submit(None)
    house.step()
    assert key not in house.ends, "one of its sequences goes on"
    house.engine.send(Finish(key, 0))
    house.submit(None)
    house.step()
    assert isinstance(house.ends[key], Finished)
    house.files.gates["urgent"].set()
    house.drain()
    assert len(house.streams[urgent]) == 3
    assert house.files.loads == ["a", "urgent"]


def test_a_request_that_was_taken_back_is_not_passed_for_another_aging_time() -> None:
    house, key = house_with_a_long_request()
    house.now = 5.0
    urgent = take_back(house, key)
    house.now = 11.0  # `aging_s` is 10
    again = house.submit("urgent", priority=-4)
    late = house.submit("urgent", priority=9)
    house.submit(None)
    house.files.gates["urgent"].set()
    house.drain(urgent, again, key)
    assert late not in house.ends
    house.drain()
    house.check()


def test_a_request_that_was_taken_back_is_not_overdue() -> None:
    house = House(most=1, tiers=TARGET)
    key = house.submit("a", max_tokens=60)
    while len(house.streams.get(key, [])) < 9:
        house.step()
    urgent = house.submit("urgent", max_tokens=30, **FAST)
    while not house.streams.get(urgent):
        house.step()
    assert key in house.engine.pending.waiting
    house.now = 60.0
    report = house.engine.step()
    assert report is not None
    assert [tier.overdue for tier in report.stats.tiers] == [0, 0]


def test_a_request_that_had_not_begun_counts_as_no_preemption() -> None:
    house = House(most=1, priority_preempts=True, max_num_seqs=1)
    house.drain(house.submit("a"))
    plain = house.submit(None, max_tokens=60, priority=-9)
    waits = house.submit("a")
    house.step()
    house.submit("urgent", **URGENT)
    house.drain()
    assert plain in house.ends
    assert house.files.loads == ["a", "urgent", "a"]
    assert house.ends[waits].timing.preemptions == 0


def test_timing_and_usage_are_those_of_a_request_that_did_not_make_way() -> None:
    house, key = house_with_a_long_request(prompt=list(range(1, 14)))
    house.now = 5.0
    house.drain(house.submit("urgent", **URGENT))
    house.drain()
    timing = house.ends[key].timing
    assert timing.preemptions == 1
    assert (timing.queue_s, timing.first_token_s) == (0.0, 0.0)
    assert (timing.cached_prompt_tokens, timing.computed_prompt_tokens) == (0, 13)
    assert not house.engine.scheduler._taken_back


def test_a_request_without_a_token_left_the_queue_when_it_first_ran() -> None:
    house = House(most=1, priority_preempts=True)
    key = house.submit("a", prompt=[7] * 800)  # more than fit into a step
    while not any(house.adapters):
        house.step()
    house.now = 5.0
    house.submit("urgent", **URGENT)
    while key not in house.engine.pending.waiting:
        house.step()
    assert key not in house.streams
    kept = house.engine.scheduler._taken_back[key]
    assert kept.adapter is None, "it would stay in memory"
    house.drain()
    assert house.ends[key].timing.preemptions == 1
    assert house.ends[key].timing.queue_s == 0.0


@pytest.mark.parametrize(
    ("error", "code"), [(UnavailableError("no memory"), "UNAVAILABLE"), (None, "INTERNAL")]
)
def test_a_load_that_fails_for_ever_ends_the_request(
    error: UnavailableError | None, code: str
) -> None:
    house, key = house_with_a_long_request()
    load = house.pool._load

    def fail(name: str) -> LowRank:
        if name == "urgent":
            return load(name)
        house.files.loads.append(name)
        raise error or ZeroDivisionError

    house.pool._load = fail
    # Not in threads: on a busy machine a load would take many steps, and so many seconds.
    house.engine.pending.threads[1] = LoadsAtOnce()
    house.submit("urgent", **URGENT)
    for _ in range(1000):
        if key in house.ends:
            break
        house.submit(None)  # so that a step waits for nobody
        house.step()
        house.now += 1.0
    end = house.ends[key]
    assert isinstance(end, Failed)
    assert end.code == code
    last_reason = "lora_name 'a' cannot be loaded" + (": no memory" if error else "")
    assert end.message == (
        "the request made way for another one, and lora_name 'a' could not be loaded again "
        f"for 120 s (load_watchdog_s): {last_reason}"
    )
    assert house.files.loads.count("a") > 10, "it was tried again"
    house.drain()
    assert not house.pool._requests
