"""A gateway beside a server: a process that is started again whenever it has ended.

``serving`` calls :meth:`GatewayProcess.turn` twice a second.
"""

import contextlib
import enum
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from jitney.errors import JitneyError

from jitney_server.ports import check_different, choose_ports
from jitney_server.server import TritonServer

_START_S = 60.0
"""Seconds that a gateway has to listen after its start, and as many to check its options."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause between the end of a gateway and its next start. A gateway that ran for longer than
this is started again at once."""
_READ_BYTES = 65536
"""Most bytes that one turn reads of what a gateway has printed. The next turn reads on."""
_RUN_GATEWAY = """
import ctypes, signal
PR_SET_PDEATHSIG = 1  # the kernel sends SIGTERM when `jitney serve` ends, however it ends
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
from jitney.cli import main
main()
"""


class _State(enum.Enum):
    PAUSES = enum.auto()
    """There is no process. One is started when the pause is over."""
    STARTS = enum.auto()
    """There is a process, which does not listen yet."""
    LISTENS = enum.auto()
    """There is a process, which has printed its address."""
    KILLED = enum.auto()
    """There is a process, which did not listen in time and was killed."""


class GatewayProcess:
    """The gateway of one server. Nothing that happens to it stops the server."""

    def __init__(
        self,
        server: TritonServer,
        port: int,
        options: Sequence[str],
        *,
        say: Callable[[str], None],
        print_address: Callable[[str], None],
    ) -> None:
        """Does not start it. ``port``: 0 is a free one. ``say`` gets a line for each fault,
        ``print_address`` the address when a gateway listens for the first time."""
        self._server = server
        self._port = port
        self._options = options
        self._say = say
        self._print_address = print_address
        self._process: subprocess.Popen[bytes] | None = None
        self._state = _State.PAUSES
        self._printed = b""
        """What the process has printed of a line that is not complete yet."""
        self._started_at = 0.0
        self._start_again_at = 0.0
        """When the pause is over."""
        self._next_pause_s = 0.0
        """How long the pause will be when the process ends the next time."""
        self._has_listened = False
        """Whether any process of this gateway has listened."""

    def check(self) -> None:
        """Raise JitneyError if a gateway could not be started now: its port is taken, or one of its
        options is wrong. The server need not run."""
        check_different({**self._server.requested_ports._asdict(), "gateway": self._port})
        try:
            checked = subprocess.run(
                [*self._command(), "--check"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_START_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JitneyError(
                f"the gateway does not check its options within {_START_S:.0f} s"
            ) from None
        if checked.returncode != 0:
            said = checked.stderr.strip().removeprefix("error: ")
            reason = said or f"it ended with status {checked.returncode}"
            raise JitneyError(f"the gateway cannot be started: {reason}")

    def turn(self) -> None:
        """Do what is due: start the process, print its address, kill it if it does not listen in
        time. Never waits, because the server must be watched meanwhile."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            status = self._collect()
            if self._state == _State.KILLED:
                self._pause("the gateway has ended", now)
            else:
                self._pause(f"the gateway ended by itself, with status {status}", now)
        if self._state == _State.PAUSES and now >= self._start_again_at:
            self._start(now)
        elif self._process is not None:
            self._read_lines(self._process)
            if self._state == _State.STARTS and now - self._started_at > _START_S:
                self._say(f"the gateway does not listen after {_START_S:.0f} s, and is killed")
                self._state = _State.KILLED
                self._process.kill()

    def begin_to_stop(self) -> None:
        """Let it take no new requests. Its streams go on while the server still answers them."""
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended: its clients may still be reading the end of their answers.
        Another signal ends the wait."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._collect()

    def _start(self, now: float) -> None:
        self._started_at = now
        try:
            # The port is chosen at the first start, and stays the same.
            (self._port,) = choose_ports(self._server.host, {"gateway": self._port})
            # It gets a process group of its own. Otherwise Ctrl-C in the terminal would reach it
            # too, and it is we who decide when it ends.
            self._process = subprocess.Popen(
                self._command(), stdout=subprocess.PIPE, start_new_session=True
            )
            self._state = _State.STARTS
            self._printed = b""
        except (OSError, JitneyError) as error:
            self._pause(f"the gateway could not be started: {error}", now)

    def _read_lines(self, process: "subprocess.Popen[bytes]") -> None:
        """Read what the process has printed. Its first line, the address, says that it listens
        (`run_gateway`). All other lines are passed on: unread, they would fill the pipe, and then
        the process would hang when it prints."""
        assert process.stdout is not None
        # Not `readline`, which would wait for the end of a line.
        if not select.select([process.stdout], [], [], 0)[0]:
            return
        printed = self._printed + os.read(process.stdout.fileno(), _READ_BYTES)
        complete, newline, self._printed = printed.rpartition(b"\n")
        for line in (complete + newline).splitlines():
            text = line.decode(errors="replace").strip()
            if self._state == _State.STARTS:
                self._state = _State.LISTENS
                self._take_address(text)
            elif text:
                self._say(f"the gateway: {text}")

    def _take_address(self, address: str) -> None:
        """Print the address of a gateway that listens, but only once: it stays the same."""
        if not self._has_listened:
            self._has_listened = True
            self._print_address(address)

    def _pause(self, why: str, now: float) -> None:
        """There is no process now. The next one is started after a pause, which is twice as long as
        the one before."""
        self._say(why)
        self._process = None
        self._state = _State.PAUSES
        if now - self._started_at > _LONGEST_PAUSE_S:
            self._next_pause_s = 0.0
        self._start_again_at = now + self._next_pause_s
        self._next_pause_s = min(max(1.0, 2 * self._next_pause_s), _LONGEST_PAUSE_S)

    def _collect(self) -> int:
        """Wait for the end of the process. Returns its exit status."""
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait()

    def _command(self) -> list[str]:
        server = self._server
        return [
            sys.executable,
            "-c",
            _RUN_GATEWAY,
            "gateway",
            f"--server={server.grpc_url}",
            f"--host={server.host}",
            f"--port={self._port}",
            f"--metrics-url={server.metrics_url}",
            *self._options,
        ]
