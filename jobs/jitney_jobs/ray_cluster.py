"""The cluster of a run: joining it, leaving it, and noticing that it is gone; and what Ray's errors
mean for the job."""

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from jitney.errors import JitneyError, UnavailableError

from jitney_jobs.background import in_background
from jitney_jobs.ray_library import ray

_RESUME = "`jitney batch resume` goes on, with --ray or without"
CONNECT_S = 10.0
"""Longest time to connect to a process of the cluster."""
_LOOK_S = 2.0
"""The cluster's head, and Ray's process on this machine, are looked at so often."""
_LOOKS = 3
"""The cluster is gone if one of them does not answer so often in a row. Ray itself would end this
process some seconds later, without a word that helps."""
CPU_SHARE = 0.2
"""CPUs that an actor asks Ray for. It uses all that the node has; with so small a share every node
can have one."""


class Cluster:
    """The cluster that this process has joined."""

    def __init__(self, address: str, closing: ExitStack) -> None:
        """``local`` for one on this machine alone, which ends with ``closing``. Raises
        UnavailableError."""
        self.address = address
        _connect(address)
        closing.callback(self._leave)
        resources = ray.cluster_resources()
        # The head of a cluster may have no cores: then nothing runs there.
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [node for node in alive if node["Resources"].get("CPU")]
        self.gpus = int(resources.get("GPU", 0))
        self.nodes = max(1, len(nodes))
        self.actors = self.gpus or self.nodes
        self.actors_of_node = max(1, self.gpus // self.nodes)
        here = ray.get_runtime_context()
        host, _, port = here.gcs_address.rpartition(":")
        self._addresses = [(host, int(port))]
        """Of the head, and of Ray's process on this machine."""
        self._addresses += [
            (node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in alive
            if node["NodeID"] == here.get_node_id()
        ]
        self._looked_at = time.monotonic()
        self._looking: Future[bool] | None = None
        self._missed = 0
        """How often in a row one of them did not answer."""

    def call(self, function: Any, argument: Any) -> Any:
        """In a task of Ray's, which may need a GPU. Raises what the function raises."""
        task = ray.remote(num_cpus=CPU_SHARE, num_gpus=min(1, self.gpus))(function)
        try:
            return ray.get(task.remote(argument))
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
            raise UnavailableError(f"the Ray cluster at {self.address} is gone: {_RESUME}")

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


def _connect(address: str) -> None:
    """Join a Ray cluster, ``local`` for one on this machine alone. Raises UnavailableError."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    # A cluster of this machine alone does the job in the place of this process: with Ray's niceness
    # of 15 it would stand still beside other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's native part would print warnings that tell the user nothing.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        with _without_native_output():
            ray.init(
                address,
                ignore_reinit_error=True,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"Ray is not at {address}: {error}") from None


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


def failure_of(error: BaseException) -> BaseException:
    """The JitneyError that an error of Ray's came from; if there is none, one that tells of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, JitneyError):
        # Ray has the error of a task in an attribute, which not all of its errors have.
        cause = getattr(cause, "cause", None) or cause.__cause__
    return cause or UnavailableError(f"the Ray cluster failed: {_RESUME}; Ray says: {error}")
