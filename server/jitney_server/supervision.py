"""Watches over a server: loads a model again whose process has died, and starts the server again.

If a model's process is gone, this server (2.51) goes on calling itself and the model ready, and
answers every request to it with "Stub process is not healthy". So the process that started the
server must look: ``jitney serve`` and the containers' process 1 call :meth:`Supervisor.turn` once
or twice a second.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import psutil
from jitney.errors import JitneyError

from jitney_server.admin import Admin, CallError, NoAnswerError, RefusedCallError
from jitney_server.connections import hang_up
from jitney_server.starting_stubs import StartingStubs
from jitney_server.stopping import requests_in_flight
from jitney_server.stubs import model_of, model_processes

LOAD_S = 600.0
"""Seconds that the load of a model, or the start of a server, may take."""

_LOOK_S = 0.5
"""Seconds between two looks at the models' processes during a call that may last."""
_PROBE_S = 5.0
"""Seconds between two requests that ask whether a model answers."""
_MOST_UNANSWERED = 3
"""A model that leaves this many such requests without an answer, one after the other, is killed."""
_COUNTED_S = 600.0
"""Seconds after which a repair is forgotten: it lengthens no pause any more, and does not count
towards ``most_repairs``."""
_LONGEST_PAUSE_S = 60.0
"""The longest pause between two repairs, in seconds."""
T = TypeVar("T")


class _LostProcessError(CallError):
    """The server waits for the process of a model that has ended."""


class Supervised(Protocol):
    """A server that was ready once, in a process of ours."""

    @property
    def admin(self) -> Admin: ...

    @property
    def pid(self) -> int | None: ...

    def is_alive(self) -> bool:
        """Whether its process runs."""

    def restart(self) -> None:
        """Kill what is left of the server and start it again, on the same ports and with the same
        key. Returns when it is ready. Raises JitneyError if it does not start."""


class _Processes(NamedTuple):
    """The processes of a server's models at one look."""

    model_of_pid: dict[int, str]
    """Process id -> its model. Zombies are there if they were seen alive before."""
    zombies: set[int]
    """The ids of those that are zombies."""


@dataclass
class _Observations:
    """What the supervisor has seen since the server was last started."""

    ready_at: float
    """When the server was last seen ready."""
    probed_at: float
    """When models were last asked whether they answer."""
    processes: _Processes
    """The models' processes at the last look."""
    unloaded: list[str] = field(default_factory=list)
    """Models that the supervisor has unloaded and must load again. The first one is next."""
    unanswered: Counter[str] = field(default_factory=Counter)
    """Model -> probes without an answer, one after the other."""
    fault: str | None = None
    """What is wrong with the server itself: only another start ends it."""


class Supervisor:
    """Repairs one server, with a growing pause between repairs.

    It finds the language models by their metrics. If the server has none
    (``--allow-metrics=false``), a model that hangs is not noticed; ``say`` is told so.

    ``say`` gets a line for whatever is noticed or done. After ``most_repairs`` within ten minutes
    the supervisor gives up; with None it never does. A server that is not ready for ``unready_s``
    is started again. ``meanwhile`` is called twice a second while a model is being loaded, because
    :meth:`turn` does not return until then.
    """

    def __init__(
        self,
        server: Supervised,
        say: Callable[[str], None],
        *,
        most_repairs: int | None = None,
        unready_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._server = server
        self._say = say
        self._most_repairs = most_repairs
        self._unready_s = unready_s
        self._clock = clock
        self._meanwhile = meanwhile
        self._repaired_at: list[float] = []
        self._probes_without_metrics = 0
        """How many of the last probes, one after the other, have found no metrics."""
        self._language_models: set[str] | None = None
        """Those that metrics have named. None: there were no metrics yet."""
        self._num_hang_ups = 0
        """How often all connections were closed, ours among them. A call that was under way then
        has no answer, though the server is well."""
        self._seen: _Observations
        self._begin()

    def _begin(self) -> None:
        """The server has just become ready: what was seen before does not count."""
        now = self._clock()
        processes = _find_processes(self._server.pid, known={})
        self._seen = _Observations(ready_at=now, probed_at=now, processes=processes)

    def turn(self) -> str | None:
        """Look once, and make one repair if one is due. Returns why the supervisor gives up; None
        if it does not. Blocks for as long as a load or a start takes; during a load it goes on
        looking for models whose process has ended."""
        seen = self._seen
        if seen.fault is None:
            self._look()
        if seen.fault is None and not seen.unloaded:
            return None
        now = self._clock()
        self._repaired_at = [at for at in self._repaired_at if now - at < _COUNTED_S]
        count = len(self._repaired_at)
        if self._most_repairs is not None and count >= self._most_repairs:
            return f"{count} repairs within {_COUNTED_S / 60:.0f} minutes were not enough"
        if not self._is_repair_due(now):
            return None
        if seen.fault is not None:
            self._restart()
        else:
            self._load(seen.unloaded[0])
        self._repaired_at.append(self._clock())
        return None

    def _is_repair_due(self, now: float) -> bool:
        """Whether the pause since the last repair is over: 1 s after one repair, 2 s after two, 4 s
        after three, and so on."""
        if not self._repaired_at:
            return True
        pause_s = 2.0 ** (len(self._repaired_at) - 1)
        return now - self._repaired_at[-1] >= min(pause_s, _LONGEST_PAUSE_S)

    # ------------------------------------------------------------------ what is wrong

    def _look(self) -> None:
        """Note a fault of the server, or look at its models."""
        server = self._server
        seen = self._seen
        now = self._clock()
        if not server.is_alive():
            self._note_fault("the server ended by itself")
            return
        # A server calls itself not ready while a model is unloaded that it was started with. If we
        # have unloaded one, that is no fault.
        if seen.unloaded or server.admin.is_ready():
            seen.ready_at = now
            with contextlib.suppress(CallError, psutil.Error):  # the next turn looks again
                self._look_at_models()
        elif now - seen.ready_at > self._unready_s:
            self._note_fault(f"the server has not been ready for {self._unready_s:.0f} s")

    def _look_at_models(self) -> None:
        """Unload the models whose process was killed, and probe the others now and then."""
        seen = self._seen
        self._look_for_ended()
        if seen.processes.zombies:
            # The next look decides. A probe of a model that has just been killed may take seconds,
            # and its clients wait.
            return
        if self._clock() - seen.probed_at >= _PROBE_S:
            self._probe()
            seen.probed_at = self._clock()

    def _look_for_ended(self) -> None:
        """Unload the models whose process was killed."""
        seen = self._seen
        zombies_before = seen.processes.zombies
        seen.processes = _find_processes(self._server.pid, seen.processes.model_of_pid)
        # The server ends a process itself when a model is unloaded. That one is a zombie for a
        # moment only, and its model is not ready. A process that was killed stays a zombie, and
        # the server goes on calling its model ready.
        lasting = seen.processes.zombies & zombies_before
        if lasting:
            self._unload_models_of(lasting)

    def _look_meanwhile(self, call: Callable[[], T]) -> T:
        """Make a call to the server that may take long. Until it returns, look for models whose
        process has ended, because their clients must not wait for this call.

        Raises _LostProcessError if the call waits for such a process for ever."""
        starting = None
        if self._server.pid is not None:
            starting = StartingStubs(self._server.pid, is_starting=False)
        made = _call_in_thread(call)
        while not wait([made], _LOOK_S).done:
            if self._meanwhile is not None:
                self._meanwhile()
            with contextlib.suppress(CallError, psutil.Error):  # the next look does it
                self._look_for_ended()
            if starting is not None and starting.one_has_ended(time.monotonic()):
                raise _LostProcessError("its process has ended, which the server has not noticed")
        return made.result()

    def _unload_models_of(self, zombies: set[int]) -> None:
        """Unload the models whose processes these are, unless they were unloaded before. Forgets
        the processes."""
        seen = self._seen
        states = self._server.admin.model_states()
        names = set()
        for pid in zombies:
            names.add(seen.processes.model_of_pid.pop(pid))
        for name in sorted(names.difference(seen.unloaded)):
            if name in states and states[name].state == "READY":
                self._say(f"the process of model {name} has ended by itself")
                self._unload(name)

    def _probe(self) -> None:
        """Ask every language model for an answer; kill the processes of one that gives none."""
        seen = self._seen
        admin = self._server.admin
        requests = self._requests_in_flight()
        if requests is None:
            self._probes_without_metrics += 1
            if self._probes_without_metrics == _MOST_UNANSWERED:  # a busy server may miss one
                self._say("the server gives no metrics: a model that hangs is not noticed")
            return
        self._probes_without_metrics = 0
        for name in requests.keys() - set(seen.unloaded):
            is_answering = self._look_meanwhile(partial(admin.is_answering, name))
            was_unloaded_meanwhile = name in seen.unloaded  # its process was seen to have ended
            if is_answering or was_unloaded_meanwhile:
                seen.unanswered.pop(name, None)
                continue
            seen.unanswered[name] += 1
            if seen.unanswered[name] == _MOST_UNANSWERED:
                del seen.unanswered[name]
                self._say(f"model {name} does not answer")
                self._kill(name)
                self._unload(name)

    def _requests_in_flight(self) -> dict[str, float] | None:
        """Language model -> its requests in flight. None: the server gives no metrics. It may have
        been told to have none."""
        try:
            requests = requests_in_flight(self._server.admin.metrics())
        except CallError:
            return None
        self._language_models = set(requests).union(self._language_models or ())
        return requests

    def _kill(self, name: str) -> None:
        """Kill the processes of a model."""
        for process in model_processes(self._server.pid):
            if model_of(process) == name:
                process.kill()
                self._seen.processes.model_of_pid.pop(process.pid, None)

    def _note_fault(self, fault: str) -> None:
        self._seen.fault = fault
        self._say(fault)

    # ------------------------------------------------------------------ repairs

    def _unload(self, name: str) -> None:
        """Unload a model whose process is gone, which withdraws its readiness at once.

        A repair loads it again, even if the server still calls it UNLOADING: that lasts as long as
        a client keeps a stream open.
        """
        self._seen.unloaded.append(name)
        requests = self._requests_in_flight()  # before: once it is unloaded it may have no metrics
        try:
            self._server.admin.unload(name)
        except CallError as error:
            self._note_fault(f"model {name} cannot be replaced: {error}")
        else:
            self._end_streams_of(name, requests)

    def _end_streams_of(self, name: str, requests: dict[str, float] | None) -> None:
        """Hang up on all clients if the model is, or may be, a language model.

        The server itself never ends a request that the killed process had taken, and nobody can
        tell which connections carry one.
        """
        if self._language_models is not None and name not in self._language_models:
            return
        if self._server.pid is None:
            return
        # Also if the metrics show no request: they lag, and a client may just have sent one.
        ports = self._server.admin.ports
        hung_up = hang_up(self._server.pid, [ports.http, ports.grpc])
        self._num_hang_ups += 1
        self._say(f"{hung_up.closed} connections are closed: streams of model {name} may be stuck")
        # Without metrics the model may have requests: then it counts as one that has.
        has_requests = requests is None or requests.get(name, 0) > 0
        if has_requests and not hung_up.was_allowed:
            # The stuck streams cannot be closed here: only a restart of the server ends them.
            self._note_fault("the server is ended instead")

    def _load(self, name: str) -> None:
        seen = self._seen
        began = self._clock()
        num_hang_ups = self._num_hang_ups
        try:
            self._look_meanwhile(partial(self._server.admin.load, name, LOAD_S))
        except RefusedCallError as error:
            # The reason lies in the model, so another start of the server would not help. The next
            # repair loads another model, if there is one.
            seen.unloaded.remove(name)
            seen.unloaded.append(name)
            self._say(f"model {name} cannot be loaded again: {error}")
        except _LostProcessError as error:
            self._note_fault(f"model {name} cannot be loaded again: {error}")
        except NoAnswerError as error:
            # If we have closed the connection of this call ourselves, the server goes on loading,
            # and the next repair asks once more.
            was_closed_by_us = self._num_hang_ups > num_hang_ups
            if not was_closed_by_us:
                self._note_fault(f"model {name} cannot be loaded again: {error}")
        else:
            seen.unloaded.remove(name)
            seen.processes = _find_processes(self._server.pid, seen.processes.model_of_pid)
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


def _call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call in a daemon thread, which does not delay the exit of this process. The future
    gets the call's result or exception."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="jitney-call", daemon=True).start()
    return made


def _find_processes(server_pid: int | None, known: dict[int, str]) -> _Processes:
    """The processes of the server's models now. ``known``: process id -> model, at the last
    look."""
    model_of_pid = {}
    zombies = set()
    for process in model_processes(server_pid):
        name = model_of(process)
        if name is None and process.pid in known:
            # It had a command line at the last look and has none now: it has ended.
            name = known[process.pid]
            zombies.add(process.pid)
        if name is not None:
            model_of_pid[process.pid] = name
    return _Processes(model_of_pid, zombies)
