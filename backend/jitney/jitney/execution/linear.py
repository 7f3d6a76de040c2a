"""Linear layers for the CPU, their weights packed once in the order in which they are read.

oneDNN would otherwise rearrange a weight at every call, which costs as much as the product itself
at the few rows of a decode step. Its packing and its product with an epilogue are private operators
of torch, so this module alone calls them: :func:`can_pack` probes them, and where they are missing
or wrong every layer stays as it was. An epilogue (an activation, a product or a sum with another
tensor) is computed on the result while it is still in registers.

A packed weight cannot be read back: it lives outside of ``parameters()``, and the plain one is
dropped unless another module, a tied embedding, holds it as well.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

_log = logging.getLogger(__name__)

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# Activation -> torch's function, and oneDNN's name and algorithm.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "silu": (functional.silu, "swish", ""),
    "gelu": (functional.gelu, "gelu", "none"),
    "gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), "gelu", "tanh"),
    "relu": (functional.relu, "relu", ""),
}

# Relative to the norm of the right result: rounding of one product, with a wide margin.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PACKED_DTYPES = tuple(_TOLERANCE)


@dataclass(frozen=True)
class PrepackReport:
    """What :func:`prepack_linears` did."""

    packed: int
    """Layers."""
    reason: str | None
    """Why none was packed, if so."""
    added_bytes: int
    """Memory beyond what the module took before: packed copies of weights that others hold too."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with a packed weight, and three forms with an epilogue.

    x is [..., in_features] in the weight's dtype; results are [..., out_features], and so is
    ``other``. Sums are float32, rounded once at the end.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        """``weight`` is [out_features, in_features]; ``rows`` is how many x will have as a rule."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = None if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        # Looked up once: an attribute chain through torch.ops costs about a microsecond a call.
        self._plain_op = torch.ops.mkldnn._linear_pointwise.default
        self._binary_op = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        result: Tensor = self._plain_op(x, self._packed, self._bias, "none", [], "")
        return result

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(x @ weight.T + bias)."""
        _, name, algorithm = _ACTIVATIONS[activation]
        result: Tensor = self._plain_op(x, self._packed, self._bias, name, [], algorithm)
        return result

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x @ weight.T + bias) * other."""
        result: Tensor = self._binary_op(x, other, self._packed, self._bias, "mul")
        return result

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x @ weight.T + bias + other."""
        result: Tensor = self._binary_op(x, other, self._packed, self._bias, "add")
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.dtype}"


def can_pack(dtype: torch.dtype) -> str | None:
    """None if layers of ``dtype`` can be packed on this machine, else the reason why not.

    Tries every form on a small layer, because the operators are private: a version of torch may
    lack them, change their arguments or give something else.
    """
    if dtype not in _TOLERANCE:
        return f"there is no packed product for {dtype}"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weight, bias, x, other = draw(48, 32), draw(48), draw(1, 5, 32), draw(1, 5, 48)
    plain = functional.linear(x.float(), weight.float(), bias.float())
    try:
        layer = PackedLinear(weight, bias, 5)
        pairs = [
            (layer(x), plain),
            (layer.times(x, other), plain * other.float()),
            (layer.plus(x, other), plain + other.float()),
            *((layer.activated(x, a), f(plain)) for a, (f, _, _) in _ACTIVATIONS.items()),  # type: ignore[arg-type]
        ]
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"this torch has no such operators ({type(error).__name__})"
    for got, right in pairs:
        if got.shape != right.shape or not relative_error(got, right) <= _TOLERANCE[dtype]:
            return "the operators of this torch give other results"
    return None


def relative_error(got: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of ``right``; NaN if anything is not finite."""
    right = right.float()
    return float((got.float() - right).norm() / right.norm())


def known_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Which activation ``function`` is, told by what it gives; None if it is none of ours."""
    x = torch.linspace(-6.0, 6.0, 97)
    for name, (known, _, _) in _ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), rtol=1e-6, atol=1e-6):
            return name  # type: ignore[return-value]
    return None


def prepack_linears(module: nn.Module, rows: int) -> PrepackReport:
    """Replace each ``nn.Linear`` and each of GPT-2's transposed ones below ``module``.

    ``rows`` is the number of tokens of a usual step. Layers whose class is derived from these (and
    so may do something else), quantized or of another dtype stay as they are.
    """
    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()  # named_children leaves out repeated ones
        if weight_of(child) is not None
    ]
    if not found:
        return PrepackReport(0, "it has no linear layers", 0)
    reasons = {dtype: can_pack(dtype) for dtype in {child.weight.dtype for _, _, child in found}}
    holders = _count_holders(module)
    packed: dict[int, PackedLinear] = {}  # a layer that stands in two places stays one layer
    added = 0
    while found:  # popped, so that each plain weight goes before the next one is packed
        parent, name, child = found.pop()
        weight = weight_of(child)
        assert weight is not None
        if reasons[weight.dtype] is not None:
            continue
        if id(child) not in packed:
            packed[id(child)] = PackedLinear(weight, child.bias, rows)
            if holders[id(child.weight)] > 1:
                added += weight.numel() * weight.element_size()
        setattr(parent, name, packed[id(child)])
    reason = None if packed else "; ".join(sorted({r for r in reasons.values() if r is not None}))
    return PrepackReport(len(packed), reason, added)


def weight_of(module: Any) -> Tensor | None:
    """[out, in] of a linear layer, None of anything else."""
    if type(module) is nn.Linear:
        return module.weight
    # transformers' Conv1D is y = x @ weight + bias with weight [in, out].
    if (
        type(module).__name__ == "Conv1D"
        and type(module).__module__ == "transformers.pytorch_utils"
    ):
        return module.weight.t()
    return None


def _count_holders(module: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter, by its id."""
    counts: dict[int, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts
