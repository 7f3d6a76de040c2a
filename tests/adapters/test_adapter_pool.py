"""The pool under an engine: who waits for an adapter holds up nobody else."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from jitney.adapters.pool import AdapterPool, JudgementId
from jitney.engine.engine import Engine
from jitney.engine.pending import Thread
from jitney.errors import InternalError, InvalidArgumentError, UnavailableError
from jitney.execution.low_rank import LowRank
from jitney.messages import Cancel, Failed, Finish, Finished, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from jitney.text.intake import adapter_names, check_adapter

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.solo_stream import solo_stream


class Files:
    """AdapterPool by name, each read when its gate is open."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.loads: list[str] = []
        self.versions: dict[str, str] = {}
        self.bad: set[str] = set()

    def close(self, name: str) -> None:
        """From now on its loading takes until :meth:`open`."""
        self.gates[name] = threading.Event()

    def load(self, name: str) -> LowRank:
        self.loads.append(name)
        if name in self.gates:
            assert self.gates[name].wait(60)
        if name in self.bad:
            raise InvalidArgumentError("r is 0, but must be a number above 0")
        return LowRank(self.versions.get(name, name), {})

    def judge(self, name: str) -> None:
        gate = self.gates.get(f"judge {name}")
        if gate is not None:
            assert gate.wait(60)
        if name in self.bad:
            raise InvalidArgumentError("r is 0, but must be a number above 0")

    def stamp(self, name: str) -> tuple[int, ...]:
        return (hash(self.versions.get(name, name)),)


class LoadsInThreads:
    """Checks an adapter at once, so that it does not matter how many steps a thread takes to begin,
    unless the test holds up the check."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def submit(self, call: Any, job: Any, keys: list[int]) -> None:
        is_check = isinstance(job.id, JudgementId)
        if is_check and f"judge {job.id.of.name}" not in self._files.gates:
            call(job, keys)
        else:
            Thread().submit(call, job, keys)


class House:
    """An engine over the fake runner."""

    def __init__(self, most: int = 2, aging_s: float = 10.0, **options: Any) -> None:
        self.now = 0.0
        self.files = Files()
        self.pool = AdapterPool(
            self.files.load, self.files.judge, self.files.stamp, most=most, aging_s=aging_s
        )
        overlap = options.pop("overlap", False)
        self.runner = FakeRunner(num_blocks=256, overlap=overlap)
        config = make_config({"model": "fake", "block_size": 4, **options})
        self.engine = Engine(config, self.runner, lambda: self.now, adapters=self.pool)
        self.engine.pending.threads[1] = LoadsInThreads(self.files)
        self.submits: dict[int, Submit] = {}
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, object] = {}
        self.loads = self.hits = 0
        self.waited = 0.0
        self.resident = 0
        self.adapters: list[list[str | None]] = []  # by step and row
        launch = self.runner.launch

        def note(batch):
            self.adapters.append(
                [row.adapter.version if row.adapter else None for row in batch.rows]
            )
            return launch(batch)

        self.runner.launch = note

    def submit(self, name: str | None, prompt: list[int] | None = None, **more: Any) -> int:
        key = len(self.submits)
        tokens = more.pop("max_tokens", 3)
        grammar = more.pop("grammar", "")
        params = SamplingParams(seed=key, max_tokens=tokens, lora_name=name, **more)
        deadline = None if params.deadline_ms is None else self.now + params.deadline_ms / 1000
        self.submits[key] = Submit(
            key=key,
            prompt=prompt or [1, 2, 3],
            params=params,
            arrival=self.now,
            deadline=deadline,
            grammar=grammar,
        )
        self.engine.send(self.submits[key])
        return key

    def step(self) -> None:
        report = self.engine.step()
        for event in report.events if report else []:
            if isinstance(event, Tokens):
                self.streams.setdefault(event.key, []).extend(event.ids)
            else:
                self.ends[event.key] = event
        if report is not None:
            self.loads += report.stats.adapter_loads
            self.hits += report.stats.adapter_hits
            self.waited += report.stats.adapter_wait_seconds
            self.resident = report.stats.adapters_resident
        self.engine.scheduler.check_integrity()

    def drain(self, *keys: int) -> None:
        """Until these have ended; the step waits for what is being loaded."""
        while not all(key in self.ends for key in keys or self.submits):
            self.step()

    def check(self) -> None:
        for key, submit in self.submits.items():
            assert self.streams.get(key) == solo_stream(submit)


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


class _Outbox:
    def __init__(self, house: House) -> None:
        self.house = house

    def put(self, report) -> None:
        for event in report.events:
            self.house.ends[event.key] = event


def test_a_name_that_no_file_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({"model": "m", "adapters": str(tmp_path)})
    for name in ("x" * 300, "ä" * 200):
        with pytest.raises(InvalidArgumentError, match=r"lora_name is .* of at most 255 bytes"):
            check_adapter(name, config)

    stat = os.stat

    def refuse(path: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("adapter_config.json"):
            raise PermissionError
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(InvalidArgumentError, match="must be the name of an adapter"):
        check_adapter("closed", config)


def test_files_are_found_as_long_as_they_are_there(tmp_path: Path) -> None:
    config = make_config({"model": "m", "adapters": str(tmp_path)})
    folder = tmp_path / "new"
    with pytest.raises(InvalidArgumentError, match="lora_name is 'new', but must be the name of"):
        check_adapter("new", config)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    check_adapter("new", config)
    assert adapter_names(config) == ["new"]
    for name in ("", ".", "..", "new/", "../new", "new/../new", ".new", "a\0b", "neu"):
        with pytest.raises(InvalidArgumentError, match="lora_name"):
            check_adapter(name, config)
    with pytest.raises(InvalidArgumentError, match="did you mean 'new'"):
        check_adapter("newt", config)
    with pytest.raises(InvalidArgumentError, match="lora_name"):
        check_adapter("new", make_config({"model": "m"}))
    folder.rename(tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match="lora_name is 'new', but must be the name of"):
        check_adapter("new", config)


def load_order(house: House) -> list[str]:
    """The adapters in the order of their loads, once every request has ended."""
    house.drain()
    house.check()
    return house.files.loads


TIERS = [{"name": "fast"}, {"name": "bulk", "aging_s": 50.0}]
FAST = {"tier": "fast"}
URGENT = {"priority": -5}


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


MAKES_WAY = [
    ({"priority_preempts": True}, URGENT),
    ({"tiers": [{"name": "fast", "ttft_ms": 100}, {"name": "bulk", "aging_s": 50.0}]}, FAST),
]


@pytest.mark.parametrize(("options", "urgent"), MAKES_WAY, ids=["priority", "tier"])
@pytest.mark.parametrize("overlap", [False, True])
def test_users_of_an_adapter_make_way_and_go_on_later(
    options: dict[str, Any], urgent: dict[str, Any], overlap: bool
) -> None:
    house = House(most=2, overlap=overlap, **options)
    a = [house.submit("a", max_tokens=60) for _ in range(2)]
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


@pytest.mark.parametrize(("options", "urgent"), MAKES_WAY, ids=["priority", "tier"])
def test_nobody_makes_way_for_an_adapter_that_cannot_be_loaded(
    options: dict[str, Any], urgent: dict[str, Any]
) -> None:
    house = House(most=1, **options)
    house.files.bad.add("bad")
    long = house.submit("a", max_tokens=60)
    while len(house.streams.get(long, [])) < 9:
        house.step()
    house.files.close("judge bad")
    bad = house.submit("bad", **urgent)
    for _ in range(5):
        house.step()
    house.files.gates["judge bad"].set()
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
    assert not house.pool._judgements


def house_with_a_long_request(**more: Any) -> tuple[House, int]:
    """A request runs with the only adapter that there is room for."""
    house = House(most=1, priority_preempts=True)
    key = house.submit("a", max_tokens=60, **more)
    while len(house.streams.get(key, [])) < 9:
        house.step()
    return house, key


def test_nobody_makes_way_whose_adapter_could_not_be_loaded_again() -> None:
    house, key = house_with_a_long_request()
    house.files.versions["a"] = "a, written anew"
    house.submit("urgent", **URGENT)
    assert load_order(house) == ["a", "urgent"]
    assert house.ends[key].timing.preemptions == 0


def take_back(house: House, key: int) -> int:
    """Returns the urgent request, whose adapter is being loaded."""
    house.files.close("urgent")
    urgent = house.submit("urgent", **URGENT)
    house.submit(None)
    while key not in house.engine.pending.waiting:
        house.step()
    return urgent


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


TARGET = [{"name": "fast", "ttft_ms": 100}, {"name": "bulk", "aging_s": 50.0}]


def house_with_an_aged_backlog() -> tuple[House, list[int]]:
    """Bulk requests use both adapters that there is room for. They and four others have aged."""
    house = House(most=2, tiers=TARGET)
    running = [house.submit(name, max_tokens=200) for name in "ab"]
    while any(not house.streams.get(key) for key in running):
        house.step()
    for name in "cdef":
        house.submit(name, max_tokens=60)
    house.step()
    house.now = 60.0
    return house, running


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


def test_without_an_option_nobody_is_asked_to_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(most=1, tiers=TIERS)
    monkeypatch.setattr(house.pool, "blocked", None)
    house.submit("a", max_tokens=30)
    house.submit("urgent", **FAST)
    assert load_order(house) == ["a", "urgent"]


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
