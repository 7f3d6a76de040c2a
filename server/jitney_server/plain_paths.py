"""Paths that the server's stubs can be started with.

The server puts the command of a stub together without quotes and hands it to a shell, and the stub
reads it as ASCII. So a folder whose path has a space or other letters is reached through a link in
a folder with a plain path. A model's own folder cannot be: the link would need its name. Called by
``server``.
"""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jitney.errors import InstallationError, InvalidArgumentError

_PLAIN = re.compile(r"[\w./+,:@%=-]+", re.ASCII)
_TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Used where the folder for temporary files (``TMPDIR``) has no plain path."""


def is_plain(path: Path | str) -> bool:
    """Whether a stub's command line may hold this path as it is."""
    return _PLAIN.fullmatch(str(path)) is not None


def make_runtime_folder(prefix: str) -> Path:
    """A new folder for temporary files with a plain path. Raises InstallationError if there is no
    place for one."""
    parents = runtime_parents()
    for folder in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        except OSError:
            continue
    raise InstallationError(
        f"no folder can be made in {', '.join(parents)} (TMPDIR is {tempfile.gettempdir()!r}); set "
        f"TMPDIR to a folder whose path has ASCII letters alone, without spaces: the server's stub "
        f"cannot be started from another"
    )


def runtime_parents() -> tuple[str, ...]:
    """The folders in one of which :func:`make_runtime_folder` makes its own."""
    usual = tempfile.gettempdir()
    return (usual,) if is_plain(usual) else _TEMPORARY_FOLDERS


def plain_path(folder: Path, link: Path) -> Path:
    """``folder`` if its path is plain; else ``link``, which is made and leads to it."""
    if is_plain(folder):
        return folder
    link.symlink_to(folder)
    return link


def check_model_names(names: Iterable[str]) -> None:
    """Raise InvalidArgumentError for a model whose name, which is that of its folder, is not
    plain."""
    for name in names:
        if not is_plain(name):
            raise InvalidArgumentError(
                f"model {name!r} cannot be served: the name of its folder may have ASCII letters, "
                f"digits and any of . _ + , : @ % = - only"
            )
