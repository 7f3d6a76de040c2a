"""Linear layers, plain and quantized, as far as the model and its kernels need to know them.

``quantization`` makes them; ``engine.assemble`` hands its :data:`Quantizer` to the loader.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from jitney.config import EngineConfig
from jitney.execution.checkpoint import Checkpoint

OUTLIER = 24.0
"""Where a row of activations is rounded to int8, elements that are about so many times larger than
the row's mean are outliers. They stay floats, so that they do not enlarge the row's scale.
``quantization.eight_bits`` has the definition, which kernels follow."""
MOST_OUTLIERS = 15
"""The most that a row may have."""


class FloatBudget:
    """Bytes for weights as floats, which quantized layers may hold while a load checks a model. It
    runs the model a dozen times, and to make the floats takes longer than to multiply by them."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes, if they are left. Returns whether they were."""
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


class QuantizedLinear(nn.Module):
    """``x @ weight.T + bias``; x is [..., in_features] and the result [..., out_features]."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    """Of x and of the result. Only layers that round their inputs have it."""
    weight: Tensor
    bias: Tensor | None
    rounds_inputs = False
    """Whether it rounds x to 8 bits, as floats or as integers. A difference in the last bit of x
    may then become a large one in the result."""
    keeps_inputs = False
    """Whether it leaves that rounding out. Set by :func:`float_inputs` alone."""
    suits_integer_kernels = False
    """Whether a CPU's integer kernels multiply it: its weight has 8 or 4 bits, and x is rounded to
    int8 with a scale for each of its rows."""
    scale: Tensor
    """Of the weight. In 8 bits it is float32 [1, out_features]. In 4 bits it is bfloat16 [2,
    out_features, groups]: the scale and the least value of each group of a row. Only layers that
    round their inputs have it."""
    input_factors: Tensor | None
    """float32 [in_features], or None: x is multiplied by them first of all."""
    float_budget: FloatBudget | None = None
    """Of the load under way, set by :func:`hold_floats` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("input_factors", None)
        self._held_floats: Tensor | None = None

    def hold(self, make_floats: Callable[[], Tensor]) -> Tensor:
        """What ``make_floats`` makes of the weight; what it made before, if that is held."""
        if self._held_floats is not None:
            return self._held_floats
        floats = make_floats()
        if self.float_budget is not None and self.float_budget.take(floats.nbytes):
            self._held_floats = floats
        return floats

    @staticmethod
    def merge(linears: Sequence[nn.Module]) -> "QuantizedLinear | None":
        """One layer that gives the results of all, side by side, for the same input. None if they
        are not of one class, or cannot be joined."""
        return None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class WeightFormat(Protocol):
    """How a model's linear layers are quantized: in its checkpoint, or while it is loaded."""

    in_place: bool
    """Whether the weights can go to the device as they are read."""

    @property
    def reads_itself(self) -> Collection[str]:
        """Names of tensors of a GGUF file that it reads itself, in :meth:`after_reading`.
        transformers does not read these."""

    @property
    def given_tensors(self) -> dict[str, Any] | None:
        """What transformers reads in place of the checkpoint's files, by the names of its tensors:
        tensors, or what gives one when it is indexed. None: it reads the files. Asked for after
        :meth:`before_reading`."""

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """The most that the weights take while they are loaded; ``skeleton`` is on ``meta``."""

    def loaded_bytes(self, skeleton: PreTrainedModel) -> int:
        """What the weights take once they are loaded. Less than :meth:`needed_bytes` if a load
        makes a copy of them in between."""

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


class Holder(NamedTuple):
    """A place where a module hangs."""

    parent: nn.Module
    attribute: str

    def put(self, module: nn.Module) -> None:
        """Put ``module`` there instead."""
        setattr(self.parent, self.attribute, module)


def find_children(
    module: nn.Module, fits: Callable[[nn.Module], object]
) -> dict[Any, list[Holder]]:
    """The modules below ``module`` that ``fits`` accepts -> where each of them hangs. A shared
    module hangs in several places."""
    found: dict[Any, list[Holder]] = {}
    for parent in module.modules():
        # Not named_children: it leaves out a child that a parent has under a second name.
        for name, child in parent._modules.items():
            if child is not None and fits(child):
                found.setdefault(child, []).append(Holder(parent, name))
    return found


def hold_floats(module: nn.Module, num_bytes: int) -> None:
    """Let the quantized layers of ``module`` hold their weights as floats, up to so many bytes
    together. Called when a load begins to check the module."""
    budget = FloatBudget(num_bytes)
    for each in module.modules():
        if isinstance(each, QuantizedLinear):
            each.float_budget = budget


def drop_floats(module: nn.Module) -> None:
    """Free what :func:`hold_floats` has let layers hold. Called when the checks are over."""
    for each in module.modules():
        if isinstance(each, QuantizedLinear):
            each.float_budget = None
            each._held_floats = None


def layers_that_round_inputs(module: nn.Module) -> list[QuantizedLinear]:
    """Those of ``module`` and the layers below it that round their inputs to 8 bits."""
    return [m for m in module.modules() if isinstance(m, QuantizedLinear) and m.rounds_inputs]


@contextmanager
def float_inputs(module: nn.Module) -> Iterator[None]:
    """A context in which none of the :func:`layers_that_round_inputs` does so. A small change of
    the input is then a small change of the output, as without quantization."""
    layers = layers_that_round_inputs(module)
    for each in layers:
        each.keeps_inputs = True
    try:
        yield
    finally:
        for each in layers:
            each.keeps_inputs = False
