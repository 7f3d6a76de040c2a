"""Trials: modules run on random input, to see whether a fused one computes the same. Called by
``fuse`` and ``invariant``.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import AttentionCall, StepFunction, forward
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.rotary import CosSin, Rotary

_TOKENS = 7
# Relative to the norm of the right result.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Likewise where activations are rounded to 8 bits: a difference in a last bit tips some of them to
# the next value, which is up to 1/8 away.
_COARSE_TOLERANCE = 1e-1
# Factors on random input. A module that clamps its values, or a layer its sums, shows it where they
# are large; the epsilon of a norm, and what a layer adds to its input, where they are small.
MODULE_SCALES = (1.0, 2.0**8)
NORM_SCALES = (1.0, 2.0**-10, 2.0**10)
LAYER_SCALES = (2.0**-8, 2.0**8)


def relative_error(got: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of ``right``; NaN if anything is not finite."""
    right = right.float()
    return float((got.float() - right).norm() / right.norm())


class Mixer:
    """Stands in for attention: keeps the calls, and answers something that depends on q and v."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        group = call.query.shape[1] // call.value.shape[1]
        return 0.5 * call.query + call.value.repeat_interleave(group, 1)


class Angles(CosSin):
    """cos and sin as a rotary module gave them in a trial. The layers that get this tuple tell by
    it which call of a rotary module was theirs."""

    rotary: Rotary
    """Calls the same module, with the same further arguments, for other positions."""


def run_trial(module: PreTrainedModel, step: StepFunction | None = None) -> Tensor:
    """The logits of ``module`` with a :class:`Mixer` as attention, or of ``step`` in its place."""
    positions = torch.arange(_TOKENS, device=module.device)
    ids = positions + 1
    rows = positions[::2]  # logits of some tokens alone, as in service
    if step is None:
        return forward(module, ids, positions, rows, Mixer())
    return step(ids, positions, rows, Mixer())


def record_calls(
    module: PreTrainedModel, fits: Callable[[nn.Module], object]
) -> WeakKeyDictionary[nn.Module, dict[str, Any]]:
    """Runs one trial. Returns, for each module that ``fits``, the keyword arguments that it was
    called with beside its input; among them what a rotary module gave, as :class:`Angles`. A module
    that is replaced is forgotten."""
    calls: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

    def record(each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[each] = {name: x for name, x in kwargs.items() if name != "hidden_states"}

    hooks: list[Any] = []
    for name, each in module.named_modules():
        if name == "model.rotary_emb":
            hooks.append(each.register_forward_hook(_mark_angles, with_kwargs=True))
        if fits(each):
            hooks.append(each.register_forward_pre_hook(record, with_kwargs=True))
    try:
        run_trial(module)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _mark_angles(made: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A hook of a rotary module: what it gives remembers how it was made."""
    rest = args[2:]  # the first two are x and the positions
    named = {k: v for k, v in kwargs.items() if k not in ("x", "position_ids")}
    angles = Angles(output)
    angles.rotary = lambda x, positions: made(x, positions, *rest, **named)
    return angles


def run_alone(
    module: nn.Module, x: Tensor, call: dict[str, Any]
) -> tuple[Tensor, list[AttentionCall]]:
    """What ``module`` gives for x by itself, and its calls of attention.

    ``call`` has the keyword arguments that :func:`record_calls` found; empty for a module that is
    called with x alone, and does not attend. Raises Misfit if the module needs more around it: what
    another layer has left for it, say.
    """
    mixer = Mixer()
    arguments: dict[str, Any] = {}
    if call:
        arguments = {**call, "paged": mixer}
    try:
        result = module(x, **arguments)
    except (TypeError, LookupError, AttributeError, ValueError, AssertionError) as error:
        raise Misfit(f"it cannot be run alone ({type(error).__name__})") from error
    # transformers' attention returns its weights as well, which are None here.
    if isinstance(result, tuple) and not any(isinstance(each, Tensor) for each in result[1:]):
        result = result[0]
    if not isinstance(result, Tensor):
        raise Misfit("it returns more than one tensor")
    return result, mixer.calls


class Checker:
    """Compares the modules of one model, on random input, with what is to replace them."""

    def __init__(self, like: Tensor, *, coarse: bool) -> None:
        """``like`` has the model's dtype and device. ``coarse``: products round their input to 8
        bits."""
        self._like = like
        self._tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE[like.dtype]
        self._generator = torch.Generator().manual_seed(0)

    def random(self, width: int) -> Tensor:
        """[1, T, width], normally distributed."""
        return torch.randn(1, _TOKENS, width, generator=self._generator).to(self._like)

    def check(
        self,
        module: nn.Module,
        fused: nn.Module,
        width: int,
        scales: Sequence[float],
        call: dict[str, Any],
    ) -> None:
        """Raise Misfit if they differ by more than rounding, in their result or in what they hand
        to attention, on input [1, T, width] of any of ``scales``."""
        for scale in scales:
            x = self.random(width) * scale
            right, right_calls = run_alone(module, x, call)
            got, got_calls = run_alone(fused, x, call)
            self.same("its result", got, right)
            for got_call, right_call in zip(got_calls, right_calls, strict=True):
                self.same("its query", got_call.query, right_call.query)
                self.same("its key", got_call.key, right_call.key)
                self.same("its value", got_call.value, right_call.value)

    def same(self, what: str, got: Tensor, right: Tensor) -> None:
        """Raise Misfit if they differ by more than rounding."""
        if got.shape != right.shape:
            raise Misfit(f"{what} has another shape")
        error = float((got.float() - right.float()).norm())
        allowed = self._tolerance * float(right.float().norm())
        if not error <= allowed:  # also if one is NaN
            raise Misfit(f"{what} differs")
