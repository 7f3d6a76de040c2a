"""The arguments that all kernels of state layers begin with, and the table of a step's rows.

Such a kernel computes rows of any number of tokens, one token after the other, from the state in
each row's slot, which it then overwrites. So a token's result depends neither on the other rows nor
on how a prompt was cut. A row that begins reads nothing from its slot.

Filled by ``state_layer``, read by the kernels: ``conv_kernel``, ``delta_kernel``, ``scan_kernel``.
"""

import ctypes

from jitney.execution.attention import RowSlot
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import I64_BYTES


@record
class StateCall(KernelCall):
    """``count`` is in items: each row has ``items_per_row``. Strides are in bytes."""

    rows: int
    """Address of an array of :class:`SlotRow`."""
    items_per_row: int
    x: int
    """Address of the first token's input."""
    x_stride: int
    """From token to token."""
    out: int
    out_stride: int
    state: int
    """Address of slot 0."""
    slot_stride: int
    """From slot to slot."""


@record
class SlotRow(ctypes.Structure):
    """An ``attention.RowSlot``, field by field."""

    slot: int
    first: int
    num_tokens: int
    is_new: int


read_row = reader(SlotRow)
ROW_BYTES = ctypes.sizeof(SlotRow)
ROW_FIELDS = ROW_BYTES // I64_BYTES
assert tuple(SlotRow.__annotations__) == RowSlot._fields
