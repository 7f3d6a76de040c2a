"""API keys: those of a file, as it is now, and those with which the jobs of batches come back."""

import contextlib
import logging
import os
import re
import secrets
from collections.abc import ItemsView
from pathlib import Path

from jitney.errors import ConfigError, InvalidArgumentError
from jitney.sampling_params import parse_limits

from jitney_gateway.batch_records import Folder, write_whole

_LOG = logging.getLogger(__name__)
_KEY = re.compile(r"([\w.-]+):([\w.~+/=-]{24,})((?:\s+\S+)*)", re.ASCII)
Read = tuple[dict[str, str], dict[str, str]]
"""Key -> its owner's name; name -> the limits of its keys, as text."""


class Keys:
    """Those of ``file``, and one of each owner's jobs if there is a ``folder`` of batches."""

    def __init__(self, file: Path, folder: Folder | None = None) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._file, self._folder = file, folder
        self._seen = self._state()
        self._known, self._limits = self._read()

    def limits(self, owner: str) -> str:
        """What :func:`~jitney.sampling_params.parse_limits` reads; empty: none."""
        return self._limits.get(owner, "")

    def items(self) -> ItemsView[str, str]:
        """Key and its owner's name, of each. While the file cannot be used, those of before."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._known, self._limits = self._read()
            except ConfigError as error:
                _LOG.warning("the API keys stay as they were: %s", error)
        return self._known.items()

    def _state(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            now = self._file.stat()
            return now.st_mtime_ns, now.st_size
        return None

    def _read(self) -> Read:
        keys, limits = read_keys(self._file)
        if self._folder is not None:
            for owner in set(keys.values()):
                try:
                    keys |= _key_of_jobs(self._folder, owner)
                except (ConfigError, OSError) as error:  # a full disk keeps no old key alive
                    _LOG.warning("batches of %s wait for their key: %s", owner, error)
                    self._seen = None  # so that it is tried again
        return keys, limits


def read_keys(file: Path) -> Read:
    """Of lines ``NAME:KEY LIMITS``, as the proxy takes them. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    keys: dict[str, str] = {}
    limits: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            match = _KEY.fullmatch(line)
            if match is None:
                bound = "NAME:KEY, the key at least 24 characters long"
                raise ConfigError(f"{file}, line {number}: must be {bound}")
            keys[match[2]], said = match[1], " ".join(match[3].split())
            try:
                parse_limits(said)
            except InvalidArgumentError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from None
            if limits.setdefault(match[1], said) != said:
                other = f"{match[1]} has a key of other limits above"
                raise ConfigError(f"{file}, line {number}: {other}")
    if not keys:
        raise ConfigError(f"{file}: there is no key in it")
    return keys, limits


def _key_of_jobs(folder: Folder, owner: str) -> dict[str, str]:
    """Key -> owner: with it the jobs of batches come back here. Made once for all gateways."""
    path = folder.key_file(owner)
    if not path.exists():
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        write_whole(made, [f"{owner}:{secrets.token_hex(24)}\n".encode()])
        with contextlib.suppress(FileExistsError):  # another gateway was faster
            os.link(made, path)
        made.unlink()
    return read_keys(path)[0]
