"""Finds a model's process that ends while its server starts, or while the model is loaded again.

The server (2.51) may not notice it, and then it waits for the process for ever. Called by
``server`` and ``supervision``.
"""

import contextlib
import math

import psutil

from jitney_server.stubs import model_processes

_LOOK_S = 1.0
"""Seconds between two looks at the processes."""
_ENDED_S = 10.0
"""A process that has been a zombie for so many seconds is one that the server does not notice: the
server collects the others at once."""


class StartingStubs:
    """The processes of the models of a server that starts, or loads a model again."""

    def __init__(self, server_pid: int, *, is_starting: bool) -> None:
        """``is_starting``: the server itself starts, so all of these processes count. Else only
        those count that it starts from now on."""
        self._server_pid = server_pid
        self._ignored: set[int] = set()
        if not is_starting:
            self._ignored = {process.pid for process in model_processes(server_pid)}
        self._looked_at = -math.inf
        self._zombie_since: dict[int, float] = {}
        """Process id of a zombie -> when it was first seen as one."""

    def one_has_ended(self, now: float) -> bool:
        """Whether one of these processes has ended, and the server has not noticed it."""
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        zombie_since = {}
        for process in model_processes(self._server_pid):
            if process.pid in self._ignored:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    zombie_since[process.pid] = self._zombie_since.get(process.pid, now)
        self._zombie_since = zombie_since
        return any(now - since >= _ENDED_S for since in zombie_since.values())
