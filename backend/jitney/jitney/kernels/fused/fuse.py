"""The search of a loaded model for modules that fused ones can replace.

A fused module is built from each candidate (see ``recognise``), and both are run on the same random
input (``trial``). Only what agrees is replaced; the rest stays as it was, and the report says why.
The largest first: whole decoder layers, then gated MLPs, then RMS norms. If all layers of a causal
model could be replaced, the whole of it is fused too (``whole_model``).
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import AttentionCall, LoadedModel
from jitney.execution.probe import embedding_weight
from jitney.execution.quantized import coarse_layers, find_children
from jitney.kernels.fused.adapted import AdaptedForward
from jitney.kernels.fused.forms import AttentionForm, FusedNorm, Misfit, NormForm
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP, LayerNorms
from jitney.kernels.fused.recognise import (
    Children,
    attention_children,
    is_norm,
    known_activation,
    layer_children,
    mlp_children,
)
from jitney.kernels.fused.rotary import Rotary, rotary_table
from jitney.kernels.fused.trial import (
    LAYER_SCALES,
    MODULE_SCALES,
    NORM_SCALES,
    Angles,
    Checker,
    record_calls,
    run_alone,
    run_trial,
)
from jitney.kernels.fused.whole_model import FusedForward, ModelKernels

_log = logging.getLogger(__name__)

_SURPLUS = 64
"""Positions beyond the longest sequence: a step may be launched before its end is known."""


@dataclass
class FuseReport:
    """What was replaced, and what kept other modules from it."""

    swapped: Counter[str] = field(default_factory=Counter)
    """Kind of module -> how many: those inside of replaced layers are not counted."""
    forward: FusedForward | None = None
    """The whole model, if all of it could be fused."""
    added_bytes: int = 0
    """Memory beyond what the module took before."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why something stayed as it was -> how often."""

    def kept(self, what: str, reason: str) -> None:
        """Count a module that stays."""
        self.reasons[f"{what}: {reason}"] += 1

    def applied(self, model: LoadedModel) -> LoadedModel:
        """``model`` with its new forward and size; the log says what was done."""
        self._log()
        faster = replace(model, weight_bytes=model.weight_bytes + self.added_bytes)
        if self.forward is None:
            return faster
        if not model.sites:
            return replace(faster, forward=self.forward, fused=True)
        adapted = AdaptedForward(self.forward, model.sites)
        return replace(faster, forward=adapted, fused=True, sites=adapted.sites, pack=adapted.pack)

    def _log(self) -> None:
        counts = ", ".join(f"{count} x {what}" for what, count in self.swapped.items())
        _log.info("replaced: %s", counts or "nothing")
        if self.forward is not None and self.forward.program is not None:
            _log.info("a step's layers are one native call")
        for why, count in self.reasons.items():
            _log.info("not replaced (%d): %s", count, why)


def fuse(
    module: PreTrainedModel, kernels: ModelKernels, length: int, *, norms_alone: bool = False
) -> FuseReport:
    """Replace whatever fits in ``module``, on the device it is on; ``length`` is that of the
    longest sequence.

    Never fails on a model that does not fit: then nothing is replaced. Memory beyond the module's
    own is that of one layer, as each is freed when its successor is there.
    """
    with torch.inference_mode():
        fuser = _Fuser(module, kernels, length)
        report = fuser.report
        if norms_alone:
            swap_children(module, "norm", is_norm, fuser.norm, report)
            return report
        swap_children(module, "layer", layer_children, fuser.layer, report)
        swap_children(module, "gated MLP", mlp_children, fuser.mlp, report)
        swap_children(module, "norm", is_norm, fuser.norm, report)
        try:
            report.forward = fuser.forward()
        except Misfit as misfit:
            report.kept("model", str(misfit))
    return report


def swap_children(
    module: nn.Module,
    what: str,
    fits: Callable[[nn.Module], object],
    build: Callable[[Any], nn.Module],
    report: FuseReport,
) -> None:
    """Replace each module that ``fits`` by what ``build`` makes of it."""
    found = deque(find_children(module, fits).items())
    while found:  # taken out, so that what was replaced is freed before the next one is built
        child, parents = found.popleft()
        try:
            fused = build(child)
        except Misfit as misfit:
            report.kept(what, str(misfit))
            continue
        report.swapped[what] += 1
        for parent, name in parents:
            setattr(parent, name, fused)


class _Fuser:
    """One search of one model. Each method builds what may replace a module, and raises Misfit if
    it does not compute the same."""

    def __init__(self, module: PreTrainedModel, kernels: ModelKernels, length: int) -> None:
        self.report = FuseReport()
        self._module: Any = module
        self._config: Any = module.config
        self._kernels = kernels
        self._length = length
        self._like = embedding_weight(module).new_zeros(1)
        self._checker = Checker(self._like, coarse=bool(coarse_layers(module)))
        self._calls = record_calls(module, _is_called_with_angles)
        self._rotaries: dict[FusedDecoderLayer, Rotary] = {}

    # ------------------------------------------------------------------ norms and MLPs

    def norm(self, norm: Any) -> FusedNorm:
        """An RMS norm. Whether it multiplies by its weight or by 1 + weight is found by trying
        both."""
        epsilon = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
        if not isinstance(epsilon, float):
            raise Misfit("it has no epsilon")
        weight = norm.weight.detach().float()
        try:
            return self._norm_with(norm, weight, epsilon)
        except Misfit:
            return self._norm_with(norm, 1.0 + weight, epsilon)

    def _norm_with(self, norm: nn.Module, scale: Tensor, epsilon: float) -> FusedNorm:
        form = NormForm(scale.contiguous(), epsilon)
        fused = FusedNorm(form, self._kernels.norm(form))
        self._checker.check(norm, fused, width=scale.numel(), scales=NORM_SCALES, call={})
        return fused

    def mlp(self, mlp: nn.Module) -> FusedMLP:
        """A gated MLP."""
        children = mlp_children(mlp)
        assert children is not None
        *gate_up, down = children.products
        activation = known_activation(children.others[0])
        if activation is None:
            raise Misfit("its activation is unknown")
        gated = self._kernels.linear(gate_up, activation)
        fused = FusedMLP(gated, self._kernels.linear([down])).eval()
        width = gate_up[0].in_features
        self._checker.check(mlp, fused, width=width, scales=MODULE_SCALES, call={})
        return fused

    # ------------------------------------------------------------------ decoder layers

    def layer(self, layer: nn.Module) -> FusedDecoderLayer:
        """A decoder layer."""
        children = layer_children(layer)
        assert children is not None
        call = self._calls.get(layer, {})
        angles = call.get("position_embeddings")
        if not isinstance(angles, tuple):
            raise Misfit("it takes no rotary embedding")

        old_attention, old_mlp = children.others
        attention = self._attention(old_attention)
        mlp = self._mlp_of_layer(old_mlp)
        norms = LayerNorms(*(None if norm is None else self.norm(norm) for norm in children.norms))
        fused = FusedDecoderLayer(attention, mlp, norms, self._kernels).eval()
        width = self._config.hidden_size
        self._checker.check(layer, fused, width=width, scales=LAYER_SCALES, call=call)

        _copy_plain_values(layer, fused)
        if isinstance(angles, Angles):  # else its rotary module is not where most models have it
            self._rotaries[fused] = angles.rotary
        return fused

    def _mlp_of_layer(self, mlp: nn.Module) -> nn.Module:
        """The MLP, fused if it can be; a layer calls one that cannot be as it is."""
        if mlp_children(mlp) is None:
            return mlp
        try:
            return self.mlp(mlp)
        except Misfit as misfit:
            self.report.kept("gated MLP", str(misfit))
            return mlp

    def _attention(self, attention: nn.Module) -> FusedAttention:
        children = attention_children(attention)
        assert children is not None
        call = self._calls.get(attention, {})
        *qkv, output = children.products
        form = self._attention_form(attention, children, call)
        half = _has_half_angles(call["position_embeddings"][0], form.head_size)
        fused = FusedAttention(
            form=form,
            qkv=self._kernels.linear(qkv),
            output=self._kernels.linear([output]),
            half_rotary=half,
            kernels=self._kernels,
        ).eval()
        width = self._config.hidden_size
        self._checker.check(attention, fused, width=width, scales=MODULE_SCALES, call=call)
        return fused

    def _attention_form(
        self, attention: nn.Module, children: Children, call: dict[str, Any]
    ) -> AttentionForm:
        """What the module hands to attention when it is run once."""
        x = self._checker.random(self._config.hidden_size)
        _, attention_calls = run_alone(attention, x, call)
        if len(attention_calls) != 1:
            raise Misfit("it does not attend once")
        attention_call = attention_calls[0]
        form = _form_of(attention_call)

        *qkv, _ = children.products
        outputs = sum(each.out_features for each in qkv)
        same_shapes = attention_call.value.shape == attention_call.key.shape
        if not same_shapes or outputs != sum(form.qkv_heads) * form.head_size:
            raise Misfit("its projections do not give the heads alone")
        if not children.norms:
            return form

        query, key = (self.norm(norm).form for norm in children.norms)
        normed_heads = (query.scale.numel() // form.head_size, key.scale.numel() // form.head_size)
        of_each_head = normed_heads == (1, 1)
        of_all_heads = normed_heads == (form.query_heads, form.key_heads)
        if not (of_each_head or of_all_heads) or query.epsilon != key.epsilon:
            raise Misfit("its query and key norms differ")
        return replace(form, norms=(query, key))

    # ------------------------------------------------------------------ the whole model

    def forward(self) -> FusedForward:
        """The whole model, whose head is then fused, too."""
        module = self._module
        inner = self._inner_parts()
        layers = list(module.model.layers)
        norm = inner["norm"]
        embed = inner["embed_tokens"]
        old_head = module.lm_head
        if not isinstance(norm, FusedNorm) or not all(layer in self._rotaries for layer in layers):
            raise Misfit("not all of its parts are fused")

        expected = run_trial(module)
        # Layers with the same rotary embedding share a table. Of each layer: (rotary, half).
        rotaries = [(self._rotaries[x], x.self_attn.half_rotary) for x in layers]
        different = list(dict.fromkeys(rotaries))
        length = self._length + _SURPLUS
        fused = FusedForward(
            embed=embed,
            layers=layers,
            tables=[rotary_table(rotary, half, length, self._like) for rotary, half in different],
            table_of_layer=[different.index(each) for each in rotaries],
            norm=norm,
            head=self._kernels.linear([old_head]),
            softcap=vars(self._config).get("final_logit_softcapping"),
            kernels=self._kernels,
        )
        got = run_trial(module, fused)
        self._checker.same("its result without transformers' forward", got, expected)

        module.lm_head = fused.head
        is_tied = old_head.weight is embed.weight
        is_packed = not list(fused.head.parameters())  # a copy of the weight, in another layout
        if is_tied and is_packed:  # so the embedding keeps the weight, too
            self.report.added_bytes += old_head.weight.nbytes
        return fused

    def _inner_parts(self) -> dict[str, nn.Module]:
        """The children of the inner model, if it and the model have the usual ones alone."""
        children = dict(self._module.named_children())
        if set(children) != {"model", "lm_head"}:
            raise Misfit("it is more than an inner model and a head")
        inner = dict(children["model"].named_children())
        if set(inner) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise Misfit("its inner model has other parts")
        return inner


def _is_called_with_angles(module: nn.Module) -> bool:
    return layer_children(module) is not None or attention_children(module) is not None


def _form_of(call: AttentionCall) -> AttentionForm:
    _, query_heads, head_size = call.query.shape
    return AttentionForm(
        layer=call.layer,
        query_heads=query_heads,
        key_heads=call.key.shape[1],
        head_size=head_size,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks,
    )


def _has_half_angles(cos: Tensor, head_size: int) -> bool:
    """Whether cos [1, T, columns] has one column for each pair of rotated values. Else it has one
    for each value, and its second half repeats the first."""
    first, second = cos.tensor_split(2, -1)
    half = not torch.equal(first, second)
    rotated = cos.shape[-1] * 2 if half else cos.shape[-1]
    if rotated > head_size:
        raise Misfit("its rotary embedding is wider than a head")
    return half


def _copy_plain_values(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the plain public attributes of ``source``: the model around a layer may ask
    for its type, say."""
    for name, value in vars(source).items():
        is_public = not name.startswith("_") and name != "training"
        if is_public and isinstance(value, (str, int, float)):
            setattr(target, name, value)
