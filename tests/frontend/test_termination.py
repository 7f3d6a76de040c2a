"""What the front does at the signals of a stop, and that it hears them while the main thread sits
in C."""

import itertools
import math
import signal
import subprocess
import sys
import textwrap

import pytest
from jitney.frontend.termination import Termination
from jitney.stop_signals import STOPS, TIME_IS_KEPT, TIME_IS_OVER


class FakeService:
    """Notes the times that what is open has got."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def drain(self, grace_s: float) -> None:
        self.times.append(grace_s)

    def count_error(self) -> None:
        raise AssertionError


def times_after(*numbers: signal.Signals) -> list[float]:
    service = FakeService()
    termination = Termination(service, drain_s=5.0)
    for number in numbers:
        termination.hear(number)
    return service.times


def test_without_a_launcher_running_requests_have_drain_s() -> None:
    assert times_after(STOPS, STOPS) == [5.0], "another signal does not give more time"


@pytest.mark.parametrize("signals", [*itertools.permutations([STOPS, TIME_IS_KEPT, STOPS])])
def test_drain_s_cuts_nothing_while_a_launcher_keeps_the_time(
    signals: tuple[signal.Signals, ...],
) -> None:
    """Whoever stops a service of systemd sends SIGTERM to all of its processes, too."""
    assert times_after(*signals)[-1] == math.inf
    assert times_after(*signals, TIME_IS_OVER, TIME_IS_KEPT, STOPS)[-1] == 0


def test_a_terminal_that_changes_its_size_ends_nothing() -> None:
    assert times_after(TIME_IS_OVER) == []
    assert times_after(STOPS, TIME_IS_OVER) == [5.0]


def test_signals_are_heard_though_the_main_thread_runs_no_python() -> None:
    """One for which the callback fails is counted, and does not end the thread."""
    program = textwrap.dedent("""
        import os, signal, threading, time
        from jitney.frontend.termination import on_signals

        main_in_python = threading.Event()
        heard = []
        errors = []

        def callback(number):
            if not errors:
                os.kill(os.getpid(), signal.SIGURG)  # the next one runs it again
                raise ValueError
            heard.append((number, not main_in_python.is_set()))

        on_signals((signal.SIGTERM, signal.SIGURG), callback, lambda: errors.append(1))

        def kill():
            os.kill(os.getpid(), signal.SIGTERM)
            ends = time.monotonic() + 60
            while not heard and time.monotonic() < ends:
                time.sleep(0.01)
            lock.release()

        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=kill).start()
        lock.acquire()  # in C, like the stub's main thread in its message loop
        main_in_python.set()
        print(heard, errors)
    """)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == f"[({int(signal.SIGURG)}, True)] [1]"
