"""Linear layers whose weights and activations have 8 bits: e4m3, or int8 on a CPU.

A weight has one scale for each output channel, fixed at load. An activation has one scale for each
token, computed in every call. The product is multiplied by both scales at the end.

- e4m3: torch multiplies (``torch._scaled_mm``). It sums in float32 on a CPU, and in the tensor
  cores' accumulators on a GPU.
- int8: this module multiplies floats. It is used while a model is loaded, and for models that are
  not fused; otherwise ``kernels.cpu`` replaces these layers by its own.

Made by ``quantize`` (options ``fp8`` and ``int8``) and by the readers of quantized checkpoints.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import MOST_OUTLIERS, OUTLIER, QuantizedLinear
from jitney.quantization import e4m3

_LARGEST_INT8 = 127
_TINY = 1e-30
"""The least divisor, so that nothing is divided by 0. Also added to a bound that is doubled, which
may be 0."""
_NO_FRACTION = 1.5 * 2**23
"""float32 has no fraction from 2²³ on: what is added to it is rounded to a whole number."""
_SMALL_COLUMN = 8
"""A column is enlarged if its largest weight is at least this many times smaller than the mean of
all columns' largest weights."""
_MOST_ENLARGED = 2**16
"""A column is multiplied by at most this."""
_VALUES_AT_ONCE = 1 << 14
"""Values of a weight that are rounded at a time. They stay in the processor's cache, and torch
gives so few to one thread: to share them out takes longer than to compute them."""
_ROWS_AT_ONCE = 8192
"""Rows of a weight that are converted to floats at the same time. It bounds the memory of that."""


class EightBitLinear(QuantizedLinear):
    """A :class:`QuantizedLinear` of 8 bits; x and the result are in ``dtype``.

    It computes::

        rounded, x_scale = quantize_rows(x * input_factors)
        y = (rounded @ weight.T) * x_scale * scale + bias

    With ``keeps_inputs``, ``x * input_factors`` is not rounded.

    ``input_factors`` [in_features] undo what was done to columns of the weight before it was
    quantized (:meth:`Int8Linear.quantized_from`): if column k was multiplied by 2ⁿ, input k is
    multiplied by 2⁻ⁿ. So a factor is at most 1. None: all are 1.
    """

    weight_dtype: torch.dtype
    weight: Tensor
    """[out_features, in_features], contiguous: products take its transpose, which must be
    column-major."""
    bias: Tensor | None
    rounds_inputs = True

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` is [out_features, in_features] in ``weight_dtype``. ``scale`` is float32
        [1, out_features]."""
        super().__init__()
        assert weight.dtype == self.weight_dtype
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
        """Round x [T, in_features], multiply it by the weight and add the bias. Returns
        [T, out_features]."""
        raise NotImplementedError

    @classmethod
    def quantized_from(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype."""
        quantized, scale = cls.quantize_rows(weight.detach())
        return cls(weight=quantized, scale=scale.t(), bias=bias, dtype=weight.dtype)

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "EightBitLinear | None":
        """One layer that gives the results of all, side by side, for the same input. None if the
        layers do not fit together.

        Every output channel keeps its weights and its scale. Only a layer whose ``input_factors``
        differ from the merged layer's is rounded again.
        """
        layers = [each for each in linears if isinstance(each, EightBitLinear)]
        if len(layers) != len(linears):
            return None
        if len({_merge_key(each) for each in layers}) != 1:
            return None

        factors = _common_factors(layers)
        # As bytes: not every version of torch concatenates e4m3.
        weights = [each.weight_for(factors).view(torch.uint8) for each in layers]
        biases = [each.bias for each in layers if each.bias is not None]
        first = layers[0]
        merged = type(first)(
            weight=torch.cat(weights).view(first.weight_dtype),
            scale=torch.cat([each.scale for each in layers], 1),
            bias=torch.cat(biases) if biases else None,
            dtype=first.dtype,
        )
        merged.input_factors = factors
        return merged

    def weight_for(self, factors: Tensor | None) -> Tensor:
        """This layer's weight, changed so that inputs are multiplied by ``factors``, not by
        ``self.input_factors``. None stands for factors of 1.

        Each factor must be at least this layer's. Where a factor doubles, the weights of its column
        are halved. So no weight becomes larger, and all still fit into 8 bits.
        """
        if self.input_factors is None:
            # No factor is above 1, so the new ones must be 1 as well.
            assert factors is None
            return self.weight
        new_factors = 1.0 if factors is None else factors
        change = self.input_factors / new_factors  # at most 1
        if (change == 1).all():
            return self.weight
        return (self.weight * change).round().to(self.weight_dtype)

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        weight = self.weight.float() * self.scale.t()
        return weight if self.input_factors is None else weight * self.input_factors

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.input_factors is not None:
            rows = rows * self.input_factors
        y = self.float_product(rows.float()) if self.keeps_inputs else self.product(rows)
        return y.view(*x.shape[:-1], self.out_features)

    def float_product(self, x: Tensor) -> Tensor:
        """Multiply float32 x [T, in_features], as it is, by the weight, and add the bias."""
        if self.float_budget is None:
            parts = self.weight.split(_ROWS_AT_ONCE)
        else:  # a load is under way
            parts = (self.hold(self.weight.float),)
        y = torch.cat([functional.linear(x, rows.float()) for rows in parts], 1) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.to(self.dtype)


class _MergeKey(NamedTuple):
    """Layers can be merged if they agree in these."""

    layer_class: type[EightBitLinear]
    inputs: int
    dtype: torch.dtype
    has_bias: bool


def _merge_key(layer: EightBitLinear) -> _MergeKey:
    return _MergeKey(type(layer), layer.in_features, layer.dtype, layer.bias is not None)


def _common_factors(layers: Sequence[EightBitLinear]) -> Tensor | None:
    """``input_factors`` of a merged layer: for each column, the largest of the layers' factors."""
    given = [each.input_factors for each in layers if each.input_factors is not None]
    if len(given) < len(layers):
        # One layer has factors of 1, and no factor is larger.
        return None
    return torch.stack(given).amax(0)


class Fp8Linear(EightBitLinear):
    """In e4m3."""

    weight_dtype = e4m3.E4M3
    quantize_rows = staticmethod(e4m3.quantize_rows)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`EightBitLinear`."""
        quantized, scale = e4m3.quantize_rows(x)
        # The bias is added afterwards: with one, cuBLAS has no product of few rows and many inputs
        # on some GPUs (CUBLAS_STATUS_NOT_SUPPORTED on an H100, from 8,192 inputs on). Without one
        # it has that product, and is as fast.
        y: Tensor = torch._scaled_mm(
            quantized,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return y if self.bias is None else y + self.bias


class Int8Linear(EightBitLinear):
    """In int8, for CPUs."""

    weight_dtype = torch.int8
    suits_integer_kernels = True

    @classmethod
    def quantized_from(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype.

        Each row of the weight has one scale, which its largest weight sets. So a column of far
        smaller weights would be rounded to zeros in every row, and in models such columns often go
        with inputs that are outliers. Therefore the column is enlarged: multiplied by a power of 2.
        Its input is multiplied by the inverse of that power: the column's entry in
        ``input_factors``.
        """
        weight = weight.detach()
        column_sizes = weight.abs().amax(0).float()

        # How many times smaller than the mean column each one is, and the largest power of 2 that
        # is not above that number.
        ratio = column_sizes.mean() / column_sizes.clamp_min(_TINY)
        exponent = ratio.clamp(1, _MOST_ENLARGED).log2().floor()

        is_small = ratio >= _SMALL_COLUMN
        factors: Tensor | None = None
        if is_small.any():
            factors = (0.5**exponent).where(is_small, 1.0)

        rounded = []
        for rows in weight.split(max(1, _VALUES_AT_ONCE // weight.shape[1])):
            enlarged = rows if factors is None else rows / factors
            rounded.append(cls.quantize_rows(enlarged))
        layer = cls(
            weight=torch.cat([q for q, _ in rounded]),
            scale=torch.cat([scale for _, scale in rounded]).t(),
            bias=bias,
            dtype=weight.dtype,
        )
        layer.input_factors = factors
        return layer

    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of x [T, K] as int8 [T, K] and their scales, float32 [T, 1]: x ≈ q · scale.

        A NaN or an infinity in a row makes the row's scale NaN: a broken activation is never
        hidden.
        """
        wide = x.float()
        largest = wide.abs().amax(1, keepdim=True)
        # This division rounds twice (see ``e4m3.quantize_rows``). It does no harm: at most, a value
        # almost halfway between two integers is rounded to the other one.
        inverse_scale = torch.where(largest > 0, _LARGEST_INT8 / largest, 0.0)

        # To make the scale of a broken row NaN, and leave the others as they are: 0 * NaN and
        # 0 * infinity are NaN, so the sum is NaN in a broken row, and 0 in a sound one.
        zero_or_nan = (wide * 0).sum(1, keepdim=True)
        scale = largest / _LARGEST_INT8 + zero_or_nan

        # int8 has no NaN, and to convert one is undefined. The scale says that the row is broken.
        q = round_small((wide * inverse_scale).nan_to_num_())
        return q.to(torch.int8), scale

    def product(self, x: Tensor) -> Tensor:
        """As the kernels do: outliers stay floats, and all other values are rounded to bytes.

        It multiplies floats: the sums of ``torch._int_mm`` saturate with AVX2.
        """
        wide = x.float()
        sizes = wide.abs()
        outliers = wide.where(sizes > _outlier_bounds(sizes), 0.0)
        quantized, scale = self.quantize_rows(wide - outliers)
        return self.float_product(quantized * scale + outliers)


def _outlier_bounds(sizes: Tensor) -> Tensor:
    """A bound for each row of ``sizes`` [T, K], the absolute values of a row: larger ones are
    outliers. Returns [T, 1]. This is the definition of an outlier, which the kernels follow:

    1. The bound is OUTLIER times the row's mean.
    2. The outliers are in that mean, and raise the bound. So the following is done twice: take the
       mean again with the outliers found so far as zeros; the bound is OUTLIER times that. A row
       that already has more than MOST_OUTLIERS keeps its bound: a lower one would add more.
    3. While a row has more than MOST_OUTLIERS, its bound is doubled.
    """
    bounds = sizes.mean(1, keepdim=True) * OUTLIER

    for _ in range(2):
        mean = sizes.where(sizes <= bounds, 0.0).mean(1, keepdim=True)
        has_few = _outlier_counts(sizes, bounds) <= MOST_OUTLIERS
        bounds = (mean * OUTLIER).where(has_few, bounds)

    while True:
        too_many = _outlier_counts(sizes, bounds) > MOST_OUTLIERS
        if not too_many.any():
            return bounds
        # The mean of tiny values may round to 0. Doubling alone would leave a bound of 0 as it is.
        bounds = bounds.where(~too_many, 2 * bounds + _TINY)


def _outlier_counts(sizes: Tensor, bounds: Tensor) -> Tensor:
    """How many values of each row are above its bound: [T, 1]."""
    return (sizes > bounds).sum(1, keepdim=True)


def round_small(x: Tensor) -> Tensor:
    """Round float32 x in place, as ``round_`` does: halves to the even neighbour. All values must
    be below 2²² in size.

    torch's own shares even a few thousand values out to threads, and waits for them: on a busy
    machine that takes longer than all else that is done to a weight.
    """
    return x.add_(_NO_FRACTION).sub_(_NO_FRACTION)


def layer_bytes(out_features: int, in_features: int) -> int:
    """Bytes of a layer's weight and scales."""
    scale = torch.float32.itemsize
    return out_features * (in_features + scale)
