"""Linear layers whose weights have 4 bits, for CPUs.

The inputs are divided into groups of neighbours. For each output and group there is a scale and a
least value: a weight is ``q * scale + least``, with q from 0 to 15. An activation is rounded to 8
bits, with one scale for each token and group.

This module multiplies floats. It is used while a model is loaded, and for models that are not
fused; otherwise ``kernels.cpu`` replaces these layers by its own. Made by ``quantize`` (option
``int4``) and by the readers of quantized checkpoints.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.eight_bits import Int8Linear, round_small

GROUP_SIZES = (128, 64, 32)
"""Inputs of a group, largest first. :func:`choose_group_size` chooses one of these."""
_LARGEST_Q = 15
"""Also the mask of the lower 4 bits of a byte."""
_KEPT_RANGE = 0.9
""":meth:`Int4Linear.quantized_from` begins with a scale that covers this share of a group's range,
and fits a better one afterwards. The first scale clips values outside the share. In return, the
steps inside are smaller."""
_VALUES_AT_ONCE = 1 << 14
"""Values of a weight that are rounded at a time. They stay in the processor's cache, and torch
gives so few to one thread: to share them out takes longer than to compute them."""
_TINY = 1e-30
"""Keeps a divisor from being 0."""


class Int4Linear(QuantizedLinear):
    """A :class:`QuantizedLinear` of 4 bits; x and the result are in ``dtype``."""

    weight: Tensor
    """uint8 [out_features, in_features / 2]: input 2 i in the low half of byte i, input 2 i + 1 in
    its high half."""
    scale: Tensor
    """bfloat16 [2, out_features, groups]: two tensors in one, because kernels read both.
    ``scale[0]`` are the scales, and ``scale[1]`` are the least values."""
    rounds_inputs = True
    suits_integer_kernels = True

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` and ``scale`` are those of the class."""
        super().__init__()
        self.out_features = len(weight)
        self.in_features = 2 * weight.shape[1]
        self.dtype = dtype
        assert scale.dtype == torch.bfloat16
        assert scale.shape[:2] == (2, self.out_features)
        self.group_size = self.in_features // scale.shape[2]
        assert self.group_size in GROUP_SIZES
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    @classmethod
    def quantized_from(cls, weight: Tensor, bias: Tensor | None) -> "Int4Linear":
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype."""
        size = choose_group_size(weight.shape[1])
        pieces = weight.detach().split(max(1, _VALUES_AT_ONCE // weight.shape[1]))
        rounded = [_round_groups(rows.float().unflatten(1, (-1, size))) for rows in pieces]
        return cls.from_quantized(
            q=torch.cat([each.q for each in rounded]),
            scale_and_least=torch.cat([each.scale_and_least for each in rounded], 1),
            bias=bias,
            dtype=weight.dtype,
        )

    @classmethod
    def from_quantized(
        cls, q: Tensor, scale_and_least: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> "Int4Linear":
        """The layer of a weight that is quantized already. ``q`` is uint8 [out_features,
        in_features], one value in each byte. ``scale_and_least`` becomes the attribute ``scale``.
        """
        low_halves = q[:, ::2]
        high_halves = q[:, 1::2] << 4
        return cls(
            weight=low_halves | high_halves,
            scale=scale_and_least.contiguous(),
            bias=bias,
            dtype=dtype,
        )

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "Int4Linear | None":
        """See :class:`QuantizedLinear`."""
        layers = [each for each in linears if isinstance(each, Int4Linear)]
        if len(layers) != len(linears):
            return None
        if len({_merge_key(each) for each in layers}) != 1:
            return None
        biases = [each.bias for each in layers if each.bias is not None]
        return Int4Linear(
            weight=torch.cat([each.weight for each in layers]),
            scale=torch.cat([each.scale for each in layers], 1),  # along the outputs
            bias=torch.cat(biases) if biases else None,
            dtype=layers[0].dtype,
        )

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        weight = torch.empty(self.out_features, self.in_features, device=self.weight.device)
        rows = max(1, _VALUES_AT_ONCE // self.in_features)
        for begin in range(0, self.out_features, rows):
            part = slice(begin, begin + rows)
            low = self.weight[part] & _LARGEST_Q
            high = self.weight[part] >> 4
            q = torch.stack((low, high), -1).view(len(low), -1, self.group_size)
            scale = self.scale[0, part].float().unsqueeze(2)
            least = self.scale[1, part].float().unsqueeze(2)
            torch.addcmul(least, q.float(), scale, out=weight[part].view_as(q))
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """As the kernels do: each group of x is rounded, unless ``keeps_inputs``."""
        if not self.keeps_inputs:
            quantized, scale = Int8Linear.quantize_rows(x.reshape(-1, self.group_size))
            x = (quantized * scale).view(x.shape)
        bias = None if self.bias is None else self.bias.float()
        weight = self.hold(self.dequantized)
        return functional.linear(x.float(), weight, bias).to(self.dtype)


class _RoundedGroups(NamedTuple):
    """Rows of a weight in 4 bits."""

    q: Tensor
    """uint8 [outputs, inputs]"""
    scale_and_least: Tensor
    """bfloat16 [2, outputs, groups]"""


def _round_groups(values: Tensor) -> _RoundedGroups:
    """Round float32 ``values`` [outputs, groups, size]."""
    # A first q, by a scale that covers most of each group's range.
    low = values.amin(2, keepdim=True)
    high = values.amax(2, keepdim=True)
    middle = (low + high) / 2
    kept = (high - low) * _KEPT_RANGE
    q = _nearest(values, scale=kept / _LARGEST_Q, least=middle - kept / 2)

    # The scale and the least value that fit this q best, rounded as they are stored.
    scale_and_least = _fit_line(q, values).bfloat16()

    # The q that fits these best.
    scale = scale_and_least[0].float()
    least = scale_and_least[1].float()
    q = _nearest(values, scale, least).to(torch.int8).view(torch.uint8).flatten(1)
    return _RoundedGroups(q, scale_and_least.squeeze(3))


class _FourBitMergeKey(NamedTuple):
    """Layers can be merged if they agree in these."""

    inputs: int
    group_size: int
    dtype: torch.dtype
    has_bias: bool


def _merge_key(layer: Int4Linear) -> _FourBitMergeKey:
    return _FourBitMergeKey(
        layer.in_features, layer.group_size, layer.dtype, layer.bias is not None
    )


def _fit_line(q: Tensor, values: Tensor) -> Tensor:
    """For each group, the scale and the least value that bring ``q * scale + least`` closest to
    ``values``, by least squares. q and values are [outputs, groups, size]. Returns
    [2, outputs, groups, 1]."""
    q_mean = q.mean(2, keepdim=True)
    values_mean = values.mean(2, keepdim=True)
    centred = q - q_mean
    slope = (centred * (values - values_mean)).sum(2, keepdim=True)
    slope /= centred.square().sum(2, keepdim=True).clamp_min(_TINY)
    intercept = values_mean - slope * q_mean
    return torch.stack((slope, intercept))


def _nearest(values: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """The q, from 0 to 15, whose ``q * scale + least`` is nearest to each value."""
    distance = values - least
    return round_small(distance.div_(scale.clamp_min(_TINY)).clamp_(0, _LARGEST_Q))


def choose_group_size(in_features: int) -> int:
    """Inputs of a group: the largest of GROUP_SIZES that divides ``in_features``. At least the
    smallest one must."""
    return next(size for size in GROUP_SIZES if in_features % size == 0)


def layer_bytes(out_features: int, in_features: int, group_size: int) -> int:
    """Bytes of a layer's weight, scales and least values."""
    weight_row = in_features // 2
    groups = in_features // group_size
    scale_and_least = 2 * torch.bfloat16.itemsize
    return out_features * (weight_row + groups * scale_and_least)
