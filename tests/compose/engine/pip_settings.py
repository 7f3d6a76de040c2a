"""This machine's settings of pip, for a build in a container, as build secrets.

A container sees neither the machine's files nor its certificates. So local folders that pip is told
to look into are offered on the loopback address, which builds share, and the certificates go along.
"""

import http.server
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_SOURCES = ("index-url", "extra-index-url", "find-links")
_KEPT = (*_SOURCES, "trusted-host", "timeout", "default-timeout", "retries")


@contextmanager
def build_secrets(folder: Path) -> Iterator[list[str]]:
    """Arguments of `docker build` that give it pip's settings, valid until the block ends."""
    settings = pip_settings()
    with offered(folders_of(settings)) as address:
        lines = ["[global]", "disable-pip-version-check = 1"]
        for name, value in settings.items():
            if name in _SOURCES:
                value = " ".join(over_http(each, address) for each in value.split())
            if name not in ("trusted-host", "cert"):
                lines.append(f"{name} = {value}")
        lines.append(f"trusted-host = 127.0.0.1 {settings.get('trusted-host', '')}")
        certificates = Path(settings.get("cert", _CERTIFICATES))
        secrets = []
        if certificates.is_file():
            lines.append("cert = /run/secrets/ca_bundle")
            secrets.append(f"--secret=id=ca_bundle,src={certificates}")
        file = folder / "pip.conf"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield [f"--secret=id=pip_conf,src={file}", *secrets]


def pip_settings() -> dict[str, str]:
    """Name -> value of pip's global settings, from its files and the environment, which wins."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, str] = {}
    for scope in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            key = name.removeprefix(f"{scope}.")
            if key != name and key.lstrip(".") in (*_KEPT, "cert"):
                found[key.lstrip(".")] = " ".join(shlex.split(value))
    return found


def local_path(source: str) -> Path | None:
    """The folder or file behind a ``file:`` address or a path; None for what is elsewhere."""
    parts = urlsplit(source)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(source) if source.startswith("/") else None


def folders_of(settings: dict[str, str]) -> list[Path]:
    """The local folders among pip's sources; the pages of an index point to files beside it."""
    paths = [local_path(each) for name in _SOURCES for each in settings.get(name, "").split()]
    return [path.resolve().parent for path in paths if path is not None]


def over_http(source: str, address: str) -> str:
    """A source as a container reaches it."""
    path = local_path(source)
    if path is None:
        return source
    slash = "/" if path.is_dir() else ""
    return f"http://{address}{quote(str(path.resolve()))}{slash}"


@contextmanager
def offered(folders: list[Path]) -> Iterator[str]:
    """``host:port`` of a server of these folders' files, on the loopback address alone."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            wanted = Path(re.sub(r"/+", "/", unquote(urlsplit(path).path))).resolve()
            inside = any(wanted.is_relative_to(folder) for folder in folders)
            # SimpleHTTPRequestHandler tells a folder by its slash.
            slash = "/" if path.endswith("/") and wanted.is_dir() else ""
            return f"{wanted}{slash}" if inside else "/nonexistent"

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
