"""IR: instructions of the processor's tile unit (AMX).

A thread has eight tile registers of at most 16 rows of 64 bytes, 1,024 bytes each::

    tile            64 bytes = 16 units = one vector
            +--------------------------------------+
    row 0   | unit 0 | unit 1 | ...      | unit 15 |
    row 1   |        |        |          |         |
      ...   |        |        |          |         |
    row 15  +--------------------------------------+

One instruction multiplies two tiles and adds to a third::

    sums[m, lane] += sum over u of left[m, u] . right[u, lane]

A row of ``left`` holds 16 units of one row of the left factor; row u of ``right`` is one vector of
the right one. The product of two units is the sum of those of their elements (``dot``).

Before a thread uses tiles it sets their shapes (:func:`emit_shapes`). In the end it gives them back
(:func:`amx_end`), so that Linux need not save their 8 KiB when it switches threads.

Called by ``micro_kernel`` (attention) and ``product_tiles`` (linear layers). Where the processor
has no tile unit, nothing is emitted: kernels are never asked to use tiles there.
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
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
TILES = 8
"""Tile registers of a thread."""

# The configuration of the tile unit is 64 bytes in memory.
_CONFIG_BYTES = 64
_PALETTE = 1
"""Byte 0. 1 means: tiles of at most 16 rows of 64 bytes."""
_ROW_BYTES_OFFSET = 16
"""From this byte on, 16 bits for each tile: how many bytes a row of it has."""
_ROWS_OFFSET = 48
"""From this byte on, 8 bits for each tile: how many rows it has."""


def emit_amx(builder, name: str, *operands) -> None:
    """IR: an instruction by LLVM's name, if there is a tile unit. An operand that is a Python
    number is the number of a tile register; others are IR values."""
    if not host_has_amx():
        return
    values = [constant(i8, x) if isinstance(x, int) else x for x in operands]
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), values)


def load_tile(builder, tile: int, address, stride) -> None:
    """IR: load a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, "tileloadd64", tile, pointer(builder, address, i8), stride)


def store_tile(builder, tile: int, address, stride) -> None:
    """IR: store a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, "tilestored64", tile, pointer(builder, address, i8), stride)


def emit_shapes(builder, rows: Sequence[Any], row_bytes: Sequence[int]) -> None:
    """IR: set the shapes of this thread's eight tiles. Each of ``rows`` is a Python number or an IR
    value of 8 bits."""
    config: list[Any] = [0] * _CONFIG_BYTES
    config[0] = _PALETTE
    for tile in range(TILES):
        # The upper 8 of these 16 bits stay 0.
        config[_ROW_BYTES_OFFSET + 2 * tile] = row_bytes[tile]
        config[_ROWS_OFFSET + tile] = rows[tile]
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
