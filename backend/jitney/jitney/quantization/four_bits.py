"""Linear layers whose weights have 4 bits, for CPUs.

The inputs of an output come in groups. Each group has a scale and a least value: a weight is
``q * scale + least``, q from 0 to 15. An activation is rounded to 8 bits, with a scale for each
token and group.

Here the product is one of floats, for loads and for models that are not fused. In service a CPU's
kernels take the place of these layers. Made by ``quantize`` (option ``int4``) and by the readers of
quantized checkpoints.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.eight_bits import Int8Linear

GROUPS = (128, 64, 32)
"""Inputs that share a scale: the first of these that divides a layer's inputs."""
_LARGEST_Q = 15
_KEPT_RANGE = 0.9
"""Share of a group's range that the first scale covers: the rest is clipped, and all else finer."""
_TINY = 1e-30


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
        self.out_features = len(weight)
        self.in_features = 2 * weight.shape[1]
        self.dtype = dtype
        assert scale.dtype == torch.bfloat16
        assert scale.shape[:2] == (2, self.out_features)
        self.group = self.in_features // scale.shape[2]
        assert self.group in GROUPS
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Int4Linear":
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype."""
        values = weight.detach().float().unflatten(1, (-1, group_size(weight.shape[1])))

        # Round with a scale that covers most of each group's range.
        low, high = values.aminmax(dim=2, keepdim=True)
        middle = (low + high) / 2
        reach = (high - low) / 2 * _KEPT_RANGE
        q = _nearest(values, scale=2 * reach / _LARGEST_Q, least=middle - reach)

        # Then take the scale and the least that fit these q best (least squares), and round anew.
        q_mean = q.mean(2, keepdim=True)
        values_mean = values.mean(2, keepdim=True)
        centred = q - q_mean
        slope = (centred * (values - values_mean)).sum(2, keepdim=True)
        slope /= centred.square().sum(2, keepdim=True).clamp_min(_TINY)
        scale_and_least = torch.stack((slope, values_mean - slope * q_mean)).bfloat16()
        scale, least = scale_and_least.float()
        q = _nearest(values, scale, least).to(torch.uint8).flatten(1)
        return cls.stored(q, scale_and_least.squeeze(3), bias, weight.dtype)

    @classmethod
    def stored(
        cls, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> "Int4Linear":
        """Of q as uint8 [out_features, in_features]; ``scale`` as in ``__init__``."""
        halves = q[:, ::2] | q[:, 1::2] << 4
        return cls(halves, scale.contiguous(), bias, dtype)

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "Int4Linear | None":
        """See :class:`QuantizedLinear`."""
        layers = [each for each in linears if isinstance(each, Int4Linear)]
        forms = {(x.in_features, x.group, x.dtype, x.bias is None) for x in layers}
        if len(layers) != len(linears) or len(forms) != 1:
            return None
        biases = [each.bias for each in layers if each.bias is not None]
        return Int4Linear(
            weight=torch.cat([each.weight for each in layers]),
            scale=torch.cat([each.scale for each in layers], 1),
            bias=torch.cat(biases) if biases else None,
            dtype=layers[0].dtype,
        )

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        low = self.weight & _LARGEST_Q
        high = self.weight >> 4
        groups = self.scale.shape[1:]  # [out_features, groups]
        q = torch.stack((low, high), -1).view(*groups, -1)
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
    return ((values - least) / scale.clamp_min(_TINY)).round().clamp(0, _LARGEST_Q)


def group_size(in_features: int) -> int:
    """Inputs that share a scale, of a whole number of groups of the smallest size."""
    return next(size for size in GROUPS if in_features % size == 0)


def packed_bytes(out_features: int, in_features: int) -> int:
    """What such a layer's weight takes."""
    halves = in_features // 2
    scales = in_features // group_size(in_features) * 4
    return out_features * (halves + scales)
