"""How a server is stopped, and how a command on the terminal is asked to: ``jitney serve``, the
containers' process 1 and ``jitney tune`` use it.

This server (2.51) keeps a model loaded while any client holds a gRPC stream open that has ever
carried a request to it, however idle, and waits for idle HTTP connections until its exit timeout.
So a stop first sees when nothing is in flight any more (:func:`requests_in_flight`), and then hangs
up on those clients (:func:`hang_up`); the server then unloads (:func:`unload_all`) and exits by
itself.
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

import psutil
from jitney.errors import InternalError

from jitney_server.admin import NO_ANSWER, Admin

_LOG = logging.getLogger(__name__)

_PIDFD_GETFD = 438
"""The number of the system call, which Python does not offer; the same on every architecture that
we run on."""

_LIVE = ("READY", "LOADING", "UNLOADING")
# So long must the metrics show no request: they are a quarter of a second late, responses less.
_QUIET_S = 0.6
# A model that is still ready after so long is asked once more to unload.
_ASK_AGAIN_S = 2.0
# Longer than the grace, for models without any request: a process with torch in it takes two
# seconds of a core to end, and many of them end at once.
_UNLOAD_S = 30.0
# The same if one of them still shows its metrics, which it withdraws when it ends: this server has
# lost count of its requests, and will not end it (docs/troubleshooting.md).
_STUCK_S = 3.0
# After the models are unloaded, seconds for the process to end by itself.
_LINGER_S = 2.0

_IN_FLIGHT = re.compile(
    r'^jitney_(?:running|waiting)_requests{.*?\bmodel="([^"]*)".*} (\S+)$', re.M
)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """SIGINT, SIGTERM and the closing of the terminal set the event and raise KeyboardInterrupt in
    the main thread, until the block ends. A signal that the caller ignores (``nohup``) stays
    ignored."""
    asked = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        asked.set()
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(admin: Admin, process: "subprocess.Popen[bytes]", grace_s: float) -> tuple[str, bool]:
    """Stop a server. Returns why that was not clean, empty if it was, and whether requests may have
    been cut off.

    The models are told and unloaded first, which refuses new requests and gives those in flight up
    to ``grace_s`` seconds (after its option ``drain_s`` a model of ours ends them with an error);
    then connections are closed, and the process gets SIGTERM. If it has not ended soon after, the
    caller kills it with its group.
    """
    for stub in children(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            stub.send_signal(signal.SIGTERM)  # to our models; the stub itself ignores it
    if process.poll() is not None:
        return f"the server had ended before, with status {process.poll()}", True
    left = unload_all(admin, process.pid, grace_s)
    hang_up(process.pid, admin.ports)  # the server would wait for idle ones
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LINGER_S)
    return left


def children(pid: int | None) -> list[psutil.Process]:
    """The processes of the models of the server ``pid``; none if that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [] if pid is None else psutil.Process(pid).children()
    return []


def requests_in_flight(metrics: str) -> dict[str, float]:
    """Model -> its requests, running and waiting, of all its instances, from the text of the
    metrics endpoint. A model that has no such metrics is not ours and is not there."""
    total: dict[str, float] = {}
    for model, value in _IN_FLIGHT.findall(metrics):
        total[model] = total.get(model, 0.0) + float(value)
    return total


def unload_all(admin: Admin, pid: int, grace_s: float) -> tuple[str, bool]:
    """Unload every model of the server ``pid``; requests in flight have ``grace_s`` seconds to end.
    Models of ours that say that they have no request may take longer. Returns which were left and
    why, empty if none was, and whether requests may have been lost with them."""
    began = quiet_since = time.monotonic()
    asked: dict[str, float] = {}
    said: dict[str, str] = {}  # why the server refused to unload a model
    requests: dict[str, float] = {}
    try:
        while live := {
            name: one[0] for name, one in admin.model_states().items() if one[0] in _LIVE
        }:
            now = time.monotonic()
            for name, state in live.items():
                if name not in asked or (state == "READY" and now > asked[name] + _ASK_AGAIN_S):
                    asked[name] = now
                    said[name] = ""
                    try:
                        admin.unload(name)
                    except InternalError as error:
                        said[name] = f" ({error})"
            try:
                shown = requests_in_flight(admin.metrics())
                # A model that was shown before and is not now has ended its last request: it takes
                # its metrics along. Other backends' models never have any.
                requests = {**dict.fromkeys(requests, 0.0), **shown}
            except NO_ANSWER:  # a server may be told to have no metrics
                requests = shown = {}
            quiet = all(requests.get(name) == 0 for name in live)
            stuck = any(live[name] == "UNLOADING" for name in live.keys() & shown.keys())
            longer = 0.0 if not quiet else _STUCK_S if stuck else _UNLOAD_S
            if now > began + grace_s + longer:
                busy = {name: f" with {n:.0f} requests in flight" for name, n in requests.items()}
                left = [f"{k} is {live[k]}{busy.get(k, '')}{said[k]}" for k in sorted(live)]
                return f"after {now - began:.1f} s {', '.join(left)}", not quiet
            if not quiet:
                quiet_since = now
            elif now - quiet_since > _QUIET_S:
                hang_up(pid, [admin.grpc_port])
            time.sleep(0.05)
        return "", False
    except NO_ANSWER as error:
        # The signals must do.
        return f"the server does not answer: {error}", True


def hang_up(pid: int, ports: Collection[int]) -> int:
    """Close the clients' connections to ``ports`` of the process ``pid``, one of our children.

    The sockets are borrowed from the process (Linux 5.6 or later) and shut down for reading, which
    it takes for the client's own going. Returns how many there were. Where that is not allowed
    (some containers), nothing is done but a line in the log.
    """
    ended = 0
    try:
        descriptor = os.pidfd_open(pid)
        try:
            connections = psutil.Process(pid).net_connections(kind="tcp")
            for each in connections:
                if each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports:
                    with _borrow(descriptor, each.fd) as connection:
                        connection.shutdown(socket.SHUT_RD)
                    ended += 1
        finally:
            os.close(descriptor)
    except (OSError, psutil.Error) as error:
        _LOG.info("open connections cannot be closed from outside: %s", error)
    return ended


def _borrow(pidfd: int, descriptor: int) -> socket.socket:
    """A socket of our own on another process's connection."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if ours < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=ours)
