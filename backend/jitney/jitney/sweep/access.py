"""How a client gets in where a proxy stands before the server: TLS, and headers such as an API key.

Owns the secrets of a sweep. They go into requests and onto perf_analyzer's command line, which has
no other way in, and nowhere else: no representation, message or record shows them.
"""

import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jitney.errors import InvalidArgumentError

_HIDDEN = "…"
_LEAST_SECRET = 8
"""Shorter words are none that would keep anybody out, and stand in every text: ``1``, ``gpu``."""


@dataclass(frozen=True)
class Access:
    """``ca_file`` None trusts what the machine trusts. Header names are in lower case, which HTTP
    does not tell from upper case and gRPC demands."""

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
        """As the user gives it: a CA file asks for TLS too; a header is ``NAME:VALUE`` or ``@FILE``
        with such lines.

        Raises InvalidArgumentError, which never shows a value.
        """
        made = [_header(line, where) for line, where in _lines(headers)]
        if api_key_file is not None:
            made.append(("authorization", f"Bearer {_key(api_key_file)}"))
        twice = {name for name, _ in made if [other for other, _ in made].count(name) > 1}
        if twice:
            raise InvalidArgumentError(f"header {', '.join(sorted(twice))} is given twice")
        access = cls(tls or ca_file is not None, ca_file, tuple(made))
        if access.tls:
            assert access.context is not None  # the file is read before anything is measured
        return access

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """For connections of ours; None without TLS. Raises InvalidArgumentError."""
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # ssl.SSLError is one
            reason = "it holds no certificate in PEM form"
            if not isinstance(error, ssl.SSLError):
                reason = error.strerror or str(error)
            raise InvalidArgumentError(f"cannot read ca_file {self.ca_file}: {reason}") from None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def words(self, protocol: str) -> list[str]:
        """perf_analyzer's; its -H holds for gRPC too, whatever its help says."""
        words = []
        if self.tls and protocol == "grpc":
            words += ["--ssl-grpc-use-ssl", "true"]
        if self.ca_file is not None:
            option = {
                "grpc": "--ssl-grpc-root-certifications-file",
                "http": "--ssl-https-ca-certificates-file",
            }[protocol]
            words += [option, str(self.ca_file)]
        for name, value in self.headers:
            words += ["-H", f"{name}:{value}"]
        return words

    def hide(self, text: str) -> str:
        """``text`` without the values of the headers, whole or in parts: somebody may have repeated
        them."""
        parts = set()
        for _, value in self.headers:
            # A scheme such as `Bearer` is no secret, what follows it is; so are parts of a cookie.
            words = {value, *value.split(), *re.split(r"[\s,;=]+", value)}
            secret = {word for word in words if len(word) >= _LEAST_SECRET}
            parts |= secret | {json.dumps(word)[1:-1] for word in secret}
        if not parts:
            return text
        # At once, the longest first: what replaces one must not cut another in two.
        longest = sorted(parts, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest)), _HIDDEN, text)


def _lines(headers: Sequence[str]) -> list[tuple[str, str]]:
    """Each header with where it stands."""
    made = []
    for number, text in enumerate(headers, 1):
        if not text.startswith("@"):
            made.append((text, f"header {number}"))
            continue
        lines = enumerate(_read("header", Path(text[1:])).splitlines(), 1)
        made += [(line, f"{text[1:]}, line {i},") for i, line in lines if line.strip()]
    return made


def _header(text: str, where: str) -> tuple[str, str]:
    name, found, value = (part.strip() for part in text.partition(":"))
    token = name.replace("-", "").replace("_", "").replace(".", "")
    if not found or not (token.isascii() and token.isalnum()) or not _sendable(value):
        raise InvalidArgumentError(f"{where} must be NAME:VALUE in printable ASCII")
    return name.lower(), value


def _key(path: Path) -> str:
    """The first key of a file with a key alone or, as docker-compose's, ``NAME:KEY`` a line."""
    for line in _read("api_key_file", path).splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            key = line.strip().rpartition(":")[2]
            if not _sendable(key) or " " in key:
                raise InvalidArgumentError(f"api_key_file {path}: its first key cannot be sent")
            return key
    raise InvalidArgumentError(f"api_key_file {path} holds no key")


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors set
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidArgumentError(f"cannot read {option} {path}: {reason}") from None


def _sendable(value: str) -> bool:
    return bool(value) and value.isascii() and value.isprintable()
