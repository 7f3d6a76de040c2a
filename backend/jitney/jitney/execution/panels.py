"""Linear layers on the tile unit of the processor (AMX), for bfloat16.

The product is our own kernel (``panel_kernel``): at the few rows of a decode step it reads weights
faster than oneDNN's, a call costs a tenth, and it can be a step of a ``program``, which a call into
torch cannot. Where the processor has no tile unit, ``linear`` packs for oneDNN.

Imported only where Numba is.
"""

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution import panel_kernel
from jitney.execution.attention.openmp import ask_for_tiles, team_runner
from jitney.execution.attention.products import host_has_amx
from jitney.execution.compiled import compile_body, source_version
from jitney.execution.linear import Activation

ACTIVATIONS: dict[Activation, int] = {
    "silu": panel_kernel.SILU,
    "gelu_tanh": panel_kernel.GELU_TANH,
}
_MOST_THREADS = 4096  # the bound of option threads
_ITEMS = 64
"""About so many items a product is cut into: many enough to share out, few enough to be cheap."""


class PanelKernel:
    """The compiled product and the scratch memory of its threads. One per engine."""

    def __init__(self) -> None:
        version = source_version(
            "panel_kernel.py", "row_kernels.py", "attention/products.py", "attention/simd.py"
        )

        def product(arguments: int) -> None:
            if version != 0:
                panel_kernel.product_body(arguments)

        self._function = compile_body(product)  # owns the code
        self.address: int = self._function.address
        self.run = team_runner()
        # Untouched pages of it take no memory.
        self._scratch = np.empty(_MOST_THREADS * panel_kernel.SCRATCH_BYTES + 64, np.uint8)
        self.scratch = -(-self._scratch.ctypes.data // 64) * 64


def can_use_panels(dtype: torch.dtype) -> bool:
    """Whether this process may use a tile unit for products of ``dtype``."""
    return dtype == torch.bfloat16 and host_has_amx() and ask_for_tiles()


def fits_panels(linear: nn.Linear) -> bool:
    """Whether both sizes are what whole panels and tiles need."""
    return linear.in_features % panel_kernel.STEP == 0 and linear.out_features % 32 == 0


class PanelLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16; sums are float32, rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and of what it is multiplied with, one
    above the other, and the result [..., N] is ``activation(gate) * up``.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernel: PanelKernel,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        outputs, self.in_features = weight.shape
        self.out_features = outputs if activation is None else outputs // 2
        self.kernel = kernel
        self._panels = _pack(weight.detach(), gated=activation is not None)
        self._bias = None
        if bias is not None:
            self._bias = bias.detach().float().contiguous()
            if activation is not None:
                self._bias = _interleave(self._bias)
        pairs = outputs // 32
        arguments = np.zeros(panel_kernel.ARGUMENTS, np.int64)
        arguments[panel_kernel.STEPS] = self.in_features // panel_kernel.STEP
        arguments[panel_kernel.PANELS] = self._panels.data_ptr()
        arguments[panel_kernel.PAIRS] = pairs
        arguments[panel_kernel.PAIRS_PER_ITEM] = max(1, pairs // _ITEMS)
        arguments[panel_kernel.ACTIVATION] = 0 if activation is None else ACTIVATIONS[activation]
        arguments[panel_kernel.BIAS] = 0 if self._bias is None else self._bias.data_ptr()
        arguments[panel_kernel.SCRATCH] = kernel.scratch
        self._constants = arguments

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self._multiply(x, None)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The result plus ``other`` [..., out_features]."""
        return self._multiply(x, other)

    def write_call(self, arguments: np.ndarray, x: int, out: int, other: int = 0) -> None:
        """Write the kernel's arguments for contiguous rows at these addresses; 0 is no ``other``.
        The number of rows and the two counters are left to be set."""
        arguments[: panel_kernel.ARGUMENTS] = self._constants
        arguments[panel_kernel.X] = x
        arguments[panel_kernel.X_STRIDE] = 2 * self.in_features
        arguments[panel_kernel.OUT] = out
        arguments[panel_kernel.OUT_STRIDE] = 2 * self.out_features
        arguments[panel_kernel.OTHER] = other
        arguments[panel_kernel.OTHER_STRIDE] = 2 * self.out_features

    def _multiply(self, x: Tensor, other: Tensor | None) -> Tensor:
        assert x.dtype == torch.bfloat16
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        if other is not None:
            assert other.shape == out.shape
            other = other.contiguous()
        arguments = np.empty(panel_kernel.ARGUMENTS, np.int64)
        self.write_call(
            arguments, x.data_ptr(), out.data_ptr(), 0 if other is None else other.data_ptr()
        )
        arguments[panel_kernel.ROWS] = x.numel() // self.in_features
        self.kernel.run(self.kernel.address, arguments.ctypes.data, torch.get_num_threads())
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _pack(weight: Tensor, *, gated: bool) -> Tensor:
    """[N, K] as panels [N / 16, K / 2, 16, 2]; those of gate and up by turns."""
    outputs, inputs = weight.shape
    panels = weight.view(outputs // 16, 16, inputs // 2, 2).permute(0, 2, 1, 3)
    if gated:
        panels = panels.view(2, outputs // 32, *panels.shape[1:]).transpose(0, 1)
    return panels.contiguous()


def _interleave(bias: Tensor) -> Tensor:
    """[2 N] in the order of the outputs of gated panels."""
    return bias.view(2, -1, 16).transpose(0, 1).contiguous()


class GatedPanels(nn.Module):
    """A gated MLP of two products: down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: PanelLinear, down: PanelLinear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x and ``residual``, which is added to the result, are [..., hidden size]."""
        inner = self.gate_up.forward(x)
        return self.down.forward(inner) if residual is None else self.down.plus(inner, residual)
