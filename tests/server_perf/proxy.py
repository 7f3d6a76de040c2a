"""The proxy of docker-compose without a container: nginx with the files of deploy/proxy, filled in
for this machine, in front of a server that is already there."""

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitney.server.ports import choose_ports

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "proxy"
SETTINGS = {
    "TRITON_HOST": "127.0.0.1", "GRAFANA_HOST": "127.0.0.1", "RESOLVER": "",
    "MAX_BODY": "8m", "MAX_STREAM_BODY": "1g", "REQUESTS_PER_SECOND": "1000", "BURST": "1000",
    "OPEN_PER_KEY": "256", "DRAIN_SECONDS": "5", "IDLE_STREAM_SECONDS": "60",
}  # fmt: skip


@dataclass(frozen=True)
class Proxy:
    """A running one. ``address`` is ``localhost:port``, for HTTP and gRPC."""

    address: str
    certificate: Path
    keys: Path
    """As deploy/secrets.sh makes it."""
    key: str

    @property
    def options(self) -> list[str]:
        """What `jitney bench` is told of it."""
        access = ["--ca-file", str(self.certificate), "--api-key-file", str(self.keys)]
        return ["--url", self.address, *access]


@contextlib.contextmanager
def running(
    nginx: Path, folder: Path, http_url: str, grpc_url: str, kept_back: str = ""
) -> Iterator[Proxy]:
    """In front of a server at ``host:port`` each; ``kept_back`` names a part of the paths' patterns
    that is left out, such as ``stats``."""
    secrets = folder / "secrets"
    subprocess.run(
        [ROOT / "deploy" / "secrets.sh"], env={**os.environ, "SECRETS": str(secrets)},
        check=True, capture_output=True,
    )  # fmt: skip
    port, other = choose_ports("127.0.0.1", [0, 0])
    _configure(folder, http_url, grpc_url, port, other, kept_back)
    keys = secrets / "api_keys"
    (line,) = [at for at in keys.read_text("utf-8").splitlines() if not at.startswith("#")]
    name, key = line.split(":")
    (folder / "tmp" / "keys.map").write_text(f'"~^Bearer {key}$" "{name}";\n', encoding="utf-8")
    command = [nginx, "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await(port, process, folder / "log")
        yield Proxy(f"localhost:{port}", secrets / "tls_certificate", keys, key)
    finally:
        process.terminate()
        process.wait(30)


def _configure(
    folder: Path, http_url: str, grpc_url: str, port: int, other: int, kept_back: str
) -> None:
    """Other places for the container's files, other ports, and nothing else."""
    (folder / "tmp").mkdir()
    moved = {
        "/etc/jitney/": f"{folder}/", "/run/secrets/": f"{folder}/secrets/",
        "/dev/stdout": f"{folder}/requests", "/dev/stderr": f"{folder}/log",
        "listen 8443": f"listen 127.0.0.1:{port}", "listen 3000": f"listen 127.0.0.1:{other}",
        "$triton:8000": f"$triton:{http_url.rpartition(':')[2]}",
        "$triton:8001": f"$triton:{grpc_url.rpartition(':')[2]}",
    }  # fmt: skip
    for file in FILES.glob("*.conf*"):
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"(?<=\s)/tmp/", f"{folder}/tmp/", text)
        for name, value in SETTINGS.items():
            text = text.replace(f"@{name}@", value)
        for old, new in moved.items():
            text = text.replace(old, new)
        if kept_back:
            text = text.replace("/models/[^/]+", f"/models/(?!{kept_back})[^/]+")
            text = re.sub(rf"\|{kept_back}\w*(?=\||\))", "", text, flags=re.IGNORECASE)
        (folder / file.name.removesuffix(".in")).write_text(text, encoding="utf-8")


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        time.sleep(0.1)
    raise AssertionError(f"no proxy at port {port}: {log.read_text(encoding='utf-8')}")
