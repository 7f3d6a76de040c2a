"""Running compiled code on the threads that torch itself uses.

A second thread pool would fight torch's, whose threads spin for a while after each operation, for
the same cores; torch's own is already awake. OpenMP's ``GOMP_parallel`` is the call that compilers
make of ``#pragma omp parallel``; GNU's, LLVM's and Intel's libraries have it. A team belongs to the
Python thread that calls, so two engines in one process do not meet.
"""

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see its Documentation/arch/x86/xstate.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def team_runner() -> Callable[[int, int, int], None]:
    """``run(body, argument, threads)`` calls ``void body(argument)`` on so many of torch's threads
    and waits for them; without the GIL. Where torch has no such library, one thread runs it."""
    try:
        parallel = _torch_library().GOMP_parallel
    except (OSError, AttributeError) as error:
        _log.warning("attention runs on one thread: torch's OpenMP was not found (%s)", error)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        return lambda body, argument, threads: kind(body)(argument)
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return lambda body, argument, threads: parallel(body, argument, threads, 0)


def team_size_address() -> int | None:
    """Address of ``int omp_get_num_threads(void)`` of torch's OpenMP; None if it has none."""
    try:
        function = _torch_library().omp_get_num_threads
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def yield_address() -> int | None:
    """Address of ``int sched_yield(void)``, which gives the core to whoever waits for it."""
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def _torch_library() -> ctypes.CDLL:
    """Symbols of the libraries that libtorch_cpu was linked with are found through it."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def ask_for_tiles() -> bool:
    """Ask Linux for this process's right to use the tile registers of AMX. Asking twice is fine."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
