"""Layers for a CPU's kernels, made of the integers that GPTQ, AWQ and compressed-tensors store.

What a layer becomes depends on its integers:

- 4 bits in groups of consecutive inputs, if kernels have groups of that size
  (:func:`has_int4_form`): ``Int4Linear``. The integers stay as they are, and scales are rounded to
  bfloat16.
- 8 bits with one scale for each output: ``Int8Linear``. The integers stay as they are.
- All others are rounded once more, to ``Int8Linear``: 8 bits in groups, 4 bits in groups of other
  sizes, groups of scattered inputs, and e4m3.

Called by ``weight_formats``.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from jitney.errors import CheckpointError, show
from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import GROUP_SIZES, Int4Linear

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
    group_of_input: Tensor | None
    """int64 [inputs]. None: the groups are consecutive inputs, the same number in each."""

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
    tensors: LayerTensors,
    inputs: int,
    dtype: torch.dtype,
    *,
    bits: int = 4,
    plus_one: bool = False,
    group_sizes: Collection[int] = (),
) -> QuantizedLinear:
    """The layer of ``inputs`` inputs that was quantized by ``method`` and stored in ``tensors``.

    ``bits`` (of an integer) and ``plus_one`` (zero points are one more than what is stored) are for
    GPTQ alone. ``group_sizes`` are those that the checkpoint's configuration names.

    Raises CheckpointError if a tensor is missing or has a wrong shape, if the layer's groups have
    none of the sizes, or if an input is in a group that the layer does not have.
    """
    bias = tensors.get("bias")
    if method == "compressed-tensors":
        if "weight" in tensors:
            return _of_unpacked_weight(tensors, bias, dtype)
        grouped = _compressed_tensors(tensors, inputs)
    elif method == "awq":
        grouped = _awq(tensors, inputs)
    else:
        grouped = _gptq(tensors, inputs, bits, plus_one)

    if grouped.group_of_input is not None:
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
    """Whether an ``Int4Linear`` can hold integers whose scales are for ``groups`` groups of
    consecutive inputs."""
    if groups == 0 or inputs % groups != 0:
        return False
    size = inputs // groups
    # A group of a multiple of the largest size is cut into groups of that size.
    largest = GROUP_SIZES[0]
    return size in GROUP_SIZES or size % largest == 0


def _of_unpacked_weight(
    tensors: LayerTensors, bias: Tensor | None, dtype: torch.dtype
) -> Int8Linear:
    """The layer of a weight [outputs, inputs] in int8 or e4m3, which is not packed into words. It
    has one scale for each output, or one for all."""
    weight = _matrix(tensors, "weight")
    outputs = len(weight)
    scale = _tensor(tensors, "weight_scale").float().reshape(1, -1)
    if scale.shape[1] not in (1, outputs):
        bound = f"one for all outputs, or one for each of {outputs}"
        raise CheckpointError.of("the number of scales in weight_scale", scale.shape[1], bound)
    scale = scale.expand(1, outputs)
    zero = tensors.get("weight_zero_point")
    if weight.dtype == torch.int8 and (zero is None or not zero.any()):
        return Int8Linear(weight=weight, scale=scale, bias=bias, dtype=dtype)
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
    if groups != 0 and inputs % groups == 0 and inputs // groups in group_sizes:
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
    return Int8Linear(weight=weight, scale=grouped.scale.float().t(), bias=bias, dtype=dtype)


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
    largest = GROUP_SIZES[0]
    if size > largest:
        # Each group becomes several groups of the largest size, with the same scale.
        scale_and_least = scale_and_least.repeat_interleave(size // largest, 2)
    return Int4Linear.from_quantized(
        q=grouped.q, scale_and_least=scale_and_least, bias=bias, dtype=dtype
    )


def _dequantized(grouped: _Grouped) -> Tensor:
    """The weight as it acts: float32 [outputs, inputs]."""
    group_of_input = grouped.group_of_input
    if group_of_input is None:
        group_of_input = _consecutive_groups(grouped.inputs, grouped.groups)
    zero = grouped.zero[:, group_of_input]
    scale = grouped.scale.float()[:, group_of_input]
    return (grouped.q.float() - zero) * scale


def _round_to_int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
    """The layer of a weight that was dequantized: float32 [outputs, inputs]."""
    q, scale = Int8Linear.quantize_rows(weight.contiguous())
    return Int8Linear(weight=q, scale=scale.t(), bias=bias, dtype=dtype)


# ------------------------------------------------------------------ what the methods store


def _compressed_tensors(tensors: LayerTensors, inputs: int) -> _Grouped:
    """A row of words for each output: [outputs, words]. A word holds 4 integers of 8 bits, or 8 of
    4 bits. The last word of a row may be padded.

    Zero points are packed along the outputs: [words, groups], where the last word may be padded as
    well. Without zero points, zero is the middle of the range.
    """
    words = _matrix(tensors, "weight_packed")
    scale = _matrix(tensors, "weight_scale")
    outputs, groups = scale.shape
    # Each layer may have bits of its own. The shape tells how many: a row of 8 bits has about twice
    # as many words as one of 4 bits.
    bits = 8 if words.shape[1] == _count_words(inputs, 8) else 4
    _check_shape("weight_packed", words, [outputs, _count_words(inputs, bits)])
    if "weight_zero_point" not in tensors:
        middle = 2.0 ** (bits - 1)
        zero = torch.full(scale.shape, middle)
    else:
        zero_words = _matrix(tensors, "weight_zero_point")
        _check_shape("weight_zero_point", zero_words, [_count_words(outputs, bits), groups])
        padded = _unpack(zero_words.t(), bits)  # [groups, outputs and padding]
        zero = padded[:, :outputs].t().float()
    return _Grouped(
        q=_unpack(words, bits)[:, :inputs],
        scale=scale,
        zero=zero,
        group_of_input=_read_group_index(tensors, "weight_g_idx", inputs, groups),
    )


def _awq(tensors: LayerTensors, inputs: int) -> _Grouped:
    """Words [inputs, outputs / 8], and zero points in words [groups, outputs / 8]: see
    :data:`_AWQ_ORDER`."""
    words = _matrix(tensors, "qweight")
    zero_words = _matrix(tensors, "qzeros")
    scale = _matrix(tensors, "scales")
    groups, outputs = scale.shape
    _check_shape("qweight", words, [inputs, outputs // 8])
    _check_shape("qzeros", zero_words, [groups, outputs // 8])
    return _Grouped(
        q=_unpack_awq(words),
        scale=scale.t(),
        zero=_unpack_awq(zero_words).float(),
        group_of_input=None,
    )


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack words [rows, outputs / 8] to uint8 [outputs, rows]."""
    by_word = _unpack(words, 4).unflatten(1, (-1, 8))
    return by_word[..., _AWQ_ORDER].flatten(1).t()


def _gptq(tensors: LayerTensors, inputs: int, bits: int, plus_one: bool) -> _Grouped:
    """A column of words for each output, packed along the inputs: [words, outputs]. Zero points
    are packed along the outputs: [groups, words]."""
    words = _matrix(tensors, "qweight")
    zero_words = _matrix(tensors, "qzeros")
    scale = _matrix(tensors, "scales")
    groups, outputs = scale.shape
    _check_shape("qweight", words, [inputs * bits // 32, outputs])
    _check_shape("qzeros", zero_words, [groups, outputs * bits // 32])
    zero = _unpack(zero_words, bits).t().float()
    if plus_one:
        zero = zero + 1
    return _Grouped(
        q=_unpack(words.t(), bits),
        scale=scale.t(),
        zero=zero,
        group_of_input=_read_group_index(tensors, "g_idx", inputs, groups),
    )


def _count_words(values: int, bits: int) -> int:
    """Words of 32 bits that hold so many values; the last one may be padded."""
    return -(-values * bits // 32)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, values]. A word's first value is in its lowest
    bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    # The shift fills up with the sign of the word, which the mask removes.
    mask = (1 << bits) - 1
    values = (words.unsqueeze(-1) >> shifts) & mask
    return values.to(torch.uint8).flatten(1)


def _tensor(tensors: LayerTensors, name: str) -> Tensor:
    """A tensor that the layer must have. Raises CheckpointError if it is missing."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{name} is missing")
    return tensor


def _matrix(tensors: LayerTensors, name: str) -> Tensor:
    """A matrix. Raises CheckpointError if it is missing, or does not have two dimensions."""
    tensor = _tensor(tensors, name)
    if tensor.ndim != 2:
        raise CheckpointError.of(f"the shape of {name}", list(tensor.shape), "of two dimensions")
    return tensor


def _check_shape(name: str, tensor: Tensor, expected: list[int]) -> None:
    """Raise CheckpointError if the tensor ``name`` has another shape."""
    shape = list(tensor.shape)
    if shape != expected:
        raise CheckpointError.of(f"the shape of {name}", shape, str(expected))


# ------------------------------------------------------------------ groups of inputs


def _read_group_index(tensors: LayerTensors, name: str, inputs: int, groups: int) -> Tensor | None:
    """``_Grouped.group_of_input``, as the tensor ``name`` has it. Without that tensor, the groups
    are consecutive inputs.

    Raises CheckpointError if the tensor does not have one of ``groups`` groups for each input.
    """
    if name not in tensors:
        return None
    group_of_input = tensors[name].long()
    _check_shape(name, group_of_input, [inputs])
    for number in (int(group_of_input.min()), int(group_of_input.max())):
        if not 0 <= number < groups:
            raise CheckpointError.of(f"a group in {name}", number, f"from 0 to {groups - 1}")
    if inputs % groups != 0:
        return group_of_input
    if torch.equal(group_of_input, _consecutive_groups(inputs, groups)):
        return None
    return group_of_input


def _consecutive_groups(inputs: int, groups: int) -> Tensor:
    """The group of each input, int64 [inputs], if each group is as many consecutive inputs. The
    groups must divide the inputs."""
    size = inputs // groups
    return torch.arange(inputs) // size
