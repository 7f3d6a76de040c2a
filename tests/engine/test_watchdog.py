"""Which engines the watchdog ends, and which it leaves alone."""

import time
from collections.abc import Callable

from jitney.messages import (
    Failed,
)

from tests.engine.deadly_runner import (
    COMPILES,
    HANGING_GRAMMAR,
    HANGS,
    SLOW_GRAMMAR,
)
from tests.engine.front import Front


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


def test_time_in_which_the_front_was_stopped_is_no_silence_of_the_engine(
    make_front: Callable[..., Front],
) -> None:
    """A paused container stops both. The engine is given the time again to send something."""
    front = make_front(watchdog_s=3.0)
    front.submit(3, HANGS)
    time.sleep(1.0)
    front.engine._clock = lambda: time.monotonic() + 3600.0
    began = time.monotonic()
    front.read_until(lambda: front.engine.health.restarts.total() == 1)
    assert time.monotonic() - began > 2.5


def test_a_step_that_compiles_does_not_hang(make_front: Callable[..., Front]) -> None:
    """It says so before each kernel, and takes longer than ``watchdog_s`` in all."""
    front = make_front(watchdog_s=4.0)
    front.finish(front.submit(1, COMPILES))
    assert not front.engine.health.restarts


def test_an_idle_engine_does_not_hang(make_front: Callable[..., Front]) -> None:
    front = make_front(watchdog_s=2.0)
    front.finish(front.submit(1))
    time.sleep(3.0)
    front.finish(front.submit(2))
    assert not front.engine.health.restarts
