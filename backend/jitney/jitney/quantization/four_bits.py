"""Linear layers whose weights have 4 bits, for CPUs.

The inputs of an output come in groups, each with a scale and a least value: a weight is
``q * scale + least``, q from 0 to 15. An activation is rounded to 8 bits, with a scale for each
token and group. The plain product is one of floats, since a CPU's kernels take the place of such
layers. Made by ``quantize`` (option ``int4``) and ``checkpoint``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.eight_bits import Int8Linear

GROUPS = (128, 64, 32)
"""Inputs that share a scale: the first of these that divides a layer's."""
_MOST = 15
_SHARE = 0.9
"""Of a group's range, to begin with: what lies outside is clipped, and all else is finer."""
_LEAST = 1e-30


class Int4Linear(QuantizedLinear):
    """A :class:`QuantizedLinear` of 4 bits; x and the result are in ``dtype``."""

    rounds_inputs = True
    has_bytes = True

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` is uint8 [out_features, in_features / 2], inputs 2 i in the low halves;
        ``scale`` bfloat16 [2, out_features, groups], scales and leasts."""
        super().__init__()
        self.out_features, self.in_features = len(weight), 2 * weight.shape[1]
        assert scale.dtype == torch.bfloat16
        assert scale.shape[:2] == (2, self.out_features)
        self.group, self.dtype = self.in_features // scale.shape[2], dtype
        assert self.group in GROUPS
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Int4Linear":
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype."""
        values = weight.detach().float().unflatten(1, (-1, group_size(weight.shape[1])))
        low, high = values.aminmax(dim=2, keepdim=True)
        middle, reach = (low + high) / 2, (high - low) / 2 * _SHARE
        q = _nearest(values, 2 * reach / _MOST, middle - reach)
        # The scale and least that fit these best (least squares).
        centred, mean = q - q.mean(2, keepdim=True), values.mean(2, keepdim=True)
        slope = (centred * (values - mean)).sum(2, keepdim=True)
        slope /= centred.square().sum(2, keepdim=True).clamp_min(_LEAST)
        scale = torch.stack((slope, mean - slope * q.mean(2, keepdim=True))).bfloat16()
        q = _nearest(values, *scale.float())
        return cls.stored(q.to(torch.uint8).flatten(1), scale.squeeze(3), bias, weight.dtype)

    @classmethod
    def stored(
        cls, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> "Int4Linear":
        """Of q as uint8 [out_features, in_features]; ``scale`` as in ``__init__``."""
        return cls(q[:, ::2] | q[:, 1::2] << 4, scale.contiguous(), bias, dtype)

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "Int4Linear | None":
        """As of ``EightBitLinear``."""
        each = [linear for linear in linears if isinstance(linear, Int4Linear)]
        keys = {(x.in_features, x.group, x.dtype, x.bias is None) for x in each}
        if len(each) != len(linears) or len(keys) != 1:
            return None
        biases = [linear.bias for linear in each if linear.bias is not None]
        return Int4Linear(
            torch.cat([linear.weight for linear in each]),
            torch.cat([linear.scale for linear in each], 1),
            torch.cat(biases) if biases else None,
            each[0].dtype,
        )

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        q = torch.stack((self.weight & _MOST, self.weight >> 4), -1).view(*self.scale.shape[1:], -1)
        scale, least = self.scale.float().unsqueeze(3)
        return (q * scale + least).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """As the kernels do: each group of x is rounded, unless ``exact``."""
        if not self.exact:
            quantized, scale = Int8Linear.quantize_rows(x.reshape(-1, self.group))
            x = (quantized * scale).view(x.shape)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.dequantized(), bias).to(self.dtype)


def _nearest(values: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    return ((values - least) / scale.clamp_min(_LEAST)).round().clamp(0, _MOST)


def group_size(in_features: int) -> int:
    """Inputs that share a scale, of a whole number of groups of the smallest size."""
    return next(size for size in GROUPS if in_features % size == 0)


def packed_bytes(out_features: int, in_features: int) -> int:
    """What such a layer's weight takes."""
    return out_features * (in_features // 2 + in_features // group_size(in_features) * 4)
