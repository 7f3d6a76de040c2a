"""Calls of several owners: in turn, one of an owner at a time."""

import threading
from collections.abc import Iterator

import pytest
from jitney.frontend.fair_pool import FairPool

PATIENCE_S = 60.0


class Calls:
    """Calls that note when they begin, and end when they may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._may_end = threading.Semaphore(0)

    def run(self, name: str) -> None:
        with self._changed:
            self.begun.append(name)
            self._changed.notify()
        assert self._may_end.acquire(timeout=PATIENCE_S)

    def wait_for(self, count: int) -> list[str]:
        """The calls that have begun, once they are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, PATIENCE_S)
            return self.begun.copy()

    def end_one(self) -> None:
        self._may_end.release()


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    for _ in range(100):
        made.end_one()


def submit(pool: FairPool, calls: Calls, *names: str) -> None:
    """The first letter is the owner."""
    for name in names:
        pool.submit(name[0], lambda name=name: calls.run(name))  # type: ignore[misc]


def test_owners_take_turns(calls: Calls) -> None:
    pool = FairPool(1, "test")
    submit(pool, calls, "x1")
    calls.wait_for(1)
    submit(pool, calls, "a1", "a2", "a3", "b1", "c1", "b2")
    for count in range(1, 8):
        calls.wait_for(count)
        calls.end_one()
    assert calls.begun == ["x1", "a1", "b1", "c1", "a2", "b2", "a3"]
    pool.shutdown()


def test_an_owner_has_one_call_at_a_time(calls: Calls) -> None:
    """Although a thread is free."""
    pool = FairPool(2, "test")
    submit(pool, calls, "a1", "a2", "a3")
    calls.wait_for(1)
    submit(pool, calls, "b1")
    assert calls.wait_for(2) == ["a1", "b1"]
    calls.end_one()
    calls.end_one()
    assert calls.wait_for(3)[2] == "a2"
    pool.shutdown()


class Panic(BaseException):
    """As native code raises."""


def test_a_call_that_fails_holds_up_nobody(calls: Calls) -> None:
    def panic() -> None:
        raise Panic

    pool = FairPool(1, "test")
    pool.submit("a", lambda: 1 / 0)
    pool.submit("a", panic)
    submit(pool, calls, "a1")
    calls.wait_for(1)
    pool.shutdown()


def test_after_the_shutdown_nothing_is_taken_or_begun(calls: Calls) -> None:
    pool = FairPool(1, "at-shutdown")
    submit(pool, calls, "a1", "a2", "b1")
    calls.wait_for(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        submit(pool, calls, "a3")
    calls.end_one()
    for thread in threading.enumerate():
        if thread.name.startswith("at-shutdown"):
            thread.join(PATIENCE_S)
    assert calls.begun == ["a1"]
