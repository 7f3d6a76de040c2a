"""``jitney gateway``: serves the endpoints of ``app`` until it is told to stop."""

import importlib.util
import re
import secrets
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

import uvicorn

from jitney.errors import ConfigError, InstallationError
from jitney.gateway.app import make_app
from jitney.gateway.backend import Backend
from jitney.gateway.batch_records import Folder, write_whole
from jitney.gateway.load import Load
from jitney.tracing import Tracing

GRACE_S = 10
"""Seconds that streams get when the gateway stops."""
_KEY = re.compile(r"([\w.-]+):([\w.~+/=-]{24,})")


def run_gateway(
    server: str,
    host: str,
    port: int,
    api_key_file: Path | None = None,
    otlp_endpoint: str | None = None,
    metrics_url: str | None = None,
    batches: Path | None = None,
) -> None:
    """Print the address and serve until SIGINT or SIGTERM; port 0 is a free one. Spans of requests
    go to ``otlp_endpoint``; the server's load is read at ``metrics_url``; files and batches are
    kept in ``batches``. Raises ConfigError for a key file, an address or a folder that cannot be
    used, and for packages that one of them needs."""
    keys = {} if api_key_file is None else read_keys(api_key_file)
    tracing = None if otlp_endpoint is None else Tracing(otlp_endpoint, "jitney-gateway")
    load = None if metrics_url is None else Load(metrics_url)
    folder = None if batches is None else _open(batches)
    if folder is not None:
        keys |= _keys_of_jobs(folder, set(keys.values()))
    listener = listen(host, port)
    url = "http://{}:{}".format(*listener.getsockname())
    config = uvicorn.Config(
        lambda: make_app(Backend(server), keys, tracing, load, folder, url),
        factory=True,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
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


def read_keys(file: Path) -> dict[str, str]:
    """Key -> name, of lines NAME:KEY, as the proxy takes them. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            match = _KEY.fullmatch(line)
            if match is None:
                bound = "NAME:KEY, the key at least 24 characters long"
                raise ConfigError(f"{file}, line {number}: must be {bound}")
            keys[match[2]] = match[1]
    if not keys:
        raise ConfigError(f"{file}: there is no key in it")
    return keys


def _open(root: Path) -> Folder:
    for package in ("pyarrow", "yaml"):
        if importlib.util.find_spec(package) is None:
            needed = "pip install 'triton-jitney[gateway,jobs]'"
            raise InstallationError(f"batches are jobs, which need {package}: {needed}")
    try:
        return Folder(root.absolute())
    except OSError as error:
        raise ConfigError(f"batches cannot be kept in {root}: {error.strerror}") from None


def _keys_of_jobs(folder: Folder, owners: Iterable[str]) -> dict[str, str]:
    """Key -> owner: with them the jobs of batches come back here. Made once for each owner."""
    keys: dict[str, str] = {}
    for owner in owners:
        path = folder.key_file(owner)
        if not path.exists():
            write_whole(path, [f"{owner}:{secrets.token_hex(24)}\n".encode()])
        keys |= read_keys(path)
    return keys
