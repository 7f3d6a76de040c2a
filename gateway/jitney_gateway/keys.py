"""API keys: those of a file, as it is now, and those with which mounted services come back.

The gateway asks for the owner of each request's key; it reads the file again when it has changed.
"""

import logging
import re
from collections.abc import ItemsView, Sequence
from pathlib import Path
from typing import NamedTuple

from jitney.errors import ConfigError, InvalidArgumentError
from jitney.sampling_params import parse_limits

from jitney_gateway.mounting import MountedService

_LOG = logging.getLogger(__name__)
_LINE = re.compile(
    r"(?P<owner>[\w.-]+):(?P<key>[\w.~+/=-]{24,})(?P<limits>(?:\s+\S+)*)",
    re.ASCII,
)


class KeyFile(NamedTuple):
    """What a file of keys says."""

    owners: dict[str, str]
    """Key -> its owner's name."""
    limits: dict[str, str]
    """Owner's name -> the limits of all keys of that owner, as text."""


class FileState(NamedTuple):
    """By which a change of the file is seen."""

    changed_ns: int
    size: int


class Keys:
    """The keys of ``file``, and those that ``services`` have for its owners."""

    def __init__(self, file: Path, services: Sequence[MountedService] = ()) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._file = file
        self._services = services
        self._seen = self._state()
        self._known = self._read()

    def limits(self, owner: str) -> str:
        """What :func:`~jitney.sampling_params.parse_limits` reads; empty: none."""
        return self._known.limits.get(owner, "")

    def items(self) -> ItemsView[str, str]:
        """Each key and its owner's name. While the file cannot be used, those of before."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._known = self._read()
            except ConfigError as error:
                _LOG.warning("the API keys stay as they were: %s", error)
        return self._known.owners.items()

    def _state(self) -> FileState | None:
        try:
            now = self._file.stat()
        except OSError:
            return None
        return FileState(now.st_mtime_ns, now.st_size)

    def _read(self) -> KeyFile:
        known = read_keys(self._file)
        for owner in set(known.owners.values()):
            for service in self._services:
                try:
                    known.owners.update(service.keys_of(owner))
                except (ConfigError, OSError) as error:
                    # A full disk must not keep a key alive that was taken away: go on without.
                    _LOG.warning("what is mounted has no key for %s yet: %s", owner, error)
                    self._seen = None  # so that it is tried again
        return known


def read_keys(file: Path) -> KeyFile:
    """Read lines ``NAME:KEY LIMITS``, as the proxy takes them. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    known = KeyFile({}, {})
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            _add_line(known, line)
        except InvalidArgumentError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
    if not known.owners:
        raise ConfigError(f"{file}: there is no key in it")
    return known


def _add_line(known: KeyFile, line: str) -> None:
    """Raises InvalidArgumentError."""
    match = _LINE.fullmatch(line)
    if match is None:
        bound = "NAME:KEY, the key at least 24 characters long"
        raise InvalidArgumentError(f"must be {bound}")
    owner = match["owner"]
    limits = " ".join(match["limits"].split())
    parse_limits(limits)
    if known.limits.setdefault(owner, limits) != limits:
        raise InvalidArgumentError(f"{owner} has a key of other limits above")
    known.owners[match["key"]] = owner
