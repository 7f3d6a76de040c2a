"""Runs a gateway: what ``jitney gateway`` does, from its options to its end."""

import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from jitney.addresses import before_port, family_of
from jitney.errors import ConfigError
from jitney.tracing import Tracing

from jitney_gateway.app import make_app
from jitney_gateway.connections import ConnectionBounds, most_connections
from jitney_gateway.keys import FileKeys, FixedKeys, KeySource
from jitney_gateway.mounting import open_service
from jitney_gateway.server_client import ServerClient
from jitney_gateway.server_load import ServerLoad


def run_gateway(
    server_address: str,
    host: str,
    port: int,
    *,
    api_key_file: Path | None = None,
    otlp_endpoint: str | None = None,
    metrics_url: str | None = None,
    batches: Path | None = None,
    grace_s: int = 10,
    strict: bool = False,
    allowed_origins: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    only_check: bool = False,
) -> None:
    """Print the gateway's address and serve until SIGINT or SIGTERM.

    - ``port``: 0 picks a free one.
    - ``otlp_endpoint``: the collector that gets the spans of requests.
    - ``metrics_url``: the server's metrics, from which the gateway reads the server's load.
    - ``batches``: the folder in which files and batches are kept.
    - ``grace_s``: seconds that streams get to end at the stop.
    - ``strict``: fields that have no effect are refused, not ignored.
    - ``allowed_origins``: web origins whose pages may use the gateway; ``*`` for all.
    - ``aliases``: another name of a model -> its own name.
    - ``only_check``: check these options, and return without serving.

    Raises ConfigError for a key file, an address or a folder that cannot be used. Raises
    ConfigError or InstallationError if a package is missing that an option needs.
    """
    tracing = None if otlp_endpoint is None else Tracing(otlp_endpoint, "jitney-gateway")
    load = None if metrics_url is None else ServerLoad(metrics_url)
    services = [open_service("batches", batches)]
    keys: KeySource = FixedKeys({})
    if api_key_file is not None:
        keys = FileKeys(api_key_file, services)
    listener = listen(host, port)
    if only_check:
        listener.close()
        return
    bound_host, bound_port = listener.getsockname()[:2]

    def make() -> FastAPI:
        return make_app(
            ServerClient(server_address, aliases),
            keys,
            tracing=tracing,
            load=load,
            services=services,
            url=f"http://{before_port(bound_host)}:{bound_port}",
            strict=strict,
            allowed_origins=allowed_origins,
        )

    config = uvicorn.Config(
        make,
        factory=True,  # the client of the server must be made in the event loop that uses it
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=grace_s,
    )
    bounds = ConnectionBounds(most_connections())
    bounds.apply_to(config)
    server = uvicorn.Server(config)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # These handlers serve twice. A signal may come before uvicorn has its own. And when uvicorn has
    # stopped because of a signal, it restores these and raises the signal again: with them, the
    # process still ends normally.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    # The only line on stdout: `jitney serve` waits for it, and reads no further.
    print(f"OpenAI   http://{before_port(host)}:{bound_port}/v1", flush=True)
    server.run([listener])


def listen(host: str, port: int) -> socket.socket:
    """A listener whose connections send small pieces at once. Raises ConfigError."""
    try:
        listener = socket.create_server(
            (host, port),
            family=family_of(host),
            backlog=2048,
            dualstack_ipv6=host == "::",
        )
    except OSError as error:
        address = f"{before_port(host)}:{port}"
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
    # Connections inherit the option. asyncio would set it on each connection itself, but only if
    # the listener was made with an explicit protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
