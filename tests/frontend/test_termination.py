"""What the front does at the signals of a stop, and that it hears them while the main thread sits
in C."""

import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from jitney.frontend.termination import Termination
from jitney.stop_signals import LOOK, STOPS, VARIABLE, Note, read_note, write_note

from tests.real_server.client import wait_until


class FakeService:
    """Notes what it was told."""

    def __init__(self) -> None:
        self.calls: list[float | str] = []

    def drain(self, grace_s: float) -> None:
        self.calls.append(grace_s)

    def reopen(self) -> None:
        self.calls.append("reopen")

    def count_error(self) -> None:
        raise AssertionError


class Front:
    """A front that hears signals. ``note`` is what its launcher has written so far."""

    def __init__(self, reopen_s: float = 3600.0) -> None:
        self.service = FakeService()
        self.note: Note | None = None
        self._termination = Termination(
            self.service, drain_s=5.0, read_note=lambda: self.note, reopen_s=reopen_s
        )

    def hear(self, *events: signal.Signals | Note) -> list[float | str]:
        """What the service is told at these signals and notes."""
        for event in events:
            if isinstance(event, Note):
                self.note = event
            else:
                self._termination.hear(event)
        return self.service.calls


WAITS = (Note.WAIT, LOOK)
ENDS = (Note.END, LOOK)


@pytest.mark.parametrize(
    ("events", "calls"),
    [
        # Without a launcher, running requests have drain_s. Another signal gives no more time.
        ((STOPS, STOPS), [5.0]),
        # A signal alone may come from anybody.
        ((LOOK,), []),
        ((STOPS, LOOK), [5.0]),
        # With a launcher, drain_s does not count. systemd sends SIGTERM to all processes, too.
        (WAITS, [math.inf]),
        ((STOPS, *WAITS), [5.0, math.inf]),
        ((*WAITS, STOPS, *WAITS), [math.inf]),
        ((Note.WAIT, STOPS), [math.inf]),
        # When the time is over, nothing gives requests more of it.
        ((*WAITS, *ENDS), [math.inf, 0]),
        (ENDS, [0]),
        ((*WAITS, *ENDS, *WAITS, STOPS, *ENDS), [math.inf, 0]),
    ],
)
def test_what_ends_requests(
    events: Sequence[signal.Signals | Note], calls: list[float | str]
) -> None:
    assert Front().hear(*events) == calls


def test_a_stray_sigterm_drains_for_a_while_only() -> None:
    front = Front(reopen_s=-5.0)
    front.hear(STOPS)
    wait_until(lambda: front.service.calls == [5.0, "reopen"])
    front.hear(STOPS)
    wait_until(lambda: front.service.calls == [5.0, "reopen"] * 2)


def test_a_launcher_that_comes_later_ends_the_while() -> None:
    front = Front(reopen_s=-4.9)
    front.hear(STOPS, *WAITS)
    front._termination._reopen()  # the timer may have begun to run
    assert front.service.calls == [5.0, math.inf]


def test_a_note_that_can_no_longer_be_read_still_counts() -> None:
    front = Front()
    front.hear(*WAITS)
    front.note = None
    assert front.hear(STOPS) == [math.inf], "SIGTERM does not shorten the launcher's time"


def test_a_note_of_which_no_signal_has_told_yet_keeps_the_service_closed() -> None:
    front = Front()
    front.hear(STOPS, Note.WAIT)
    front._termination._reopen()
    assert front.service.calls == [5.0, math.inf]


def test_a_note_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "note"
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_note() is None, "no launcher of ours"
    monkeypatch.setenv(VARIABLE, str(file))
    assert read_note() is None, "it has written none yet"
    for note in Note:
        write_note(file, note)
        assert read_note() == note
    file.write_bytes(b"\xff")
    assert read_note() is None


def test_a_model_that_loads_during_a_stop_drains_at_once(tmp_path: Path) -> None:
    file = tmp_path / "note"
    write_note(file, Note.WAIT)
    program = textwrap.dedent("""
        from jitney.frontend.termination import drain_at_signals

        class Service:
            def drain(self, grace_s):
                print(grace_s)

            def count_error(self):
                pass

        drain_at_signals(Service(), 5.0)
    """)
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, VARIABLE: str(file)},
    )
    assert result.stdout.strip() == "inf"


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
