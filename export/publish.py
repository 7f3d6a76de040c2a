"""Writes a finished model folder into the repository, completely or not at all.

Everything is written to a hidden folder beside the destination, on the same file system, and then
renamed. An earlier version under that name is moved aside first, and back if the rename fails. A
folder that no export has written is not replaced.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from export.errors import ExportError, RecipeError

VERSION = "1"
# The beginning of every configuration that an export writes; a hand-written one has another.
MARK = "# Written by python -m export"
# Says that `make models` has made this folder. An export removes it from a folder it replaces.
STAMP = ".built"


def require_replaceable(destination: Path, *, overwrite: bool) -> None:
    """Raises RecipeError where ``publish`` would replace a model that no export has written."""
    config = destination / "config.pbtxt"
    if config.is_file():
        ours = config.read_text(encoding="utf-8", errors="replace").startswith(MARK)
    else:
        ours = not (destination / VERSION).exists()
    if not ours and not overwrite:
        raise RecipeError(
            f"{destination} holds a model that no export has written: choose another --name or "
            "--out, or replace its config.pbtxt and version 1 with --overwrite"
        )


def require_writable(repository: Path) -> None:
    """Raises ExportError where nothing can be written. Leaves nothing behind."""
    existing = repository.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ExportError(f"{repository} cannot be written: {error}") from error


def publish(work: Path, config: str, destination: Path) -> None:
    """Make ``destination``/{config.pbtxt, 1/…} of a configuration and the files in ``work``.

    Other files in an earlier folder of that name (other versions, labels) are kept. Two exports
    into one repository wait for each other.
    """
    repository = destination.parent
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with (
            _locked(repository),
            tempfile.TemporaryDirectory(prefix=".export-", dir=repository) as staging,
        ):
            fresh = Path(staging) / "fresh"
            earlier = Path(staging) / "earlier"
            shutil.copytree(work, fresh / VERSION)
            (fresh / "config.pbtxt").write_text(config, encoding="utf-8")
            if destination.exists():
                _keep(destination, fresh)
            try:
                if destination.exists():
                    destination.rename(earlier)
                fresh.rename(destination)
            except BaseException:  # Ctrl-C too must not lose the earlier version
                if earlier.exists():
                    earlier.rename(destination)
                raise
    except OSError as error:
        raise ExportError(f"{destination} cannot be written: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or the file as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other export writes into ``folder`` until the block ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _keep(folder: Path, fresh: Path) -> None:
    """Copy into ``fresh`` the entries of ``folder`` that an export does not write."""
    for each in folder.iterdir():
        if each.name not in (VERSION, "config.pbtxt", STAMP):
            copy = shutil.copytree if each.is_dir() else shutil.copy2
            copy(each, fresh / each.name)
