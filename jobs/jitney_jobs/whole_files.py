"""Local files that are there as a whole or not at all, whenever their writer is killed or the
machine loses power."""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes], mode: int = 0o666) -> None:
    """Write a file, or write it anew. ``mode``: of the file, before the process' umask. Raises
    OSError."""
    temporary = write_beside(path, pieces, mode)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_beside(path: Path, pieces: Iterable[bytes], mode: int = 0o666) -> Path:
    """A file beside ``path``, on the disk, which the caller puts there. Its name is of this call
    alone. If ``pieces`` raise, or writing raises OSError, there is none."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
            file.writelines(pieces)
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync(path: Path) -> None:
    """Make a local file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
