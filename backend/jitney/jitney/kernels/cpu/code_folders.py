"""The folders of compiled kernels: which of them are in use, and which are removed.

Each version of the sources has a folder of its own (``code_cache``), and a version that nobody uses
any more leaves its folder behind. A process that uses a folder holds a shared lock in it until it
ends. A folder is removed only under an exclusive lock, so never while a process uses it.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from functools import cache
from pathlib import Path
from typing import BinaryIO

PREFIX = "jitney-kernels-"
"""The name of each folder is this and 16 hexadecimal digits."""
NUM_KEPT = 3
"""So many folders stay, those that were used last, however long ago that was."""
UNUSED_S = 28 * 24 * 3600.0
"""All other folders are removed after so many seconds without a use."""
_VERSION = re.compile(rf"{PREFIX}[0-9a-f]{{16}}")
_REMOVED = ".removed"
"""Put behind the name of a folder that is being removed."""
_LOCK = "in-use"
"""A file in each folder. It is locked while the folder is in use, and its time is that of the last
use."""


@cache
def claim(folder: Path) -> BinaryIO:
    """Make the folder if there is none, and mark it as used until this process ends. Then remove
    the folders beside it that nobody uses. Raises OSError if it cannot be made or written to.

    Returns the file that is locked. The cache of this function keeps it open.
    """
    file = _lock(folder)
    os.utime(folder / _LOCK)
    # What cannot be removed stays: that stops nobody.
    with contextlib.suppress(OSError):
        remove_unused(folder.parent)
    return file


def remove_unused(parent: Path) -> None:
    """Remove the folders in ``parent`` that nobody uses: all but the NUM_KEPT that were used last,
    if they have not been used for UNUSED_S. Folders of other users stay."""
    used_at: dict[Path, float] = {}
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.name.endswith(_REMOVED) and _is_own(folder):
            shutil.rmtree(folder, ignore_errors=True)  # a removal that was interrupted
        elif _VERSION.fullmatch(folder.name) is not None and _is_own(folder):
            used_at[folder] = _last_use(folder)
    newest_first = sorted(used_at, key=lambda folder: used_at[folder], reverse=True)
    for folder in newest_first[NUM_KEPT:]:
        if time.time() - used_at[folder] > UNUSED_S:
            _remove_if_free(folder)


def _lock(folder: Path) -> BinaryIO:
    """The folder's file with a shared lock on it. If another process removes the folder before the
    lock is there, it is made again."""
    path = folder / _LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:
            continue  # the folder was removed
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            return file  # this file system has no locks, so no folder on it is removed
        if _is_at(file, path):
            return file
        file.close()  # the folder was removed: nobody else will look at this file


def _remove_if_free(folder: Path) -> None:
    path = folder / _LOCK
    with contextlib.suppress(OSError), path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: the folder is in use
        if not _is_at(file, path):
            return  # another process has removed it
        # Under its old name the folder is gone at once: nobody can begin to use a part of it.
        removed = folder.with_name(f"{folder.name}{_REMOVED}")
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether this open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _last_use(folder: Path) -> float:
    """When the folder was last used, in seconds of the wall clock."""
    # Folders that an earlier version of this module made have no lock: their own time must do.
    for path in (folder / _LOCK, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return time.time()  # it has just been removed


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False
