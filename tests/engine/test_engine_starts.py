"""Engines that start, hang or fail while they load a model, or do not stay up."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from jitney.engine import fork_server as fork_server_module
from jitney.engine.supervisor import SupervisedEngine
from jitney.errors import CheckpointError, LoadError, UnavailableError
from jitney.messages import (
    Failed,
)
from jitney.read_config import make_config

from tests.engine.front import LOADER, Front, fork_server_of


def child_commands() -> Iterator[list[str]]:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
            yield child.cmdline()


def test_an_engine_looks_for_no_garbage_among_what_was_imported() -> None:
    told = "collects while importing: False, now: True, mostly frozen: True"
    with pytest.raises(CheckpointError, match=told):
        SupervisedEngine(make_config({"model": "garbage"}), LOADER).start()


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
    good = front.engine.config
    front.engine.config = make_config({"model": "broken"})
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


@pytest.mark.parametrize("hangs", ["the engine", "the fork server"])
def test_a_first_load_that_hangs_fails(hangs: str) -> None:
    loader = LOADER if hangs == "the engine" else "tests.engine.deadly_runner:hanging_loader"
    config = make_config({"model": "hangs", "load_watchdog_s": 1.0})
    with pytest.raises(LoadError, match=r"no progress in loading .* for 1 s \(load_watchdog_s\)"):
        SupervisedEngine(config, loader).start()
    assert not [command for command in child_commands() if loader in command]


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


def test_when_memory_is_short_the_engine_goes_before_its_front(
    make_front: Callable[..., Front],
) -> None:
    def score(pid: int | str | None) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert score(make_front().engine.pid) > score("self")


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
