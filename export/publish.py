"""A finished model folder takes its place in the repository at once, or not at all.

Everything is written to a hidden folder beside the destination, on the same file system, and then
renamed. An earlier version under that name is moved aside first, and back if the rename fails.
"""

import shutil
import tempfile
from pathlib import Path

from export.errors import ExportError

VERSION = "1"


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
            _swap(fresh, destination, Path(staging) / "earlier")
    except OSError as error:
        raise ExportError(f"{destination} cannot be written: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there with all its content or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _swap(fresh: Path, destination: Path, earlier: Path) -> None:
    replaced = destination.exists()
    if replaced:
        for each in destination.iterdir():
            if each.name not in (VERSION, "config.pbtxt"):
                copy = shutil.copytree if each.is_dir() else shutil.copy2
                copy(each, fresh / each.name)
        destination.rename(earlier)
    try:
        fresh.rename(destination)
    except OSError:
        if replaced:
            earlier.rename(destination)
        raise
