"""Linear layers whose weights and activations have 8 bits: e4m3, or int8 on a CPU.

A weight has one scale per output channel, fixed at load; an activation has one per token, taken
anew at every call. The product is scaled once at the end. That of e4m3 is torch's
(``torch._scaled_mm``), which sums in float32 on a CPU and in the tensor cores' accumulators on a
GPU; that of int8 is one of floats, since a CPU's kernels take the place of such layers. Made by
``quantize`` (options ``fp8`` and ``int8``) and ``checkpoint`` (checkpoints stored that way).
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import MOST_OUTLIERS, OUTLIER, QuantizedLinear
from jitney.quantization import e4m3

_MOST = 127
_LEAST_RATIO, _MOST_RATIO = 8, 2**16
"""Of the mean size of a weight's columns to that of one which is enlarged, and by how much."""
_ROWS = 8192
"""Of a weight that are floats at a time."""


class EightBitLinear(QuantizedLinear):
    """A :class:`QuantizedLinear` of 8 bits; x and the result are in ``dtype``."""

    weight: Tensor
    """[out_features, in_features]; the kernels read its transpose, which is column-major."""
    bias: Tensor | None
    rounds_inputs = True
    kind: torch.dtype
    """Of the weight."""

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` and ``scale`` as the attributes are."""
        super().__init__()
        assert weight.dtype == self.kind
        assert weight.is_contiguous()
        assert scale.dtype == torch.float32
        assert scale.shape == (1, len(weight))
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of x [T, K] as 8 bits [T, K] and their scales, float32 [T, 1]: x ≈ q · scale."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x [T, in_features], rounded, times the weight, plus the bias: [T, out_features]."""
        raise NotImplementedError

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype."""
        quantized, scale = cls.quantize_rows(weight.detach())
        return cls(quantized, scale.t(), bias, weight.dtype)

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "EightBitLinear | None":
        """One layer that gives the results of all, one after the other, for the same input: every
        output channel keeps its weights and scale, so nothing is rounded again. None if the layers
        do not fit together."""
        each = [linear for linear in linears if isinstance(linear, EightBitLinear)]
        if len(each) != len(linears) or not each:
            return None
        keys = {(type(x), x.in_features, x.dtype, x.bias is None) for x in each}
        if len(keys) > 1:
            return None
        biases = [linear.bias for linear in each if linear.bias is not None]
        given = [linear.factors for linear in each if linear.factors is not None]
        factors = torch.stack(given).amax(0) if len(given) == len(each) else None
        merged = type(each[0])(
            # Bytes: not every version of torch concatenates e4m3.
            torch.cat([x.weight_for(factors).view(torch.uint8) for x in each]).view(each[0].kind),
            torch.cat([linear.scale for linear in each], 1),
            torch.cat(biases) if biases else None,
            each[0].dtype,
        )
        merged.factors = factors
        return merged

    def weight_for(self, factors: Tensor | None) -> Tensor:
        """The weight for an x times ``factors``, which are no smaller than this layer's."""
        if self.factors is None:
            return self.weight
        change = self.factors if factors is None else self.factors / factors
        if (change == 1).all():
            return self.weight
        return (self.weight * change).round().to(self.kind)

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        weight = self.weight.float() * self.scale.t()
        return weight if self.factors is None else weight * self.factors

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.factors is not None:
            rows = rows * self.factors
        y = self.by_floats(rows.float(), self.scale) if self.exact else self.product(rows)
        return y.view(*x.shape[:-1], self.out_features)

    def by_floats(self, x: Tensor, scale: Tensor) -> Tensor:
        """float32 x [T, in_features] times the weight, times ``scale``, plus the bias."""
        parts = [functional.linear(x, part.float()) for part in self.weight.split(_ROWS)]
        y = torch.cat(parts, 1) * scale
        return (y if self.bias is None else y + self.bias).to(self.dtype)


class Fp8Linear(EightBitLinear):
    """In e4m3."""

    kind = e4m3.DTYPE
    quantize_rows = staticmethod(e4m3.quantize_rows)

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(weight, scale, bias, dtype)
        self._round = e4m3.quantize_rows
        if weight.device.type == "cuda":
            from jitney.quantization import fp8_kernel  # needs triton

            self._round = fp8_kernel.quantize_rows

    def product(self, x: Tensor) -> Tensor:
        quantized, scale = self._round(x)
        y: Tensor = torch._scaled_mm(
            quantized,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return y


class Int8Linear(EightBitLinear):
    """In int8, for CPUs."""

    kind = torch.int8
    has_bytes = True

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """As of every class. A column of weights that are all far below those of others, and would
        be rounded to zeros, is enlarged by a power of 2, and its input made as much smaller: the
        inputs of such columns are often outliers."""
        sizes = weight.detach().abs().amax(0).float()
        ratio = sizes.mean() / sizes.clamp_min(1e-30)
        factors = 0.5 ** ratio.clamp(1, _MOST_RATIO).log2().floor()
        factors = factors.where(ratio >= _LEAST_RATIO, 1.0)
        quantized, scale = cls.quantize_rows(weight.detach() / factors)
        layer = cls(quantized, scale.t(), bias, weight.dtype)
        layer.factors = factors if factors.min() < 1 else None
        return layer

    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of x [T, K] as int8 [T, K] and their scales, float32 [T, 1]: x ≈ q · scale. A NaN or
        an infinity in a row makes the row's scale NaN: a broken activation is never hidden."""
        wide = x.float()
        largest = wide.abs().amax(1, keepdim=True)
        share = torch.where(largest > 0, _MOST / largest, 0.0)
        scale = largest / _MOST + (wide * 0).sum(1, keepdim=True)
        return (wide * share).nan_to_num().round().to(torch.int8), scale

    def product(self, x: Tensor) -> Tensor:
        wide, size = x.float(), x.float().abs()
        limit = size.mean(1, keepdim=True) * OUTLIER
        for _ in range(2):  # outliers are no part of the mean
            closer = size.where(size <= limit, 0.0).mean(1, keepdim=True) * OUTLIER
            few = (size > limit).sum(1, keepdim=True) <= MOST_OUTLIERS
            limit = closer.where(few, limit)
        while (many := (size > limit).sum(1, keepdim=True) > MOST_OUTLIERS).any():
            limit = limit.where(~many, 2 * limit + 1e-30)
        outliers = wide.where(size > limit, 0.0)
        quantized, scale = self.quantize_rows(wide - outliers)
        # Not by torch._int_mm: with AVX2 its sums clip.
        return self.by_floats(quantized * scale + outliers, self.scale)
