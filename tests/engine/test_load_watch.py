"""Whether a load gets on: by messages, and by what its processes compute."""

import subprocess
import sys

import pytest
from jitney.engine import load_watch
from jitney.engine.load_watch import LoadWatch, ticks_of_all


def test_a_load_without_progress_hangs() -> None:
    watch = LoadWatch(most_s=5.0, now=100.0)
    assert watch.look([], 105.0)
    assert not watch.look([], 105.1)
    watch.note_message("reading", 105.0)
    assert watch.look([], 110.0)
    assert not watch.look([], 110.1)


def test_what_computes_gets_on_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as long as what does nothing."""
    ticks = iter(range(1000))
    monkeypatch.setattr(load_watch, "ticks_of_all", lambda pid: next(ticks))
    watch = LoadWatch(most_s=5.0, now=0.0)
    for second in range(51):
        assert watch.look([1], float(second))
    assert not watch.look([1], 51.0)
    watch.note_message("reading", 51.0)
    assert watch.look([1], 52.0)


def test_what_looks_for_a_file_again_and_again_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that sleeps computes a little: here one tick in 20 s."""
    monkeypatch.setattr(load_watch, "ticks_of_all", lambda pid: second // 20)
    watch = LoadWatch(most_s=100.0, now=0.0)
    for second in range(120):
        is_getting_on = watch.look([1], float(second))
        if not is_getting_on:
            break
    assert second == 101


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """All processes may have been stopped."""
    watch = LoadWatch(most_s=5.0, now=0.0)
    assert watch.look([], 4.0)
    assert watch.look([], 3600.0)
    assert watch.look([], 3605.0)
    assert not watch.look([], 3606.0)


def test_who_sends_the_same_messages_again_and_again_hangs() -> None:
    watch = LoadWatch(most_s=5.0, now=0.0)
    for second in range(6):
        watch.note_message("the file is not there", float(second))
        watch.note_message("waiting for it", float(second))
        assert watch.look([], float(second))
    assert not watch.look([], 6.0)
    watch.note_message("it is there", 6.0)
    assert watch.look([], 6.0)


def test_a_load_that_never_ends_hangs_whatever_it_sends() -> None:
    """A hundred times as long as what does nothing. What was stopped meanwhile does not count."""
    watch = LoadWatch(most_s=5.0, now=0.0)
    assert watch.look([], 1000.0), "it was stopped"
    for second in range(1000, 1501):
        watch.note_message(f"attempt {second}", float(second))
        assert watch.look([], float(second))
    watch.note_message("attempt 1501", 1501.0)
    assert not watch.look([], 1501.0)


SCRIPT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print("on", flush=True)
time.sleep(3600)
"""


def test_what_a_child_computes_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"on\n"
            before = ticks_of_all(parent.pid)
            assert any(ticks_of_all(parent.pid) > before for _ in range(100_000))
            (child,) = load_watch.children_of(parent.pid)
            subprocess.run(["kill", "-9", str(child)], check=True)
        finally:
            parent.kill()
    assert ticks_of_all(parent.pid) == 0, "it has ended"
