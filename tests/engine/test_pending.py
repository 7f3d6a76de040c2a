"""Requests that wait for a grammar and an adapter, each made when the test wants it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from jitney.adapters.pool import AdapterPool
from jitney.engine import engine as engine_module
from jitney.engine.engine import Engine
from jitney.engine.grammars import Grammars
from jitney.errors import InvalidArgumentError
from jitney.execution.low_rank import LowRank
from jitney.messages import (
    Cancel,
    Cancelled,
    Emitted,
    Event,
    Failed,
    Finish,
    Finished,
    Submit,
    Tokens,
)
from jitney.rank import Rank
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.inline import make_at_once
from tests.solo_stream import solo_stream

GRAMMAR = "0,2:6"


class Later:
    """In place of a thread: notes what it is to do."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        self.calls.append(partial(call, *args))

    def go_on(self) -> None:
        """Do the first thing."""
        self.calls.pop(0)()


class House:
    """An engine whose clock and threads stand still."""

    def __init__(
        self,
        compile_grammar: Callable[[str], FakeGrammar] = FakeGrammar,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        config = make_config({"model": "fake", "block_size": 4, **(options or {})})
        pool = AdapterPool(
            lambda name: LowRank(name, {}),
            lambda name: None,
            lambda name: (),
            most=1,
            aging_s=1.0,
        )
        self.now = 0.0
        self.engine = Engine(
            config,
            FakeRunner(),
            lambda: self.now,
            compile_grammar=compile_grammar,
            adapters=pool,
            **more,
        )
        self.grammars = Later()
        self.adapters = Later()
        self.engine.pending.threads = [self.grammars, self.adapters]  # type: ignore[list-item]
        self.events: list[Event] = []

    def send(self, *messages: Submit | Cancel | Finish) -> None:
        for message in messages:
            self.engine.send(message)
        self.engine.send(plain(99))  # so that the step has something to do, and waits for nobody
        self.step()

    def step(self) -> None:
        report = self.engine.step()
        self.engine.scheduler.check_integrity()
        self.events += report.events if report is not None else []

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def drain_without(self, key: int) -> None:
        """Until only this request is open."""
        while self.engine._open != {key}:
            self.step()

    def of(self, key: int) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def ids(self, key: int) -> list[int]:
        return [id for event in self.of(key) if isinstance(event, Tokens) for id in event.ids]


def plain(key: int) -> Submit:
    params = SamplingParams(seed=key, max_tokens=40)
    return Submit(key=key, prompt=[1, 2, 3], params=params, arrival=0.0)


def demanding(key: int, **more: Any) -> Submit:
    params = SamplingParams(seed=key, max_tokens=6, lora_name="law")
    return Submit(key=key, prompt=[1, 2, 3], params=params, arrival=0.0, grammar=GRAMMAR, **more)


@pytest.mark.parametrize("grammar_first", [True, False])
def test_a_request_waits_for_all_that_it_needs(grammar_first: bool) -> None:
    house = House()
    house.send(demanding(0), demanding(1))
    assert [len(house.grammars.calls), len(house.adapters.calls)] == [1, 1], "once for both"
    stats = house.engine.scheduler.stats()
    assert (stats.queued, stats.waiting, stats.running) == (2, 2, 1)
    threads = [house.grammars, house.adapters]
    for thread in threads if grammar_first else reversed(threads):
        assert not house.of(0)
        thread.go_on()
        house.step()
    house.drain()
    for key in (0, 1):
        assert house.ids(key) == solo_stream(demanding(key))
        assert isinstance(house.of(key)[-1], Finished)


def test_a_failure_of_one_ends_the_request_and_releases_the_other() -> None:
    def fail(text: str) -> FakeGrammar:
        raise InvalidArgumentError("structured_outputs: bad")

    house = House(fail)
    house.send(demanding(0))
    house.grammars.go_on()
    house.step()
    assert not house.of(0), "the adapter is still on its way"
    house.adapters.go_on()
    house.drain()
    assert house.of(0) == [Failed(0, "INVALID_ARGUMENT", "structured_outputs: bad")]
    assert not house.engine.pending


def test_a_lack_of_memory_while_a_grammar_is_compiled_refuses_it_once() -> None:
    """The next request that asks for it tries again; a bad grammar is known to be bad."""
    faults: list[BaseException] = [MemoryError(), InvalidArgumentError("structured_outputs: bad")]
    compiled: list[str] = []

    def compile_grammar(text: str) -> FakeGrammar:
        compiled.append(text)
        if faults:
            raise faults.pop(0)
        return FakeGrammar(text)

    house = House(compile_grammar)
    make_at_once(house.engine)
    codes = []
    for key in range(3):
        house.send(msgspec.structs.replace(demanding(key), params=plain(key).params))
        house.drain()
        (end,) = house.of(key)
        assert isinstance(end, Failed)
        codes.append(end.code)
    assert codes == ["INTERNAL", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]
    assert len(compiled) == 2


def test_a_kept_error_gathers_no_traceback() -> None:
    grammars = Grammars(FakeGrammar, most=1)
    error = InvalidArgumentError("structured_outputs: bad")
    for key in (0, 1):
        grammars.claim(Rank(0, 0.0, key), GRAMMAR, arrival=0.0, now=0.0)
    grammars.receive(GRAMMAR, error, now=0.0)
    for key in (0, 1):
        with pytest.raises(InvalidArgumentError, match="structured_outputs: bad"):
            grammars.take(key)
    assert error.__traceback__ is None


def test_a_cancel_ends_it_even_in_the_step_that_makes_it_ready() -> None:
    house = House()
    make_at_once(house.engine)
    house.send(demanding(0), Cancel(0))
    house.drain()
    assert house.of(0) == [Cancelled(0)]
    assert not house.engine.pending


def resumed(key: int, **more: Any) -> Submit:
    """It had emitted three tokens of a sequence that is still open."""
    ids = solo_stream(demanding(key))[:3]
    return demanding(key, emitted=[Emitted(ids)], first_token=0.0, **more)


def test_a_stop_string_that_was_found_before_is_not_forgotten() -> None:
    """The front saw it before the engine died; the new engine still waits for the adapter."""
    house = House()
    house.send(resumed(0), Finish(0, 0))
    house.drain()
    (end, finished) = house.of(0)
    assert isinstance(end, Tokens)
    assert (end.ids, end.finish_reason) == ([], "stop")
    assert isinstance(finished, Finished)


def test_a_deadline_ends_a_resumed_request_with_what_it_has() -> None:
    house = House()
    house.send(resumed(0, deadline=1.0), demanding(1, deadline=1.0))
    house.now = 1.0
    house.step()
    (end, finished) = house.of(0)
    assert isinstance(end, Tokens)
    assert (end.ids, end.finish_reason) == ([], "deadline")
    assert isinstance(finished, Finished)
    (failed,) = house.of(1)
    assert isinstance(failed, Failed)
    assert failed.code == "DEADLINE_EXCEEDED"
    house.grammars.go_on()
    house.adapters.go_on()
    house.drain()
    assert len(house.of(0)) == 2, "what comes later is for nobody"
    assert not house.engine.pending


def test_a_fault_while_messages_are_taken_forgets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()

    def fail(message: Submit) -> list[Event]:
        raise ZeroDivisionError

    monkeypatch.setattr(house.engine.scheduler, "submit", fail)
    for key in (0, 1):
        house.engine.send(plain(key))
    report = house.engine._step_or_recover()
    assert report is not None
    assert [(event.key, type(event)) for event in report.events] == [(0, Failed), (1, Failed)]


def with_grammar(key: int, grammar: str, **more: Any) -> Submit:
    params = SamplingParams(seed=key, max_tokens=6, **more)
    return Submit(key=key, prompt=[1, 2, 3], params=params, arrival=0.0, grammar=grammar)


def test_what_takes_long_does_not_hold_up_the_next_for_long() -> None:
    house = House()
    house.send(with_grammar(0, "0:6"), with_grammar(1, "1:6"))
    assert len(house.grammars.calls) == 1, "one at a time"
    house.now = 5.1
    house.step()
    assert len(house.grammars.calls) == 2
    house.grammars.calls.pop(1)()
    house.drain_without(0)
    assert house.ids(1) == solo_stream(with_grammar(1, "1:6"))
    house.grammars.go_on()
    house.drain()
    assert house.ids(0) == solo_stream(with_grammar(0, "0:6"))


def test_what_comes_too_late_is_dropped_and_made_again_for_the_next() -> None:
    house = House()
    house.send(with_grammar(0, GRAMMAR))
    house.now = 120.1
    house.step()
    said = "the grammar was not there after 120 s (load_watchdog_s)"
    assert house.of(0) == [Failed(0, "UNAVAILABLE", said)]
    house.grammars.go_on()
    house.drain()
    house.send(with_grammar(1, GRAMMAR))
    house.grammars.go_on()
    house.drain()
    assert house.ids(1) == solo_stream(with_grammar(1, GRAMMAR))


def test_threads_that_never_come_back_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SIGN_OF_LIFE_S", 0.01)
    house = House()
    for key in range(12):
        house.engine.send(with_grammar(key, f"{key % 7}:{key + 1}"))
        house.step()
        house.now += 130.0
        house.step()
        house.step()
    assert len(house.grammars.calls) == 8
    ends = [house.of(key)[-1] for key in range(12)]
    assert [type(end) for end in ends] == [Failed] * 12
    assert ends[-1] == Failed(11, "UNAVAILABLE", "no grammar can be made now")
    house.grammars.go_on()
    house.step()
    house.engine.send(with_grammar(12, GRAMMAR))
    house.step()
    assert len(house.grammars.calls) == 8, "one has come back, so one may begin"


def test_what_was_made_in_time_is_not_given_up_because_the_engine_was_away() -> None:
    """A step may take minutes, or the process be stopped."""
    house = House()
    house.send(with_grammar(0, GRAMMAR))
    house.grammars.go_on()
    house.now = 3600.0
    house.drain()
    assert house.ids(0) == solo_stream(with_grammar(0, GRAMMAR))


def test_who_asks_for_what_nobody_waits_for_any_more_waits_from_then_on() -> None:
    house = House()
    house.send(with_grammar(0, GRAMMAR))
    house.engine.send(Cancel(0))
    house.drain()
    house.now = 3600.0
    house.send(with_grammar(1, GRAMMAR))
    assert not [event for event in house.of(1) if isinstance(event, Failed)]
    house.grammars.calls.pop()()  # the second one; the first never comes back
    house.drain()
    assert house.ids(1) == solo_stream(with_grammar(1, GRAMMAR))


def test_what_nobody_waits_for_any_more_is_not_made() -> None:
    compiled: list[str] = []

    def compile_grammar(text: str) -> FakeGrammar:
        compiled.append(text)
        return FakeGrammar(text)

    house = House(compile_grammar)
    house.send(*(with_grammar(key, f"{key}:6") for key in range(3)))
    for key in (0, 1):
        house.engine.send(Cancel(key))
    house.step()
    for _ in range(2):
        house.grammars.go_on()
        house.step()
    house.engine.send(with_grammar(3, "1:6"))
    house.step()
    house.grammars.go_on()
    house.drain()
    assert compiled == ["0:6", "2:6", "1:6"]
    assert house.ids(3) == solo_stream(with_grammar(3, "1:6"))


def test_whoever_waits_is_named_while_a_resource_is_made() -> None:
    noted: list[tuple[int, str, list[int]]] = []
    house = House(note_making=lambda *of: noted.append(of))
    house.send(demanding(3))
    numbers = [number for number, _, _ in noted]
    claims = [(kind, keys) for _, kind, keys in noted]
    assert claims == [("grammar", [3]), ("grammar", []), ("adapter", [3]), ("adapter", [])]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    noted.clear()
    house.grammars.go_on()
    ((first, *begun), (last, *over)) = noted
    assert (begun, over, first) == (["grammar", [3]], ["grammar", []], last)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_grammar_of_the_first_tier_is_compiled_before_a_backlog_that_has_aged(
    has_ended: bool,
) -> None:
    """What is being compiled is not interrupted. It may end just when the new request comes."""
    compiled: list[str] = []

    def compile_grammar(text: str) -> FakeGrammar:
        compiled.append(text)
        return FakeGrammar(text)

    tiers = [{"name": "fast"}, {"name": "bulk", "aging_s": 50.0}]
    house = House(compile_grammar, options={"tiers": tiers})
    house.now = 56.0
    house.send(*(with_grammar(key, f"{key}:6", tier="bulk") for key in range(4)))
    house.now = 60.0
    if has_ended:
        house.grammars.go_on()
    house.engine.send(with_grammar(4, "4:6", tier="fast"))
    house.step()
    while house.grammars.calls:
        house.grammars.go_on()
        house.step()
    assert compiled == ["0:6", "4:6", "1:6", "2:6", "3:6"]
    house.drain()
