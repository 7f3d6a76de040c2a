"""Linear layers for the CPU, their weights packed once in the order in which they are read.

oneDNN would otherwise rearrange a weight at every call, which costs as much as the product itself
at the few rows of a decode step. Its packing and its product with an epilogue are private operators
of torch, so this module alone calls them: :func:`can_pack` probes them, and where they are missing
or wrong every layer stays as it was. An epilogue (an activation, a product or a sum with another
tensor) is computed on the result while it is still in registers.

A packed weight cannot be read back: it lives outside of ``parameters()``, and the plain one is
dropped unless another module, a tied embedding, holds it as well.

Called by ``layer_kernels`` for the products that ``column_linear`` has not, and by ``accelerator``
for linear layers that no fused module took.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of
from jitney.kernels.fused.forms import ACTIVATIONS, Activation, Misfit
from jitney.kernels.fused.fuse import FuseReport, swap_children
from jitney.kernels.fused.trial import relative_error


class _OneDnnActivation(NamedTuple):
    """What oneDNN calls an activation."""

    name: str
    algorithm: str


_ACTIVATIONS: dict[Activation, _OneDnnActivation] = {
    "silu": _OneDnnActivation("swish", ""),
    "gelu": _OneDnnActivation("gelu", "none"),
    "gelu_tanh": _OneDnnActivation("gelu", "tanh"),
    "relu": _OneDnnActivation("relu", ""),
}

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The error that rounding of one product may make, with a wide margin; relative to the norm of the
right result."""

Product = Callable[..., Tensor]
"""One of torch's operators."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with a packed weight, and the same with three kinds of epilogue.

    x is [..., in_features] in the weight's dtype; results are [..., out_features], and so is
    ``other``. Sums are float32, rounded once at the end.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, usual_tokens: int) -> None:
        """``weight`` is [out_features, in_features]; x has ``usual_tokens`` rows as a rule."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), usual_tokens
        )
        # Looked up once: an attribute chain through torch.ops takes time in each call.
        self._plain_op: Product = torch.ops.mkldnn._linear_pointwise.default
        self._binary_op: Product = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        return self._plain_op(x, self._packed, self._bias, "none", [], "")

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(x @ weight.T + bias)."""
        epilogue = _ACTIVATIONS[activation]
        return self._plain_op(x, self._packed, self._bias, epilogue.name, [], epilogue.algorithm)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x @ weight.T + bias) * other."""
        return self._binary_op(x, other, self._packed, self._bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x @ weight.T + bias + other."""
        return self._binary_op(x, other, self._packed, self._bias, "add")


def can_pack(dtype: torch.dtype) -> str | None:
    """None if layers of ``dtype`` can be packed on this machine, else the reason why not.

    Tries them all on a small layer, because the operators are private: a version of torch may lack
    them, change their arguments or give something else.
    """
    if dtype not in _TOLERANCE:
        return f"there is no packed product for {dtype}"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    trial = _Trial(dtype)
    try:
        results = trial.results()
    except (AttributeError, NotImplementedError, TypeError) as error:
        return f"this torch has no such operators ({type(error).__name__})"
    except RuntimeError as error:  # bfloat16 without AVX-512 and without AVX-NE-CONVERT
        return f"this processor has no packed product for {dtype}: {error}"
    for result in results:
        if not result.is_right(_TOLERANCE[dtype]):
            return "the operators of this torch give wrong results"
    return None


class _Result(NamedTuple):
    """What an operator gave, and the right result in float32."""

    given: Tensor
    right: Tensor

    def is_right(self, tolerance: float) -> bool:
        # No comparison with a NaN is true: so it counts as wrong.
        return (
            self.given.shape == self.right.shape
            and relative_error(self.given, self.right) <= tolerance
        )


class _Trial:
    """Every method of :class:`PackedLinear` on a small layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self._weight = normal(48, 32)
        self._bias = normal(48)
        self._x = normal(1, 5, 32)
        self._other = normal(1, 5, 48)

    def results(self) -> list[_Result]:
        x = self._x
        other = self._other
        right = functional.linear(x.float(), self._weight.float(), self._bias.float())
        layer = PackedLinear(self._weight, self._bias, 5)
        results = [
            _Result(layer(x), right),
            _Result(layer.times(x, other), right * other.float()),
            _Result(layer.plus(x, other), right + other.float()),
        ]
        for activation, function in ACTIVATIONS.items():
            results.append(_Result(layer.activated(x, activation), function(right)))
        return results


def prepack_linears(
    module: nn.Module,
    usual_tokens: int,
    report: FuseReport,
    make_own_linear: Callable[[Sequence[Any]], nn.Module] | None = None,
    *,
    keep: Collection[nn.Module] = (),
    batch_invariant: bool = False,
) -> None:
    """Replace the linear layers below ``module`` by packed ones: ``nn.Linear``, GPT-2's transposed
    layers, and quantized layers of bytes or nibbles.

    ``usual_tokens`` are those of a usual step. ``make_own_linear`` is ``ModelKernels.linear``,
    which makes a layer of our own product (None: there is none). With ``batch_invariant``, no layer
    gets a product of oneDNN. ``keep``: those of ``own_weights.layers_read_by_others``.

    Layers that have no such product stay as they are, and so do those whose class is derived from
    these, as they may compute something else. A weight that another module holds as well, an
    embedding, stays in memory beside its packed copy: the ``report`` counts these bytes.
    """
    holders = Counter[nn.Parameter]()
    for each in module.modules():
        holders.update(each.parameters(recurse=False))
    why_not_packed = cache(can_pack)

    def make_packed(linear: Any) -> nn.Module:
        packed: nn.Module
        if linear in keep:
            raise Misfit("another module reads its weight")
        reason = why_not_packed(linear.weight.dtype)
        if reason is None and not batch_invariant:
            # oneDNN comes first: for a layer alone it is faster with many rows. (``layer_kernels``
            # prefers ours, because they can be part of a ``program``.)
            packed = PackedLinear(weight_of(linear), linear.bias, usual_tokens)
        elif make_own_linear is not None:
            # Also for every quantized layer: ``can_pack`` refuses int8 and uint8.
            packed = make_own_linear([linear])
        else:
            raise Misfit(reason or "there is no product of ours")
        # The weight is taken out of ``holders``: otherwise that would keep it in memory, and its
        # bytes would be counted again for another layer that has the same weight.
        num_holders = holders.pop(linear.weight, 0)
        if num_holders > 1:
            report.added_bytes += linear.weight.nbytes
        return packed

    def fits(each: nn.Module) -> bool:
        return is_linear(each) or (isinstance(each, QuantizedLinear) and each.suits_integer_kernels)

    swap_children(module, "linear layer", fits, make_packed, report)
