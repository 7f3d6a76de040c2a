"""Room in the shared memory of the server's stub, and what is done without."""

import logging
import os
import resource
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from jitney import stub_memory
from jitney.server_log import log_to_server


class Pool:
    """The stub's object of that name."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked = 0

    def free_memory(self) -> int:
        self.asked += 1
        return self.free


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """An empty one, on a file system without space."""
    made = Pool(0)
    module: Any = types.ModuleType("c_python_backend_utils")
    module.shared_memory = made
    monkeypatch.setitem(sys.modules, "c_python_backend_utils", module)
    set_space(monkeypatch, 0)
    return made


def set_space(monkeypatch: pytest.MonkeyPatch, space: int) -> None:
    status = types.SimpleNamespace(f_bavail=space // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)


def test_a_pool_that_may_not_grow_needs_room(pool: Pool) -> None:
    assert not stub_memory.has_room()
    pool.free = stub_memory.ROOM
    assert stub_memory.has_room()


def test_a_pool_that_may_grow_is_not_asked(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_space(monkeypatch, stub_memory.SPACE_TO_GROW)
    assert stub_memory.has_room()
    assert pool.asked == 0


def test_a_limit_on_files_keeps_a_pool_from_growing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_space(monkeypatch, stub_memory.SPACE_TO_GROW)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, resource.RLIM_INFINITY))
    assert not stub_memory.has_room()


def test_outside_of_a_stub_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "c_python_backend_utils", None)
    set_space(monkeypatch, 0)
    assert stub_memory.has_room()


class Clock:
    """In place of the module ``time``: it passes only in a sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_wait_for_room_ends_with_room_or_in_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(stub_memory, "time", clock)
    assert not stub_memory.wait_for_room(until=0.03)
    assert pool.asked > 1
    assert 0.03 <= clock.now < 0.03 + 2 * stub_memory.WAIT_S
    pool.free = stub_memory.ROOM
    ended_at = clock.now
    assert stub_memory.wait_for_room(until=60.0)
    assert clock.now == ended_at, "there is room at once"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The package's, as it was before once the test ends."""
    log = logging.getLogger("jitney")
    before = (log.level, log.propagate, log.handlers[:])
    yield log
    log.setLevel(before[0])
    log.propagate = before[1]
    log.handlers[:] = before[2]


def test_without_room_log_lines_are_printed(
    pool: Pool, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server would end the stub for want of memory."""
    lines: list[str] = []
    logger = types.SimpleNamespace(log_info=lines.append, log_warn=lines.append)
    log_to_server(logger)
    log.warning("full")
    assert lines == []
    assert capsys.readouterr().err == "WARNING: full\n"
    pool.free = stub_memory.ROOM
    log.warning("not full")
    assert lines == ["not full"]
