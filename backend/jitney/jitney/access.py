"""How a client gets to a server behind a proxy: TLS, and headers such as an API key. For benchmarks
and jobs.
"""

import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jitney.errors import InvalidArgumentError

_HEADER = re.compile(r"\s*([\w.-]+)\s*:\s*([\x20-\x7e]*[\x21-\x7e])\s*", re.ASCII)
"""NAME:VALUE in printable ASCII. The value does not end in a space."""
_LIMIT = re.compile(r"\s(tiers|min_priority)=\S*")
"""One of the limits that may follow a key in a file of keys."""
_SHORTEST_SECRET = 8
"""Shorter values protect nothing, and occur in every text: ``1``, ``gpu``."""


@dataclass(frozen=True)
class Access:
    """How a client passes a proxy before the server.

    Owns the secrets of a run. They go into requests and onto perf_analyzer's command line, which
    takes them no other way; no representation, message or record shows them.
    """

    tls: bool = False
    ca_file: Path | None = None
    """Certificates to trust, in PEM form. None: those that the machine trusts."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Names and values. The names are in lower case, which gRPC requires."""

    @classmethod
    def of(
        cls,
        tls: bool = False,
        ca_file: Path | None = None,
        api_key_file: Path | None = None,
        headers: Sequence[str] = (),
    ) -> "Access":
        """What the user gives, read and checked. A CA file implies TLS. A header is ``NAME:VALUE``,
        or ``@FILE`` with such lines.

        Raises InvalidArgumentError, whose text never shows a value.
        """
        read: list[tuple[str, str]] = []
        for number, text in enumerate(headers, start=1):
            lines = [text]
            if text.startswith("@"):
                lines = _read_lines("header", Path(text[1:]))
            read += [_header(line, f"header {number}") for line in lines]
        if api_key_file is not None:
            key = _first_key(api_key_file)
            read.append(_header(f"authorization:Bearer {key}", "the key of api_key_file"))
        names = {name for name, _ in read}
        if len(names) < len(read):
            raise InvalidArgumentError("a header is given twice")
        access = cls(tls=tls or ca_file is not None, ca_file=ca_file, headers=tuple(read))
        access.check()
        return access

    def check(self) -> None:
        """Read the CA file now, and not in the middle of a measurement. Raises
        InvalidArgumentError."""
        _ = self.context

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """For our own connections; None without TLS. Raises InvalidArgumentError."""
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, ssl.SSLError):
                reason = "it holds no certificate in PEM form"
            raise InvalidArgumentError(f"cannot read ca_file {self.ca_file}: {reason}") from None

    @property
    def scheme(self) -> str:
        """Of a URL of the server."""
        return "https" if self.tls else "http"

    def hide(self, text: str) -> str:
        """``text`` with ``…`` in place of the headers' values and of their parts."""
        secrets: set[str] = set()
        for _, value in self.headers:
            secrets |= _secrets_of(value)
        if not secrets:
            return text
        # All at once, the longest first: no replacement may cut another secret in two.
        longest_first = sorted(secrets, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)), "…", text)


def _secrets_of(value: str) -> set[str]:
    """What must not be shown of a header's value: the whole, the words after a scheme such as
    ``Bearer``, and the parts of a cookie; each also as JSON writes it."""
    words = {value}
    words.update(value.split())  # the words after a scheme, whatever characters they have
    words.update(re.split(r"[\s,;=]+", value))  # the names and values of a cookie
    secrets: set[str] = set()
    for word in words:
        if len(word) >= _SHORTEST_SECRET:  # ``Bearer`` itself is shorter
            in_json = json.dumps(word)[1:-1]
            secrets |= {word, in_json}
    return secrets


def _header(text: str, where: str) -> tuple[str, str]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(f"{where} must be NAME:VALUE in printable ASCII")
    return match[1].lower(), match[2]


def _first_key(path: Path) -> str:
    """The first key of a file. A line is ``KEY``, or as in the server's file of keys ``NAME:KEY``,
    perhaps with the key's limits behind it (``tiers=…``, ``min_priority=…``). The key is what
    stands after the last colon, so it has none itself."""
    lines = [line for line in _read_lines("api_key_file", path) if not line.startswith("#")]
    first = lines[0] if lines else ""
    without_limits = _LIMIT.sub("", first)
    _, _, key = without_limits.rpartition(":")
    key = key.strip()
    if not key or " " in key:
        raise InvalidArgumentError(f"api_key_file {path} holds no key without spaces")
    return key


def _read_lines(option: str, path: Path) -> list[str]:
    """The lines that are not empty. ``option`` says in a message what the file was given for."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # without some editors' byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidArgumentError(f"cannot read {option} {path}: {reason}") from None
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line]
