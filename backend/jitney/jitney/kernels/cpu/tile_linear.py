"""Linear layers on the tile unit of the processor (AMX), for bfloat16.

The product is our own kernel (``tile_kernel``): at the few rows of a decode step it reads weights
faster than oneDNN's, a call costs a tenth, and it can be a step of a ``program``, which a call into
torch cannot. Where the processor has no tile unit, ``linear`` packs for oneDNN.

Imported only where Numba is.
"""

import numpy as np
import torch
from torch import Tensor, nn

from jitney.kernels.cpu import tile_kernel
from jitney.kernels.cpu.amx import may_use_amx
from jitney.kernels.cpu.compiled import Kernel, source_version
from jitney.kernels.cpu.tile_kernel import ProductCall
from jitney.kernels.fused.layers import Activation

ACTIVATIONS: dict[Activation, int] = {
    "silu": tile_kernel.SILU,
    "gelu_tanh": tile_kernel.GELU_TANH,
}
_MOST_THREADS = 4096  # the bound of option threads
_ITEMS = 64
"""About so many items a product is cut into: many enough to share out, few enough to be cheap."""


class TileKernel:
    """The compiled product and the scratch memory of its threads. One per engine."""

    def __init__(self) -> None:
        version = source_version()

        def product(arguments: int) -> None:
            if version != 0:
                tile_kernel.product_body(arguments)

        kernel = Kernel(product)
        self.address, self.run = kernel.address, kernel.run
        # Untouched pages of it take no memory.
        self._scratch = np.empty(_MOST_THREADS * tile_kernel.SCRATCH_BYTES + 64, np.uint8)
        self.scratch = -(-self._scratch.ctypes.data // 64) * 64


def can_use_tiles(dtype: torch.dtype) -> bool:
    """Whether this process may use a tile unit for products of ``dtype``."""
    return dtype == torch.bfloat16 and may_use_amx()


def fits_tiles(linear: nn.Linear) -> bool:
    """Whether both sizes are those of whole tiles."""
    return linear.in_features % tile_kernel.STEP == 0 and linear.out_features % 32 == 0


class TileLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16; sums are float32, rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and of what it is multiplied with, one
    above the other, and the result [..., N] is ``activation(gate) * up``.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernel: TileKernel,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        outputs, self.in_features = weight.shape
        self.out_features = outputs if activation is None else outputs // 2
        self.kernel = kernel
        gated = activation is not None
        self._packed = _pack(weight.detach(), gated)
        self._bias = None
        if bias is not None:
            self._bias = _interleave(bias.detach().float().view(-1, 16), gated)
        pairs = outputs // 32
        self._call = ProductCall(
            x_stride=2 * self.in_features,
            steps=self.in_features // tile_kernel.STEP,
            weight=self._packed.data_ptr(),
            pairs=pairs,
            pairs_per_item=max(1, pairs // _ITEMS),
            out_stride=2 * self.out_features,
            activation=0 if activation is None else ACTIVATIONS[activation],
            other_stride=2 * self.out_features,
            bias=0 if self._bias is None else self._bias.data_ptr(),
            scratch=kernel.scratch,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def call_for(self, x: int, out: int, other: int = 0) -> ProductCall:
        """The kernel's arguments for contiguous rows at these addresses; 0 is no ``other``. The
        number of rows is left to be set."""
        call = ProductCall.from_buffer_copy(self._call)
        call.x, call.out, call.other = x, out, other
        return call

    def plus(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The result, plus ``other`` [..., out_features] if there is one."""
        assert x.dtype == torch.bfloat16
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        if other is not None:
            assert other.shape == out.shape
            other = other.contiguous()
        call = self.call_for(x.data_ptr(), out.data_ptr(), 0 if other is None else other.data_ptr())
        call.rows = x.numel() // self.in_features
        self.kernel.run(call, torch.get_num_threads())
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _pack(weight: Tensor, gated: bool) -> Tensor:
    """[N, K] as columns [N / 16, K / 2, 16, 2]."""
    outputs, inputs = weight.shape
    columns = weight.view(outputs // 16, 16, inputs // 2, 2).permute(0, 2, 1, 3)
    return _interleave(columns, gated)


def _interleave(columns: Tensor, gated: bool) -> Tensor:
    """Contiguous; the columns of gate and up by turns."""
    if gated:
        columns = columns.unflatten(0, (2, -1)).transpose(0, 1)
    return columns.contiguous()
