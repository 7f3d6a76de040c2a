"""What a Numba kernel is to the host: a record of arguments, machine code, and threads to run it.

A kernel is compiled at its first use and found in Numba's cache at later loads. It runs on the
threads that torch itself uses.

A record is a class of annotated fields: ``int`` (64 bits) or ``float`` (32 bits). The host makes
one (``RowsCall(stride=64)``), sets its fields and passes its address (``ctypes.addressof``).
Compiled code calls ``reader(RowsCall)`` with the address and gets a named tuple.

A second thread pool would fight torch's, whose threads spin for a while after each operation, for
the same cores; torch's own is already awake. OpenMP's ``GOMP_parallel`` is the call that compilers
make of ``#pragma omp parallel``; GNU's, LLVM's and Intel's libraries have it. A team belongs to the
Python thread that calls, so two engines in one process do not meet.

Called by every module of this folder that has a kernel of its own. Imported only where Numba is.
"""

import ctypes
import hashlib
import logging
from collections import namedtuple
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from numba import cfunc, njit, types
from numba.extending import intrinsic

from jitney.kernels.cpu.emit import f32, i64, offset_by, pointer

_log = logging.getLogger(__name__)

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}
_Record = TypeVar("_Record", bound=type[ctypes.Structure])


def record(cls: _Record) -> _Record:
    """Decorates a ``ctypes.Structure``: its own annotations become fields, in their order."""
    cls._fields_ = [
        (name, ctypes.c_float if kind is float else ctypes.c_int64)
        for name, kind in cls.__annotations__.items()
    ]
    return cls


@record
class KernelCall(ctypes.Structure):
    """What the arguments of every kernel of a ``program`` begin with."""

    counter: int
    """Items taken so far: 0 at the start."""
    threads: int
    """Threads that have begun, if the kernel numbers its threads (attention does, for their scratch
    memory): 0 at the start."""
    count: int
    """Number of rows; for attention, its writes and adapters the number of items."""


THREADS_OFFSET = KernelCall.threads.offset  # type: ignore[attr-defined]


def reader(cls: type[ctypes.Structure]) -> Any:
    """A Numba function from an address to a named tuple of the fields of the record there."""
    fields = get_type_hints(cls)
    kinds = tuple(types.float32 if kind is float else types.int64 for kind in fields.values())
    result = types.NamedTuple(kinds, namedtuple(cls.__name__, fields))

    @intrinsic
    def read(typingctx, address):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for name, kind in fields.items():
                where = offset_by(builder, args[0], getattr(cls, name).offset)
                to = f32 if kind is float else i64
                values.append(builder.load(pointer(builder, where, to)))
            return context.make_tuple(builder, result, values)

        return result(types.intp), emit

    return read


class Kernel:
    """The machine code of ``body``, which takes the address of its arguments.

    Every thread of a team calls it. It is ``void (*)(void *)`` at ``address``.

    ``body`` must hold :func:`source_version` in a closure variable, or Numba's cache does not see
    changes of other files. So it is always written like this, and the condition is always true::

        version = source_version()
        Kernel(lambda address: rows_body(tag, address) if version else None)
    """

    def __init__(self, body: Callable[[int], None]) -> None:
        signature = types.void(types.intp)
        self._function = _with_cache(partial(cfunc, signature, **_OPTIONS), body)  # owns the code
        self.address = int(self._function.address)
        self.was_cached: bool = self._function.cache_hits > 0
        # void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags)
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        )
        self._parallel = kind(function_address("GOMP_parallel"))

    def run(self, arguments: ctypes.Structure, threads: int) -> None:
        """Run on so many of torch's threads, without the GIL, and wait for them."""
        self._parallel(self.address, ctypes.addressof(arguments), threads, 0)


def compile_function(function: Callable[..., Any]) -> Any:
    """``function`` for Python to call, compiled at the first call. It must not use names of other
    files, whose changes Numba's cache does not see: it takes such values as arguments."""
    return _with_cache(partial(njit, **_OPTIONS), function)


def import_compiler() -> None:
    """Make Numba import what it imports when it first compiles a function or finds one compiled."""
    cfunc(types.void())(lambda: None)


def _with_cache(compiler: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """``compiler(cache=True)(function)``, or without a cache where no folder for it can be
    written."""
    try:
        return compiler(cache=True)(function)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        _log.warning("no folder for compiled code can be written, so each load compiles: %s", error)
        return compiler()(function)


@cache
def source_version() -> int:
    """A number, not 0, that changes with the files of this folder.

    Numba's cache sees changes of the file that defines the compiled function only; a closure
    variable of that function is part of the cache's key.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little") | 1


def function_address(name: str) -> int:
    """Address of a C function of torch or of what it was linked with."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    address = ctypes.cast(library[name], ctypes.c_void_p).value
    assert address is not None
    return address
