"""Linear layers, plain and quantized, as far as the model and its kernels need to know them.

``quantization`` makes them; ``engine.assemble`` hands its :data:`Quantizer` to the loader.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from jitney.config import EngineConfig
from jitney.execution.checkpoint import Checkpoint

OUTLIER = 24.0
"""When a row of activations is rounded to bytes, an element larger than this times the mean size
of the row's other elements stays a float. So the row's scale can follow those."""
MOST_OUTLIERS = 15
"""Of a row. While there are more, the bound is doubled."""


class QuantizedLinear(nn.Module):
    """``x @ weight.T + bias``; x is [..., in_features] and the result [..., out_features]."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    weight: Tensor
    bias: Tensor | None
    rounds_inputs = False
    """Whether it rounds x to 8 bits, floats or integers: a difference in the last bit of x may then
    be a large one in the result."""
    exact = False
    """Set it to compute without that rounding."""
    has_bytes = False
    """Whether a CPU's integer kernels multiply it: its weight has 8 or 4 bits, and x is rounded to
    int8 with a scale for each of its rows."""
    scale: Tensor
    """float32 [1, out_features], if it has one for each output; of 4 bits, see ``Int4Linear``."""
    factors: Tensor | None
    """float32 [in_features]: x is multiplied with them before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", None)

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "QuantizedLinear | None":
        """One layer that gives the results of all, one after the other, for the same input. None
        if they are not of one class or cannot be joined without rounding again."""
        return None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class WeightFormat(Protocol):
    """How a model's linear layers are quantized: in its checkpoint, or while it is loaded."""

    in_place: bool
    """Whether the weights can go to the device as they are read."""

    @property
    def packed(self) -> Collection[str]:
        """Tensors of a GGUF file that it reads itself, in :meth:`after_reading`."""

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """The most that the weights take while they are loaded; ``skeleton`` is on ``meta``."""

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Tell transformers how to read the weights."""

    def after_reading(self, module: PreTrainedModel) -> None:
        """Put quantized layers into the module."""


Quantizer = Callable[[Checkpoint, EngineConfig, torch.dtype, torch.device], WeightFormat | None]
"""How the weights of a checkpoint are to be quantized; None if they are not. Raises ConfigError,
CheckpointError or UnsupportedModelError."""


def is_linear(module: nn.Module) -> bool:
    """Whether it is a plain linear layer or GPT-2's transposed one. A class derived from these may
    do something else."""
    return type(module) in (nn.Linear, Conv1D)


def weight_of(linear: Any) -> Tensor:
    """[out_features, in_features] of a module that :func:`is_linear`."""
    weight: Tensor = linear.weight.detach()
    return weight.t() if type(linear) is Conv1D else weight


def find_children(
    module: nn.Module, fits: Callable[[nn.Module], object]
) -> dict[Any, list[tuple[nn.Module, str]]]:
    """Each module below ``module`` that ``fits`` -> everything that holds it, as (parent, name):
    where another module must be set to replace it."""
    found: dict[Any, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():  # named_children leaves out repeated ones
            if child is not None and fits(child):
                found.setdefault(child, []).append((parent, name))
    return found


def coarse_layers(module: nn.Module) -> list[QuantizedLinear]:
    """The layers below ``module`` that round their inputs to 8 bits."""
    return [m for m in module.modules() if isinstance(m, QuantizedLinear) and m.rounds_inputs]


@contextmanager
def exact_products(module: nn.Module) -> Iterator[list[QuantizedLinear]]:
    """A context in which no layer below ``module`` rounds its inputs: a small change of the input
    is then a small change of the output, as without quantization. Gives the layers that otherwise
    do."""
    layers = coarse_layers(module)
    for each in layers:
        each.exact = True
    try:
        yield layers
    finally:
        for each in layers:
            each.exact = False
