"""The way to a server behind a proxy, for benchmarks and jobs: TLS, and headers such as a key."""

import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jitney.errors import InvalidArgumentError

_HEADER = re.compile(r"\s*([\w.-]+)\s*:\s*([\x20-\x7e]*[\x21-\x7e])\s*", re.ASCII)
_LIMIT = re.compile(r"\s(tiers|min_priority)=\S*")
_SHORTEST_SECRET = 8
"""Shorter values protect nothing, and occur in every text: ``1``, ``gpu``."""


@dataclass(frozen=True)
class Access:
    """How a client passes a proxy before the server: TLS, and headers such as an API key.

    Owns the secrets of a run: they go into requests and onto perf_analyzer's command line, which
    takes them no other way; no representation, message or record shows them. ``ca_file`` None
    trusts what the machine trusts. Header names are in lower case, which gRPC requires.
    """

    tls: bool = False
    ca_file: Path | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls,
        tls: bool = False,
        ca_file: Path | None = None,
        api_key_file: Path | None = None,
        headers: Sequence[str] = (),
    ) -> "Access":
        """A CA file implies TLS; a header is ``NAME:VALUE``, or ``@FILE`` with such lines.

        Raises InvalidArgumentError, which never shows a value.
        """
        made = []
        for i, text in enumerate(headers, 1):
            lines = _read_lines("header", Path(text[1:])) if text.startswith("@") else [text]
            made += [_header(line, f"header {i}") for line in lines]
        if api_key_file is not None:
            key = _key(api_key_file)
            made.append(_header(f"authorization:Bearer {key}", "the key of api_key_file"))
        if len(dict(made)) < len(made):
            raise InvalidArgumentError("a header is given twice")
        access = cls(tls or ca_file is not None, ca_file, tuple(made))
        assert (access.context is not None) == access.tls  # reads the file before any measurement
        return access

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """For our own connections; None without TLS. Raises InvalidArgumentError."""
        try:
            return ssl.create_default_context(cafile=self.ca_file) if self.tls else None
        except OSError as error:
            not_pem = isinstance(error, ssl.SSLError)
            reason = "it holds no certificate in PEM form" if not_pem else error.strerror
            raise InvalidArgumentError(f"cannot read ca_file {self.ca_file}: {reason}") from None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def hide(self, text: str) -> str:
        """``text`` without the values of the headers, whole or in parts."""
        parts = set()
        for _, value in self.headers:
            # A scheme such as `Bearer` is no secret, what follows it is; so are a cookie's parts.
            words = {value, *value.split(), *re.split(r"[\s,;=]+", value)}
            secret = {word for word in words if len(word) >= _SHORTEST_SECRET}
            parts |= secret | {json.dumps(word)[1:-1] for word in secret}
        # All at once, the longest first: no replacement may cut another secret in two.
        longest = sorted(parts, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest)), "…", text) if parts else text


def _header(text: str, where: str) -> tuple[str, str]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(f"{where} must be NAME:VALUE in printable ASCII")
    return match[1].lower(), match[2]


def _key(path: Path) -> str:
    """The first key of a file whose lines are ``KEY`` or, as docker-compose's, ``NAME:KEY`` and
    the key's limits."""
    lines = [line for line in _read_lines("api_key_file", path) if not line.startswith("#")]
    key = _LIMIT.sub("", lines[0]).rpartition(":")[2].strip() if lines else ""
    if not key or " " in key:
        raise InvalidArgumentError(f"api_key_file {path} holds no key without spaces")
    return key


def _read_lines(option: str, path: Path) -> list[str]:
    """Those that are not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # without some editors' byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidArgumentError(f"cannot read {option} {path}: {reason}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]
