"""A finished model folder takes its place in the repository at once, or not at all.

Everything is written to a hidden folder beside the destination, on the same file system, and then
renamed. An earlier version under that name is moved aside first, and back if the rename fails. A
folder that no export has written is not replaced.
"""

import contextlib
import errno
import shutil
import tempfile
import time
from pathlib import Path

from export.errors import ExportError, RecipeError

VERSION = "1"
# How every configuration of ours begins; a hand-written one does not.
MARK = "# Written by python -m export"
# That `make models` has made this folder: no longer true of what an export replaces.
STAMP = ".built"
# Two exports into one folder may meet between two renames; the next try finds order again.
_ATTEMPTS = 20
_RACED = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)


def require_place(destination: Path, *, overwrite: bool) -> None:
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

    What else an earlier folder of that name holds (other versions, labels) is kept.
    """
    repository = destination.parent
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=repository) as staging:
            fresh = Path(staging) / "fresh"
            shutil.copytree(work, fresh / VERSION)
            (fresh / "config.pbtxt").write_text(config, encoding="utf-8")
            for attempt in range(_ATTEMPTS):
                earlier = Path(staging) / f"earlier-{attempt}"
                try:
                    _swap(fresh, destination, earlier)
                    break
                except OSError as error:
                    if attempt + 1 == _ATTEMPTS or not _raced(error):
                        raise
                    time.sleep(0.01)
    except OSError as error:
        raise ExportError(f"{destination} cannot be written: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there with all its content or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _raced(error: OSError) -> bool:
    """Whether another export may have moved the folder meanwhile; ``copytree`` has no number."""
    return isinstance(error, shutil.Error) or error.errno in _RACED


def _swap(fresh: Path, destination: Path, earlier: Path) -> None:
    replaced = destination.exists()
    if replaced:
        _keep(destination, fresh)  # which may be much, so that it is done beside
    try:
        if replaced:
            destination.rename(earlier)
            # Another export's version may have come between, and is now this one's to keep.
            _keep(earlier, fresh)
        fresh.rename(destination)
    except BaseException:  # Ctrl-C too must not cost the earlier version
        if earlier.exists():
            with contextlib.suppress(OSError):  # another export's version stands there by now
                earlier.rename(destination)
        raise


def _keep(folder: Path, fresh: Path) -> None:
    """Copy into ``fresh`` what it lacks and an export does not write. Each entry whole or not."""
    for each in folder.iterdir():
        kept = fresh / each.name
        if each.name in (VERSION, "config.pbtxt", STAMP) or kept.exists():
            continue
        with tempfile.TemporaryDirectory(dir=fresh.parent) as partial:
            copy = shutil.copytree if each.is_dir() else shutil.copy2
            copy(each, Path(partial) / each.name)
            (Path(partial) / each.name).rename(kept)
