"""Running compiled code on the threads that torch itself uses.

A second thread pool would fight torch's, whose threads spin for a while after each operation, for
the same cores; torch's own is already awake. OpenMP's ``GOMP_parallel`` is the call that compilers
make of ``#pragma omp parallel``; GNU's, LLVM's and Intel's libraries have it. A team belongs to the
Python thread that calls, so two engines in one process do not meet.
"""

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

_log = logging.getLogger(__name__)


def team_runner() -> Callable[[int, int, int], None]:
    """``run(body, argument, threads)`` calls ``void body(argument)`` on so many of torch's threads
    and waits for them; without the GIL. Where torch has no such library, one thread runs it."""
    try:
        parallel = _torch_library().GOMP_parallel
    except (OSError, AttributeError) as error:
        _log.warning("kernels run on one thread: torch's OpenMP was not found (%s)", error)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        return lambda body, argument, threads: kind(body)(argument)
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return lambda body, argument, threads: parallel(body, argument, threads, 0)


def function_address(name: str) -> int | None:
    """Address of a C function of torch or of what it was linked with; None if there is none."""
    try:
        function = _torch_library()[name]
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _torch_library() -> ctypes.CDLL:
    """Symbols of the libraries that libtorch_cpu was linked with are found through it."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
