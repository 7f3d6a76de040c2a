"""Where the machine code of kernels is kept from one load to the next.

Numba itself names the folder of compiled code after the folder that the source was imported from.
The server imports this package through a folder of links whose name is new at each start, so Numba
would find nothing again. Here the folder is named after what is compiled: the text of the sources,
and Numba's version. So a checkout that was moved finds its code too.

Called by ``compiled``. Imported only where Numba is.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.misc.appdirs import AppDirs

from jitney.execution import byte_cache
from jitney.kernels.cpu.code_folders import PREFIX, claim

_OUTSIDE = Path(byte_cache.__file__)
"""The one file outside this folder whose constants are compiled into kernels."""
_RIGHTS_OF_OTHERS = 0o077


class _Locator(_CacheLocator):
    """The folder of one function's code. Also the line and the digest by which Numba tells this
    function from others, and this version of it from others."""

    def __init__(self, function: Callable[..., Any], file: str, folder: Path) -> None:
        self._line = function.__code__.co_firstlineno
        self._py_file = file  # Numba's own warnings name it
        self._folder = folder

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "_Locator | None":
        """The locator of the first folder that can be written to; None if there is no such folder.
        Also None if the function is defined in no file: nobody could tell when it changes."""
        source = Path(py_file)
        if not source.is_file():
            return None
        for folder in _folders(source):
            locator = cls(py_func, py_file, folder / _folder_name())
            with contextlib.suppress(OSError):
                locator.ensure_cache_path()
                claim(locator._folder)
                return locator
        return None

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> bytes:
        """A digest of the function's own file. For a kernel of this folder it would not be needed,
        as the name of ``_folder`` changes with its file. It is for the functions of tests, whose
        files are elsewhere."""
        return hashlib.sha256(Path(self._py_file).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _CodeFiles(CompileResultCacheImpl):
    """Numba's files of compiled code, in the folders of :class:`_Locator`."""

    _locator_classes: list[type[object]] = [_Locator]  # noqa: RUF012 - as in the base class


class CodeCache(FunctionCache):
    """The cached code of one function. Numba asks it for the code before it compiles the function,
    and hands it the code afterwards.

    The constructor raises RuntimeError, with "no locator" in its text, if no folder can be written
    to.
    """

    _impl_class = _CodeFiles


def _folders(source: Path) -> Iterator[Path]:
    """Folders for compiled code, the best first. ``source``: the file of the function."""
    # The environment variable NUMBA_CACHE_DIR; empty if it is not set.
    named = config.CACHE_DIR  # type: ignore[attr-defined]
    if named:
        yield Path(named)
    yield source.resolve().parent / "__pycache__"
    yield Path(AppDirs("jitney", appauthor=False).user_cache_dir)
    # For a user without a home.
    folder = Path(tempfile.gettempdir(), f"jitney-kernels-{os.getuid()}")
    if _is_private(folder):
        yield folder


def _is_private(folder: Path) -> bool:
    """Whether only this user can use ``folder``, which is made if there is none. Code that another
    user can change must not be run."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    rights_of_others = found.st_mode & _RIGHTS_OF_OTHERS
    return found.st_uid == os.getuid() and rights_of_others == 0


@cache
def _folder_name() -> str:
    """A name that changes with the files of this folder, the one outside it, and Numba.

    Each kernel is compiled from many of these files, and Numba itself compares only the one that
    the kernel's outermost function is in.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for path in [*sorted(Path(__file__).parent.glob("*.py")), _OUTSIDE]:
        digest.update(path.read_bytes())
    return f"{PREFIX}{digest.hexdigest()[:16]}"
