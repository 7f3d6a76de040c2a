"""The API keys that a gateway takes: those of a file, and those of mounted services.

The gateway asks for the keys with each request. The file is read again when it has changed, so a
key can be added or taken away while the gateway runs.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

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
    """A file has changed if its state differs."""

    changed_ns: int
    """When its text, mode or owner changed: a file that could not be read may be readable now."""
    size: int


class KeySource(Protocol):
    """What the gateway asks about API keys."""

    def refreshed_owners(self) -> Mapping[str, str]:
        """Each key and its owner's name. Empty: a client needs no key."""

    def limits(self, owner: str) -> str:
        """The owner's limits, as :func:`~jitney.sampling_params.parse_limits` takes them. Empty if
        there are none."""


class FixedKeys:
    """Keys that do not change and have no limits."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        """``owners``: key -> its owner's name."""
        self._owners = owners

    def refreshed_owners(self) -> Mapping[str, str]:
        """Each key and its owner's name."""
        return self._owners

    def limits(self, owner: str) -> str:
        """Always empty: no owner has limits."""
        return ""


class FileKeys:
    """The keys of ``file``, and those that ``services`` have for the owners in it."""

    def __init__(self, file: Path, services: Sequence[MountedService] = ()) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._file = file
        self._services = services
        self._state_read = self._state()
        """The file's state when it was last read. None: there was no file."""
        self._must_read_again = False
        """The last reading failed, or a service had no key for an owner."""
        self._failure: str | None = None
        """Why the last reading failed. None if it did not."""
        self._known = self._read()

    def limits(self, owner: str) -> str:
        """The limits in the lines of an owner. Empty if there are none."""
        return self._known.limits.get(owner, "")

    def refreshed_owners(self) -> Mapping[str, str]:
        """Each key and its owner's name. Reads the file if it has changed. While it cannot be used,
        the keys stay as they were, and each call tries to read it again."""
        state = self._state()
        has_changed = state != self._state_read
        if has_changed or self._must_read_again:
            self._state_read = state
            try:
                self._known = self._read()
                self._failure = None
            except ConfigError as error:
                # The reason may pass without a change of the file, such as too many open files.
                self._must_read_again = True
                if has_changed or str(error) != self._failure:  # not again with each request
                    _LOG.warning("the API keys stay as they were: %s", error)
                self._failure = str(error)
        return self._known.owners

    def _state(self) -> FileState | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return FileState(status.st_ctime_ns, status.st_size)

    def _read(self) -> KeyFile:
        """The file's keys, and the services' keys for the owners in it."""
        self._must_read_again = False
        known = read_keys(self._file)
        for owner in set(known.owners.values()):
            for service in self._services:
                self._add_keys_of(service, owner, known)
        return known

    def _add_keys_of(self, service: MountedService, owner: str, known: KeyFile) -> None:
        try:
            known.owners.update(service.keys_of(owner))
        except (ConfigError, OSError) as error:
            # A service may be unable to write a key, for example on a full disk. The file is still
            # taken as it is: a key that was taken away from it must not go on working.
            _LOG.warning("what is mounted has no key for %s yet: %s", owner, error)
            self._must_read_again = True


def read_keys(file: Path) -> KeyFile:
    """Read lines ``NAME:KEY LIMITS``; ``deploy/proxy/reload-keys`` reads the same file. Raises
    ConfigError."""
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
    parse_limits(limits)  # to refuse what it cannot read
    if known.limits.setdefault(owner, limits) != limits:
        raise InvalidArgumentError(f"an earlier line of {owner} has other limits")
    known.owners[match["key"]] = owner
