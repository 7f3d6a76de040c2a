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
"""Where a row of activations is rounded to int8, an element is an outlier if its size is more than
this times the mean size of the other elements. Outliers stay floats, so that they do not enlarge
the row's scale."""
MOST_OUTLIERS = 15
"""The most that a row may have. While it has more, the bound is doubled."""


class QuantizedLinear(nn.Module):
    """``x @ weight.T + bias``; x is [..., in_features] and the result [..., out_features]."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    weight: Tensor
    bias: Tensor | None
    rounds_inputs = False
    """Whether it rounds x to 8 bits, as floats or as integers. A difference in the last bit of x
    may then become a large one in the result."""
    exact = False
    """Set it to compute without that rounding."""
    suits_integer_kernels = False
    """Whether a CPU's integer kernels multiply it: its weight has 8 or 4 bits, and x is rounded to
    int8 with a scale for each of its rows."""
    scale: Tensor
    """Of the weight. In 8 bits it is float32 [1, out_features]; in 4 bits, see ``Int4Linear``."""
    factors: Tensor | None
    """float32 [in_features], or None: x is multiplied by them first of all."""

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
    """The modules below ``module`` that ``fits`` accepts, each with all that hold it: a list of
    (parent, name of the attribute). To replace the module, set another one at each of these."""
    found: dict[Any, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        # Not named_children: it leaves out a child that a parent has under a second name.
        for name, child in parent._modules.items():
            if child is not None and fits(child):
                found.setdefault(child, []).append((parent, name))
    return found


def coarse_layers(module: nn.Module) -> list[QuantizedLinear]:
    """``module`` and the layers below it, as far as they round their inputs to 8 bits."""
    return [m for m in module.modules() if isinstance(m, QuantizedLinear) and m.rounds_inputs]


@contextmanager
def exact_products(module: nn.Module) -> Iterator[None]:
    """A context in which none of the :func:`coarse_layers` rounds its inputs. A small change of the
    input is then a small change of the output, as without quantization."""
    layers = coarse_layers(module)
    for each in layers:
        each.exact = True
    try:
        yield
    finally:
        for each in layers:
            each.exact = False
