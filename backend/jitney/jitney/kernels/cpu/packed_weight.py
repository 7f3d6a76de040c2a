"""Weights of linear layers in the order in which the product kernels read them.

Whatever the type, a weight [N, K] becomes columns of 16 outputs (``product_kernel`` and
``four_bit_kernel`` draw them). Here they are a tensor [N / 16, ...]: one column behind the other.

Outputs are filled up with zeros, so that there are whole pairs of columns. In all functions here,
``filling`` is how many are added.

Called by ``column_linear``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jitney.execution.quantized import MOST_OUTLIERS
from jitney.kernels.cpu.amx import TILE_ROW_BYTES
from jitney.kernels.cpu.convert_kernel import OUTLIER_BYTES, TAIL_INDICES
from jitney.kernels.cpu.emit import LANES, UNIT_BYTES
from jitney.kernels.cpu.four_bit_vectors import ROW_GROUP_BYTES
from jitney.kernels.cpu.processor import must_widen_bf16
from jitney.kernels.cpu.simd import BF16, F32, I4, I8, WIDE

PAIR_OUTPUTS = 2 * LANES
"""Outputs of two columns."""
_LEAST_BYTES_BEHIND_ROW = 32
"""How many bytes there must be behind the K bytes of a row of x. The tile unit reads 64 bytes of a
row at once. If the last scale group has 32 inputs, these 64 bytes end 32 bytes behind the row."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight as a kernel reads it, and what the kernel must know of it.

    The tensors are in the order of the outputs. If there is a gate they are those of gate and up,
    16 outputs by turns.
    """

    tag: Any
    """Of the product's elements (``simd``)."""
    columns: Tensor
    """[N / 16, ...]: the memory of each column."""
    x_stride: int
    """Bytes of a row of x, in the form that the product reads."""
    convert_tag: Any = None
    """The tag for which ``convert_kernel`` brings rows of x into that form. None: they have it."""
    tail: int = 0
    """This and the fields below are those of :class:`ProductCall`, as tensors where those are
    addresses."""
    scale_group: int = 0
    scales: Tensor | None = None
    shifts: Tensor | None = None
    bias: Tensor | None = None

    @property
    def column_bytes(self) -> int:
        return self.columns[0].nbytes


def pack_weight(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, *, gated: bool
) -> PackedWeight:
    """See :class:`ColumnLinear` for the arguments. ``gated``: ``weight`` has the outputs of a gate,
    and below them as many of up."""
    filling = -len(weight) % PAIR_OUTPUTS
    if scale is None:
        packed = _pack_floats(weight, filling)
    elif weight.dtype == torch.uint8:
        packed = _pack_nibbles(weight, scale, filling)
    else:
        packed = _pack_bytes(weight, scale, filling)
    if bias is not None:
        packed = replace(packed, bias=functional.pad(bias.detach().float(), (0, filling)))
    return replace(
        packed,
        columns=_in_order(packed.columns, gated),
        scales=_outputs_in_order(packed.scales, gated),
        shifts=_outputs_in_order(packed.shifts, gated),
        bias=_outputs_in_order(packed.bias, gated),
    )


def _in_order(columns: Tensor, gated: bool) -> Tensor:
    """The columns, contiguous; if ``gated``, those of gate and of up by turns instead of one above
    the other, so that a pair is 16 outputs of each."""
    if gated:
        columns = columns.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return columns.contiguous()


def _outputs_in_order(numbers: Tensor | None, gated: bool) -> Tensor | None:
    """The same, of one number for each output."""
    return None if numbers is None else _in_order(numbers.view(-1, LANES), gated)


# --------------------------------------------------------------------------- floats and bytes


def _pack_floats(weight: Tensor, filling: int) -> PackedWeight:
    """A weight of bfloat16 or of float32."""
    filled = _fill_up(weight, filling)
    inputs = filled.shape[1]
    columns = _columns(filled)
    if weight.dtype == torch.float32:
        return PackedWeight(F32, columns, x_stride=4 * inputs)
    if must_widen_bf16():
        return PackedWeight(WIDE, columns, x_stride=4 * inputs, convert_tag=F32)
    return PackedWeight(BF16, columns, x_stride=2 * inputs)


def _pack_bytes(weight: Tensor, scale: Tensor, filling: int) -> PackedWeight:
    """A weight of int8, with a ``scale`` for each output."""
    filled = _fill_up(weight, filling)
    inputs = filled.shape[1]
    # In pieces of 1024 outputs: the sum makes an int32 copy of each.
    shifts = [128 * piece.sum(1, dtype=torch.int32) for piece in filled.split(1024)]
    scales = functional.pad(scale.detach().float().view(-1), (0, filling))
    return PackedWeight(
        tag=I8,
        columns=_columns(filled),
        x_stride=inputs + TAIL_INDICES + OUTLIER_BYTES * MOST_OUTLIERS,
        convert_tag=I8,
        tail=inputs,
        scales=scales,
        shifts=torch.cat(shifts),
    )


def _fill_up(weight: Tensor, filling: int) -> Tensor:
    """The weight with zeros behind its inputs, up to whole tiles of a column, and with ``filling``
    outputs more."""
    filled = weight.detach().contiguous()  # GPT-2's are transposed
    tile_inputs = TILE_ROW_BYTES // weight.itemsize
    more_inputs = -weight.shape[1] % tile_inputs
    if filling or more_inputs:  # else it would be copied
        filled = functional.pad(filled, (0, more_inputs, 0, filling))
    return filled


def _columns(filled: Tensor) -> Tensor:
    """[N / 16, units, 16, elements of a unit] of a weight [N, K]. Not contiguous yet."""
    unit = UNIT_BYTES // filled.itemsize
    outputs = filled.view(len(filled) // LANES, LANES, -1, unit)
    return outputs.transpose(1, 2)


# --------------------------------------------------------------------------- nibbles


def _pack_nibbles(weight: Tensor, scale: Tensor, filling: int) -> PackedWeight:
    """A weight of 4 bits: ``weight`` uint8 [N, K / 2], ``scale`` bfloat16 [2, N, scale groups]. Of
    the latter, index 0 is the scales, index 1 the least values."""
    inputs = 2 * weight.shape[1]
    scale_groups = scale.shape[2]
    weight = functional.pad(weight, (0, 0, 0, filling))
    scale = functional.pad(scale, (0, 0, 0, filling))
    # A scale group of a column is its scales and least values, and behind them its nibbles. Both
    # tensors are [column, scale group, bytes].
    heads = _scales_and_leasts(scale)
    nibbles = _vectors_of_nibbles(weight, scale_groups)
    return PackedWeight(
        tag=I4,
        columns=torch.cat((heads, nibbles), 2).flatten(1),
        x_stride=inputs + max(_LEAST_BYTES_BEHIND_ROW, ROW_GROUP_BYTES * scale_groups),
        convert_tag=I4,
        scale_group=inputs // scale_groups,
    )


def _scales_and_leasts(scale: Tensor) -> Tensor:
    """uint8 [N / 16, scale groups, 64] of ``scale`` [2, N, scale groups]: of each of the 16 outputs
    a scale and a least value."""
    columns = scale.unflatten(1, (-1, LANES))  # [2, column, output, group]
    pairs = columns.permute(1, 3, 2, 0).contiguous()  # [column, group, output, 2]
    return pairs.view(torch.uint8).flatten(2)


def _vectors_of_nibbles(weight: Tensor, scale_groups: int) -> Tensor:
    """uint8 [N / 16, scale groups, bytes of a group] of ``weight`` uint8 [N, K / 2], which has
    input 2 i in the low half of byte i, and input 2 i + 1 in the high half.

    A vector of nibbles is 8 inputs of 16 outputs: of each output the first 4 inputs in the low
    halves of 4 bytes, and the next 4 inputs in the high halves.
    """
    q = torch.stack((weight & 15, weight >> 4), -1).flatten(1)  # [N, K]
    vectors = q.shape[1] // 8
    by_output = q.view(-1, LANES, vectors, 2, 4)  # [column, output, vector, half, input]
    low, high = by_output.unbind(3)  # [column, output, vector, input] each
    both = (low | high << 4).transpose(1, 2)  # [column, vector, output, input]
    return both.reshape(len(both), scale_groups, -1)
