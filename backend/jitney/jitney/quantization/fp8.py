"""Linear layers whose weights and activations are e4m3.

A weight has one scale per output channel, fixed at load; an activation has one per token, taken
anew at every call. The product of both is torch's (``torch._scaled_mm``), which sums in float32 on
a CPU and in the tensor cores' accumulators on a GPU, and scales once at the end. Made by
``quantize`` (option ``fp8``) and ``checkpoint`` (checkpoints stored that way).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.e4m3 import DTYPE, quantize_rows


class Fp8Linear(QuantizedLinear):
    """A :class:`QuantizedLinear` in e4m3; x and the result are in ``dtype``."""

    weight: Tensor
    """e4m3 [out_features, in_features]; the kernels read its transpose, which is column-major."""
    scale: Tensor
    """float32 [1, out_features]."""
    bias: Tensor | None
    rounds_inputs = True

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """``weight`` and ``scale`` as the attributes are."""
        super().__init__()
        assert weight.dtype == DTYPE
        assert weight.is_contiguous()
        assert scale.dtype == torch.float32
        assert scale.shape == (1, len(weight))
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self._quantize_rows = quantize_rows
        if weight.device.type == "cuda":
            from jitney.quantization import fp8_kernel  # needs triton

            self._quantize_rows = fp8_kernel.quantize_rows
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
        )

    def dequantized(self) -> Tensor:
        """The weight as it acts: float32 [out_features, in_features]."""
        return self.weight.float() * self.scale.t()

    def forward(self, x: Tensor) -> Tensor:
        if self.exact:
            return functional.linear(x, self.dequantized().to(self.dtype), self.bias)
        quantized, scale = self._quantize_rows(x.reshape(-1, self.in_features))
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
