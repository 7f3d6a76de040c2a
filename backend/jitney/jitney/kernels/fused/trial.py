"""Runs modules on random input, to prove that a fused one computes the same. Called by ``fuse``,
``recognise`` and ``invariant``.

A *trial* runs a whole model (:func:`run_model`) or one module alone (:func:`run_module`). A
:class:`StandIn` takes the place of attention, so a trial needs no KV cache. What modules hand to
attention is compared as well.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from jitney.execution.attention import RowSlot
from jitney.execution.interface import AttentionCall, StepFunction, forward_module
from jitney.execution.machine import is_out_of_memory
from jitney.execution.state_rows import SlotCache
from jitney.execution.state_slots import StateLayout, StateSlots
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.rotary import CosSin, Rotary

_TOKENS = 7
"""Of a trial at the first positions."""
_TOKENS_AT_END = 4

# The most that two results may differ: the norm of the difference over the norm of the right one.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# The same, where products round their input to 8 bits. For a value about halfway between two 8-bit
# numbers, its last bit decides to which one it is rounded. In e4m3 these two differ by up to 1/8 of
# the value.
_COARSE_TOLERANCE = 1e-1
# The most that the norm of a token's query or key may differ, relative to the right one. Rounding
# changes some of its numbers up and some down, so it changes the norm far less than the numbers.
# The factor of Ministral 3 for long positions begins at 1.07.
_NORM_TOLERANCE = {dtype: tolerance / 2 for dtype, tolerance in _TOLERANCE.items()}
_COARSE_NORM_TOLERANCE = 0.04

# Random input is multiplied by each of these factors. Large input shows whether a module clamps
# values. Small input shows the epsilon of a norm. Small input also shows what the branches of a
# layer add: a large residual would hide that.
MODULE_SCALES = (1.0, 2.0**8)
NORM_SCALES = (1.0, 2.0**-10, 2.0**10)
LAYER_SCALES = (2.0**-8, 2.0**8)

_MISFITS = (TypeError, LookupError, AttributeError, ValueError, AssertionError, RuntimeError)
"""What a module may raise if its arguments or their sizes are not those that it expects. For sizes
that do not fit, torch raises RuntimeError."""

ModuleArguments = dict[str, Any]
"""The keyword arguments with which transformers calls a module, beside its input. A module that is
called with its input alone has none."""


class StandIn:
    """Takes the place of attention: it records the calls, and returns a mix of query and value. The
    key shows in the record alone."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        if call.token_index is not None:
            # It runs modules of the layer.
            tokens = slice(0, len(call.query))
            call.token_index.choose(0, tokens, len(call.query), exchange=lambda keys: keys)
        group = call.query.shape[1] // call.value.shape[1]
        # A latent is narrower than the values that are made of it.
        value = _of_size(call.value, call.value_size).repeat_interleave(group, 1)
        query = _of_size(call.query, call.value_size)
        return 0.5 * query + value


def _of_size(heads: Tensor, size: int) -> Tensor:
    """[…, heads, size]: with zeros behind, or cut off. As it is if it has the size already: the
    check of batch invariance looks at each operation here."""
    missing = size - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads


# ------------------------------------------------------------------ running a model


def first_positions(module: PreTrainedModel) -> Tensor:
    """Positions [T] of a trial: those of a short prompt."""
    return torch.arange(_TOKENS, device=module.device)


def spread_positions(
    module: PreTrainedModel, length: int, named_lengths: Sequence[int] = ()
) -> Tensor:
    """Positions [T] of a trial: some at the start, the middle and the end of ``length`` tokens, and
    at each of ``named_lengths`` (``support.named_lengths``) and before it.

    An attention may multiply its query by a factor that is 1 at all small positions, as that of
    Ministral 3 does. Most of the tokens are at the end: so the factor shows in most of the result.
    """
    chosen = [0, 1, length // 2]
    for named in named_lengths:
        chosen += [named - 1, named]
    chosen += range(length - _TOKENS_AT_END, length)
    # The shortest contexts have fewer positions than a trial has tokens.
    return torch.tensor(chosen, device=module.device).clamp(0, length - 1)


def trial_ids(positions: Tensor) -> Tensor:
    """The tokens [T] of a trial at these positions [T]."""
    return torch.arange(len(positions), device=positions.device) + 1


class FirstInput(NamedTuple):
    """What the first layer of a model read in a trial."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    """[T, width]"""


def run_model(
    module: PreTrainedModel, positions: Tensor, step: StepFunction | None = None
) -> Tensor:
    """The logits of ``module``, or of ``step``, which is to take its place, for tokens at these
    ``positions`` [T]."""
    ids = trial_ids(positions)
    # The logits of some tokens alone, as in service.
    rows = torch.arange(len(positions), device=module.device)[::2]
    if step is None:
        return forward_module(module, ids, positions, rows, StandIn())
    return step(ids, positions, rows, StandIn())


def record_first_input(module: PreTrainedModel, layer: nn.Module, positions: Tensor) -> FirstInput:
    """Run the model as :func:`run_model` does, and keep what ``layer``, its first one, read."""
    found: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        found.append(states[0])

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run_model(module, positions)
    finally:
        hook.remove()
    return FirstInput(ids=trial_ids(positions), positions=positions, rows=found[0])


class MarkedCosSin(CosSin):
    """cos and sin as a rotary module gave them, and how to get those of other positions.

    transformers computes them once and hands this very tuple to its layers. So the arguments of a
    layer tell where its cos and sin came from: a model may have several kinds of layers, and call
    its rotary module once for each kind.
    """

    rotary: Rotary
    """Calls the same module, with the same further arguments, for other positions."""


def record_arguments(
    module: PreTrainedModel, positions: Tensor, fits: Callable[[nn.Module], object]
) -> WeakKeyDictionary[nn.Module, ModuleArguments]:
    """Run the model once, for tokens at these ``positions`` [T]. For each module that ``fits``,
    record the arguments of its call.

    cos and sin are among them, as :class:`MarkedCosSin`. A module is forgotten once it has been
    replaced.
    """
    recorded: WeakKeyDictionary[nn.Module, ModuleArguments] = WeakKeyDictionary()

    def record(each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded[each] = {name: x for name, x in kwargs.items() if name != "hidden_states"}

    hooks: list[Any] = []
    for name, each in module.named_modules():
        # That of the inner model: "model.rotary_emb", say.
        if name.endswith(".rotary_emb") and name.count(".") == 1:
            hooks.append(each.register_forward_hook(_mark_cos_sin, with_kwargs=True))
        if fits(each):
            hooks.append(each.register_forward_pre_hook(record, with_kwargs=True))
    try:
        run_model(module, positions)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def _mark_cos_sin(rotary: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A hook of a rotary module. What it returns takes the place of the module's output."""
    # x and the positions come first; what follows says for which kind of layer.
    more_args = args[2:]
    more_kwargs = {k: v for k, v in kwargs.items() if k not in ("x", "position_ids")}
    if not isinstance(output, tuple):
        return output  # Llama 4 has one tensor of complex numbers: no fused layer takes it
    marked = MarkedCosSin(output)
    marked.rotary = lambda x, positions: rotary(x, positions, *more_args, **more_kwargs)
    return marked


# ------------------------------------------------------------------ running one module


def run_module(
    module: nn.Module, x: Tensor, arguments: ModuleArguments
) -> tuple[Tensor, list[AttentionCall]]:
    """The result of ``module`` for x, and its calls of attention.

    Raises Misfit if the module cannot be run alone: it may need what another layer leaves for it,
    or x may have another size than its weights. A lack of memory is no Misfit, nor is a
    fault of the device.
    """
    stand_in = StandIn()
    if arguments:  # a norm or an MLP is called with its input alone
        arguments = {**arguments, "paged": stand_in}
    try:
        result = module(x, **arguments)
    except _MISFITS as error:
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        raise Misfit(f"it cannot be run alone ({type(error).__name__})") from error
    # Attention of transformers returns (result, attention weights). Ours gives None for those.
    if isinstance(result, tuple) and not any(isinstance(each, Tensor) for each in result[1:]):
        result = result[0]
    if not isinstance(result, Tensor):
        raise Misfit("it returns more than one tensor")
    return result, stand_in.calls


def returns_tuple(module: nn.Module, x: Tensor, arguments: ModuleArguments) -> bool:
    """Whether ``module`` returns a tuple."""
    if arguments:
        arguments = {**arguments, "paged": StandIn()}
    return isinstance(module(x, **arguments), tuple)


def run_in_steps(fused: nn.Module, x: Tensor, layout: StateLayout) -> Tensor:
    """The result of a fused module with states for x [1, T, width], computed in three steps: some
    tokens, some more, and the last one. So the second and the third go on after a state."""
    slots = StateSlots(layout, num_slots=1, device=x.device)
    num_tokens = x.shape[1]
    results = []
    first = 0
    for last in (num_tokens // 2, num_tokens - 1, num_tokens):
        row = RowSlot(slot=0, first=0, num_tokens=last - first, is_new=first == 0)
        results.append(fused(x[:, first:last], SlotCache(slots, [row])))
        first = last
    return torch.cat(results, 1)


# ------------------------------------------------------------------ comparing


def relative_error(got: Tensor, right: Tensor) -> float:
    """The norm of the difference over the norm of ``right``. NaN or infinite if a number of either
    is."""
    right = right.float()
    return float((got.float() - right).norm() / right.norm())


class Checker:
    """Compares the modules of one model with the fused ones that are to replace them."""

    def __init__(self, like: Tensor, *, coarse: bool, tokens: int = _TOKENS) -> None:
        """``like`` has the model's dtype and device. ``coarse``: some products round their input to
        8 bits. ``tokens``: how many the recorded arguments are for."""
        self._like = like
        self._tokens = tokens
        self._tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE[like.dtype]
        self._norm_tolerance = _COARSE_NORM_TOLERANCE if coarse else _NORM_TOLERANCE[like.dtype]
        self._generator = torch.Generator().manual_seed(0)

    def random(self, width: int) -> Tensor:
        """[1, T, width], normally distributed."""
        return torch.randn(1, self._tokens, width, generator=self._generator).to(self._like)

    def chosen(self, experts: int) -> tuple[Tensor, Tensor]:
        """For each token, two of so many experts, and random scores."""
        numbers = torch.rand(self._tokens, experts, generator=self._generator)
        scores, chosen = numbers.topk(min(2, experts))
        return chosen.to(self._like.device), scores.to(self._like)

    def check(
        self,
        module: nn.Module,
        fused: nn.Module,
        width: int,
        scales: Sequence[float],
        arguments: ModuleArguments,
    ) -> None:
        """Raise Misfit if both differ by more than rounding, in their results or in what they hand
        to attention. The input is random, [1, T, width], multiplied by each of ``scales``."""
        for scale in scales:
            x = self.random(width) * scale
            right, right_calls = run_module(module, x, arguments)
            # A float16 may overflow, and what overflows proves nothing: halve the input until it
            # does not. Input of scale 1 or less is never halved.
            halvings = 0
            while not bool(right.isfinite().all()) and 2.0**halvings < scale:
                halvings += 1
                x = x / 2
                right, right_calls = run_module(module, x, arguments)
            got, got_calls = run_module(fused, x, arguments)
            self.check_same("its result", got, right)
            if len(got_calls) != len(right_calls):
                raise Misfit("it attends another number of times")
            for got_call, right_call in zip(got_calls, right_calls, strict=True):
                self.check_same("its query", got_call.query, right_call.query)
                self._check_norms("its query", got_call.query, right_call.query)
                self.check_same("its key", got_call.key, right_call.key)
                self._check_norms("its key", got_call.key, right_call.key)
                self.check_same("its value", got_call.value, right_call.value)

    def check_same(self, what: str, got: Tensor, right: Tensor) -> None:
        """Raise Misfit if two tensors differ by more than rounding."""
        if got.shape != right.shape:
            raise Misfit(f"{what} has another shape")
        difference = float((got.float() - right.float()).norm())
        allowed = self._tolerance * float(right.float().norm())
        # Not ``difference > allowed``: that is false if one of them is NaN.
        if not difference <= allowed:
            raise Misfit(f"{what} differs")

    def check_most_rows(self, what: str, got: Tensor, right: Tensor) -> None:
        """Raise Misfit unless more than half of the rows [T, width] are the same but for rounding.

        For a router with its experts: where two of its numbers are nearly equal, a rounding sends a
        token to another expert."""
        if got.shape != right.shape:
            raise Misfit(f"{what} has another shape")
        differences = (got.float() - right.float()).norm(dim=-1)
        allowed = self._tolerance * right.float().norm(dim=-1)
        if not int((differences <= allowed).sum()) * 2 > len(right):
            raise Misfit(f"{what} differs")

    def _check_norms(self, what: str, got: Tensor, right: Tensor) -> None:
        """Raise Misfit if the norm of a token's [T, heads, head size] differs. A factor of a few
        per cent shows here also where numbers are rounded coarsely."""
        norms_got = got.float().flatten(1).norm(dim=-1)
        norms_right = right.float().flatten(1).norm(dim=-1)
        allowed = self._norm_tolerance * norms_right
        if not bool(((norms_got - norms_right).abs() <= allowed).all()):
            raise Misfit(f"{what} has another norm")
