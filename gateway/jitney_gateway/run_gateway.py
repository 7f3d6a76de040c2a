"""``jitney gateway``: serves the endpoints of ``app`` until it is told to stop."""

import signal
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from jitney.errors import ConfigError
from jitney.tracing import Tracing

from jitney_gateway.app import make_app
from jitney_gateway.keys import Keys
from jitney_gateway.mounting import open_service
from jitney_gateway.server_client import ServerClient
from jitney_gateway.server_load import ServerLoad


def run_gateway(
    server: str,
    host: str,
    port: int,
    *,
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
    load = None if metrics_url is None else ServerLoad(metrics_url)
    services = [open_service("batches", batches)]
    keys = None if api_key_file is None else Keys(api_key_file, services)
    listener = listen(host, port)
    own_host, own_port = listener.getsockname()

    def make() -> FastAPI:  # in the loop that serves, which the client of the server belongs to
        return make_app(
            ServerClient(server),
            keys or {},
            tracing=tracing,
            load=load,
            services=services,
            url=f"http://{own_host}:{own_port}",
        )

    config = uvicorn.Config(
        make,
        factory=True,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=grace_s,
    )
    print(f"OpenAI   http://{host}:{own_port}/v1", flush=True)
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
