"""How a server is stopped, and how a command on the terminal is asked to stop.

``jitney serve``, the containers' process 1 and ``jitney tune`` use it.

This server (2.51) does not end in time on SIGTERM while clients hold connections. It waits for idle
HTTP connections until its exit timeout. And it keeps a model loaded while a client holds a gRPC
stream open that has carried a request to the model, even if the stream is idle now. So a stop

1. tells the models (SIGTERM) and asks the server to unload them (:func:`unload_all`),
2. waits until no request is in flight (:func:`requests_in_flight`),
3. closes the clients' connections (:func:`hang_up`): now the server can unload the models,
4. sends SIGTERM to the server, which then exits by itself.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

import psutil
from jitney.errors import InternalError

from jitney_server.admin import NO_ANSWER, Admin

_LOG = logging.getLogger(__name__)

_PIDFD_GETFD = 438
"""The number of the system call, which Python does not offer. It is the same on every architecture
that we run on."""

_LIVE = ("READY", "LOADING", "UNLOADING")
_QUIET_S = 0.6
"""Seconds for which the metrics must show no request before connections are closed. The metrics are
up to a quarter of a second old, and a last response is under way for less time than that."""
_ASK_AGAIN_S = 2.0
"""Seconds after which a model that is still ready is asked once more to unload."""
_UNLOAD_S = 30.0
"""Seconds, after the grace, that models without requests have to end. A process that has imported
torch needs two seconds of a core to end, and many of them end at once."""
_STUCK_S = 3.0
"""The same, in place of ``_UNLOAD_S``, if a model that is unloading still has metrics. A model
withdraws its metrics when the server tells it to end. One that still has them was not told: the
server has lost count of the model's requests, and never tells it (docs/troubleshooting.md)."""
_EXIT_S = 2.0
"""Seconds that the server has to exit once its models are unloaded."""
_PAUSE_S = 0.05

_IN_FLIGHT = re.compile(
    r'^jitney_(?:running|waiting)_requests{.*?\bmodel="([^"]*)".*} (\S+)$', re.M
)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """SIGINT, SIGTERM and the closing of the terminal set the event and raise KeyboardInterrupt in
    the main thread, until the block ends. A signal that the caller ignores (``nohup``) stays
    ignored."""
    asked_to_stop = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        asked_to_stop.set()
        raise KeyboardInterrupt

    handlers_before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, interrupt)
    try:
        yield asked_to_stop
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


class StopOutcome(NamedTuple):
    """How a stop went."""

    problem: str | None = None
    """Why the stop was not clean. None: every request had ended and every model was unloaded."""
    cut_requests: bool = False
    """Whether requests may have been cut off."""


def stop(admin: Admin, process: "subprocess.Popen[bytes]", grace_s: float) -> StopOutcome:
    """Stop a server, as the module's docstring says.

    New requests are refused at once, and those in flight get up to ``grace_s`` seconds; a model of
    ours ends its requests with an error after its option ``drain_s``. If the process has not ended
    when this returns, the caller kills it with its group.
    """
    for stub in children(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            # Our models take it as the sign to refuse requests. The stub itself ignores it.
            stub.send_signal(signal.SIGTERM)
    if process.poll() is not None:
        return StopOutcome(f"the server had ended before, with status {process.poll()}", True)
    outcome = unload_all(admin, process.pid, grace_s)
    hang_up(process.pid, admin.ports)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_S)
    return outcome


def children(pid: int | None) -> list[psutil.Process]:
    """The processes of the models of the server ``pid``. There are none if that has ended."""
    if pid is None:
        return []
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def requests_in_flight(metrics: str) -> dict[str, float]:
    """Model -> its requests, running and waiting, of all its instances.

    ``metrics`` is the text of the metrics endpoint. Models of other backends have no such metrics,
    and are left out.
    """
    totals: dict[str, float] = {}
    for model, value in _IN_FLIGHT.findall(metrics):
        totals[model] = totals.get(model, 0.0) + float(value)
    return totals


# ------------------------------------------------------------------------------- unloading


def unload_all(admin: Admin, pid: int, grace_s: float) -> StopOutcome:
    """Unload every model of the server ``pid``. Requests in flight have ``grace_s`` seconds to end;
    models that show no request may take longer."""
    unloading = _Unloading(admin)
    began = time.monotonic()
    quiet_since = began
    try:
        while True:
            unloading.look_at_models()
            if not unloading.live:
                return StopOutcome()
            now = time.monotonic()
            unloading.ask_to_unload(now)
            unloading.look_at_requests()
            is_quiet = unloading.is_quiet()
            extra_s = 0.0
            if is_quiet:
                # No request is lost by a longer wait.
                extra_s = _STUCK_S if unloading.is_stuck() else _UNLOAD_S
            if now > began + grace_s + extra_s:
                problem = f"after {now - began:.1f} s {unloading.describe()}"
                return StopOutcome(problem, cut_requests=not is_quiet)
            if not is_quiet:
                quiet_since = now
            elif now - quiet_since > _QUIET_S:
                # Only an idle stream can still hold a model now.
                hang_up(pid, [admin.ports.grpc])
            time.sleep(_PAUSE_S)
    except NO_ANSWER as error:
        # Nothing is left but to send signals.
        return StopOutcome(f"the server does not answer: {error}", cut_requests=True)


class _Unloading:
    """The models of a server that is being stopped: their states and their requests."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.live: dict[str, str] = {}
        """Model -> its state, of those that are not unloaded yet."""
        self._requests: dict[str, float] = {}
        """Model -> its requests in flight, of those that have had metrics."""
        self._with_metrics: set[str] = set()
        """Models that have metrics now."""
        self._asked_at: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        """Model -> why the server refused to unload it, when it was asked last."""

    def look_at_models(self) -> None:
        """Note the states of the models. Raises one of NO_ANSWER."""
        states = self._admin.model_states()
        self.live = {name: entry.state for name, entry in states.items() if entry.state in _LIVE}

    def look_at_requests(self) -> None:
        """Note the requests that the metrics show."""
        try:
            shown = requests_in_flight(self._admin.metrics())
        except NO_ANSWER:
            # The server may have been told to have no metrics.
            self._requests = {}
            self._with_metrics = set()
            return
        # A model that had metrics before and has none now has ended its last request: it has 0.
        self._requests = {**dict.fromkeys(self._requests, 0.0), **shown}
        self._with_metrics = set(shown)

    def ask_to_unload(self, now: float) -> None:
        """Ask the server to unload each model: once, and again while the model is still ready long
        after that."""
        for name, state in self.live.items():
            if name in self._asked_at:
                is_late = now > self._asked_at[name] + _ASK_AGAIN_S
                if state != "READY" or not is_late:
                    continue
            self._asked_at[name] = now
            self._refusals.pop(name, None)
            try:
                self._admin.unload(name)
            except InternalError as error:
                self._refusals[name] = str(error)

    def is_quiet(self) -> bool:
        """Whether the metrics show that no live model has a request. They cannot show that of a
        model of another backend."""
        return all(self._requests.get(name) == 0 for name in self.live)

    def is_stuck(self) -> bool:
        """Whether a model that is unloading was never told to end: it still has metrics."""
        return any(
            state == "UNLOADING" and name in self._with_metrics for name, state in self.live.items()
        )

    def describe(self) -> str:
        """The models that are left, and why."""
        texts = []
        for name in sorted(self.live):
            text = f"{name} is {self.live[name]}"
            if name in self._requests:
                text += f" with {self._requests[name]:.0f} requests in flight"
            if name in self._refusals:
                text += f" ({self._refusals[name]})"
            texts.append(text)
        return ", ".join(texts)


# ------------------------------------------------------------------------------- connections


def hang_up(pid: int, ports: Collection[int]) -> int:
    """Close the clients' connections to ``ports`` of the process ``pid``, one of our children.

    The process gets the end of the connection to read, as if the client had closed it. Returns the
    number of connections. Where the system does not allow to take another process's sockets (some
    containers), nothing is done but a line in the log. Needs Linux 5.6 or later.
    """
    closed = 0
    try:
        with _opened_pidfd(pid) as pidfd:
            for connection in psutil.Process(pid).net_connections(kind="tcp"):
                if connection.status != psutil.CONN_ESTABLISHED:
                    continue
                if connection.laddr.port in ports:
                    with _copied_socket(pidfd, connection.fd) as copy:
                        copy.shutdown(socket.SHUT_RD)
                    closed += 1
    except (OSError, psutil.Error) as error:
        _LOG.info("open connections cannot be closed from outside: %s", error)
    return closed


@contextlib.contextmanager
def _opened_pidfd(pid: int) -> Iterator[int]:
    """A descriptor of the process itself."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _copied_socket(pidfd: int, descriptor: int) -> socket.socket:
    """A socket of our own for a connection of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if ours < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=ours)
