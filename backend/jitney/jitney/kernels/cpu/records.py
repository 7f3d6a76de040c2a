"""A kernel's arguments, described once: the host sets them by name, and the kernel reads them so.

A record is a class of annotated fields: ``int`` (64 bits) or ``float`` (32 bits). The host makes
one (``RowsCall(stride=64)``), sets its fields and passes its address (``ctypes.addressof``).
Compiled code calls ``reader(RowsCall)`` with the address and gets a named tuple.
"""

import ctypes
from collections import namedtuple
from typing import Any, TypeVar, get_type_hints

from numba import types
from numba.extending import intrinsic

from jitney.kernels.cpu.simd import f32, i64, offset_by, pointer

_Record = TypeVar("_Record", bound=type[ctypes.Structure])


def record(cls: _Record) -> _Record:
    """Decorates a ``ctypes.Structure``: its own annotations become fields, in their order."""
    cls._fields_ = [
        (name, ctypes.c_float if kind is float else ctypes.c_int64)
        for name, kind in cls.__annotations__.items()
    ]
    return cls


@record
class Call(ctypes.Structure):
    """What the arguments of every kernel of a ``program`` begin with."""

    counter: int
    """Items taken so far: 0 at the start."""
    threads: int
    """Threads that have begun, where each needs memory of its own: 0 at the start."""
    count: int
    """Of rows; of items, for attention and its writes."""


THREADS_OFFSET = Call.threads.offset  # type: ignore[attr-defined]


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
                values.append(builder.load(pointer(builder, where, f32 if kind is float else i64)))
            return context.make_tuple(builder, result, values)

        return result(types.intp), emit

    return read
