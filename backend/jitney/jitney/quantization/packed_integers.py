"""Layers for a CPU's kernels, made of the integers that GPTQ, AWQ and compressed-tensors store.

What a layer becomes depends on its integers:

- 4 bits in groups of neighbouring inputs, if kernels have groups of that size
  (:func:`has_int4_form`): ``Int4Linear``. The integers stay as they are, and scales are rounded to
  bfloat16.
- 8 bits with one scale for each output: ``Int8Linear``. The integers stay as they are.
- All others are rounded once more, to ``Int8Linear``: 8 bits in groups, 4 bits in groups of other
  sizes, groups of scattered inputs, and e4m3.

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
"""A word of AWQ holds eight outputs, 4 bits each, in an order of its own. Output i has the 4 bits
that begin at bit ``4 * _AWQ_ORDER[i]``."""
_FOUR_BITS_END = 16
"""Integers of 4 bits are below it."""


class _Grouped(NamedTuple):
    """Weights ``(q - zero) * scale``. The inputs are divided into groups, and for each output and
    group there is a scale and a zero."""

    q: Tensor
    """uint8 [outputs, inputs]"""
    scale: Tensor
    """[outputs, groups]"""
    zero: Tensor
    """float32 [outputs, groups]"""
    scattered: Tensor | None
    """[inputs], the group of each input. None if the inputs of each group are neighbours."""

    @property
    def inputs(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.scale.shape[1]

    @property
    def has_four_bits(self) -> bool:
        """Whether each q fits into 4 bits. That may also be so where the checkpoint has 8."""
        return bool(self.q.max() < _FOUR_BITS_END)


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
    none of these sizes, or if an input is in a group that the layer does not have.
    """
    bias = stored.get("bias")
    if "weight" in stored:
        return _of_unpacked_weight(stored, bias, dtype)

    if "weight_packed" in stored:
        grouped = _compressed_tensors(stored, inputs)
    elif method == "awq":
        grouped = _awq(stored)
    else:
        grouped = _gptq(stored, inputs, plus_one)

    if grouped.scattered is not None:
        return _round_to_int8(_dequantized(grouped), bias, dtype)

    _check_groups(grouped, group_sizes)
    as_stored: QuantizedLinear | None
    if grouped.has_four_bits:
        as_stored = _keep_as_int4(grouped, bias, dtype)
    else:
        as_stored = _keep_as_int8(grouped, bias, dtype)
    if as_stored is not None:
        return as_stored
    return _round_to_int8(_dequantized(grouped), bias, dtype)


def has_int4_form(inputs: int, groups: int) -> bool:
    """Whether an ``Int4Linear`` can have so many groups of neighbouring inputs: of one of its
    sizes, or of a multiple of its largest one."""
    if groups == 0 or inputs % groups != 0:
        return False
    size = inputs // groups
    return size in GROUPS or size % GROUPS[0] == 0


def _of_unpacked_weight(
    stored: LayerTensors, bias: Tensor | None, dtype: torch.dtype
) -> Int8Linear:
    """The layer of a weight [outputs, inputs] in int8 or e4m3, which is not packed into words. It
    has one scale for each output, or one for all."""
    weight = stored["weight"]
    scale = stored["weight_scale"].float().reshape(1, -1).expand(1, len(weight))
    zero = stored.get("weight_zero_point")
    if weight.dtype == torch.int8 and (zero is None or not zero.any()):
        return Int8Linear(weight, scale, bias, dtype)
    values = weight.float()
    if zero is not None:
        values = values - zero.float().reshape(-1, 1)
    return _round_to_int8(values * scale.t(), bias, dtype)


def _check_groups(grouped: _Grouped, group_sizes: Collection[int]) -> None:
    """Raise CheckpointError if the groups do not divide the inputs as the checkpoint says."""
    inputs = grouped.inputs
    groups = grouped.groups
    if groups == 1:
        return
    if inputs % groups == 0 and inputs // groups in group_sizes:
        return
    raise CheckpointError(
        f"group_size of the quantized weights is {show(sorted(group_sizes))}, but must divide "
        f"{inputs} inputs into {groups} groups"
    )


def _keep_as_int8(grouped: _Grouped, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear | None:
    """The layer with these integers as they are. None if an output has several scales, or if its
    zero moves integers out of int8."""
    if grouped.groups > 1:
        return None
    shifted = grouped.q.float() - grouped.zero
    if shifted.min() < -128 or shifted.max() > 127:
        return None
    weight = shifted.to(torch.int8).contiguous()
    return Int8Linear(weight, grouped.scale.float().t(), bias, dtype)


def _keep_as_int4(grouped: _Grouped, bias: Tensor | None, dtype: torch.dtype) -> Int4Linear | None:
    """The layer with these integers as they are. None if its groups are of another size."""
    if not has_int4_form(grouped.inputs, grouped.groups):
        return None

    # (q - zero) * scale = q * scale + least. The least value is computed from the rounded scale, so
    # that q = zero still gives almost 0.
    scale = grouped.scale.bfloat16().float()
    least = -scale * grouped.zero
    scale_and_least = torch.stack((scale, least)).bfloat16()

    size = grouped.inputs // grouped.groups
    largest = GROUPS[0]
    if size > largest:
        # Each group becomes several groups of the largest size, with the same scale.
        scale_and_least = scale_and_least.repeat_interleave(size // largest, 2)
    return Int4Linear.stored(grouped.q, scale_and_least, bias, dtype)


def _dequantized(grouped: _Grouped) -> Tensor:
    """The weight as it acts: float32 [outputs, inputs]."""
    group_of = grouped.scattered
    if group_of is None:
        group_of = _neighbours(grouped.inputs, grouped.groups)
    zero = grouped.zero[:, group_of]
    scale = grouped.scale.float()[:, group_of]
    return (grouped.q.float() - zero) * scale


def _round_to_int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
    """The layer of a weight that was dequantized: float32 [outputs, inputs]."""
    q, scale = Int8Linear.quantize_rows(weight.contiguous())
    return Int8Linear(q, scale.t(), bias, dtype)


# ------------------------------------------------------------------ what the methods store


def _compressed_tensors(stored: LayerTensors, inputs: int) -> _Grouped:
    """A row of words for each output: [outputs, words]. A word holds 4 integers of 8 bits, or 8 of
    4 bits. The last word of a row may be padded.

    Zero points are packed along the outputs: [words, groups], where the last word may be padded as
    well. Without zero points, zero is the middle of the range.
    """
    words = stored["weight_packed"]
    scale = stored["weight_scale"]
    outputs = len(scale)
    # The shape tells the bits. With 8 bits a word has 4 integers, and a row has words for all its
    # inputs. With 4 bits a row has half as many words: 4 integers in each would not be enough.
    bits = 8 if words.shape[1] * 4 >= inputs else 4
    zero_words = stored.get("weight_zero_point")
    if zero_words is None:
        middle = 2.0 ** (bits - 1)
        zero = torch.full(scale.shape, middle)
    else:
        padded = _unpack(zero_words.t(), bits)  # [groups, outputs and padding]
        zero = padded[:, :outputs].t().float()
    return _Grouped(
        q=_unpack(words, bits)[:, :inputs],
        scale=scale,
        zero=zero,
        scattered=_scattered(stored, name="weight_g_idx", inputs=inputs, groups=scale.shape[1]),
    )


def _awq(stored: LayerTensors) -> _Grouped:
    """Words [inputs, outputs / 8]: see :data:`_AWQ_ORDER`."""
    return _Grouped(
        q=_unpack_awq(stored["qweight"]),
        scale=stored["scales"].t(),
        zero=_unpack_awq(stored["qzeros"]).float(),
        scattered=None,
    )


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack words [rows, outputs / 8] to uint8 [outputs, rows]."""
    by_word = _unpack(words, 4).unflatten(1, (-1, 8))
    return by_word[..., _AWQ_ORDER].flatten(1).t()


def _gptq(stored: LayerTensors, inputs: int, plus_one: bool) -> _Grouped:
    """A column of words for each output, packed along the inputs: [words, outputs]. Zero points
    are packed along the outputs: [groups, words]."""
    words = stored["qweight"]
    bits = len(words) * 32 // inputs
    scale = stored["scales"].t()
    zero = _unpack(stored["qzeros"], bits).t().float()
    if plus_one:
        zero = zero + 1
    return _Grouped(
        q=_unpack(words.t(), bits),
        scale=scale,
        zero=zero,
        scattered=_scattered(stored, name="g_idx", inputs=inputs, groups=scale.shape[1]),
    )


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, values]. A word's first value is in its lowest
    bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    # The shift fills up with the sign of the word, which the mask removes.
    mask = (1 << bits) - 1
    values = (words.unsqueeze(-1) >> shifts) & mask
    return values.to(torch.uint8).flatten(1)


# ------------------------------------------------------------------ groups of inputs


def _scattered(stored: LayerTensors, name: str, inputs: int, groups: int) -> Tensor | None:
    """The group of each input, int64 [inputs], as the tensor ``name`` has them. None if the inputs
    of each group are neighbours; if there is no such tensor, they are.

    Raises CheckpointError if the tensor does not have one of ``groups`` groups for each input.
    """
    if name not in stored:
        return None
    group_of = stored[name].long()
    if group_of.shape != (inputs,):
        shape = list(group_of.shape)
        raise CheckpointError.of(f"the shape of {name}", shape, str([inputs]))
    for number in (int(group_of.min()), int(group_of.max())):
        if not 0 <= number < groups:
            raise CheckpointError.of(f"a group in {name}", number, f"from 0 to {groups - 1}")
    if inputs % groups == 0 and torch.equal(group_of, _neighbours(inputs, groups)):
        return None
    return group_of


def _neighbours(inputs: int, groups: int) -> Tensor:
    """The group of each input, int64 [inputs], if the inputs of each group are neighbours. The
    groups must divide the inputs."""
    size = inputs // groups
    return torch.arange(inputs) // size
