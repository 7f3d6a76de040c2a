"""An engine in a real process, killed in every way: its requests go on, and nobody else's end."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from jitney.engine import supervisor
from jitney.engine.supervisor import SupervisedEngine
from jitney.engine.wire import Ready, Start
from jitney.errors import UnavailableError
from jitney.messages import (
    Cancel,
    Cancelled,
    Failed,
    StepStats,
)
from jitney.read_config import make_config

from tests.engine.deadly_runner import (
    DEADLY_GRAMMAR,
    DEADLY_WHEN_BEGUN,
    HANGS,
    KILLS,
    LOSES_THE_DEVICE,
)
from tests.engine.front import PATIENCE_S, Front, fork_server_of


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
