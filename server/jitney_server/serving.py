"""``jitney serve``: runs a server until it is told to stop, and repairs it meanwhile."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime

from jitney.errors import JitneyError
from rich.console import Console
from rich.markup import escape

from jitney_server.gateway_process import GatewayProcess
from jitney_server.interruptible import interruptible
from jitney_server.server import TritonServer
from jitney_server.supervision import Supervisor
from jitney_server.welcome import print_welcome

_OUT = Console(highlight=False, emoji=False)
_ERR = Console(stderr=True, highlight=False, emoji=False)
_PAUSE_S = 0.5
"""Seconds between two looks at the server and the gateway."""
_GATEWAY_END_S = 2.0
"""Seconds that a gateway has to end once the server has answered every request."""

NOT_UNLOADED = 3
"""Exit status if no request was left at the stop, but the server had to be killed."""


def serve_until_stopped(
    server: TritonServer,
    *,
    start_timeout_s: float,
    grace_s: int,
    openai_port: int | None = None,
    gateway_options: Sequence[str] = (),
) -> int:
    """Start ``server``, print its addresses, repair it until a signal comes, and stop it.

    With ``openai_port`` a gateway with ``gateway_options`` runs beside it; 0 is a free port.
    Returns the exit status: 0 or NOT_UNLOADED. Raises JitneyError if

    - the gateway's options or port cannot be used: then nothing is loaded;
    - the server does not start;
    - the stop may have cut requests off.
    """
    gateway: GatewayProcess | None = None
    if openai_port is not None:
        # The gateway waits for its streams as long as the server waits for its requests.
        options = [*gateway_options, f"--grace={grace_s}"]
        gateway = GatewayProcess(server, openai_port, options, say=_say, print_address=_OUT.print)
    with interruptible() as asked_to_stop, _killed_at_last(gateway):
        _run(server, gateway, asked_to_stop, start_timeout_s)
        return _stop(server, gateway, grace_s)


@contextlib.contextmanager
def _killed_at_last(gateway: GatewayProcess | None) -> Iterator[None]:
    try:
        yield
    finally:
        if gateway is not None:
            gateway.kill()


def _run(
    server: TritonServer,
    gateway: GatewayProcess | None,
    asked_to_stop: threading.Event,
    start_timeout_s: float,
) -> None:
    """Start the server and the gateway, and repair them. Returns at a signal.

    Raises JitneyError if the gateway cannot be started or the server does not start. Then nothing
    is left running.
    """
    try:
        if gateway is not None:
            gateway.check()
        what = ", ".join(server.models or ()) or f"all of {server.model_repository.name}"
        with _ERR.status(f"Loading {what} …"):
            server.start(start_timeout_s)
        # A gateway that ends is started again even while a model is loaded, which may take minutes.
        look_at_gateway = None if gateway is None else gateway.turn
        supervisor = Supervisor(server, _say, meanwhile=look_at_gateway)
        if not print_welcome(server, _OUT):
            _say(f"warning: {server.model_repository} holds no models, so nothing is served")
        while True:
            if gateway is not None:
                gateway.turn()
            if asked_to_stop.wait(_PAUSE_S):
                return
            supervisor.turn()
    except KeyboardInterrupt:
        pass  # the signal came: `interruptible` raises this wherever the main thread is
    except JitneyError:
        server.stop()
        raise


def _say(text: str) -> None:
    """Print a line with the time, because it may be read much later."""
    _ERR.print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {escape(text)}", soft_wrap=True)


def _stop(server: TritonServer, gateway: GatewayProcess | None, grace_s: int) -> int:
    """Stop the gateway and the server. Returns the exit status, or raises JitneyError."""
    _ERR.print(f"Stopping: running requests get up to {grace_s} s; Ctrl-C again to end them now.")
    if gateway is not None:
        gateway.begin_to_stop()
    try:
        server.stop()
    except KeyboardInterrupt:
        server.stop(0)
    if gateway is not None:
        gateway.wait(_GATEWAY_END_S)
    outcome = server.last_stop
    if outcome.problem is None:
        if outcome.stuck is not None:
            _say(f"every request was answered; the server was killed, because {outcome.stuck}")
        _ERR.print("Stopped.")
        return 0
    problem = f"{outcome.problem}; its log is {server.log_file}"
    if outcome.cut_requests:
        raise JitneyError(f"the stop was not clean: {problem}")
    _say(f"Stopped; no request was left, but the server had to be killed: {problem}")
    return NOT_UNLOADED
