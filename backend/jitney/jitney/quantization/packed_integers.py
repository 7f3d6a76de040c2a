"""Layers for a CPU's kernels, made of the integers that GPTQ, AWQ and compressed-tensors store.

What a layer becomes depends on its integers:

- 4 bits in groups of neighbouring inputs (32, 64 or whole 128s): ``Int4Linear``. The integers stay
  as they are; scales are rounded to bfloat16.
- 8 bits with one scale for each output: ``Int8Linear``, as they are.
- all else (8 bits in groups, groups of scattered inputs, e4m3): rounded once more, to
  ``Int8Linear`` with one scale for each output.

Called by ``stored_weights``.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from jitney.errors import CheckpointError, show
from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import GROUPS, Int4Linear

LayerTensors = dict[str, Tensor]
"""The tensors of a layer, by the last part of their names."""
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""A word holds eight outputs of 4 bits: output i is in bits 4 n to 4 n + 3, n the i-th of these."""
_FOUR_BITS_END = 16
"""Integers of 4 bits are below it."""


class _Grouped(NamedTuple):
    """Weights ``(q - zero) * scale``; each output has one scale and one zero in each group."""

    q: Tensor
    """uint8 [outputs, inputs]"""
    scale: Tensor
    """[outputs, groups]"""
    zero: Tensor
    """float32 [outputs, groups]"""
    group_of: Tensor | None
    """The group of each input; None if the inputs of a group are neighbours."""


def make_linear(
    method: str,
    stored: LayerTensors,
    inputs: int,
    dtype: torch.dtype,
    *,
    plus_one: bool = False,
    group_sizes: Collection[int] = (),
) -> QuantizedLinear:
    """The layer of ``inputs`` inputs that ``stored`` holds.

    ``plus_one``: the zero points of GPTQ are one more than what is stored. ``group_sizes``: those
    that the checkpoint's configuration names. Raises CheckpointError if the layer's groups have
    none of these sizes.
    """
    bias = stored.get("bias")
    if "weight" in stored:
        return _of_whole_weight(stored, bias, dtype)

    if "weight_packed" in stored:
        grouped = _compressed_tensors(stored, inputs)
    elif method == "awq":
        grouped = _awq(stored)
    else:
        grouped = _gptq(stored, inputs, plus_one)

    if grouped.group_of is None:
        _check_groups(grouped, inputs, group_sizes)
        as_bytes = _keep_bytes(grouped, bias, dtype)
        if as_bytes is not None:
            return as_bytes
        as_nibbles = _keep_nibbles(grouped, bias, dtype)
        if as_nibbles is not None:
            return as_nibbles
    return _round_to_bytes(_values(grouped), bias, dtype)


def _of_whole_weight(stored: LayerTensors, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
    """Of a weight [outputs, inputs] in int8 or e4m3, not packed into words, with one scale for each
    output or one for all."""
    weight = stored["weight"]
    scale = stored["weight_scale"].float().reshape(1, -1).expand(1, len(weight))
    zero = stored.get("weight_zero_point")
    if weight.dtype == torch.int8 and (zero is None or not zero.any()):
        return Int8Linear(weight, scale, bias, dtype)
    values = weight.float()
    if zero is not None:
        values = values - zero.float().reshape(-1, 1)
    return _round_to_bytes(values * scale.t(), bias, dtype)


def _check_groups(grouped: _Grouped, inputs: int, group_sizes: Collection[int]) -> None:
    """Raise CheckpointError if the groups do not divide the inputs as the checkpoint says."""
    groups = grouped.scale.shape[1]
    size = inputs // groups
    if groups == 1 or (size * groups == inputs and size in group_sizes):
        return
    raise CheckpointError(
        f"group_size of the quantized weights is {show(sorted(group_sizes))}, which makes no "
        f"{groups} groups of {inputs} inputs, but must divide them"
    )


def _keep_bytes(grouped: _Grouped, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear | None:
    """The integers as they are, if they have 8 bits, one scale for each output, and a zero that
    leaves them within int8."""
    if grouped.scale.shape[1] > 1:
        return None
    if grouped.q.max() < _FOUR_BITS_END:  # 4 bits do, as they are
        return None
    shifted = grouped.q.float() - grouped.zero
    if shifted.min() < -128 or shifted.max() > 127:
        return None
    weight = shifted.to(torch.int8).contiguous()
    return Int8Linear(weight, grouped.scale.float().t(), bias, dtype)


def _keep_nibbles(grouped: _Grouped, bias: Tensor | None, dtype: torch.dtype) -> Int4Linear | None:
    """The integers as they are, if they have 4 bits in groups of a size that the kernels have, or
    of a multiple of the largest one."""
    if grouped.q.max() >= _FOUR_BITS_END:
        return None
    size = grouped.q.shape[1] // grouped.scale.shape[1]
    largest = GROUPS[0]
    if size not in GROUPS and size % largest != 0:
        return None

    # (q - zero) * scale = q * scale + least. The least value is computed from the scale as it is
    # stored, so that q = zero still gives almost 0.
    scale = grouped.scale.bfloat16().float()
    least = -scale * grouped.zero
    scale_and_least = torch.stack((scale, least)).bfloat16()
    if size > largest:  # made of several groups of the largest size, with the same scale
        scale_and_least = scale_and_least.repeat_interleave(size // largest, 2)
    return Int4Linear.stored(grouped.q, scale_and_least, bias, dtype)


def _values(grouped: _Grouped) -> Tensor:
    """The weight as it acts: float32 [outputs, inputs]."""
    inputs = grouped.q.shape[1]
    group_of = grouped.group_of
    if group_of is None:
        group_of = torch.arange(inputs) // (inputs // grouped.scale.shape[1])
    index = group_of.long()
    return (grouped.q.float() - grouped.zero[:, index]) * grouped.scale.float()[:, index]


def _round_to_bytes(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
    q, scale = Int8Linear.quantize_rows(weight.contiguous())
    return Int8Linear(q, scale.t(), bias, dtype)


# ------------------------------------------------------------------ what the methods store


def _compressed_tensors(stored: LayerTensors, inputs: int) -> _Grouped:
    """Words [outputs, words of a row], of 4 bytes or 8 half bytes; a row's last word may be filled
    up. Zero points are packed along the outputs: [words of a column, groups]. Without them, zero is
    the middle of the range."""
    words = stored["weight_packed"]
    scale = stored["weight_scale"]
    outputs = len(scale)
    fits_as_bytes = words.shape[1] * 4 >= inputs
    bits = 8 if fits_as_bytes else 4
    zero_words = stored.get("weight_zero_point")
    if zero_words is None:
        middle = 2.0 ** (bits - 1)
        zero = torch.full(scale.shape, middle)
    else:
        by_group = _unpack(zero_words.t(), bits)  # [groups, outputs, filled up]
        zero = by_group[:, :outputs].t().float()
    return _Grouped(
        q=_unpack(words, bits)[:, :inputs],
        scale=scale,
        zero=zero,
        group_of=_unless_neighbours(stored.get("weight_g_idx"), scale.shape[1]),
    )


def _awq(stored: LayerTensors) -> _Grouped:
    """Words [inputs, outputs / 8], the outputs of each in an order of their own."""
    return _Grouped(
        q=_unpack_awq(stored["qweight"]),
        scale=stored["scales"].t(),
        zero=_unpack_awq(stored["qzeros"]).float(),
        group_of=None,
    )


def _unpack_awq(words: Tensor) -> Tensor:
    """Words [rows, outputs / 8] as uint8 [outputs, rows]."""
    by_word = _unpack(words, 4).unflatten(1, (-1, 8))
    return by_word[..., _AWQ_ORDER].flatten(1).t()


def _gptq(stored: LayerTensors, inputs: int, plus_one: bool) -> _Grouped:
    """Words [inputs / values of a word, outputs]; zero points as words [groups, outputs / values of
    a word]."""
    words = stored["qweight"]
    bits = 32 * len(words) // inputs
    scale = stored["scales"].t()
    zero = _unpack(stored["qzeros"], bits).t().float()
    if plus_one:
        zero = zero + 1
    return _Grouped(
        q=_unpack(words.t(), bits),
        scale=scale,
        zero=zero,
        group_of=_unless_neighbours(stored.get("g_idx"), scale.shape[1]),
    )


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] as uint8 [rows, values], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = (1 << bits) - 1  # also removes the signs that the shift copies
    values = (words.unsqueeze(-1) >> shifts) & mask
    return values.to(torch.uint8).flatten(1)


def _unless_neighbours(group_of: Tensor | None, groups: int) -> Tensor | None:
    """``group_of``, the group of each input, unless the inputs of a group are neighbours: then
    None, as where nothing is stored."""
    if group_of is None:
        return None
    inputs = len(group_of)
    in_order = torch.arange(inputs) // (inputs // groups)
    return None if torch.equal(group_of.long(), in_order) else group_of
