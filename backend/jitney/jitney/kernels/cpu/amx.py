# mypy: disable-error-code="no-untyped-def"
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
from numba.core import cgutils

from jitney.kernels.cpu.simd import call_llvm, emitted, host_has, i64, offset_by, pointer

i8 = ir.IntType(8)
MAX_ROWS_AMX = 16

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
    values = [ir.Constant(i8, a) if isinstance(a, int) else a for a in args]
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), values)


def move_tile(builder: Any, name: str, tile: int, address: Any, stride: Any) -> None:
    """IR: load or store a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, name, tile, pointer(builder, address, i8), stride)


def emit_shapes(builder: Any, rows: Sequence[Any], row_bytes: Sequence[int]) -> None:
    """IR: set the shapes of this thread's eight tiles: ``rows`` are numbers or values of 8 bits."""
    values = [1, *[0] * 63]  # the palette is 1
    values[16:32:2], values[48:56] = row_bytes, rows
    where = stack_memory(builder, 64)
    for offset, value in enumerate(values):
        byte = ir.Constant(i8, value) if isinstance(value, int) else value
        builder.store(byte, pointer(builder, offset_by(builder, where, offset), i8))
    emit_amx(builder, "ldtilecfg", pointer(builder, where, i8))


def stack_memory(builder: Any, size: int) -> Any:
    """IR: the address of so many bytes on the stack, in whole cache lines. Undefined at first."""
    memory = cgutils.alloca_once(builder, ir.ArrayType(i8, size))
    memory.align = 64
    return builder.ptrtoint(memory, i64)


@emitted(types.void)
def amx_end(builder):
    """Give the tile registers back."""
    if host_has_amx():
        emit_amx(builder, "tilerelease")
