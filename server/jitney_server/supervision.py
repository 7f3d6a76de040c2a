"""Watches over a server: loads a model again whose process died, and starts the server again.

This server (2.51) goes on calling itself and a model ready whose process is gone, and answers every
request to it with "Stub process is not healthy". Whoever started it must look: ``jitney serve`` and
the containers' process 1 call :meth:`Supervisor.turn` about every second.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
from jitney.errors import InternalError, JitneyError

from jitney_server.admin import NO_ANSWER, Admin
from jitney_server.stopping import children, hang_up, requests_in_flight

LOAD_S = 600.0
"""Seconds that the load of a model, or the start of a server, may take."""

_STUB = "triton_python_backend_stub"
_PROBE_S = 5.0
_MOST_UNANSWERED = 3
# Repairs are counted over so many seconds; the second waits for 1 s, the third for 2 s, …
_WITHIN_S = 600.0
_LONGEST_WAIT_S = 60.0


class Supervised(Protocol):
    """A server that was ready once, in a process of ours."""

    @property
    def admin(self) -> Admin: ...

    @property
    def pid(self) -> int | None: ...

    def is_alive(self) -> bool:
        """Whether its process runs."""

    def restart(self) -> None:
        """End what is left of it, remove its shared memory, and start it on the same ports with the
        same key; returns when it is ready. Raises JitneyError if that does not succeed."""


class Supervisor:
    """Repairs one server, with a growing pause between repairs.

    ``say`` gets a line for whatever is noticed or done. After ``most_repairs`` within ten minutes
    it gives up; None never does. A server that is not ready for ``unready_s`` is started again.
    """

    def __init__(
        self,
        server: Supervised,
        say: Callable[[str], None],
        *,
        most_repairs: int | None = None,
        unready_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._say = say
        self._most_repairs = most_repairs
        self._unready_s = unready_s
        self._clock = clock
        self._repairs: list[float] = []  # when they ended
        self._begin()

    def _begin(self) -> None:
        """The server is whole now."""
        self._models: dict[int, str] = {}  # of every live process of a model; and of those ended
        self._ended: set[int] = set()  # processes that had ended at the last look
        self._lost: set[str] = set()  # models to load again
        self._unanswered: Counter[str] = Counter()
        self._ready_at = self._probed_at = self._clock()
        self._fault = ""  # of the server itself, which only another start ends
        self._note_processes()

    def turn(self) -> str:
        """Look once, and repair what may be repaired now. Returns why it gives up; empty if it does
        not. Blocks for as long as a load or a start takes."""
        if not self._fault:
            self._look()
        if not (self._fault or self._lost):
            return ""
        now = self._clock()
        self._repairs = [at for at in self._repairs if now - at < _WITHIN_S]
        count = len(self._repairs)
        if self._most_repairs is not None and count >= self._most_repairs:
            return f"{count} repairs within {_WITHIN_S / 60:.0f} minutes were not enough"
        if not count or now - self._repairs[-1] >= min(2.0 ** (count - 1), _LONGEST_WAIT_S):
            if self._fault:
                self._restart()
            else:
                self._load(min(self._lost))
            self._repairs.append(self._clock())
        return ""

    # ------------------------------------------------------------------ what is wrong

    def _look(self) -> None:
        server = self._server
        now = self._clock()
        if not server.is_alive():
            self._note("the server ended by itself")
        elif server.admin.is_ready() or self._lost:
            self._ready_at = now
            with contextlib.suppress(*NO_ANSWER, psutil.Error):
                self._look_at_models()  # if it is not answered now, the next turn sees more
        elif now - self._ready_at > self._unready_s:
            self._note(f"the server has not been ready for {self._unready_s:.0f} s")

    def _look_at_models(self) -> None:
        """Unload models whose process was killed. The server keeps it as a zombie, and still calls
        the model ready; where it ends a process itself, neither is so for long."""
        ended = self._note_processes()
        if both := ended & self._ended:
            states = self._server.admin.model_states()
            for name in sorted({self._models.pop(pid) for pid in both} - self._lost):
                if states.get(name, ("", ""))[0] == "READY":
                    self._say(f"the process of model {name} has ended by itself")
                    self._unload(name)
        self._ended = ended
        if self._clock() - self._probed_at >= _PROBE_S:
            self._probe()
            self._probed_at = self._clock()

    def _note_processes(self) -> set[int]:
        """Which process is whose. Returns those known that have ended and are zombies."""
        known = self._models
        self._models = {}
        ended = set()
        for process in children(self._server.pid):
            name = model_of(process)
            if not name and process.pid in known:
                name = known[process.pid]
                ended.add(process.pid)
            if name:
                self._models[process.pid] = name
        return ended

    def _probe(self) -> None:
        """Ask every language model for an answer; kill the processes of one that gives none."""
        admin = self._server.admin
        for name in requests_in_flight(admin.metrics()).keys() - self._lost:
            self._unanswered[name] += 1
            if admin.is_answered(name):
                del self._unanswered[name]
            elif self._unanswered[name] == _MOST_UNANSWERED:
                del self._unanswered[name]
                self._say(f"model {name} does not answer")
                for process in children(self._server.pid):
                    if model_of(process) == name:
                        process.kill()
                        self._models.pop(process.pid, None)
                self._unload(name)

    def _note(self, fault: str) -> None:
        self._fault = fault
        self._say(fault)

    # ------------------------------------------------------------------ repairs

    def _unload(self, name: str) -> None:
        """Withdraw its readiness at once, whenever it may be loaded again. A stream that its client
        keeps open keeps it UNLOADING; it can be loaded beside that.

        Streams of a process that was killed while it sent a response would never end: all clients
        are hung up on, if it was a language model, because whose stream it is cannot be known."""
        self._lost.add(name)
        admin = self._server.admin
        try:
            admin.unload(name)
            requests = requests_in_flight(admin.metrics())
            if self._server.pid is not None and name in requests:
                ended = hang_up(self._server.pid, [admin.http_port, admin.grpc_port])
                self._say(f"{ended} connections are closed: streams of model {name} may be stuck")
                if requests[name] and not ended:  # it is not allowed here
                    self._note("the server is ended instead")
        except NO_ANSWER as error:
            self._note(f"model {name} cannot be replaced: {error!r}")

    def _load(self, name: str) -> None:
        began = self._clock()
        try:
            self._server.admin.load(name, LOAD_S)
        except InternalError as error:  # its own reason: another server would hear the same
            self._say(f"model {name} cannot be loaded again: {error}")
        except NO_ANSWER as error:
            self._note(f"model {name} cannot be loaded again: {error!r}")
        else:
            self._lost.discard(name)
            self._note_processes()
            self._say(f"model {name} is loaded again, after {self._clock() - began:.1f} s")

    def _restart(self) -> None:
        began = self._clock()
        try:
            self._server.restart()
        except (JitneyError, OSError) as error:
            self._say(f"the server could not be started again: {error}")
        else:
            self._begin()
            self._say(f"the server is ready again, after {self._clock() - began:.1f} s")


def model_of(process: psutil.Process) -> str:
    """The model whose process this is; empty if it is none, or none that lives. The first argument
    of a stub is a file of its model's version. One that is ending has no command line any more,
    though it may not be called a zombie yet."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:  # or a zombie
        words = []
    return Path(words[1]).parents[1].name if words[1:] and _STUB in words[0] else ""
