"""Machine code of Numba kernels: compiled once, found in Numba's cache at the next load.

Imported only where Numba is.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types

_log = logging.getLogger(__name__)


_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}


def compile_body(body: Callable[[int], None]) -> Any:
    """``void (*)(void *)`` of ``body(arguments)``. The object owns the code at its ``address``."""
    signature = types.void(types.intp)
    return _with_cache(lambda **cache: cfunc(signature, **_OPTIONS, **cache)(body))


def compile_function(function: Callable[..., Any]) -> Any:
    """``function`` for Python to call, compiled at the first call. It must take as arguments what
    it needs of other files: see :func:`source_version`."""
    return _with_cache(lambda **cache: njit(**_OPTIONS, **cache)(function))


def _with_cache(make: Callable[..., Any]) -> Any:
    """``make(cache=True)``, or without where no folder for the cache can be written."""
    try:
        return make(cache=True)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        _log.warning("no folder for compiled code can be written, so each load compiles: %s", error)
        return make()


def source_version(*names: str) -> int:
    """A number, not 0, that changes with the named files of this folder.

    Numba's cache sees changes of the file that defines the compiled function only; a closure
    variable of that function is part of the cache's key.
    """
    digest = hashlib.sha256()
    for name in names:
        digest.update(Path(__file__).parent.joinpath(name).read_bytes())
    return int.from_bytes(digest.digest()[:7], "little") | 1
