"""Looks for modules of a loaded model that fused ones can replace. The package's docstring explains
how, with an example.

Called by a device's accelerator, which gives the kernels.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import LoadedModel
from jitney.execution.probe import embedding_weight
from jitney.execution.quantized import find_children, layers_that_round_inputs
from jitney.execution.support import named_lengths
from jitney.kernels.fused.adapted import AdaptedForward, AdaptedModules
from jitney.kernels.fused.forms import AttentionForm, FusedNorm, HeadNorms, Misfit, Norm, NormForm
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP, LayerNorms
from jitney.kernels.fused.likeness import Likeness, likeness
from jitney.kernels.fused.recognise import (
    AttentionChildren,
    attention_children,
    is_norm,
    known_activation,
    layer_children,
    mlp_children,
)
from jitney.kernels.fused.rotary import SURPLUS, Rotary, rotary_table
from jitney.kernels.fused.trial import (
    LAYER_SCALES,
    MODULE_SCALES,
    NORM_SCALES,
    Checker,
    MarkedCosSin,
    ModuleArguments,
    first_positions,
    record_arguments,
    run_model,
    run_module,
    spread_positions,
)
from jitney.kernels.fused.whole_model import FusedForward, ModelKernels

_log = logging.getLogger(__name__)


@dataclass
class FuseReport:
    """What was replaced, and why other modules stayed as they were."""

    kernels: ModelKernels | None = None
    """What fused modules are computed with. None: nothing is fused."""
    swapped: Counter[str] = field(default_factory=Counter)
    """Kind of module -> how many were replaced. Modules inside of a replaced layer do not count."""
    forward: FusedForward | None = None
    """The whole model. None if not all of it could be fused."""
    added_bytes: int = 0
    """Bytes of weights beyond those that the module had before."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason why modules stayed as they were -> how many."""

    def kept(self, what: str, reason: str) -> None:
        """Count a module that stays as it was. ``what`` is its kind."""
        self.reasons[f"{what}: {reason}"] += 1

    def applied(self, model: LoadedModel) -> LoadedModel:
        """``model`` with its new size, and with its new forward if there is one. Logs what was
        replaced."""
        self._log()
        faster = replace(model, weight_bytes=model.weight_bytes + self.added_bytes)
        if self.forward is not None:
            faster = replace(faster, forward=self.forward)
        if not model.sites or self.kernels is None:  # no adapters, or nothing is fused
            return faster
        adapted: AdaptedForward | AdaptedModules
        if self.forward is not None:
            adapted = AdaptedForward(self.forward, model.sites)
        else:
            adapted = AdaptedModules(model.module, self.kernels, model.sites)
        return replace(faster, forward=adapted, sites=adapted.sites, pack=adapted.pack)

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
    """Replace what can be replaced in ``module``, on the device that it is on. ``length`` is that
    of the longest sequence. ``norms_alone``: replace nothing but norms. Option ``batch_invariant``
    needs our norms even if option ``fuse`` is off.

    Never fails on a model: at worst, nothing is replaced. Takes memory for one layer beyond the
    module's own, as each module is freed once it is replaced.
    """
    with torch.inference_mode():
        fuser = _Fuser(module, kernels, length)
        report = fuser.report
        # The largest modules first: what is inside of a replaced one is not found any more.
        if not norms_alone:
            swap_children(
                module, what="layer", fits=layer_children, build=fuser.build_layer, report=report
            )
            swap_children(
                module,
                what="gated MLP",
                fits=fuser.is_untried_mlp,
                build=fuser.build_mlp,
                report=report,
            )
        swap_children(module, what="norm", fits=is_norm, build=fuser.build_norm, report=report)
        if norms_alone:
            return report
        try:
            report.forward = fuser.fuse_model()
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
    """Replace each module below ``module`` that ``fits`` by what ``build`` makes of it. A module
    for which ``build`` raises Misfit stays. ``what`` is the kind of these modules."""
    found = deque(find_children(module, fits).items())
    while found:
        # Taken out of ``found``: nothing here may hold a module that has been replaced, so that it
        # is freed before the next one is built.
        child, parents = found.popleft()
        try:
            fused = build(child)
        except Misfit as misfit:
            report.kept(what, str(misfit))
            continue
        report.swapped[what] += 1
        for parent, name in parents:
            setattr(parent, name, fused)


class _LayerRotary(NamedTuple):
    """Where a layer's cos and sin come from. Layers for which these are equal share a table."""

    rotary: Rotary
    """Calls the model's rotary module for any positions: see ``trial.MarkedCosSin``. One such
    function is made at each call of the module in the trial. So two layers have equal ones if their
    cos and sin came from the same call."""
    half: bool
    """Whether it gives half of cos and sin: see ``rotary``."""


class _ModelParts(NamedTuple):
    """What the forward pass of a model calls before its head."""

    embed: nn.Module
    layers: list[FusedDecoderLayer]
    norm: FusedNorm


class _Fuser:
    """Builds fused modules for one model, and proves them. Each method raises Misfit if the module
    cannot be replaced."""

    def __init__(self, module: PreTrainedModel, kernels: ModelKernels, length: int) -> None:
        self.report = FuseReport(kernels)
        self._module: Any = module
        self._config: Any = module.config
        self._kernels = kernels
        self._length = length
        # A tensor of the model's dtype and device.
        self._like = embedding_weight(module).new_zeros(1)
        named = named_lengths(module.config, length)
        self._spread_positions = spread_positions(module, length, named)
        self._checker = Checker(
            self._like,
            coarse=bool(layers_that_round_inputs(module)),
            tokens=len(self._spread_positions),
        )
        self._arguments = record_arguments(module, self._spread_positions, _takes_cos_and_sin)
        # Of the fused layers whose cos and sin a table can give.
        self._rotary_of: dict[FusedDecoderLayer, _LayerRotary] = {}
        # Gated MLPs that did not fit when their decoder layers were built. The report counts them.
        self._kept_mlps: set[nn.Module] = set()
        # What is known of the decoder layers whose fused forms were proved: see `likeness`.
        self._proved: set[Likeness] = set()
        self._skips_trials = False

    # ------------------------------------------------------------------ norms and MLPs

    def build_norm(self, norm: Any) -> FusedNorm:
        """For an RMS norm."""
        # Architectures have one of two names for it.
        epsilon = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
        if not isinstance(epsilon, float):
            raise Misfit("it has no epsilon")
        weight = norm.weight.detach().float()
        # Some norms multiply by their weight, others by 1 + weight. The proof tells which it is.
        try:
            return self._norm_with_scale(norm, weight, epsilon)
        except Misfit:
            return self._norm_with_scale(norm, 1.0 + weight, epsilon)

    def _norm_with_scale(self, norm: Any, scale: Tensor, epsilon: float) -> FusedNorm:
        form = NormForm(scale.contiguous(), epsilon)
        fused = FusedNorm(form, self._kernels.norm(form))
        fused.weight = norm.weight.detach()
        # Never left out: the trial tells which scale is right.
        self._checker.check(norm, fused, width=scale.numel(), scales=NORM_SCALES, arguments={})
        return fused

    def _check(
        self,
        module: nn.Module,
        fused: nn.Module,
        width: int,
        scales: Sequence[float],
        arguments: ModuleArguments,
    ) -> None:
        """:meth:`Checker.check`, unless a decoder layer like this one has been proved."""
        if not self._skips_trials:
            self._checker.check(module, fused, width, scales, arguments)

    def _build_norm_if_any(self, norm: nn.Module | None) -> Norm:
        return None if norm is None else self.build_norm(norm)

    def is_untried_mlp(self, module: nn.Module) -> bool:
        """Whether it is a gated MLP that has not been found unfit with its decoder layer."""
        return mlp_children(module) is not None and module not in self._kept_mlps

    def build_mlp(self, mlp: nn.Module) -> FusedMLP:
        """For a gated MLP."""
        children = mlp_children(mlp)
        assert children is not None
        activation = known_activation(children.activation)
        if activation is None:
            raise Misfit("its activation is unknown")
        gated = self._kernels.linear(children.gate_up, activation)
        fused = FusedMLP(gated, self._kernels.linear([children.down])).eval()
        width = children.gate_up[0].in_features
        self._check(mlp, fused, width=width, scales=MODULE_SCALES, arguments={})
        return fused

    # ------------------------------------------------------------------ decoder layers

    def build_layer(self, layer: nn.Module) -> FusedDecoderLayer:
        """For a decoder layer. Of layers that are alike, the first alone is tried: what is wrong
        with the others would show in the logits of the whole model (``probe.check_same``)."""
        alike = likeness(layer, self._arguments.get(layer, {}))
        self._skips_trials = alike in self._proved
        try:
            fused = self._build_layer(layer)
        finally:
            self._skips_trials = False
        self._proved.add(alike)
        return fused

    def _build_layer(self, layer: nn.Module) -> FusedDecoderLayer:
        children = layer_children(layer)
        assert children is not None
        arguments = self._arguments.get(layer, {})
        cos_sin = arguments.get("position_embeddings")
        if not isinstance(cos_sin, tuple):
            raise Misfit("it takes no rotary embedding")

        attention = self._build_attention(children.attention)
        mlp = self._build_mlp_if_possible(children.mlp)
        norms = LayerNorms(
            attention=self._build_norm_if_any(children.attention_norm),
            after_attention=self._build_norm_if_any(children.after_attention_norm),
            mlp=self._build_norm_if_any(children.mlp_norm),
            after_mlp=self._build_norm_if_any(children.after_mlp_norm),
        )
        fused = FusedDecoderLayer(attention, mlp, norms, self._kernels).eval()
        self._check(
            layer,
            fused,
            width=self._config.hidden_size,
            scales=LAYER_SCALES,
            arguments=arguments,
        )

        _copy_plain_values(layer, fused)
        # A model with its rotary module in an unusual place gives a tuple without the mark. Its
        # layers can be fused, but it gets no table.
        if isinstance(cos_sin, MarkedCosSin):
            self._rotary_of[fused] = _LayerRotary(cos_sin.rotary, attention.half_rotary)
        return fused

    def _build_mlp_if_possible(self, mlp: nn.Module) -> nn.Module:
        """A fused MLP. If that is not possible, the same MLP: a fused layer calls it as it is."""
        if mlp_children(mlp) is None:
            return mlp
        try:
            return self.build_mlp(mlp)
        except Misfit as misfit:
            self.report.kept("gated MLP", str(misfit))
            self._kept_mlps.add(mlp)
            return mlp

    def _build_attention(self, attention: nn.Module) -> FusedAttention:
        """For the attention of a layer."""
        children = attention_children(attention)
        assert children is not None
        arguments = self._arguments.get(attention, {})
        form = self._attention_form(attention, children, arguments)
        cos, _ = arguments["position_embeddings"]
        fused = FusedAttention(
            form=form,
            qkv=self._kernels.linear(children.qkv),
            output=self._kernels.linear([children.output]),
            half_rotary=_is_half(cos, form.head_size),
            kernels=self._kernels,
        ).eval()
        self._check(
            attention,
            fused,
            width=self._config.hidden_size,
            scales=MODULE_SCALES,
            arguments=arguments,
        )
        return fused

    def _attention_form(
        self, attention: nn.Module, children: AttentionChildren, arguments: ModuleArguments
    ) -> AttentionForm:
        """What the module computes, by what it hands to attention when it is run once."""
        x = self._checker.random(self._config.hidden_size)
        _, calls = run_module(attention, x, arguments)
        if len(calls) != 1:
            raise Misfit("it does not attend once")
        call = calls[0]
        form = AttentionForm.of(call)

        # Products may give more than heads: a gate on the queries, say.
        outputs = sum(each.out_features for each in children.qkv)
        heads_alone = outputs == sum(form.qkv_heads) * form.head_size
        if call.value.shape != call.key.shape or not heads_alone:
            raise Misfit("its projections do not give the heads alone")

        if children.query_norm is None or children.key_norm is None:
            return form
        norms = HeadNorms(
            query=self.build_norm(children.query_norm).form,
            key=self.build_norm(children.key_norm).form,
        )
        _check_head_norms(norms, form)
        return replace(form, norms=norms)

    # ------------------------------------------------------------------ the whole model

    def fuse_model(self) -> FusedForward:
        """The whole model. Replaces its head by a fused one."""
        module = self._module
        embed, layers, norm = self._parts_of_model()
        old_head = module.lm_head
        # The first positions are a trial of their own: a rotary module may give these other angles
        # in a step that has long positions too, which a table cannot do.
        trials = [first_positions(module), self._spread_positions]
        expected = [run_model(module, positions) for positions in trials]

        # Each kind of rotary embedding has one table, which all layers of that kind share.
        index_of_table: dict[_LayerRotary, int] = {}
        for layer in layers:
            index_of_table.setdefault(self._rotary_of[layer], len(index_of_table))
        length = self._length + SURPLUS
        fused = FusedForward(
            embed=embed,
            layers=layers,
            tables=[
                rotary_table(rotary, half, length, like=self._like)
                for rotary, half in index_of_table
            ],
            table_of_layer=[index_of_table[self._rotary_of[layer]] for layer in layers],
            norm=norm,
            head=self._kernels.linear([old_head]),
            softcap=vars(self._config).get("final_logit_softcapping"),
            kernels=self._kernels,
        )
        for positions, right in zip(trials, expected, strict=True):
            got = run_model(module, positions, fused)
            self._checker.check_same("its result without transformers' forward", got, right)

        module.lm_head = fused.head
        # A packed layer has no parameters: it holds a copy of the weight in another layout. If the
        # embedding shares the weight, that stays in memory as well.
        is_packed = not list(fused.head.parameters())
        is_tied = old_head.weight is embed.weight
        if is_packed and is_tied:
            self.report.added_bytes += old_head.weight.nbytes
        return fused

    def _parts_of_model(self) -> _ModelParts:
        """The parts of the model that :class:`FusedForward` calls. Raises Misfit if the model has
        others as well, or if they are not all fused."""
        children = dict(self._module.named_children())
        if set(children) != {"model", "lm_head"}:
            raise Misfit("it is more than an inner model and a head")
        inner: dict[str, Any] = dict(children["model"].named_children())
        if set(inner) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise Misfit("its inner model has other parts")
        parts = _ModelParts(inner["embed_tokens"], list(inner["layers"]), inner["norm"])
        have_tables = all(layer in self._rotary_of for layer in parts.layers)
        if not isinstance(parts.norm, FusedNorm) or not have_tables:
            raise Misfit("not all of its parts are fused")
        return parts


# ------------------------------------------------------------------ what a module computes


def _takes_cos_and_sin(module: nn.Module) -> bool:
    """Whether transformers may call it with cos and sin among its arguments."""
    return layer_children(module) is not None or attention_children(module) is not None


def _check_head_norms(norms: HeadNorms, form: AttentionForm) -> None:
    """Raise Misfit unless the two norms are alike: both of each head, or both of all heads
    together."""
    query, key = norms
    heads_in_query_norm = query.scale.numel() // form.head_size
    heads_in_key_norm = key.scale.numel() // form.head_size
    of_each_head = heads_in_query_norm == 1 and heads_in_key_norm == 1
    of_all_heads = heads_in_query_norm == form.query_heads and heads_in_key_norm == form.key_heads
    if not (of_each_head or of_all_heads) or query.epsilon != key.epsilon:
        raise Misfit("its query and key norms differ")


def _is_half(cos: Tensor, head_size: int) -> bool:
    """Whether cos [1, T, columns] is half of what fused layers take: see ``rotary``. A whole one
    has two equal halves. Raises Misfit if it is wider than a head."""
    first, second = cos.tensor_split(2, -1)
    half = not torch.equal(first, second)
    rotated = cos.shape[-1] * 2 if half else cos.shape[-1]
    if rotated > head_size:
        raise Misfit("its rotary embedding is wider than a head")
    return half


def _copy_plain_values(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the public attributes of ``source`` that are strings and numbers. The model
    around a layer may read them, such as the layer's type."""
    for name, value in vars(source).items():
        is_public = not name.startswith("_") and name != "training"
        if is_public and isinstance(value, (str, int, float)):
            setattr(target, name, value)
