"""The cluster of a run: joining it, leaving it, and noticing that it is gone."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from jitney.errors import UnavailableError

from jitney_jobs.background import in_background
from jitney_jobs.ray_errors import RESUME, failure_of
from jitney_jobs.ray_library import ray

_LOG = logging.getLogger(__name__)
CONNECT_S = 10.0
"""Longest time to connect to a process of the cluster."""
_LOOK_S = 2.0
"""The cluster's head, and Ray's process on this machine, are looked at so often."""
_LOOKS = 3
"""The cluster is gone if one of them does not answer so often in a row. Ray itself would end this
process some seconds later, without a word that helps."""
_HTTP2_SETTINGS = b"\x04"
"""The type of a frame, which is byte 3 of its head."""
_HTTP2_HEAD_BYTES = 9
_HTTP2_BEGINNING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0" * 5
"""What a client begins with: a fixed text, and settings of which none differs (RFC 9113, 3.4)."""
_POLL_S = 0.2
CPU_SHARE = 0.2
"""CPUs that an actor asks Ray for. It uses all that the node has; with so small a share every node
can have one."""
_FULL_S = 30.0
"""If nothing of the run has begun on the cluster after so long, the user is told. Processes begin
within some seconds, on a busy machine too."""
_TELL_S = 60.0
"""Between two times that the user is told."""


class Cluster:
    """The cluster that this process has joined."""

    def __init__(self, address: str, closing: ExitStack) -> None:
        """``local`` for one on this machine alone, which ends with ``closing``. Raises
        UnavailableError; and KeyboardInterrupt if SIGTERM comes while Ray starts."""
        self.address = address
        _connect(address)
        closing.callback(self._leave)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        with_cpus = [node for node in nodes if node["Resources"].get("CPU")]
        self.nodes = max(1, len(with_cpus))
        """The head of a cluster may have no CPUs: then nothing runs there."""
        self.gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
        self.gpus_of_actor = min(1, self.gpus)
        self.actors = self.gpus or self.nodes
        self.actors_of_node = max(1, self.gpus // self.nodes)
        here = ray.get_runtime_context()
        host, _, port = here.gcs_address.rpartition(":")
        self._addresses = [(host, int(port))]
        """Of the head, and of Ray's process on this machine."""
        self._addresses += [
            (node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in nodes
            if node["NodeID"] == here.get_node_id()
        ]
        self._looked_at = time.monotonic()
        self._looking: Future[bool] | None = None
        self._missed = 0
        """How often in a row one of them did not answer."""

    def call(
        self, function: Any, argument: Any, patience_s: float, say: Callable[[str], None]
    ) -> Any:
        """In a task of Ray's, which may need a GPU. ``say`` is told if it waits for room on the
        cluster. Raises what the function raises, and UnavailableError if there is no room for
        longer than ``patience_s``, or if the cluster is gone."""
        task: Any = ray.remote(_in_two_steps)
        steps = task.options(
            num_cpus=CPU_SHARE,
            num_gpus=self.gpus_of_actor,
            num_returns="streaming",
            max_retries=0,  # a process that was ended for its memory would be begun for ever
        ).remote(function, argument)
        waiting = WaitForRoom(self, patience_s)
        told_at = -_TELL_S
        try:
            while not _has_next(steps):
                self.check()
                text = waiting.text()
                if text is not None and time.monotonic() - told_at >= _TELL_S:
                    told_at = time.monotonic()
                    say(text)
            ray.get(next(steps))  # the task has begun
            while not _has_next(steps):
                self.check()
            return ray.get(next(steps))
        except ray.exceptions.RayError as error:
            raise failure_of(error) from None

    def check(self) -> None:
        """Raise UnavailableError if the cluster is gone."""
        if self._looking is None:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._looking = in_background(self._is_reachable)
            return
        if not self._looking.done():
            return
        self._missed = 0 if self._looking.result() else self._missed + 1
        self._looking = None
        self._looked_at = time.monotonic()
        if self._missed >= _LOOKS:
            raise UnavailableError(f"the Ray cluster at {self.address} is gone: {RESUME}")

    def _is_reachable(self) -> bool:
        try:
            for address in self._addresses:
                socket.create_connection(address, CONNECT_S).close()
        except OSError:
            return False
        return True

    def _leave(self) -> None:
        if self._missed < _LOOKS:
            ray.shutdown()


class WaitForRoom:
    """Until something of the run has begun on the cluster. Others may have all of its CPUs or GPUs,
    or it has too few, and more may come."""

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        """``patience_s``: how long the run waits."""
        self._gpus_of_actor = cluster.gpus_of_actor
        self._patience_s = patience_s
        self._began = time.monotonic()

    def text(self) -> str | None:
        """What is missing. None if that is not worth a word yet. Raises UnavailableError if it has
        been missing for too long."""
        seconds = time.monotonic() - self._began
        if seconds < min(_FULL_S, self._patience_s):
            return None
        has = ray.cluster_resources()
        free = ray.available_resources()
        needs = {"CPU": CPU_SHARE, "GPU": self._gpus_of_actor}
        texts = [
            f"{count:g} {name} of a node ({free.get(name, 0):g} of {has.get(name, 0):g} are free)"
            for name, count in needs.items()
            if count
        ]
        text = f"nothing has begun on the Ray cluster for {seconds:,.0f} s"
        needs_text = f"an actor needs {' and '.join(texts)}"
        if seconds >= self._patience_s:
            raise UnavailableError(f"{text} (patience); {needs_text}")
        return f"{text}; {needs_text}"


def _in_two_steps(function: Any, argument: Any) -> Iterator[Any]:
    """What the function returns. Before it comes None, when the task begins."""
    yield None
    yield function(argument)


def _has_next(steps: Any) -> bool:
    """Whether the next step of a task is there. Waits a moment for it."""
    ready, _ = ray.wait([steps], timeout=_POLL_S)
    return bool(ready)


def _connect(address: str) -> None:
    """Join a Ray cluster, ``local`` for one on this machine alone. Raises as :class:`Cluster`."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    # A cluster of this machine alone does the job in the place of this process: with Ray's niceness
    # of 15 it would stand still beside other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's native part would print warnings that tell the user nothing.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray would try for minutes, and then end the process
            _check_is_grpc(host, int(port))
        # What happens to a node would be printed on stdout, in many lines. No setting prevents it.
        ray._private.worker.print_to_stdstream = _log_lines
        with _without_native_output(), _with_our_signals():
            ray.init(
                address,
                ignore_reinit_error=True,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError) as error:
        text = f"Ray is not at {address}: {error}"
        if address == "auto" and isinstance(error, ConnectionError):
            # Ray's text names an option that only its own commands have.
            text = "no Ray cluster runs on this machine (--ray auto), and RAY_ADDRESS names none"
        raise UnavailableError(text) from None


def _check_is_grpc(host: str, port: int) -> None:
    """Raises OSError if nothing there speaks gRPC, as the head of a cluster does: over HTTP/2,
    whose server begins with its settings."""
    answer = b""
    with socket.create_connection((host, port), CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS") == "1":
            return
        connection.sendall(_HTTP2_BEGINNING)
        while len(answer) < _HTTP2_HEAD_BYTES:
            data = connection.recv(_HTTP2_HEAD_BYTES - len(answer))
            if not data:
                break
            answer += data
    if answer[3:4] != _HTTP2_SETTINGS:
        raise ConnectionError("what answers there is no Ray")


def _log_lines(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        _LOG.info("Ray says: %s", line)


@contextlib.contextmanager
def _without_native_output() -> Iterator[None]:
    """While Ray starts: it would say at which level it logs. Its errors are Python's."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextlib.contextmanager
def _with_our_signals() -> Iterator[None]:
    """While Ray starts: it sets what SIGTERM does, and would leave it so."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # Ray's answer to SIGTERM
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
