"""Process 1 of the server containers: starts ``tritonserver``, watches it and drains it.

    python entrypoint.py --embedded            the server of the nvidia-pytriton package
    python entrypoint.py --native FOLDER       NVIDIA's own, e.g. in /opt/tritonserver

Owns the server's command line, its signals and the container's exit status. Everything that the
server and its models print goes to standard output, which the container engine rotates.

SIGTERM stops the server. First the models are told: ours refuse new requests, and end running ones
with an error after ``--drain-s``. Then they are unloaded, and last the server gets SIGTERM. On
SIGTERM alone it would cut streams, and would not end while a stream or a connection is open.

A model whose process ends is loaded again. A server that ends, or that stays not ready, is started
again. The pauses before these repairs grow. After ``--most-repairs`` of them within ten minutes
this process gives up: the container engine's restart policy then starts a new container.

Exit status:

- 0: every request was answered.
- 1: requests were cut off, or may have been; or this process gave up.
- 3: no request was left, but the server had to be killed, or it ended with an error.
"""

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from health import remember
from jitney.errors import LoadError
from jitney_server.admin import Admin
from jitney_server.command_line import common_options, with_stop_note
from jitney_server.group_guard import guard_group
from jitney_server.installation import backend_folder, find_installation, link_backends
from jitney_server.interruptible import interruptible
from jitney_server.launch import launch, restrict
from jitney_server.leftovers import RunFolder, sweep
from jitney_server.ports import ServerPorts
from jitney_server.serving import NOT_UNLOADED
from jitney_server.stacks import risk_of_large_requests
from jitney_server.stopping import stop
from jitney_server.supervision import LOAD_S, Supervisor

_POLL_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or a failure; returns the container's exit status."""
    server = Server(parse(arguments))
    try:
        failure = serve_until_signal(server)
        # One signal is enough: the stop takes at most as long as the options say.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        status = server.drain()
    finally:
        server.kill()
    return status if failure is None else 1


def serve_until_signal(server: "Server") -> str | None:
    """Serve. Returns why the supervisor has given up; None after a signal."""
    with interruptible():
        try:
            failure = server.serve()
            say(f"{failure}; a new container must take over")
            return failure
        except KeyboardInterrupt:  # a signal came: `interruptible` raises this
            return None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what follows ``--`` goes to tritonserver as it is."""
    parser = argparse.ArgumentParser(description="Run tritonserver as process 1 of a container.")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--embedded", action="store_true", help="the server of nvidia-pytriton")
    kind.add_argument("--native", type=Path, metavar="FOLDER", help="where NVIDIA's server is")
    parser.add_argument("--models", type=Path, default=Path("/models"), help="model repository")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--drain-s", type=float, default=30.0, help="seconds that requests in flight get at a stop"
    )
    parser.add_argument(
        "--exit-timeout-s",
        type=int,
        default=10,
        help="seconds that the server gives requests if it gets SIGTERM from somebody else",
    )
    parser.add_argument(
        "--most-repairs", type=int, default=5, help="within ten minutes; then a new container"
    )
    parser.add_argument(
        "--unready-s", type=float, default=120.0, help="seconds the server may be not ready"
    )
    parser.add_argument("server_args", nargs="*", metavar="-- ARGUMENT")
    return parser.parse_args(arguments)


class Server:
    """One ``tritonserver`` after the other, each of which leads its own process group."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.key = secrets.token_hex(16)
        ports = ServerPorts(options.http_port, options.grpc_port, options.metrics_port)
        self.admin = Admin(options.host, ports, {"jitney-key": self.key})
        self.process: subprocess.Popen[bytes] | None = None
        self.runtime: RunFolder | None = None
        self.was_ready = False

    @property
    def pid(self) -> int | None:
        """The id of the server's process."""
        return None if self.process is None else self.process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the last process; None while it runs."""
        return None if self.process is None else self.process.poll()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the server; it is not ready yet."""
        options = self.options
        remember(options.models)
        runtime = RunFolder()
        self.runtime = runtime
        environment = with_stop_note(os.environ, runtime)
        if options.embedded:
            installation = find_installation()
            backends = runtime.path / "backends"
            link_backends(backends, installation, backend_folder())
            environment["LD_LIBRARY_PATH"] = installation.library_path
            binary = installation.binary
            caches = installation.caches
        else:
            binary = options.native / "bin" / "tritonserver"
            backends = options.native / "backends"
            caches = options.native / "caches"
        self.process = launch(
            self.command(binary, backends, caches),
            restrict(self.key),
            environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals to the container's terminal are ours to pass on
        )
        runtime.note_server(self.process.pid)
        guard_group(self.process.pid)

    def command(self, binary: Path, backends: Path, caches: Path) -> list[str]:
        """The server's command line, without its secret arguments."""
        options = self.options
        assert self.runtime is not None
        return [
            str(binary),
            f"--model-repository={options.models}",
            f"--backend-directory={backends}",
            f"--cache-directory={caches}",
            *common_options(
                host=options.host,
                ports=self.admin.ports,
                exit_timeout_s=options.exit_timeout_s,
                run_folder=self.runtime,
            ),
            "--load-model=*",
            *options.server_args,
        ]

    # ------------------------------------------------------------------ while it runs

    def serve(self) -> str:
        """Start the server, and repair it until the supervisor gives up. Returns why it did."""
        sweep()
        self.start()
        # No time limit: how long models take to load is the user's matter. So with
        # `--exit-on-error=false` and a model that does not load, this waits until a signal comes.
        while not self.admin.is_ready():
            if not self.is_alive():
                return f"the server ended by itself with status {self.status}"
            time.sleep(_POLL_S)
        self.was_ready = True
        self.note_ready()
        most = self.options.most_repairs
        unready_s = self.options.unready_s
        supervisor = Supervisor(self, say, most_repairs=most, unready_s=unready_s)
        say("ready")
        say(f"without a proxy before it: {risk_of_large_requests()}")
        while True:
            given_up = supervisor.turn()
            if given_up is not None:
                return given_up
            collect_orphans(self.pid)
            time.sleep(_POLL_S)

    def restart(self) -> None:
        """End what is left of the server, and start it again; returns when it is ready."""
        self.kill()
        self.start()
        deadline = time.monotonic() + LOAD_S
        while not self.admin.is_ready():
            if not self.is_alive() or time.monotonic() > deadline:
                raise LoadError(f"it is not ready; its status is {self.status}")
            time.sleep(_POLL_S)
        self.note_ready()

    def note_ready(self) -> None:
        """The server that was started last is ready."""
        assert self.runtime is not None
        self.runtime.note_ready()

    # ------------------------------------------------------------------ how it ends

    def drain(self) -> int:
        """Stop the server. Returns the exit status that the module's docstring describes."""
        if self.process is None or not self.is_alive():
            return 1
        assert self.runtime is not None
        # A server with `--exit-on-error=false` may serve although it was never ready.
        if not self.was_ready and not self.admin.is_ready("/v2/health/live"):
            say("stopping while models load: no request was taken yet")
            return 0  # `kill` follows. On SIGTERM the server would first load all models.
        say(f"stopping; requests in flight get up to {self.options.drain_s:.0f} s")
        outcome = stop(self.admin, self.process, self.options.drain_s, self.runtime.stop_note)
        if self.status is None:
            say("the server did not end in time and was killed")
        else:
            say(f"the server ended with status {self.status}")
        if outcome.problem is not None:
            say(outcome.problem)
        if outcome.stuck is not None:
            say(f"the server does not unload models that have no requests: {outcome.stuck}")
        if outcome.cut_requests:
            say("not every request had ended")
            return 1
        # A server with a stuck model never ends by itself: to kill it is no failure.
        ended_well = self.status == 0 or outcome.stuck is not None
        return 0 if outcome.problem is None and ended_well else NOT_UNLOADED

    def kill(self) -> None:
        """Kill what is left of the server and its models, and remove what they left. May be called
        again."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.runtime is not None:
            self.runtime.remove()


def collect_orphans(server: int | None) -> None:
    """Collect the processes that have ended, except the server.

    The kernel makes process 1 the parent of every process whose own parent has ended. A process
    that nobody collects counts against the container's limit of processes.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # there are no children
            return
        if ended is None or ended.si_pid == server:
            return  # `Server` asks for the server's status itself
        os.waitpid(ended.si_pid, os.WNOHANG)


def say(text: str) -> None:
    """One line in the container's log."""
    print(f"[entrypoint] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
