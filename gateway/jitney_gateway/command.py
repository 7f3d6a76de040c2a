"""``jitney gateway``: serves the endpoints of ``app`` until it is told to stop."""

import importlib.util
import signal
import socket
from pathlib import Path

import uvicorn
from jitney.errors import ConfigError, InstallationError
from jitney.tracing import Tracing

from jitney_gateway.app import make_app
from jitney_gateway.backend import Backend
from jitney_gateway.batch_records import Folder
from jitney_gateway.keys import Keys
from jitney_gateway.load import Load


def run_gateway(
    server: str,
    host: str,
    port: int,
    api_key_file: Path | None = None,
    otlp_endpoint: str | None = None,
    metrics_url: str | None = None,
    batches: Path | None = None,
    grace_s: int = 10,
) -> None:
    """Print the address and serve until SIGINT or SIGTERM; port 0 is a free one. Spans of requests
    go to ``otlp_endpoint``; the server's load is read at ``metrics_url``; files and batches are
    kept in ``batches``; at the stop, streams get ``grace_s`` seconds. Raises ConfigError for a key
    file, an address or a folder that cannot be used, and for packages that one of them needs."""
    tracing = None if otlp_endpoint is None else Tracing(otlp_endpoint, "jitney-gateway")
    load = None if metrics_url is None else Load(metrics_url)
    folder = None if batches is None else _open(batches)
    keys = None if api_key_file is None else Keys(api_key_file, folder)
    listener = listen(host, port)
    url = "http://{}:{}".format(*listener.getsockname())
    config = uvicorn.Config(
        lambda: make_app(Backend(server), keys or {}, tracing, load, folder, url),
        factory=True,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=grace_s,
    )
    print(f"OpenAI   http://{host}:{listener.getsockname()[1]}/v1", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn sends them on once it has stopped
        signal.signal(number, lambda number, frame: None)
    uvicorn.Server(config).run([listener])


def listen(host: str, port: int) -> socket.socket:
    """A listener whose connections send small pieces at once. Raises ConfigError."""
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    # Connections inherit it; asyncio sets it on none of a listener whose protocol is left to choose
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _open(root: Path) -> Folder:
    for package in ("pyarrow", "yaml"):
        if importlib.util.find_spec(package) is None:
            needed = "pip install 'triton-jitney[gateway,jobs]'"
            raise InstallationError(f"batches are jobs, which need {package}: {needed}")
    try:
        return Folder(root.absolute())
    except OSError as error:
        raise ConfigError(f"batches cannot be kept in {root}: {error.strerror}") from None
