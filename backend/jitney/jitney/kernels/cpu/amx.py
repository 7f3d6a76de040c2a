"""IR: instructions of the processor's tile unit (AMX).

A thread has eight tile registers of at most 16 rows of 64 bytes, 1,024 bytes each::

    tile            64 bytes = 16 units = one vector
            +--------------------------------------+
    row 0   | unit 0 | unit 1 | ...      | unit 15 |
    row 1   |        |        |          |         |
      ...   |        |        |          |         |
    row 15  +--------------------------------------+

One instruction computes ``c[m, lane] += sum over u of a[m, u] . b[u, lane]``, where a row of ``a``
holds 16 units of one row of the first factor, and row u of ``b`` is one vector of the second.

Before a thread uses tiles it sets their shapes (:func:`emit_shapes`), and in the end it gives them
back (:func:`amx_end`), so that nothing has to be saved at a context switch.

Called by ``micro_kernel`` (attention) and ``product_kernel`` (linear layers). Where the processor
has no tile unit, nothing is emitted, and no kernel runs such code.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types

from jitney.kernels.cpu.emit import (
    call_llvm,
    constant,
    emitted,
    i8,
    offset_by,
    pointer,
    stack_memory,
)
from jitney.kernels.cpu.processor import host_has_amx

TILE_ROWS = 16
TILE_BYTES = 1024

# The configuration of the tile unit: the palette in byte 0, from byte 16 on how many bytes a row of
# each tile has (16 bits each), from byte 48 on how many rows it has (8 bits each).
_CONFIG_BYTES = 64
_PALETTE = 1
_ROW_BYTES_AT = 16
_ROWS_AT = 48


def emit_amx(builder, name: str, *operands) -> None:
    """IR: an instruction by LLVM's name, if there is a tile unit. Operands that are Python numbers
    name tiles."""
    values = [constant(i8, x) if isinstance(x, int) else x for x in operands]
    if host_has_amx():
        call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), values)


def load_tile(builder, tile: int, address, stride) -> None:
    """IR: load a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, "tileloadd64", tile, pointer(builder, address, i8), stride)


def store_tile(builder, tile: int, address, stride) -> None:
    """IR: store a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, "tilestored64", tile, pointer(builder, address, i8), stride)


def emit_shapes(builder, rows: Sequence[Any], row_bytes: Sequence[int]) -> None:
    """IR: set the shapes of this thread's eight tiles: ``rows`` are numbers or values of 8 bits."""
    config: list[Any] = [0] * _CONFIG_BYTES
    config[0] = _PALETTE
    # Every other byte: the upper half of these 16-bit numbers is 0.
    config[_ROW_BYTES_AT : _ROW_BYTES_AT + 16 : 2] = row_bytes
    config[_ROWS_AT : _ROWS_AT + 8] = rows
    memory = stack_memory(builder, _CONFIG_BYTES)
    for offset, value in enumerate(config):
        byte = constant(i8, value) if isinstance(value, int) else value
        where = offset_by(builder, memory, offset)
        builder.store(byte, pointer(builder, where, i8))
    emit_amx(builder, "ldtilecfg", pointer(builder, memory, i8))


@emitted(types.void)
def amx_end(builder):
    """Give the tile registers back."""
    emit_amx(builder, "tilerelease")
