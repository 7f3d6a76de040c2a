"""A kernel's arguments, described once: the host sets them by name, and the kernel reads them so.

A record is a class of annotated fields: ``int`` (64 bits), ``float`` (32 bits), or another record,
whose address is held. The host makes one (``NormCall(rows=3)``), sets its fields and passes its
address (``ctypes.addressof``); many of a kind are a NumPy array of ``numpy.dtype(NormCall)``.
Compiled code calls ``reader(NormCall)`` with the address and gets a named tuple.
"""

import ctypes
from collections import namedtuple
from typing import Any, TypeVar

from numba import types
from numba.extending import intrinsic

from jitney.kernels.cpu.simd import f32, i64, offset_by, pointer

_Record = TypeVar("_Record", bound=type[ctypes.Structure])


def record(cls: _Record) -> _Record:
    """Decorates a ``ctypes.Structure``: its annotations become its fields, in their order."""
    cls._fields_ = [
        (name, ctypes.c_float if kind is float else ctypes.c_int64)
        for name, kind in cls.__annotations__.items()
    ]
    return cls


def reader(cls: type[ctypes.Structure]) -> Any:
    """A Numba function from an address to a named tuple of the fields of the record there.

    The record that a field points to is read as well, so it must be there.
    """
    kind = _tuple_type(cls)

    @intrinsic
    def read(typingctx, address):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _load_fields(context, builder, cls, kind, args[0])

        return kind(types.intp), emit

    return read


def _tuple_type(cls: Any) -> Any:
    """Numba's type of what is read."""
    scalars = {int: types.int64, float: types.float32}
    kinds = {n: scalars.get(kind) or _tuple_type(kind) for n, kind in cls.__annotations__.items()}
    return types.NamedTuple(tuple(kinds.values()), namedtuple(cls.__name__, kinds))


def _load_fields(context: Any, builder: Any, cls: Any, kind: Any, address: Any) -> Any:
    values = []
    for (name, field), inner in zip(cls.__annotations__.items(), kind.types, strict=True):
        where = offset_by(builder, address, getattr(cls, name).offset)
        value = builder.load(pointer(builder, where, f32 if field is float else i64))
        if field not in (int, float):
            value = _load_fields(context, builder, field, inner, value)
        values.append(value)
    return context.make_tuple(builder, kind, values)
