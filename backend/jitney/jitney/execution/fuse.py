"""The pass over a loaded model that puts fused CPU modules in the place of its own.

What fits is told by structure and behaviour, never by a model's name: candidates are found by the
parts they have, a fused module is built from those, and both are run on the same random input. Only
what agrees is swapped; the rest stays as it was, and the report says why. Three levels, the largest
first: whole pre-norm decoder layers (:class:`fused.FusedDecoderLayer`), gated MLPs, RMS norms. If
all layers of a plain causal model could be swapped, its ``forward`` is swapped too.

Run once, after loading and before ``linear.prepack_linears``, which takes the layers left over.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import AttentionCall, forward
from jitney.execution.linear import (
    Activation,
    PackedLinear,
    can_pack,
    known_activation,
    relative_error,
)

if TYPE_CHECKING:  # needs Numba
    from jitney.execution.fused import FusedDecoderLayer, FusedMLP, FusedRMSNorm, Kernels
    from jitney.execution.panels import GatedPanels, PanelKernel, PanelLinear

_TOKENS = 7
# Relative to the norm of the right result.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Two roundings of a sum with the residual, relative to the norm of the residual.
_RESIDUAL_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
# Small, so that a layer's own contribution stands out of the residual that it is added to.
_HIDDEN_SCALE = 2.0**-5
# Around 1 and where epsilon shows.
_NORM_SCALES = (1.0, 2.0**-10, 2.0**10)
# A gated MLP that clamps its values shows it only where they are large.
_MLP_SCALES = (1.0, 2.0**8)
# Options of configurations that bound values. Random input does not reach every bound.
_BOUNDING = ("clip", "clamp", "limit", "softcap")
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass
class FuseReport:
    """How many modules were swapped, by level, and what kept others from it."""

    layers: int = 0
    mlps: int = 0
    norms: int = 0
    """Standing alone: those inside of swapped layers are not counted."""
    whole: bool = False
    """Whether the model's own ``forward`` was swapped."""
    program: bool = False
    """Whether a step's layers run as one native call."""
    added_bytes: int = 0
    """A copy of the head's weight, if the embedding holds it too."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why something stayed as it was -> how often."""

    def kept(self, what: str, reason: str) -> None:
        """Count a module that stays."""
        text = f"{what}: {reason}"
        self.reasons[text] = self.reasons.get(text, 0) + 1


class _Misfit(Exception):
    """A candidate lacks something, or computes something else. The text says what."""


def fuse_modules(module: PreTrainedModel, rows: int) -> FuseReport:
    """Swap whatever fits in ``module``, on a CPU. ``rows`` is the number of tokens of a usual step.

    Never fails on a model that does not fit: then nothing is swapped.
    """
    report = FuseReport()
    dtype = next(module.parameters()).dtype
    obstacle = can_pack(dtype)
    kernels = panels = None
    if obstacle is None:
        try:
            from jitney.execution.fused import Kernels
            from jitney.execution.panels import PanelKernel, can_use_panels

            kernels = Kernels(dtype)
            panels = PanelKernel() if can_use_panels(dtype) else None
        except ImportError as error:
            obstacle = f"Numba is missing ({error})"
    if kernels is None:
        report.kept("model", obstacle or "no kernels")
        return report
    with torch.inference_mode():
        _Pass(module, rows, dtype, kernels, panels, report).run()
    return report


class _Pass:
    """One run over one model."""

    def __init__(
        self,
        module: PreTrainedModel,
        rows: int,
        dtype: torch.dtype,
        kernels: "Kernels",
        panels: "PanelKernel | None",
        report: FuseReport,
    ) -> None:
        self._module = module
        self._rows = rows
        self._dtype = dtype
        self._kernels = kernels
        self._panels = panels
        self._report = report
        self._generator = torch.Generator().manual_seed(0)

    def run(self) -> None:
        """Layers first: a norm or an MLP inside of one that fits needs no swap of its own."""
        calls = self._record_calls()
        self._report.layers = self._swap(
            "layer", _is_layer, lambda m: self._fused_layer(m, calls.get(id(m)))
        )
        self._report.mlps = self._swap("gated MLP", _is_mlp, self._checked_mlp)
        self._report.norms = self._swap("norm", _is_norm, self._fused_norm)
        try:
            self._swap_forward()
        except _Misfit as misfit:
            self._report.kept("model", str(misfit))

    def _swap(
        self, what: str, fits: Callable[[nn.Module], bool], build: Callable[[Any], nn.Module]
    ) -> int:
        """Replace each module that ``fits`` by what ``build`` makes of it; returns their number."""
        swapped: dict[int, nn.Module] = {}  # a module that stands in two places stays one
        found = list(_children(self._module, fits))[::-1]
        while found:  # popped, so that what was replaced goes before the next one is built
            parent, name, child = found.pop()
            try:
                fused = swapped.get(id(child)) or build(child)
            except _Misfit as misfit:
                self._report.kept(what, str(misfit))
            else:
                swapped[id(child)] = fused
                setattr(parent, name, fused)
        return len(swapped)

    def _swap_forward(self) -> None:
        from jitney.execution.fused import FusedDecoderLayer, FusedRMSNorm
        from jitney.execution.fused_model import FusedForward

        module: Any = self._module
        inner = getattr(module, "model", None)
        if set(dict(module.named_children())) != {"model", "lm_head"} or inner is None:
            raise _Misfit("it is more than an inner model and a head")
        parts = dict(inner.named_children())
        if set(parts) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise _Misfit("its inner model has other parts")
        if not (
            type(parts["embed_tokens"]) is nn.Embedding
            and type(module.lm_head) is nn.Linear
            and isinstance(parts["norm"], FusedRMSNorm)
            and all(isinstance(layer, FusedDecoderLayer) for layer in inner.layers)
        ):
            raise _Misfit("not all of its parts are fused")
        self._refuse_bounds()
        positions = torch.arange(_TOKENS)
        some = positions[::2]
        right = forward(module, positions + 1, positions, some, _Mixer())
        fused = FusedForward(module)
        got = fused((positions + 1)[None], positions[None], some, _Mixer()).logits
        self._check("its result without transformers' forward", got[0], right)
        self._report.added_bytes += self._pack_head(module)
        module.forward = FusedForward(module)
        self._report.whole, self._report.program = True, module.forward.has_program

    def _refuse_bounds(self) -> None:
        for name, value in vars(self._module.config).items():
            if value is not None and any(word in name for word in _BOUNDING):
                raise _Misfit(f"its configuration bounds values ({name})")

    def _pack_head(self, module: Any) -> int:
        """Pack ``lm_head``, before its place is bound; returns the bytes that this adds."""
        head = module.lm_head
        shared = head.weight is module.model.embed_tokens.weight
        module.lm_head = self._pack(head)
        return head.weight.numel() * head.weight.element_size() if shared else 0

    # ------------------------------------------------------------------ norms

    def _fused_norm(self, norm: Any) -> "FusedRMSNorm":
        """What ``norm`` multiplies by, its weight or 1 + weight, is told by what it gives."""
        from jitney.execution.fused import FusedRMSNorm

        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(epsilon, float):
            raise _Misfit("it has no epsilon")
        inputs = [self._draw(1, _TOKENS, norm.weight.numel()) * s for s in _NORM_SCALES]
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
            raise _Misfit("it is not an RMS norm")
        fused = FusedRMSNorm(scale, epsilon, self._dtype, self._kernels)
        for x, y in zip(inputs, formula, strict=True):
            self._check("the kernel's result", fused(x), y)
        return fused

    # ------------------------------------------------------------------ gated MLPs

    def _fused_mlp(self, mlp: Any) -> "FusedMLP | GatedPanels":
        from jitney.execution.fused import FusedMLP
        from jitney.execution.panels import ACTIVATIONS, GatedPanels, fits_panels

        activation = known_activation(mlp.act_fn)
        if activation is None:
            raise _Misfit(f"activation {type(mlp.act_fn).__name__} is unknown")
        pair = [mlp.gate_proj, mlp.up_proj]
        if (
            self._panels is not None
            and activation in ACTIVATIONS
            and all(map(fits_panels, (*pair, mlp.down_proj)))
        ):
            return GatedPanels(
                self._panel_linear(pair, activation), self._panel_linear([mlp.down_proj])
            )
        gate, up, down = (
            PackedLinear(each.weight, each.bias, self._rows) for each in (*pair, mlp.down_proj)
        )
        return FusedMLP(gate, up, down, activation)

    def _checked_mlp(self, mlp: Any) -> "FusedMLP | GatedPanels":
        fused = self._fused_mlp(mlp)
        for scale in _MLP_SCALES:
            x = self._draw(1, _TOKENS, mlp.gate_proj.in_features) * scale
            right = mlp(x)
            if not isinstance(right, Tensor):
                raise _Misfit("it returns more than one tensor")
            self._check("its result", fused(x), right)
        return fused

    # ------------------------------------------------------------------ layers

    def _record_calls(self) -> dict[int, dict[str, Any]]:
        """Run the model once; returns the keyword arguments of each layer, by the layer's id."""
        layers = [m for m in self._module.modules() if _is_layer(m)]
        calls: dict[int, dict[str, Any]] = {}

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[id(layer)] = kwargs

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        try:
            positions = torch.arange(_TOKENS)
            forward(self._module, positions + 1, positions, positions[-1:], _Mixer())
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def _fused_layer(self, layer: Any, call: dict[str, Any] | None) -> "FusedDecoderLayer":
        self._refuse_bounds()
        if call is None or "position_embeddings" not in call:
            raise _Misfit("it takes no rotary embedding")
        hidden = self._draw(1, _TOKENS, layer.self_attn.q_proj.in_features) * _HIDDEN_SCALE
        before, after = _Mixer(), _Mixer()
        right = layer(hidden, **{**call, "paged": before})
        if not isinstance(right, Tensor) or len(before.calls) != 1:
            raise _Misfit("it returns more than one tensor, or attends more than once")
        fused = self._build_layer(layer, before.calls[0])
        got = fused(hidden, **{**call, "paged": after})
        for name in ("query", "key", "value"):
            self._check(
                f"its {name}", getattr(after.calls[0], name), getattr(before.calls[0], name)
            )
        self._check("its result", got - hidden, right - hidden, residual=hidden)
        # What the model around it may ask of a layer: the type of its attention, say.
        for name, value in vars(layer).items():
            if name[0] != "_" and name != "training" and isinstance(value, (str, int, float)):
                setattr(fused, name, value)
        return fused.eval()

    def _build_layer(self, layer: Any, call: AttentionCall) -> "FusedDecoderLayer":
        from jitney.execution.fused import AttentionForm, FusedDecoderLayer, HeadRotation

        attention = layer.self_attn
        query_heads, head_size = call.query.shape[1:]
        key_heads = call.key.shape[1]
        sizes = [getattr(attention, name).out_features // head_size for name in _PROJECTIONS]
        if sizes != [query_heads, key_heads, key_heads] or call.value.shape != call.key.shape:
            raise _Misfit("its projections do not give the heads alone")
        norms = None
        if hasattr(attention, "q_norm"):
            query_norm, key_norm = (
                self._fused_norm(attention.q_norm),
                self._fused_norm(attention.k_norm),
            )
            if {query_norm.scale.numel(), key_norm.scale.numel()} != {head_size}:
                raise _Misfit("it norms queries or keys over all heads")
            if query_norm.epsilon != key_norm.epsilon:
                raise _Misfit("its query and key norms differ")
            norms = (query_norm, key_norm)
        form = AttentionForm(
            layer=call.layer,
            query_heads=query_heads,
            key_heads=key_heads,
            head_size=head_size,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return FusedDecoderLayer(
            form,
            self._fused_norm(layer.input_layernorm),
            self._pack(*(getattr(attention, name) for name in _PROJECTIONS)),
            HeadRotation(query_heads, key_heads, head_size, norms, self._dtype, self._kernels),
            self._pack(attention.o_proj),
            self._fused_norm(layer.post_attention_layernorm),
            self._checked_mlp(layer.mlp),
            self._kernels,
        )

    # ------------------------------------------------------------------ parts

    def _pack(self, *linears: nn.Linear) -> "PackedLinear | PanelLinear":
        """One layer that gives the results of all, one after the other."""
        from jitney.execution.panels import fits_panels

        if self._panels is not None and all(map(fits_panels, linears)):
            return self._panel_linear(list(linears))
        weight, bias = _together(linears)
        return PackedLinear(weight, bias, self._rows)

    def _panel_linear(
        self, linears: list[nn.Linear], activation: Activation | None = None
    ) -> "PanelLinear":
        from jitney.execution.panels import PanelLinear

        assert self._panels is not None
        return PanelLinear(*_together(linears), self._panels, activation)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._dtype)

    def _check(self, what: str, got: Tensor, right: Tensor, residual: Tensor | None = None) -> None:
        """Raise _Misfit if they differ by more than rounding."""
        if got.shape != right.shape:
            raise _Misfit(f"{what} has another shape")
        error = float((got.float() - right.float()).norm())
        allowed = _TOLERANCE[self._dtype] * float(right.float().norm())
        if residual is not None:
            allowed += _RESIDUAL_TOLERANCE[self._dtype] * float(residual.float().norm())
        if not error <= allowed:
            raise _Misfit(f"{what} is another")


def _together(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of layers of one input, as of one layer."""
    biases: list[Tensor] = [each.bias for each in linears if each.bias is not None]
    if biases and len(biases) != len(linears):
        raise _Misfit("only some of its projections have a bias")
    if len(linears) == 1:
        return linears[0].weight, biases[0] if biases else None
    return torch.cat([each.weight for each in linears]), torch.cat(biases) if biases else None


class _Mixer:
    """Stands in for attention: keeps the calls, and answers something that depends on q and v."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        group = call.query.shape[1] // call.value.shape[1]
        return 0.5 * call.query + call.value.repeat_interleave(group, 1)


# --------------------------------------------------------------------------- structure


def _children(
    module: nn.Module, fits: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of every child that fits."""
    for parent in module.modules():
        for name, child in parent._modules.items():  # named_children leaves out repeated ones
            if child is not None and fits(child):
                yield parent, name, child


def _is_norm(module: nn.Module) -> bool:
    """One vector of weights and nothing else."""
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not any(True for _ in module.buffers())
    )


def _is_mlp(module: Any) -> bool:
    """Three linear layers and an activation between them."""
    children = dict(module.named_children())
    linears = {name for name, child in children.items() if type(child) is nn.Linear}
    return (
        linears == {"gate_proj", "up_proj", "down_proj"}
        and set(children) <= {*linears, "act_fn"}
        and callable(getattr(module, "act_fn", None))
        and not any(True for _ in module.parameters(recurse=False))
    )


def _is_layer(module: Any) -> bool:
    """Two norms, an attention of plain projections and a gated MLP."""
    children = dict(module.named_children())
    if set(children) != _LAYER_PARTS or not _is_mlp(children["mlp"]):
        return False
    attention = dict(children["self_attn"].named_children())
    linears = {name for name, child in attention.items() if type(child) is nn.Linear}
    return (
        linears == {*_PROJECTIONS, "o_proj"}
        and set(attention) - linears in (set(), {"q_norm", "k_norm"})
        and all(_is_norm(attention[name]) for name in set(attention) - linears)
        and _is_norm(children["input_layernorm"])
        and _is_norm(children["post_attention_layernorm"])
        and not any(True for _ in children["self_attn"].parameters(recurse=False))
    )
