# mypy: disable-error-code="no-untyped-def, call-arg"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""The tile unit of the processor (AMX) as LLVM code: ``tile`` c += tile a . tile b in bfloat16.

A thread has eight tile registers of at most 16 rows of 64 bytes. Before it uses them it sets their
shapes (:func:`emit_shapes`), and in the end it gives them back (:func:`amx_end`), so that nothing
has to be saved at a context switch.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types

from jitney.kernels.cpu.simd import emitted, host_has, offset_by, pointer

i8 = ir.IntType(8)
MAX_ROWS_AMX = 16
TILE_BYTES = 64
"""Of a row."""

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see its Documentation/arch/x86/xstate.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def host_has_amx() -> bool:
    """Whether the processor that Numba compiles for has a tile unit for bfloat16."""
    return host_has("amx-bf16")


def may_use_amx() -> bool:
    """Whether this process may use a tile unit: asks Linux for the right. Asking twice is fine."""
    if not host_has_amx() or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def emit_amx(builder: Any, name: str, *args: Any) -> None:
    """IR: an instruction of the tile unit, by LLVM's name. Whole numbers are tiles."""
    args = tuple(ir.Constant(i8, a) if isinstance(a, int) else a for a in args)
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=kind), args)


def move_tile(builder: Any, name: str, tile: int, address: Any, stride: Any) -> None:
    """IR: load or store a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, name, tile, pointer(builder, address, i8), stride)


def emit_shapes(builder: Any, where: Any, rows: Sequence[Any], row_bytes: Sequence[int]) -> None:
    """IR: set the shapes of this thread's eight tiles: ``rows`` are numbers or values of 8 bits.

    ``where`` is the address of 64 bytes to be written.
    """

    def put(offset: int, value: Any) -> None:
        value = ir.Constant(i8, value) if isinstance(value, int) else value
        builder.store(value, pointer(builder, offset_by(builder, where, offset), i8))

    for offset in range(64):
        put(offset, 0)
    put(0, 1)  # the palette
    for tile in range(8):
        put(16 + 2 * tile, row_bytes[tile])
        put(48 + tile, rows[tile])
    emit_amx(builder, "ldtilecfg", pointer(builder, where, i8))


@emitted(types.void)
def amx_end(builder):
    """Give the tile registers back."""
    if host_has_amx():
        emit_amx(builder, "tilerelease")
