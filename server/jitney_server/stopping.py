"""How a server is stopped.

``server`` (so ``jitney serve`` and ``jitney tune``) and the containers' process 1 use it.

On SIGTERM alone, this server (2.51) does not end in time while clients hold connections:

- It waits for idle HTTP connections until its exit timeout.
- A gRPC stream over which a client has ever sent a request to a model keeps the model from being
  unloaded until the client closes it, even if it is idle.

So a stop goes like this:

1. The models are told that the server stops (``jitney.stop_signals``), and the server is asked to
   unload them (:func:`unload_all`).
2. Requests in flight (:func:`requests_in_flight`) may end. When the grace is over, the models are
   told to end the others with an error. Those are counted.
3. The clients' connections are closed (``connections``). Now the server can unload the models.
4. The server gets SIGTERM, and exits by itself.
"""

import contextlib
import logging
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from jitney import stop_signals
from jitney.stop_signals import Note, write_note

from jitney_server.admin import Admin, CallError, RefusedCallError
from jitney_server.connections import hang_up
from jitney_server.stubs import model_processes

_LOG = logging.getLogger(__name__)

_LIVE = ("READY", "LOADING", "UNLOADING")
_QUIET_S = 0.6
"""Seconds for which the metrics must show no request before connections are closed. The metrics lag
by up to 0.25 s (the default of option ``metrics_flush_s``), and a last response takes up to 0.35 s
to its client."""
_ASK_AGAIN_S = 2.0
"""Seconds after which a model that is still ready is asked once more to unload."""
_UNLOAD_S = 30.0
"""Seconds, after the grace, that models without requests have to end. A process that has imported
torch needs two seconds of a core to end, and many of them end at once."""
_CUT_S = 3.0
"""Seconds, after the grace, that models with requests have to end them with an error."""
_STUCK_S = 5.0
"""Seconds after the last request until a model that still has metrics counts as stuck. A model
withdraws its metrics as soon as the server tells it to end. Sometimes this server never tells a
model that it unloads (docs/troubleshooting.md)."""
_STUCK_AFTER_GRACE_S = 3.0
"""The same, in seconds after the grace. Whichever of the two is over first counts."""
_LAG_S = 0.3
"""Seconds for which the metrics may still show a request that has ended."""
_EXIT_S = 2.0
"""Seconds that the server has to exit once its models are unloaded."""
_PAUSE_S = 0.05

_IN_FLIGHT = re.compile(
    r'^jitney_(?:running|waiting)_requests{.*?\bmodel="([^"]*)".*} (\S+)$', re.M
)


class StopOutcome(NamedTuple):
    """How a stop went."""

    problem: str | None = None
    """Why the stop was not clean. None: every request had ended, and every model was unloaded
    except those in ``stuck``."""
    cut_requests: bool = False
    """Whether requests may have been cut off."""
    stuck: str | None = None
    """The models without requests that this server does not unload, which is its known fault. They
    are killed, and nothing is lost with them."""


def stop(
    admin: Admin, process: "subprocess.Popen[bytes]", grace_s: float, note: Path
) -> StopOutcome:
    """Stop a server, as the module's docstring says.

    New requests are refused at once, and those in flight get up to ``grace_s`` seconds. Then a
    model of ours ends them with an error. If the process has not ended when this returns, the
    caller kills it with its group. ``note``: the file that the server's models read.
    """
    # First of all: another process may have the id of a server that has ended.
    if process.poll() is not None:
        problem = f"the server had ended before, with status {process.poll()}"
        return StopOutcome(problem, cut_requests=True)
    _tell_models(process.pid, note, Note.WAIT)
    # Models that do not know our notes may know SIGTERM. The stub itself ignores it.
    _send_to_models(process.pid, stop_signals.STOPS)
    tell_to_end = partial(_tell_models, process.pid, note, Note.END)
    outcome = unload_all(admin, process.pid, grace_s, tell_to_end)
    hang_up(process.pid, admin.ports)
    process.send_signal(signal.SIGTERM)
    if outcome.stuck is None:  # with a stuck model, it does not exit by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)
    return outcome


def _tell_models(server_pid: int, file: Path, note: Note) -> None:
    try:
        write_note(file, note)
    except OSError as error:
        # They still get SIGTERM, and give requests their option ``drain_s``.
        _LOG.warning("the models cannot be told that the server stops: %s", error)
    _send_to_models(server_pid, stop_signals.LOOK)


def _send_to_models(server_pid: int, number: signal.Signals) -> None:
    for stub in model_processes(server_pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            stub.send_signal(number)


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


def unload_all(
    admin: Admin, pid: int, grace_s: float, tell_to_end: Callable[[], None]
) -> StopOutcome:
    """Unload every model of the server ``pid``. It is over when

    - no model is left, or
    - only stuck models are left (see _STUCK_S), or
    - the time is over, and models are left, or
    - a call to the server fails: then only signals can end it.

    After ``grace_s`` seconds ``tell_to_end`` is called if requests are open: it has the models end
    them with an error. The outcome says how many were cut off.
    """
    unloading = _Unloading(admin)
    times = _StopTimes(grace_s)
    cut: str | None = None
    """What was cut off, in words. None: nothing yet."""
    try:
        while True:
            unloading.look_at_models()
            if not unloading.live:
                return StopOutcome(cut, cut_requests=cut is not None)
            times.look()
            unloading.ask_to_unload(times.now)
            unloading.look_at_requests()
            is_quiet = unloading.is_quiet()
            if not is_quiet:
                times.note_requests()
                if cut is None and times.grace_is_over():
                    cut = f"after {times.passed():.1f} s {unloading.describe_cut()}"
                    tell_to_end()
            elif unloading.is_stuck() and times.stuck_time_is_over():
                stuck = unloading.describe()
                return StopOutcome(cut, cut_requests=cut is not None, stuck=stuck)
            if times.must_give_up(is_quiet):
                problem = cut or f"after {times.passed():.1f} s {unloading.describe()}"
                return StopOutcome(problem, cut_requests=cut is not None)
            if times.is_long_quiet():
                # Only an idle stream can still hold a model now.
                hang_up(pid, [admin.ports.grpc])
            time.sleep(_PAUSE_S)
    except CallError as error:
        return StopOutcome(str(error), cut_requests=True)


class _StopTimes:
    """The clock of a stop: how long it has lasted, and which of its bounds are over."""

    def __init__(self, grace_s: float) -> None:
        self._began = time.monotonic()
        self._grace_ends = self._began + grace_s
        self.now = self._began
        """When :meth:`look` was last called."""
        self._last_request = self._began
        """When a request was last seen."""

    def look(self) -> None:
        """Take the time, which the queries below go by."""
        self.now = time.monotonic()

    def note_requests(self) -> None:
        """There are requests now."""
        self._last_request = self.now

    def passed(self) -> float:
        """Seconds since the stop began."""
        return self.now - self._began

    def grace_is_over(self) -> bool:
        """Whether a request that the metrics show has had its whole grace."""
        return self.now > self._grace_ends + _LAG_S

    def stuck_time_is_over(self) -> bool:
        """Whether the server has had enough time to end a model without requests."""
        after_last_request = self._last_request + _STUCK_S
        after_grace = self._grace_ends + _STUCK_AFTER_GRACE_S
        return self.now > min(after_last_request, after_grace)

    def must_give_up(self, is_quiet: bool) -> bool:
        """Whether the stop must end, with models left."""
        after_grace_s = _UNLOAD_S if is_quiet else _CUT_S
        return self.now > self._grace_ends + after_grace_s

    def is_long_quiet(self) -> bool:
        """Whether every response has reached its client."""
        return self.now - self._last_request > _QUIET_S


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
        """Note the states of the models. Raises CallError."""
        states = self._admin.model_states()
        self.live = {name: entry.state for name, entry in states.items() if entry.state in _LIVE}

    def look_at_requests(self) -> None:
        """Note the requests that the metrics show."""
        try:
            shown = requests_in_flight(self._admin.metrics())
        except CallError:
            # The server may have been told to have no metrics.
            self._requests = {}
            self._with_metrics = set()
            return
        # A model withdraws its metrics when its last request has ended. So one that had metrics
        # before, and has none now, has no requests.
        no_requests = dict.fromkeys(self._requests, 0.0)
        self._requests = no_requests | shown
        self._with_metrics = set(shown)

    def ask_to_unload(self, now: float) -> None:
        """Ask the server to unload each model. A model that is still ready _ASK_AGAIN_S later is
        asked for again."""
        for name, state in self.live.items():
            asked_at = self._asked_at.get(name)
            if asked_at is not None:
                asks_again = state == "READY" and now > asked_at + _ASK_AGAIN_S
                if not asks_again:
                    continue
            self._asked_at[name] = now
            self._refusals.pop(name, None)
            try:
                self._admin.unload(name)
            except RefusedCallError as error:
                self._refusals[name] = str(error)

    def is_quiet(self) -> bool:
        """Whether no live model has a request, as far as the metrics show.

        A model of another backend has no such metrics, so its requests are not known. While one is
        live the server is never quiet: no connection is closed early, and the stop says that it may
        have cut requests off.
        """
        return all(self._requests.get(name) == 0 for name in self.live)

    def is_stuck(self) -> bool:
        """Whether each live model may be stuck: it is unloading, but the server has not told it to
        end yet, since it still has metrics."""
        return all(
            state == "UNLOADING" and name in self._with_metrics for name, state in self.live.items()
        )

    def describe_cut(self) -> str:
        """How many requests are cut off if that is done now, and which models have them."""
        number = sum(self._requests.get(name, 0.0) for name in self.live)
        is_unknown = any(name not in self._requests for name in self.live)
        if number == 0 or is_unknown:
            at_least = f"{number:.0f} or more requests" if number else "requests"
            return f"{at_least} may have been cut off: {self.describe()}"
        noun = "request was" if number == 1 else "requests were"
        return f"{number:.0f} {noun} cut off: {self.describe()}"

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
