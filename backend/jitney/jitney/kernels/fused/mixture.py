"""Builds what replaces experts and their router, and proves it. Called by ``fuse``.

Each is proved by itself, the experts for choices that are given. Of a router and its experts
together most tokens alone can be compared: where two numbers of the router are nearly equal, a
rounding sends the token to another expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.kernels.fused.forms import LayerKernels, Misfit, RouterForm
from jitney.kernels.fused.layers import FusedMixture, call_mlp
from jitney.kernels.fused.recognise import (
    MixtureChildren,
    experts_children,
    known_activation,
    mixture_children,
)
from jitney.kernels.fused.trial import MODULE_SCALES, Checker


def build_experts(experts: nn.Module, kernels: LayerKernels, checker: Checker) -> nn.Module:
    """What replaces the experts of a layer. Raises Misfit if nothing can."""
    children = experts_children(experts)
    assert children is not None
    activation = known_activation(children.activation)
    if activation is None:
        raise Misfit("their activation is unknown")
    number, width, _ = children.down.shape
    fused = kernels.experts(children.gate_up, children.down, activation).eval()
    for scale in MODULE_SCALES:
        x = checker.random(width)[0] * scale
        chosen, scores = checker.chosen(number)
        got = fused(x, chosen, scores)
        checker.check_same("their result", got, experts(x, chosen, scores))
    return fused


def build_mixture(mixture: nn.Module, kernels: LayerKernels, checker: Checker) -> FusedMixture:
    """What replaces a mixture of fused experts. Raises Misfit if nothing can."""
    children = mixture_children(mixture)
    assert children is not None
    form = _router_form(children, checker)
    parameters = dict(children.router.named_parameters())
    weight = parameters["weight"].detach()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if "bias" in parameters:
        linear.bias = nn.Parameter(parameters["bias"].detach(), requires_grad=False)
    fused = FusedMixture(kernels.linear([linear]), form, children.experts).eval()
    for scale in MODULE_SCALES:
        x = checker.random(weight.shape[1]) * scale
        checker.check_most_rows("its result", fused(x)[0], call_mlp(mixture, x[0]))
    return fused


class StandInMlp(nn.Module):
    """Takes the place of a mixture while its layer is tried: the mixture was proved by itself, and
    this one sends no token to another expert."""

    def __init__(self, mixture: nn.Module, x: Tensor) -> None:
        """``x`` [T, hidden size] is some input of the mixture: it tells what kind of result the
        layer expects."""
        super().__init__()
        self._gives_tuple = isinstance(mixture(x.unsqueeze(0)), tuple)

    def forward(self, x: Tensor) -> Any:
        """x is [..., hidden size]."""
        result = 0.5 * x.roll(1, -1)
        return (result, None) if self._gives_tuple else result


def _router_form(children: MixtureChildren, checker: Checker) -> RouterForm:
    """How the router chooses, told by what it gives."""
    parameters: dict[str, Any] = dict(children.router.named_parameters())
    weight = parameters["weight"].detach()
    x = checker.random(weight.shape[1])[0]
    given = children.router(x)
    if weight.dtype != x.dtype or not isinstance(given, tuple):
        raise Misfit("its router is unknown")
    numbers = functional.linear(x, weight, parameters.get("bias")).float()
    chosen = next((each for each in given if each.dtype == torch.int64), None)
    if chosen is None or chosen.shape != (len(x), children.chosen):
        raise Misfit("its router is unknown")
    # Of two experts with equal numbers either may be chosen.
    largest, _ = numbers.topk(children.chosen)
    if not torch.equal(numbers.gather(1, chosen).sort(descending=True)[0], largest):
        raise Misfit("its router chooses by other numbers")
    for over_all in (False, True):
        right = scores_of(numbers, chosen, over_all=over_all)
        if any(_are_scores(each, right) for each in given):
            return RouterForm(chosen=children.chosen, over_all=over_all)
    raise Misfit("its router gives other scores")


def scores_of(numbers: Tensor, chosen: Tensor, *, over_all: bool) -> Tensor:
    """The scores [T, k] of the experts that were chosen by numbers [T, E]: see ``RouterForm``."""
    if over_all:
        return numbers.softmax(-1).gather(1, chosen)
    return numbers.gather(1, chosen).softmax(-1)


def _are_scores(given: Tensor, right: Tensor) -> bool:
    is_float = given.is_floating_point() and given.shape == right.shape
    return is_float and torch.allclose(given.float(), right, rtol=1e-2, atol=1e-3)
