"""Linear layers whose weights and activations are e4m3: 8 bits, of which 3 are fraction.

A weight has one scale per output channel, fixed at load; an activation has one per token, taken
anew at every call. The product of both is torch's (``torch._scaled_mm``), which sums in float32 on
a CPU and in the tensor cores' accumulators on a GPU, and scales once at the end. Made by
``quantize`` (option ``fp8``) and ``quantize_checkpoint`` (checkpoints stored that way).

The error of rounding one value to e4m3 is at most 2⁻⁴ of it where it is normal, and at most
2⁻¹⁰ · scale below 2⁻⁶ · scale; :data:`MAX` times the scale is the largest value of its row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPE = torch.float8_e4m3fn
MAX = torch.finfo(DTYPE).max  # 448
# Keeps the scale of a row of zeros from being 0. Smaller than the square of any value of interest.
_LEAST = 1e-30
# What the kernels for scaled products ask of a weight's two dimensions.
ALIGNMENT = 16

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [T, K] as e4m3 [T, K] and their scales, float32 [T, 1]: x ≈ q · scale.

    A NaN or an infinity in a row makes the row NaN: a broken activation is never hidden.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True).clamp_min(_LEAST)
    # A tensor over a tensor: torch takes a number over a tensor for a product with the reciprocal.
    return (wide * (torch.full_like(largest, MAX) / largest)).to(DTYPE), largest / MAX


class Fp8Linear(nn.Module):
    """``x @ weight.T + bias`` in e4m3.

    x is [..., in_features] in ``dtype``, and so is the result, [..., out_features].
    """

    weight: Tensor
    """e4m3 [out_features, in_features]; the kernels read its transpose, which is column-major."""
    scale: Tensor
    """float32 [1, out_features]."""
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        rows: QuantizeRows | None = None,
    ) -> None:
        """``weight`` and ``scale`` as the attributes are. ``rows`` quantizes activations: None is
        the fastest for the weight's device."""
        super().__init__()
        assert weight.dtype == DTYPE
        assert weight.is_contiguous()
        assert scale.dtype == torch.float32
        assert scale.shape == (1, len(weight))
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self._rows = rows or _rows_for(weight.device)
        self._exact = False
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Fp8Linear":
        """Quantize a weight [out_features, in_features]; the layer computes in its dtype."""
        quantized, scale = quantize_rows(weight.detach())
        return cls(quantized, scale.t(), bias, weight.dtype)

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "Fp8Linear | None":
        """One layer that gives the results of all, one after the other, for the same input: every
        output channel keeps its weights and scale, so nothing is rounded again. None if the layers
        do not fit together."""
        each = [linear for linear in linears if isinstance(linear, Fp8Linear)]
        if len(each) != len(linears) or not each:
            return None
        if len({(linear.in_features, linear.dtype, linear.bias is None) for linear in each}) > 1:
            return None
        biases = [linear.bias for linear in each if linear.bias is not None]
        return Fp8Linear(
            # Bytes: not every version of torch concatenates this dtype.
            torch.cat([linear.weight.view(torch.uint8) for linear in each]).view(DTYPE),
            torch.cat([linear.scale for linear in each], 1),
            torch.cat(biases) if biases else None,
            each[0].dtype,
            each[0]._rows,
        )

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        return self.weight.float() * self.scale.t()

    def forward(self, x: Tensor) -> Tensor:
        if self._exact:
            return functional.linear(x, self.dequantized().to(self.dtype), self.bias)
        quantized, scale = self._rows(x.reshape(-1, self.in_features))
        y: Tensor = torch._scaled_mm(
            quantized,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, e4m3"


@contextmanager
def exact_products(module: nn.Module) -> Iterator[list[Fp8Linear]]:
    """For a while, the layers below ``module`` (which this gives) round no activations: a small
    change of the input is then a small change of the output, as without quantization."""
    layers = [each for each in module.modules() if isinstance(each, Fp8Linear)]
    for each in layers:
        each._exact = True
    try:
        yield layers
    finally:
        for each in layers:
            each._exact = False


def _rows_for(device: torch.device) -> QuantizeRows:
    if device.type != "cuda":
        return quantize_rows
    from jitney.execution.quantize_kernel import quantize_rows as fused  # needs triton

    return fused
