"""An engine in a real process, killed in every way: its requests go on, and nobody else's end."""

import contextlib
import itertools
import os
import queue
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from jitney.engine import fork_server as fork_server_module
from jitney.engine import process, supervisor
from jitney.engine.engine import Engine
from jitney.engine.supervisor import SupervisedEngine
from jitney.engine.wire import Frames, Ready, RowOwner, Start, StepBegun, ToEngine, ToFront
from jitney.errors import CheckpointError, LoadError, UnavailableError
from jitney.messages import (
    Cancel,
    Cancelled,
    Failed,
    Finished,
    StepReport,
    StepStats,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.engine.deadly_runner import (
    COMPILES,
    DEADLY_GRAMMAR,
    DEADLY_WHEN_BEGUN,
    HANGING_GRAMMAR,
    HANGS,
    KILLS,
    LOSES_THE_DEVICE,
    SLOW_GRAMMAR,
)
from tests.fake_runner import FakeRunner
from tests.solo_stream import solo_stream

LOADER = "tests.engine.deadly_runner:loader"
PATIENCE_S = 60.0
"""A start of a process on a busy machine takes seconds."""


class Front:
    """An engine's process, the thread that runs it, and what came of each request."""

    def __init__(self, model: str = "fine", loader: str = LOADER, **options: Any) -> None:
        config = make_config({"model": model, "block_size": 4, **options})
        self.engine = SupervisedEngine(config, loader)
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, Finished | Cancelled | Failed] = {}
        self.submits: dict[int, Submit] = {}
        self.blocks: set[int] = set()
        self.stats = StepStats()  # of the last report that was read
        self._keys = itertools.count()
        self._thread = threading.Thread(target=self.engine.run, args=(self.reports,), daemon=True)

    def start(self) -> "Front":
        self.engine.start()
        self._thread.start()
        return self

    def make(
        self,
        *prompt: int,
        max_tokens: int = 8,
        seed: int | None = None,
        lora_name: str | None = None,
        **more: Any,
    ) -> Submit:
        key = next(self._keys)
        seed = key if seed is None else seed
        params = SamplingParams(max_tokens=max_tokens, seed=seed, lora_name=lora_name)
        now = time.monotonic()
        self.submits[key] = Submit(key=key, prompt=list(prompt), params=params, arrival=now, **more)
        return self.submits[key]

    def submit(self, *prompt: int, **more: Any) -> int:
        submit = self.make(*prompt, **more)
        self.engine.send(submit)
        return submit.key

    def read_until(self, holds: Callable[[], bool]) -> None:
        """Take reports until ``holds()``."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            try:
                report = self.reports.get(timeout=0.02)
            except queue.Empty:
                assert time.monotonic() < deadline, "it did not happen in time"
                continue
            self.stats = report.stats
            if report.stats.batch_sequences:
                self.blocks.add(report.stats.blocks_total)
            for event in report.events:
                if isinstance(event, Tokens):
                    self.streams.setdefault(event.key, []).extend(event.ids)
                elif isinstance(event, (Finished, Cancelled, Failed)):
                    assert event.key not in self.ends, "a second end"
                    self.ends[event.key] = event

    def finish(self, *keys: int) -> None:
        """Wait for these requests' ends, and compare what they got with what they must get."""
        self.read_until(lambda: all(key in self.ends for key in keys))
        for key in keys:
            assert isinstance(self.ends[key], Finished), self.ends[key]
            assert self.streams[key] == solo_stream(self.submits[key])

    def has(self, key: int, tokens: int) -> bool:
        return len(self.streams.get(key, ())) >= tokens

    def kill(self) -> None:
        assert self.engine.pid is not None
        os.kill(self.engine.pid, signal.SIGKILL)

    def close(self) -> None:
        self.engine.stop()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()


@pytest.fixture
def make_front() -> Iterator[Callable[..., Front]]:
    made: list[Front] = []

    def make(**options: Any) -> Front:
        made.append(Front(**options).start())
        return made[-1]

    yield make
    for front in made:
        front.close()


def test_streams_go_on_after_kills(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(supervisor._log, "warning", lambda text, *of: said.append(text % of))
    connect, tokenizers = SupervisedEngine._connect, list[bytes]()

    def note(self: SupervisedEngine, start: Start) -> Ready:
        ready = connect(self, start)
        tokenizers.append(ready.tokenizer)
        return ready

    monkeypatch.setattr(SupervisedEngine, "_connect", note)
    front = make_front()
    keys = [front.submit(0, 1, 2, max_tokens=400, request_id="ride-0")]
    keys += [front.submit(key, 1, 2, max_tokens=400) for key in range(1, 6)]
    for at in (40, 80, 160):
        front.read_until(lambda at=at: all(front.has(key, at) for key in keys))  # type: ignore[misc]
        before = front.engine.pid
        front.kill()
        front.read_until(lambda: all(front.has(key, at + 40) for key in keys))  # noqa: B023
        assert front.engine.pid != before
    front.finish(*keys)
    assert front.engine.health.restarts == {"killed": 3}
    assert tokenizers == [b"words", b"", b"", b""], "the front has it"
    assert front.engine.health.replayed_requests == 18
    assert front.engine.health.replayed_tokens >= 6 * (40 + 80 + 160)
    late = front.submit(7)
    front.finish(late)
    line = r"the engine ended \(killed\) and is up again after \d+\.\d s; 6 requests go on: "
    line += "'ride-0', #1, #2, #3, #4, #5"
    assert [re.fullmatch(line, each) is not None for each in said] == [True] * 3


def test_a_lost_device_is_a_death_too(make_front: Callable[..., Front]) -> None:
    front = make_front()
    others = [front.submit(1, max_tokens=200), front.submit(2, max_tokens=200)]
    front.read_until(lambda: front.has(others[1], 5))
    guilty = front.submit(3, LOSES_THE_DEVICE)
    front.finish(*others)
    front.read_until(lambda: guilty in front.ends)
    end = front.ends[guilty]
    assert isinstance(end, Failed)
    assert end.code == "INTERNAL"
    # Twice among others, at most once beside those that were proved innocent, twice alone.
    assert front.engine.health.restarts.keys() == {"device_lost"}
    assert 4 <= front.engine.health.restarts.total() <= 5


def test_who_kills_every_engine_is_failed_and_nobody_else(
    make_front: Callable[..., Front],
) -> None:
    front = make_front()
    others = [front.submit(key, max_tokens=300) for key in range(4)]
    front.read_until(lambda: all(front.has(key, 5) for key in others))
    guilty = front.submit(3, KILLS)
    late = front.submit(5)
    front.finish(*others, late)
    front.read_until(lambda: guilty in front.ends)
    assert isinstance(front.ends[guilty], Failed)
    # Twice among others, at most once beside those that were proved innocent, ten times alone.
    assert front.engine.health.restarts.keys() == {"killed"}
    assert 12 <= front.engine.health.restarts.total() <= 13


def test_two_who_kill_are_failed_one_by_one_and_nobody_else(
    make_front: Callable[..., Front],
) -> None:
    """Six deaths in a row without a completed step are no reason to give the others up."""
    front = make_front()
    front.engine.send(front.make(LOSES_THE_DEVICE))
    front.engine.send(front.make(3, LOSES_THE_DEVICE))
    others = [front.submit(key, max_tokens=100) for key in range(4)]
    front.finish(*others)
    front.read_until(lambda: {0, 1} <= front.ends.keys())
    assert all(isinstance(front.ends[key], Failed) for key in (0, 1))


def fork_server_of(front: Front) -> psutil.Process:
    parent = psutil.Process(front.engine.pid).parent()
    assert parent is not None
    return parent


def test_the_fork_server_may_die_too(make_front: Callable[..., Front]) -> None:
    front = make_front()
    key = front.submit(1, max_tokens=300)
    front.read_until(lambda: front.has(key, 20))
    fork_server_of(front).kill()
    front.finish(key)
    assert front.engine.health.restarts == {"killed": 1}


def newest_process(front: Front, victim: str) -> int | None:
    """The fork server or, once it is forked, its engine: also while a model is loaded."""
    fork_server = front.engine._fork_server.pid
    if victim == "fork server":
        return fork_server
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(fork_server).children():
            return child.pid
    return None


@pytest.mark.parametrize("victim", ["engine", "fork server"])
def test_twenty_random_kills_fail_nobody(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Each soon after a start, many while a model is loaded or before a step is over."""
    monkeypatch.setattr(supervisor, "_PAUSES_AFTER_KILLS_S", (0.05,))
    rng = random.Random(victim)
    front = make_front()
    killed: set[int] = set()
    ends_at = time.monotonic() + 2 * PATIENCE_S
    while len(killed) < 20:
        assert time.monotonic() < ends_at, "what was killed is not replaced"
        while len(front.submits) - len(front.ends) < 8:
            front.submit(len(front.submits) % 40, max_tokens=400)
        end = time.monotonic() + rng.uniform(0.0, 0.3)
        front.read_until(lambda: time.monotonic() > end)  # noqa: B023
        pid = newest_process(front, victim)
        if pid is not None and pid not in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    front.finish(*front.submits)
    assert front.engine._refusal is None


@pytest.mark.parametrize("phase", ["the engine ends", "an engine is to be forked"])
def test_a_fork_server_that_is_stopped_is_given_up(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Deadlines hold meanwhile, and requests go on with another one."""
    monkeypatch.setattr(fork_server_module, "_MOST_ENDING_S", 2.0)
    front = make_front()
    if phase == "an engine is to be forked":
        front.engine.config = msgspec.structs.replace(front.engine.config, load_watchdog_s=2.0)
    goes_on = front.submit(1, max_tokens=300)
    front.read_until(lambda: front.has(goes_on, 5))
    stopped = fork_server_of(front)
    if phase == "the engine ends":
        stopped.suspend()
        front.kill()
    else:
        # It reports the engine's end, and is stopped before it forks the next one.
        fork = fork_server_module.ForkServer.fork

        def fork_once_stopped(self: Any, tick: Any) -> Any:
            monkeypatch.setattr(fork_server_module.ForkServer, "fork", fork)
            stopped.suspend()
            return fork(self, tick)

        monkeypatch.setattr(fork_server_module.ForkServer, "fork", fork_once_stopped)
        front.kill()
    late = front.submit(2, deadline=time.monotonic() + 0.2)
    front.read_until(lambda: late in front.ends)
    assert not front.engine.health.up
    end = front.ends[late]
    assert isinstance(end, Failed)
    assert end.code == "DEADLINE_EXCEEDED"
    if phase == "the engine ends":
        front.finish(goes_on)
    else:  # a load that hangs ends what is open
        front.read_until(lambda: goes_on in front.ends)
        front.read_until(lambda: front.engine.health.up)
        front.finish(front.submit(3))


def test_a_grammar_that_ends_engines_when_a_request_begins_is_found(
    make_front: Callable[..., Front],
) -> None:
    """It is compiled, but a request cannot begin with it."""
    front = make_front()
    others = [front.submit(key, max_tokens=200) for key in range(2)]
    front.read_until(lambda: all(front.has(key, 5) for key in others))
    guilty = front.submit(9, grammar=DEADLY_WHEN_BEGUN)
    front.finish(*others)
    front.read_until(lambda: guilty in front.ends)
    end = front.ends[guilty]
    assert isinstance(end, Failed)
    assert "the grammar of this request ended the engine" in end.message


def test_a_grammar_that_ends_engines_is_found(make_front: Callable[..., Front]) -> None:
    """It is compiled outside a step, beside requests that are computed."""
    front = make_front()
    others = [front.submit(key, max_tokens=200) for key in range(4)]
    front.read_until(lambda: all(front.has(key, 5) for key in others))
    guilty = [front.submit(9, grammar=DEADLY_GRAMMAR) for _ in range(3)]
    good = front.submit(5, grammar="0,2:6")
    front.finish(*others, good)
    front.read_until(lambda: all(key in front.ends for key in guilty))
    for key in guilty:
        end = front.ends[key]
        assert isinstance(end, Failed)
        assert "the grammar of this request ended the engine" in end.message
    assert front.engine.health.restarts.total() <= 4 + 2 * len(others)


def test_an_engine_that_waits_for_a_resource_is_not_hung(make_front: Callable[..., Front]) -> None:
    """Although its only request waits for longer than the watchdog does."""
    front = make_front(watchdog_s=3.5)
    front.finish(front.submit(1, grammar=SLOW_GRAMMAR))
    assert not front.engine.health.restarts


def test_a_resource_that_is_never_there_ends_its_request_alone(
    make_front: Callable[..., Front],
) -> None:
    """And holds up nobody for long: meanwhile the next grammar is compiled."""
    front = make_front(load_watchdog_s=8.0)
    stuck = front.submit(1, grammar=HANGING_GRAMMAR)
    good = front.submit(2, grammar="0,2:6")
    front.finish(front.submit(3), good)
    assert stuck not in front.ends
    front.read_until(lambda: stuck in front.ends)
    said = "the grammar was not there after 8 s (load_watchdog_s)"
    assert front.ends[stuck] == Failed(stuck, "UNAVAILABLE", said)
    assert not front.engine.health.restarts


def test_the_watchdog_ends_an_engine_that_hangs(make_front: Callable[..., Front]) -> None:
    front = make_front(watchdog_s=2.0)
    other = front.submit(1, max_tokens=100)
    front.read_until(lambda: front.has(other, 5))
    guilty = front.submit(3, HANGS)
    front.finish(other)
    front.read_until(lambda: guilty in front.ends)
    assert 4 <= front.engine.health.restarts["hung"] <= 5


def test_a_step_that_compiles_does_not_hang(make_front: Callable[..., Front]) -> None:
    """It says so before each kernel, and takes longer than ``watchdog_s`` in all."""
    front = make_front(watchdog_s=4.0)
    front.finish(front.submit(1, COMPILES))
    assert not front.engine.health.restarts


def test_events_of_the_supervisor_itself_count_no_step_again(
    make_front: Callable[..., Front],
) -> None:
    """Nor do they say that there is no cache, if they come before the first report. They come long
    before the watchdog ends an engine that hangs."""
    front = make_front(watchdog_s=86_400)
    num_blocks = front.engine.info.num_blocks
    early = front.submit(1, HANGS, deadline=time.monotonic() + 0.5)
    front.read_until(lambda: early in front.ends)
    end = front.ends[early]
    assert isinstance(end, Failed)
    assert end.code == "DEADLINE_EXCEEDED"
    assert not front.engine.health.restarts
    assert front.stats == StepStats(blocks_total=num_blocks)
    front.kill()
    front.read_until(lambda: front.engine.health.restarts.total() == 1)
    front.finish(front.submit(2))
    assert front.stats.generated_tokens > 0
    late = front.submit(1, HANGS, deadline=time.monotonic() + 0.5)
    front.read_until(lambda: late in front.ends)
    assert (front.stats.generated_tokens, front.stats.batch_sequences) == (0, 0)
    assert (front.stats.step_seconds, front.stats.blocks_total) == (0.0, num_blocks)
    front.kill()


def test_the_cache_keeps_its_size(make_front: Callable[..., Front]) -> None:
    """Else a request that the first engine has taken might not fit into the next one's."""
    front = make_front(model="measures")
    size = front.engine.info.num_blocks
    assert size != 256
    key = front.submit(1, max_tokens=300)
    front.read_until(lambda: front.has(key, 20))
    front.kill()
    front.finish(key)
    assert front.blocks == {size}
    assert front.engine.health.restarts == {"killed": 1}


def test_an_idle_engine_does_not_hang(make_front: Callable[..., Front]) -> None:
    front = make_front(watchdog_s=2.0)
    front.finish(front.submit(1))
    time.sleep(3.0)
    front.finish(front.submit(2))
    assert not front.engine.health.restarts


def test_cancels_while_the_engine_is_down(make_front: Callable[..., Front]) -> None:
    front = make_front()
    key = front.submit(1, max_tokens=900)
    front.read_until(lambda: front.has(key, 5))
    front.kill()
    front.engine.send(Cancel(key))
    front.read_until(lambda: key in front.ends)
    assert front.ends[key] == Cancelled(key)


def test_the_queue_s_limit_holds_for_what_came_while_the_engine_was_down(
    make_front: Callable[..., Front],
) -> None:
    """The next engine's scheduler refuses what is too much, and nothing that ran before."""
    front = make_front(max_queued=2, max_num_seqs=1)
    keys = [front.submit(1, max_tokens=100)]
    front.read_until(lambda: front.has(0, 5))
    config = make_config({"model": "slow", "block_size": 4, "max_queued": 2, "max_num_seqs": 1})
    front.engine.config = config
    front.kill()
    front.read_until(lambda: not front.engine.health.up)
    keys += [front.submit(2), front.submit(3)]
    refused = front.submit(4)
    front.read_until(lambda: refused in front.ends)
    end = front.ends[refused]
    assert isinstance(end, Failed)
    assert (end.code, "and at most 2 may (max_queued)" in end.message) == ("UNAVAILABLE", True)
    front.finish(*keys)
    assert front.engine.health.replayed_requests == 1, "no engine had got the others"


def test_an_engine_looks_for_no_garbage_among_what_was_imported() -> None:
    told = "collects while importing: False, now: True, mostly frozen: True"
    with pytest.raises(CheckpointError, match=told):
        SupervisedEngine(make_config({"model": "garbage"}), LOADER).start()


def child_commands() -> Iterator[list[str]]:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
            yield child.cmdline()


def test_a_load_that_fails_says_why() -> None:
    with pytest.raises(CheckpointError, match="is truncated"):
        SupervisedEngine(make_config({"model": "broken"}), LOADER).start()
    with pytest.raises(LoadError, match="killed by signal 9"):
        SupervisedEngine(make_config({"model": "dies"}), LOADER).start()
    with pytest.raises(LoadError, match="exit status 1"):
        SupervisedEngine(make_config({"model": "fine"}), "no.such.module:load").start()
    assert not [command for command in child_commands() if LOADER in command]


def test_an_engine_that_does_not_come_back(make_front: Callable[..., Front]) -> None:
    """Open requests end as UNAVAILABLE, further ones are refused; once it is back, all is well."""
    front = make_front()
    key = front.submit(1, max_tokens=900)
    front.read_until(lambda: front.has(key, 5))
    good, front.engine.config = front.engine.config, make_config({"model": "broken"})
    front.kill()
    front.read_until(lambda: key in front.ends)
    end = front.ends[key]
    assert isinstance(end, Failed)
    assert end.code == "UNAVAILABLE"
    with pytest.raises(UnavailableError, match="being started again"):
        front.submit(2)
    assert not front.engine.health.up
    assert front.engine.health.restarts == {"killed": 1}
    front.engine.config = good
    front.read_until(lambda: front.engine.health.up)
    front.finish(front.submit(2))


def test_a_load_that_hangs_is_given_up_and_tried_again(make_front: Callable[..., Front]) -> None:
    """Open requests end as UNAVAILABLE; once a later attempt succeeds, all is well."""
    front = make_front()
    key = front.submit(1, max_tokens=900)
    front.read_until(lambda: front.has(key, 5))
    good = front.engine.config
    front.engine.config = msgspec.structs.replace(good, model="hangs", load_watchdog_s=1.5)
    front.kill()
    late = front.submit(2, deadline=time.monotonic() + 0.2)
    front.read_until(lambda: late in front.ends)
    end = front.ends[late]
    assert isinstance(end, Failed)
    assert (end.code, key in front.ends) == ("DEADLINE_EXCEEDED", False)
    front.read_until(lambda: key in front.ends)
    end = front.ends[key]
    assert isinstance(end, Failed)
    assert end.code == "UNAVAILABLE"
    front.engine.config = good
    front.read_until(lambda: front.engine.health.up)
    front.finish(front.submit(2))


def test_a_first_load_that_hangs_fails() -> None:
    config = make_config({"model": "hangs", "load_watchdog_s": 1.0})
    with pytest.raises(LoadError, match=r"does not get on .* for 1 s \(load_watchdog_s\)"):
        SupervisedEngine(config, LOADER).start()
    assert not [command for command in child_commands() if LOADER in command]


def test_five_deaths_without_a_step_are_enough(make_front: Callable[..., Front]) -> None:
    """Requests are refused for a while then, and taken again once a later attempt has succeeded."""
    front = make_front()
    for deaths in range(1, 6):
        front.read_until(lambda: front.engine.health.up)
        assert front.engine.pid is not None
        os.kill(front.engine.pid, signal.SIGABRT)
        front.read_until(lambda: front.engine.health.restarts["killed"] == deaths)  # noqa: B023
    front.read_until(lambda: front.engine._refusal is not None)
    with pytest.raises(UnavailableError, match="does not stay up"):
        front.submit(1)
    front.read_until(lambda: front.engine.health.up)
    front.finish(front.submit(2))


def test_when_memory_is_short_the_engine_goes_before_its_front(
    make_front: Callable[..., Front],
) -> None:
    def score(pid: int | str | None) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert score(make_front().engine.pid) > score("self")


def test_stop_ends_what_is_open(make_front: Callable[..., Front]) -> None:
    front = make_front()
    key = front.submit(1, max_tokens=900)
    front.read_until(lambda: front.has(key, 5))
    pid = front.engine.pid
    assert pid is not None
    front.close()
    front.read_until(lambda: key in front.ends)
    assert front.ends[key] == Failed(key, "UNAVAILABLE", "the model is being unloaded")
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(UnavailableError):
        front.submit(1)


def test_stop_while_the_engine_is_down(make_front: Callable[..., Front]) -> None:
    front = make_front()
    key = front.submit(1, max_tokens=900)
    front.read_until(lambda: front.has(key, 5))
    front.kill()
    front.close()
    front.read_until(lambda: key in front.ends)
    assert isinstance(front.ends[key], Failed)


def test_rows_are_blamed_while_their_step_is_in_flight() -> None:
    engine = SupervisedEngine(make_config({"model": "fine"}), LOADER)
    first = RowOwner(0, 0)
    second = RowOwner(1, 0)
    engine._take(StepBegun(in_flight=[], new=[first]))
    assert engine._rows == [first]
    engine._take(StepBegun(in_flight=[first], new=[second]))
    assert engine._rows == [first, second]
    engine._take(StepReport([], StepStats(steps_in_flight=1)))
    assert engine._rows == [second]
    engine._take(StepReport([], StepStats()))
    assert engine._rows == []
    engine.kill()


@pytest.mark.parametrize(
    ("sent", "status", "logged"), [(None, 0, 0), (b"\0\0\0\0" * 4, 1, 1)], ids=["gone", "garbage"]
)
def test_an_engine_that_cannot_read_its_front_says_why(
    monkeypatch: pytest.MonkeyPatch, sent: bytes | None, status: int, logged: int
) -> None:
    """An engine whose front is gone just ends."""
    statuses: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(process.os, "_exit", statuses.append)
    monkeypatch.setattr(process._log, "exception", said.append)
    ours, theirs = socket.socketpair()
    with theirs:
        if sent is not None:
            ours.sendall(sent)
        ours.close()
        process._read(Frames[ToEngine](theirs, ToEngine), engine=None)  # type: ignore[arg-type]
    assert (statuses, len(said)) == ([status], logged)


def test_a_request_that_comes_while_an_engine_ends_does_not_hide_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(process.os, "_exit", statuses.append)
    monkeypatch.setattr(process._log, "exception", said.append)
    engine = Engine(make_config({"model": "fine", "block_size": 4}), FakeRunner())
    engine.stop()  # as run() does before it raises
    ours, theirs = socket.socketpair()
    with theirs:
        submit = Submit(key=0, prompt=[1], params=SamplingParams(), arrival=0.0)
        Frames[ToFront](ours, ToFront).send(submit)
        ours.close()
        process._read(Frames[ToEngine](theirs, ToEngine), engine)
    assert (statuses, said) == ([0], [])
