"""The command line and the environment that a server is started with.

``server`` and the containers' process 1 start servers.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from jitney import stop_signals
from jitney.addresses import before_port, is_ipv6

from jitney_server.leftovers import RunFolder
from jitney_server.ports import ServerPorts

LOAD_THREADS = 16
"""Models that are loaded at the same time. During each load the server waits for at least a second
without using a core, so more threads than cores help."""
FORWARDED_HEADERS = "(?i)traceparent|tracestate|jitney-limits"
"""Headers that a model gets as parameters of its request: those of traces, and the limits of an API
key."""


def common_options(
    *, host: str, ports: ServerPorts, exit_timeout_s: int, run_folder: RunFolder
) -> list[str]:
    """The options that every server of ours gets."""
    options = [
        # Models are loaded and unloaded one by one, by a process that has the server's random key:
        # a stop unloads them, and a repair loads one again. Without this option the server refuses
        # that.
        "--model-control-mode=explicit",
        # After the start, the server calls itself ready while one of its models is loaded again:
        # its other models serve. The readiness of each model is asked for by the model's name.
        "--strict-readiness=false",
        f"--exit-timeout-secs={exit_timeout_s}",
        f"--model-load-thread-count={LOAD_THREADS}",
        f"--grpc-header-forward-pattern={FORWARDED_HEADERS}",
        f"--http-header-forward-pattern={FORWARDED_HEADERS}",
        # The stubs' shared memory gets names of our own, so that it can be removed after a kill.
        f"--backend-config=python,shm-region-prefix-name={run_folder.name}-",
    ]
    # The server (2.51) has two libraries that listen, and they write IPv6 in two ways.
    of_http = f"ipv6:{host}" if is_ipv6(host) else host
    addresses = {"http": of_http, "grpc": before_port(host), "metrics": of_http}
    for kind, port in ports._asdict().items():
        options += [f"--{kind}-address={addresses[kind]}", f"--{kind}-port={port}"]
    return options


def embedded_environment(library_path: str, run_folder: RunFolder) -> dict[str, str]:
    """The environment of a server of the nvidia-pytriton package.

    The Python in a stub takes the virtual environment of the ``python3`` that it finds on PATH. So
    the folder of our own Python stands first.
    """
    environment = with_stop_note(os.environ, run_folder)
    environment.pop("PYTHONHOME", None)  # it would hide the virtual environment
    inherited = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = f"{library_path}:{inherited}" if inherited else library_path
    search_path = environment.get("PATH", os.defpath)
    environment["PATH"] = f"{_folder_of_python3(run_folder)}:{search_path}"
    # The server, its clients and the engine share the cores. So a thread of the engine that waits
    # for another one sleeps after some 50 µs; by default it spins for milliseconds.
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    return environment


def with_stop_note(environment: Mapping[str, str], run_folder: RunFolder) -> dict[str, str]:
    """A copy of the environment that tells the models where their launcher notes a stop."""
    return {**environment, stop_signals.VARIABLE: str(run_folder.stop_note)}


def _folder_of_python3(run_folder: RunFolder) -> Path:
    """A folder whose ``python3`` is the Python that runs us."""
    folder = Path(sys.executable).parent
    python3 = folder / "python3"
    if python3.exists() and python3.samefile(sys.executable):
        return folder
    # There is no `python3`, or it is of another version. A link stands in for it.
    links = run_folder.path / "bin"
    links.mkdir()
    (links / "python3").symlink_to(sys.executable)
    return links
