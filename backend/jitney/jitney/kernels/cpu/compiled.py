"""What a Numba kernel is to the host: a record of arguments, machine code, and threads to run it.

A kernel is compiled at its first use and found in the cache of ``code_cache`` at later loads. From
its definition to a run::

    @record
    class ScaleCall(KernelCall):            # ctypes: the host fills it
        x: int
        factor: float

    read_scale = reader(ScaleCall)          # a Numba function: the record as a named tuple

    @inner
    def scale_body(tag, arguments):         # what each thread runs
        call = read_scale(arguments)
        while True:
            row = fetch_add(arguments)      # the next item: adds 1 to the record's first field
            if row >= call.count:
                return
            ...

    kernel = Kernel(lambda address: scale_body(F32, address))
    kernel.run(ScaleCall(count=rows, x=x.data_ptr(), factor=0.5), threads=2)

Kernels run on the threads that torch itself uses. A second thread pool would fight torch's for the
same cores, as torch's threads spin for a while after each operation; and torch's are awake already.
The call that starts them is OpenMP's ``GOMP_parallel``, which is what compilers make of
``#pragma omp parallel``: GNU's, LLVM's and Intel's libraries all have it. Each Python thread that
calls it has a team of its own, so two engines in one process do not meet.

Called by every module of this folder that has a kernel of its own. Imported only where Numba is.
"""

import ctypes
import logging
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from numba import cfunc, njit, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from jitney.kernels.cpu.code_cache import CodeCache
from jitney.kernels.cpu.emit import f32, i64, offset_by, pointer

_log = logging.getLogger(__name__)

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}
_Record = TypeVar("_Record", bound=type[ctypes.Structure])


def record(cls: _Record) -> _Record:
    """Decorates a ``ctypes.Structure``. Its annotations become fields, in their order: an ``int``
    has 64 bits, a ``float`` 32. If it is derived from another record, ctypes puts that one's fields
    first."""
    fields = []
    for name, kind in cls.__annotations__.items():
        fields.append((name, ctypes.c_float if kind is float else ctypes.c_int64))
    cls._fields_ = fields
    return cls


@record
class KernelCall(ctypes.Structure):
    """The fields with which the arguments of each kernel begin, if it can be part of a ``program``.
    Then the program can set them without knowing the kernel."""

    counter: int
    """Items that threads have taken so far: 0 at the start. It is the first field, so its address
    is that of the record."""
    threads_begun: int
    """0 at the start. Only attention counts the threads that begin, to give each its own scratch
    memory."""
    count: int
    """How much there is to do, in rows or in items: each record says in which."""


THREADS_BEGUN_OFFSET = KernelCall.threads_begun.offset  # type: ignore[attr-defined]


def reader(cls: type[ctypes.Structure]) -> Any:
    """A Numba function that takes an address and returns the fields of the record there, as a named
    tuple. It loads all of them once; LLVM drops the loads of those that are not used."""
    fields = get_type_hints(cls)  # with those that are inherited
    numba_types = tuple(types.float32 if kind is float else types.int64 for kind in fields.values())
    result_type = types.NamedTuple(numba_types, namedtuple(cls.__name__, fields))

    @intrinsic
    def read(typingctx, address):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for name, kind in fields.items():
                field_address = offset_by(builder, args[0], getattr(cls, name).offset)
                field_type = f32 if kind is float else i64
                values.append(builder.load(pointer(builder, field_address, field_type)))
            return context.make_tuple(builder, result_type, values)

        # Numba writes a signature as a call of the result's type.
        return result_type(types.intp), emit

    return read


class Kernel:
    """The machine code of a body: a C function ``void body(void *arguments)`` at ``address``."""

    def __init__(self, body: Callable[[int], None]) -> None:
        takes_address = ((types.intp,), types.void)
        # The next three statements do what Numba's `cfunc` does, but with our cache. The code lives
        # as long as ``_function``.
        self._function = CFunc(body, takes_address, locals={}, options=_OPTIONS)
        _use_cache(self._function, body)
        self._function.compile()
        address = self._function.address
        assert address is not None, "it is compiled"
        self.address = int(address)
        self.was_cached: bool = self._function.cache_hits > 0
        # void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags)
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        )
        self._parallel = kind(function_address("GOMP_parallel"))

    def run(self, arguments: ctypes.Structure, threads: int) -> None:
        """Call the body on so many of torch's threads, each with the address of ``arguments``, and
        wait for them. Meanwhile the GIL is free."""
        self._parallel(self.address, ctypes.addressof(arguments), threads, 0)


def compile_function(function: Callable[..., Any]) -> Any:
    """``function`` for Python to call, compiled at the first call."""
    compiled = njit(**_OPTIONS)(function)
    _use_cache(compiled, function)
    return compiled


def import_compiler() -> None:
    """Make Numba import what it imports when it first compiles a function or finds one compiled."""
    cfunc(types.void())(lambda: None)


def _use_cache(compiled: Any, function: Callable[..., Any]) -> None:
    """Let ``compiled``, what Numba made of ``function``, take its code from our cache. Without a
    folder for that, it is compiled at each load."""
    try:
        compiled._cache = CodeCache(function)  # as its `enable_caching` does with Numba's
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        _log.warning(
            "no folder for compiled code can be written, so each load compiles; set "
            "NUMBA_CACHE_DIR to one that can: %s",
            error,
        )


def function_address(name: str) -> int:
    """Address of a C function of torch or of what it was linked with."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    address = ctypes.cast(library[name], ctypes.c_void_p).value
    assert address is not None
    return address
