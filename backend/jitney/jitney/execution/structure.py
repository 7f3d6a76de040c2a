"""What the modules of a model are, told by structure and behaviour and never by a model's name.

A pass that swaps modules for faster ones (``fuse`` on a CPU, ``gpu.fuse`` on a GPU) finds
candidates by the parts they have, builds a fused module from those, and runs both on the same
random input. Only what agrees is swapped; the rest stays as it was, and the report says why. This
module has what such passes share: predicates, recording of calls, comparison, swap.
"""

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import AttentionCall, forward
from jitney.execution.linear import relative_error

TOKENS = 7
"""Tokens of the random input."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj")

# Relative to the norm of the right result.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Likewise where activations are rounded to 8 bits: a difference in a last bit tips some of them to
# the next value, which is up to 1/8 away.
_COARSE_TOLERANCE = 1e-1
# Two roundings of a sum with the residual, relative to the norm of the residual.
_RESIDUAL_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Around 1 and where epsilon shows.
_NORM_SCALES = (1.0, 2.0**-10, 2.0**10)
# A gated MLP that clamps its values shows it only where they are large.
_MLP_SCALES = (1.0, 2.0**8)
# Small, so that a layer's own contribution stands out of the residual that it is added to.
_HIDDEN_SCALE = 2.0**-5
# Options of configurations that bound values. Random input does not reach every bound.
_BOUNDING = ("clip", "clamp", "limit", "softcap")
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


@dataclass
class FuseReport:
    """How many modules were swapped, by level, and what kept others from it."""

    layers: int = 0
    attentions: int = 0
    """Standing alone, as are the next two: those inside of swapped layers are not counted."""
    mlps: int = 0
    norms: int = 0
    products: int = 0
    """Matrix products of fixed tiles."""
    whole: bool = False
    """Whether the model's own ``forward`` was swapped."""
    program: bool = False
    """Whether a step's layers run as one native call."""
    added_bytes: int = 0
    """Memory beyond what the module took before."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why something stayed as it was -> how often."""

    def kept(self, what: str, reason: str) -> None:
        """Count a module that stays."""
        text = f"{what}: {reason}"
        self.reasons[text] = self.reasons.get(text, 0) + 1


class Misfit(Exception):
    """A candidate lacks something, or computes something else. The text says what."""


class Mixer:
    """Stands in for attention: keeps the calls, and answers something that depends on q and v."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        group = call.query.shape[1] // call.value.shape[1]
        return 0.5 * call.query + call.value.repeat_interleave(group, 1)


@dataclass(frozen=True)
class NormForm:
    """An RMS norm: x / sqrt(mean(x²) + epsilon) * scale over the last dimension."""

    scale: Tensor
    """float32; the weight, or 1 + the weight."""
    epsilon: float


class Checker:
    """Random input of one model's dtype, and what it is to agree."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, coarse: bool = False
    ) -> None:
        """``coarse``: products round activations to 8 bits."""
        self.dtype, self.device = dtype, torch.device(device)
        self._tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE[dtype]
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> Tensor:
        """Normally distributed."""
        drawn = torch.randn(*shape, generator=self._generator)
        return drawn.to(dtype=self.dtype, device=self.device)

    def hidden(self, width: int) -> Tensor:
        """[1, TOKENS, width], the input of a layer."""
        return self.draw(1, TOKENS, width) * _HIDDEN_SCALE

    def check(self, what: str, got: Tensor, right: Tensor, residual: Tensor | None = None) -> None:
        """Raise Misfit if they differ by more than rounding; ``residual`` was added to both."""
        if got.shape != right.shape:
            raise Misfit(f"{what} has another shape")
        error = float((got.float() - right.float()).norm())
        allowed = self._tolerance * float(right.float().norm())
        if residual is not None:
            allowed += _RESIDUAL_TOLERANCE[self.dtype] * float(residual.float().norm())
        if not error <= allowed:
            raise Misfit(f"{what} is another")

    def check_calls(self, got: AttentionCall, right: AttentionCall) -> None:
        """Check what two modules handed to attention."""
        for name in ("query", "key", "value"):
            self.check(f"its {name}", getattr(got, name), getattr(right, name))

    def norm_form(self, norm: Any, build: Callable[[NormForm], Callable[[Tensor], Tensor]]) -> Any:
        """What ``build`` makes of ``norm``, checked. Whether it multiplies by its weight or by
        1 + weight is told by what it gives. Raises Misfit if it is no RMS norm."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(epsilon, float):
            raise Misfit("it has no epsilon")
        inputs = [self.draw(1, TOKENS, norm.weight.numel()) * s for s in _NORM_SCALES]
        original = copy.deepcopy(norm).float()
        weight = norm.weight.detach().float()
        for scale in (weight, 1.0 + weight):
            formula = [
                x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon) * scale
                for x in inputs
            ]
            if all(
                relative_error(y, original(x.float())) <= _TOLERANCE[torch.float32]
                for x, y in zip(inputs, formula, strict=True)
            ):
                break
        else:
            raise Misfit("it is not an RMS norm")
        fused = build(NormForm(scale, epsilon))
        for x, y in zip(inputs, formula, strict=True):
            self.check("the kernel's result", fused(x), y)
        return fused

    def check_mlp(self, mlp: Any, fused: Callable[[Tensor], Tensor], width: int) -> None:
        """Compare two MLPs on inputs [1, TOKENS, width]."""
        for scale in _MLP_SCALES:
            x, right = largest_finite(mlp, self.draw(1, TOKENS, width), scale)
            if not isinstance(right, Tensor):
                raise Misfit("it returns more than one tensor")
            self.check("its result", fused(x), right)


def largest_finite(run: Callable[[Tensor], Any], x: Tensor, scale: float) -> tuple[Tensor, Any]:
    """``x`` times ``scale``, or times less where a float16 would overflow, and what ``run`` gives
    of it."""
    while True:
        scaled = x * scale
        result = run(scaled)
        if scale <= 1 or not isinstance(result, Tensor) or bool(result.isfinite().all()):
            return scaled, result
        scale /= 2


def record_calls(
    module: PreTrainedModel, fits: Callable[[nn.Module], bool]
) -> dict[int, dict[str, Any]]:
    """Run the model once; returns the keyword arguments of each module that fits, by its id."""
    calls: dict[int, dict[str, Any]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[id(layer)] = kwargs

    hooks = [
        each.register_forward_pre_hook(note, with_kwargs=True)
        for each in module.modules()
        if fits(each)
    ]
    try:
        run_trial(module)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def trial_input(module: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and wanted rows of a trial."""
    positions = torch.arange(TOKENS, device=module.device)
    return positions + 1, positions, positions[::2]


def run_trial(module: PreTrainedModel) -> Tensor:
    """The logits of :func:`trial_input` with a :class:`Mixer` as its attention."""
    ids, positions, wanted = trial_input(module)
    return forward(module, ids, positions, wanted, Mixer())


def swap_children(
    module: nn.Module,
    what: str,
    fits: Callable[[nn.Module], bool],
    build: Callable[[Any], nn.Module],
    report: FuseReport,
) -> int:
    """Replace each module that ``fits`` by what ``build`` makes of it; returns their number."""
    swapped: dict[int, nn.Module] = {}  # a module that stands in two places stays one
    found = list(children(module, fits))[::-1]
    while found:  # popped, so that what was replaced goes before the next one is built
        parent, name, child = found.pop()
        try:
            fused = swapped.get(id(child)) or build(child)
        except Misfit as misfit:
            report.kept(what, str(misfit))
        else:
            swapped[id(child)] = fused
            setattr(parent, name, fused)
    return len(swapped)


def children(
    module: nn.Module, fits: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of every child that fits."""
    for parent in module.modules():
        for name, child in parent._modules.items():  # named_children leaves out repeated ones
            if child is not None and fits(child):
                yield parent, name, child


def refuse_bounds(config: Any, known: Container[str] = ()) -> None:
    """Raise Misfit if the configuration bounds values by options other than those ``known``."""
    for name, value in vars(config).items():
        if value is None or name in known:
            continue
        if any(word in name for word in _BOUNDING):
            raise Misfit(f"its configuration bounds values ({name})")


def copy_marks(layer: nn.Module, fused: nn.Module) -> None:
    """Give ``fused`` what the model around it may ask of a layer: its type of attention, say."""
    for name, value in vars(layer).items():
        if name[0] != "_" and name != "training" and isinstance(value, (str, int, float)):
            setattr(fused, name, value)


def join_linears(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of layers of one input, as of one layer."""
    biases: list[Tensor] = [each.bias for each in linears if each.bias is not None]
    if biases and len(biases) != len(linears):
        raise Misfit("only some of its projections have a bias")
    if len(linears) == 1:
        return linears[0].weight, biases[0] if biases else None
    return torch.cat([each.weight for each in linears]), torch.cat(biases) if biases else None


# --------------------------------------------------------------------------- predicates


def is_norm(module: nn.Module) -> bool:
    """One vector of weights and nothing else."""
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not any(True for _ in module.buffers())
    )


def is_mlp(module: Any) -> bool:
    """Three linear layers and an activation between them."""
    children = dict(module.named_children())
    linears = {name for name, child in children.items() if type(child) is nn.Linear}
    return (
        linears == {"gate_proj", "up_proj", "down_proj"}
        and set(children) <= {*linears, "act_fn"}
        and callable(getattr(module, "act_fn", None))
        and not any(True for _ in module.parameters(recurse=False))
    )


def is_layer(module: Any) -> bool:
    """Two norms, an attention of plain projections and a gated MLP."""
    children = dict(module.named_children())
    if set(children) != _LAYER_PARTS or not is_mlp(children["mlp"]):
        return False
    attention = dict(children["self_attn"].named_children())
    linears = {name for name, child in attention.items() if type(child) is nn.Linear}
    return (
        linears == {*PROJECTIONS, "o_proj"}
        and set(attention) - linears in (set(), {"q_norm", "k_norm"})
        and all(is_norm(attention[name]) for name in set(attention) - linears)
        and is_norm(children["input_layernorm"])
        and is_norm(children["post_attention_layernorm"])
        and not any(True for _ in children["self_attn"].parameters(recurse=False))
    )
