"""Looks for modules of a loaded model that fused ones can replace. The package's docstring explains
how, with an example.

Called by a device's accelerator, which gives the kernels.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from jitney.execution.interface import LoadedModel
from jitney.execution.probe import embedding_weight
from jitney.execution.quantized import (
    find_children,
    is_linear,
    layers_that_round_inputs,
    weight_of,
)
from jitney.execution.state_slots import StateLayout, StateModule
from jitney.execution.support import named_lengths
from jitney.kernels.fused.adapted import AdaptedForward, AdaptedModules
from jitney.kernels.fused.forms import (
    AttentionForm,
    FusedNorm,
    HeadNorms,
    LatentForm,
    Misfit,
    Norm,
    NormForm,
    Rotation,
)
from jitney.kernels.fused.latents import (
    FusedLatents,
    is_latent_attention,
    latent_form,
    latent_products,
)
from jitney.kernels.fused.layers import (
    FusedAttention,
    FusedDecoderLayer,
    FusedMixture,
    FusedMLP,
    LayerNorms,
    LayerPaths,
    Mixer,
    MlpNames,
    Wiring,
)
from jitney.kernels.fused.likeness import Likeness, likeness
from jitney.kernels.fused.mixture import StandInMlp, build_experts, build_mixture
from jitney.kernels.fused.model_parts import find_input_rows, find_logit_scaling, model_parts
from jitney.kernels.fused.products import gated_products
from jitney.kernels.fused.recognise import (
    AttentionChildren,
    LayerChildren,
    attention_children,
    experts_children,
    is_norm,
    known_activation,
    layer_children,
    mixture_children,
    mlp_children,
)
from jitney.kernels.fused.recognise_states import state_parts
from jitney.kernels.fused.rotary import (
    SURPLUS,
    AngleColumns,
    Rotary,
    columns_of,
    rotary_table,
)
from jitney.kernels.fused.states import FusedStates
from jitney.kernels.fused.trial import (
    LAYER_SCALES,
    MODULE_SCALES,
    NORM_SCALES,
    Checker,
    MarkedCosSin,
    ModuleArguments,
    first_positions,
    record_arguments,
    record_first_input,
    returns_tuple,
    run_in_steps,
    run_model,
    run_module,
    spread_positions,
)
from jitney.kernels.fused.whole_model import FusedForward, ModelKernels, ScaledHead

_log = logging.getLogger(__name__)

_ROTATIONS: tuple[Rotation, ...] = ("halves", "neighbours", "none")
"""In the order in which they are tried."""
_WITHOUT_NATIVE_CALL = "0.1 to 0.7"
"""See docs/benchmarks.md; 0.1 with experts."""

_Built = TypeVar("_Built")
_Choice = TypeVar("_Choice")


@dataclass
class FuseReport:
    """What was replaced, and why other modules stayed as they were."""

    kernels: ModelKernels | None = None
    """What fused modules are computed with. None: nothing is fused."""
    swapped: Counter[str] = field(default_factory=Counter)
    """Kind of module -> how many were replaced. Modules inside of a replaced layer do not count."""
    forward: FusedForward | None = None
    """The whole model. None if not all of it could be fused."""
    expects_program: bool = False
    """Whether a step of a usual model would be one native call here."""
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
        self._log_native_call()
        for why, count in self.reasons.items():
            _log.info("not replaced (%d): %s", count, why)

    def _log_native_call(self) -> None:
        if self.forward is not None and self.forward.program is not None:
            _log.info("a step's layers are one native call")
            return
        if not self.expects_program:
            return
        why = "the model is not fused as a whole (see below)"
        if self.forward is not None and self.forward.why_no_program is not None:
            why = self.forward.why_no_program
        _log.warning(
            "a step is no native call: %s. At hidden size 256 such a model makes %s of the "
            "tokens per CPU second that a Llama of its size makes",
            why,
            _WITHOUT_NATIVE_CALL,
        )


def fuse(
    module: PreTrainedModel,
    kernels: ModelKernels,
    length: int,
    *,
    states: StateLayout | None = None,
    norms_alone: bool = False,
) -> FuseReport:
    """Replace what can be replaced in ``module``, on the device that it is on. ``length`` is that
    of the longest sequence. ``states``: what states it keeps, if their modules may be replaced.
    ``norms_alone``: replace nothing but norms. Option ``batch_invariant`` needs our norms even if
    option ``fuse`` is off.

    Never fails on a model: at worst, nothing is replaced. Takes memory for one layer beyond the
    module's own, as each module is freed once it is replaced.
    """
    with torch.inference_mode():
        fuser = _Fuser(module, kernels, length, states)
        report = fuser.report
        report.expects_program = kernels.runs_programs and not norms_alone
        # Experts first: layers need them. Then the largest modules first: what is inside of a
        # replaced one is not found any more.
        if not norms_alone:
            swap_children(
                module,
                what="experts",
                fits=experts_children,
                build=fuser.build_experts,
                report=report,
            )
            swap_children(
                module,
                what="layer",
                fits=fuser.layer_children,
                build=fuser.build_layer,
                report=report,
            )
            swap_children(
                module,
                what="attention over latents",
                fits=is_latent_attention,
                build=fuser.build_latents,
                report=report,
            )
            swap_children(
                module,
                what="layer with states",
                fits=fuser.has_states,
                build=fuser.build_states,
                report=report,
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


class _Choices(NamedTuple):
    """What trials of a decoder layer found out of it."""

    rotation: Rotation
    """That of the module itself: fused attention over latents rotates halves in any case."""
    wiring: Wiring


class _LayerRotary(NamedTuple):
    """Where a layer's cos and sin come from. Layers for which these are equal share a table."""

    rotary: Rotary
    """Calls the model's rotary module for any positions: see ``trial.MarkedCosSin``. One such
    function is made at each call of the module in the trial. So two layers have equal ones if their
    cos and sin came from the same call."""
    columns: AngleColumns
    rotation: Rotation


class _Fuser:
    """Builds fused modules for one model, and proves them. Each method raises Misfit if the module
    cannot be replaced."""

    def __init__(
        self,
        module: PreTrainedModel,
        kernels: ModelKernels,
        length: int,
        states: StateLayout | None,
    ) -> None:
        self.report = FuseReport(kernels)
        self._layout = states
        self._states_of: dict[nn.Module, StateModule] = {}
        if states is not None:
            self._states_of = {module.get_submodule(each.path): each for each in states.modules}
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
        self._arguments = record_arguments(module, self._spread_positions, self._has_arguments)
        # Of the fused layers whose cos and sin a table can give. None: they need none.
        self._rotary_of: dict[FusedDecoderLayer, _LayerRotary | None] = {}
        # Gated MLPs that did not fit when their decoder layers were built. The report counts them.
        self._kept_mlps: set[nn.Module] = set()
        self._fused_experts: WeakSet[nn.Module] = WeakSet()
        # What is known of the decoder layers whose fused forms were proved: see `likeness`.
        self._proved: dict[Likeness, _Choices] = {}
        # Of a layer like the one that is built now; None: there was none.
        self._known: _Choices | None = None

    # ------------------------------------------------------------------ norms and MLPs

    def build_norm(self, norm: Any) -> FusedNorm:
        """For an RMS norm or a layer norm."""
        misfit = Misfit("it has no epsilon")
        # Never left out: the trial tells which form is right.
        for form in _norm_forms(norm):
            try:
                return self._norm_of_form(norm, form)
            except Misfit as found:
                misfit = found
        raise misfit

    def _norm_of_form(self, norm: Any, form: NormForm) -> FusedNorm:
        fused = FusedNorm(form, self._kernels.norm(form))
        fused.weight = norm.weight.detach()
        width = form.scale.numel()
        self._checker.check(norm, fused, width=width, scales=NORM_SCALES, arguments={})
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
        if self._known is None:
            self._checker.check(module, fused, width, scales, arguments)

    def _build_norm_if_any(self, norm: nn.Module | None) -> Norm:
        return None if norm is None else self.build_norm(norm)

    # ------------------------------------------------------------------ states

    def has_states(self, module: nn.Module) -> bool:
        """Whether it keeps states."""
        return module in self._states_of

    def build_states(self, module: nn.Module) -> FusedStates:
        """For a module that keeps states."""
        layout = self._layout
        assert layout is not None
        parts = state_parts(module, layout, self._states_of[module])
        if parts is None:
            raise Misfit(f"no kernel computes what a {type(module).__name__} does")
        fused = FusedStates(
            form=parts.form,
            project=self._kernels.linear(parts.project),
            output=self._kernels.linear([parts.output]),
            kernel=self._kernels.states(parts.form),
        ).eval()
        arguments = self._arguments.get(module, {})
        self._check(module, fused, parts.project[0].in_features, MODULE_SCALES, arguments)
        if self._known is None:
            x = self._checker.random(parts.project[0].in_features)
            right, _ = run_module(module, x, arguments)
            self._checker.check_same("its result in steps", run_in_steps(fused, x, layout), right)
        return fused

    # ------------------------------------------------------------------ latents

    def build_latents(self, attention: Any) -> FusedLatents:
        """For an attention over latents."""
        arguments = self._arguments.get(attention, {})
        x = self._checker.random(self._config.hidden_size)
        _, calls = run_module(attention, x, arguments)
        cos_sin = arguments.get("position_embeddings")
        if len(calls) != 1 or not isinstance(cos_sin, tuple):
            raise Misfit("it does not attend once, with a rotary embedding")
        form = latent_form(calls[0], self.build_norm(attention.kv_a_layernorm))
        columns = columns_of(cos_sin[0], form.latents.rotary_size)
        # Which it is stands in the configuration, or in the module's code alone.
        rotations: list[Rotation] = ["halves", "neighbours"]
        if vars(attention.config).get("rope_interleave", False):
            rotations.reverse()
        if self._known is not None:
            rotations = [self._known.rotation]

        def rotated(rotation: Rotation) -> FusedLatents:
            fused = self._latents_of(attention, form, columns, rotation)
            self._check(attention, fused, self._config.hidden_size, MODULE_SCALES, arguments)
            return fused

        fused = _first_fit(rotated, rotations)
        self.report.added_bytes += fused.kernel.added_bytes
        return fused

    def _latents_of(
        self, attention: Any, form: LatentForm, columns: AngleColumns, rotation: Rotation
    ) -> FusedLatents:
        """The fused form of an attention that rotates so."""
        children = dict(attention.named_children())
        products = latent_products(children, form, rotation)
        query_low = None
        query_norm = None
        if "q_a_proj" in children:
            query_low = self._kernels.linear([children["q_a_proj"]])
            query_norm = self.build_norm(children["q_a_layernorm"])
        return FusedLatents(
            form=form,
            kernel=self._kernels.latents(form),
            query=self._kernels.linear([products.query]),
            latent=self._kernels.linear(products.latent),
            output=self._kernels.linear([attention.o_proj]),
            query_low=query_low,
            query_norm=query_norm,
            columns=columns,
            own_rotation=rotation,
        ).eval()

    # ------------------------------------------------------------------ MLPs

    def is_untried_mlp(self, module: nn.Module) -> bool:
        """Whether it is a gated MLP that has not been found unfit with its decoder layer."""
        children = mlp_children(module)
        return children is not None and children.gated and module not in self._kept_mlps

    def build_mlp(self, mlp: nn.Module) -> FusedMLP:
        """For an MLP, gated or not."""
        children = mlp_children(mlp)
        assert children is not None
        activation = known_activation(children.activation)
        if activation is None:
            raise Misfit("its activation is unknown")
        first = list(children.first.values())
        inner = self._kernels.linear(first, activation, gated=children.gated)
        names = MlpNames(gated=list(children.first), down=children.down_name)
        fused = FusedMLP(inner, self._kernels.linear([children.down]), names).eval()
        width, _ = _sizes(first[0])
        self._check(mlp, fused, width=width, scales=MODULE_SCALES, arguments={})
        return fused

    # ------------------------------------------------------------------ experts

    def build_experts(self, experts: nn.Module) -> nn.Module:
        """For the experts of a layer."""
        fused = build_experts(experts, self._kernels, self._checker)
        self._fused_experts.add(fused)
        return fused

    # ------------------------------------------------------------------ decoder layers

    def layer_children(self, module: nn.Module) -> LayerChildren | None:
        """See ``recognise``."""
        return layer_children(module, self.has_states)

    def _has_arguments(self, module: nn.Module) -> bool:
        """Whether transformers may call it with arguments beside its input."""
        is_layer = self.layer_children(module) is not None
        if is_layer or is_latent_attention(module) or self.has_states(module):
            return True
        return attention_children(module) is not None

    def build_layer(self, layer: nn.Module) -> FusedDecoderLayer:
        """For a decoder layer. Of layers that are alike, the first alone is tried: what is wrong
        with the others would show in the logits of the whole model (``probe.check_same``)."""
        alike = likeness(layer, self._arguments.get(layer, {}))
        self._known = self._proved.get(alike)
        try:
            fused = self._build_layer(layer)
        finally:
            self._known = None
        self._proved[alike] = _Choices(_rotation_of(fused.mixer), fused.wiring)
        return fused

    def _build_layer(self, layer: nn.Module) -> FusedDecoderLayer:
        children = self.layer_children(layer)
        assert children is not None
        arguments = self._arguments.get(layer, {})
        mixer = self._build_mixer(children.mixer)
        mlp = self._build_mlp_if_possible(children.mlp)
        norms = LayerNorms(
            attention=self._build_norm_if_any(children.attention_norm),
            after_attention=self._build_norm_if_any(children.after_attention_norm),
            mlp=self._build_norm_if_any(children.mlp_norm),
            after_mlp=self._build_norm_if_any(children.after_mlp_norm),
        )
        fused = self._wire(layer, children, mixer, mlp, norms)
        _copy_plain_values(layer, fused)
        x = self._checker.random(self._config.hidden_size)
        fused.returns_tuple = returns_tuple(layer, x, arguments)
        cos_sin = arguments.get("position_embeddings")
        if isinstance(mixer, FusedStates) or mixer.rotation == "none":
            self._rotary_of[fused] = None
        # A model with its rotary module in an unusual place gives a tuple without the mark. Its
        # layers can be fused, but it gets no table.
        elif isinstance(cos_sin, MarkedCosSin):
            self._rotary_of[fused] = _LayerRotary(cos_sin.rotary, mixer.columns, mixer.rotation)
        return fused

    def _build_mixer(self, mixer: nn.Module) -> Mixer:
        """For the first branch of a layer."""
        if self.has_states(mixer):
            return self.build_states(mixer)
        if is_latent_attention(mixer):
            return self.build_latents(mixer)
        return self._build_attention(mixer)

    def _wire(
        self,
        layer: nn.Module,
        children: LayerChildren,
        mixer: Mixer,
        mlp: nn.Module,
        norms: LayerNorms,
    ) -> FusedDecoderLayer:
        """The layer of these parts, wired as a trial finds it."""
        paths = _layer_paths(children)

        def wired(wiring: Wiring) -> FusedDecoderLayer:
            fused = FusedDecoderLayer(mixer, mlp, norms, wiring, paths, self._kernels).eval()
            if isinstance(mlp, FusedMixture):
                self._check_around_mixture(layer, children, fused)
            else:
                self._check_layer(layer, fused)
            return fused

        known = self._known
        return _first_fit(wired, _wirings(layer, norms) if known is None else [known.wiring])

    def _check_around_mixture(
        self, layer: nn.Module, children: LayerChildren, fused: FusedDecoderLayer
    ) -> None:
        """Compare two layers while something else stands in place of their experts."""
        if self._known is not None:
            return
        x = self._checker.random(self._config.hidden_size)[0]
        stand_in = StandInMlp(children.mlp, x)
        tried = FusedDecoderLayer(
            mixer=fused.mixer,
            mlp=stand_in,
            norms=fused.norms,
            wiring=fused.wiring,
            paths=fused.paths,
            kernels=self._kernels,
        )
        setattr(layer, children.mlp_name, stand_in)
        try:
            self._check_layer(layer, tried.eval())
        finally:
            setattr(layer, children.mlp_name, children.mlp)

    def _check_layer(self, layer: nn.Module, fused: FusedDecoderLayer) -> None:
        self._check(
            layer,
            fused,
            width=self._config.hidden_size,
            scales=LAYER_SCALES,
            arguments=self._arguments.get(layer, {}),
        )

    def _build_mlp_if_possible(self, mlp: nn.Module) -> nn.Module:
        """A fused MLP. If that is not possible, the same MLP: a fused layer calls it as it is."""
        mixture = mixture_children(mlp)
        if mixture is None and mlp_children(mlp) is None:
            return mlp
        try:
            if mixture is None:
                return self.build_mlp(mlp)
            if mixture.experts not in self._fused_experts:
                return mlp
            return build_mixture(mlp, self._kernels, self._checker)
        except Misfit as misfit:
            self.report.kept(_kind_of_mlp(mlp), str(misfit))
            self._kept_mlps.add(mlp)
            return mlp

    def _build_attention(self, attention: nn.Module) -> FusedAttention:
        """For the attention of a layer."""
        children = attention_children(attention)
        assert children is not None
        arguments = self._arguments.get(attention, {})
        form = self._attention_form(attention, children, arguments)
        qkv: Sequence[Any] = list(children.qkv.values())
        if form.is_gated:
            qkv = gated_products(qkv, form)
        joined = self._kernels.linear(qkv)
        output = self._kernels.linear([children.output])
        columns: AngleColumns = "halves"
        rotations: Sequence[Rotation] = ("none",)
        cos_sin = arguments.get("position_embeddings")
        if isinstance(cos_sin, tuple):
            columns = columns_of(cos_sin[0], form.head_size)
            rotations = _ROTATIONS
        if self._known is not None:
            rotations = (self._known.rotation,)

        def rotated(rotation: Rotation) -> FusedAttention:
            of_rotation = replace(form, rotation=rotation)
            fused = FusedAttention(of_rotation, joined, output, columns, self._kernels).eval()
            self._check(
                attention,
                fused,
                width=self._config.hidden_size,
                scales=MODULE_SCALES,
                arguments=arguments,
            )
            return fused

        return _first_fit(rotated, rotations)

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

        # Products may give more than heads: a gate for each query head, say.
        outputs = sum(_sizes(each)[1] for each in children.qkv.values())
        more = outputs - sum(form.qkv_heads) * form.head_size
        if more == form.query_heads * form.head_size:
            form = replace(form, is_gated=True)
        elif more != 0:
            raise Misfit("its projections do not give the heads alone")
        if call.value.shape != call.key.shape:
            raise Misfit("its keys and values are of different sizes")

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
        parts = model_parts(module)
        have_tables = all(layer in self._rotary_of for layer in parts.layers)
        if not isinstance(parts.norm, FusedNorm) or not have_tables:
            raise Misfit("not all of its parts are fused")
        old_head = module.lm_head
        # The first positions are a trial of their own: a rotary module may give these other angles
        # in a step that has long positions too, which a table cannot do.
        trials = [first_positions(module), self._spread_positions]
        expected = [run_model(module, positions) for positions in trials]
        first_input = record_first_input(module, parts.layers[0], trials[0])
        scaling = find_logit_scaling(module, trials[0])
        new_head = self._kernels.linear([old_head])

        # Each kind of rotary embedding has one table, which all layers of that kind share.
        index_of_table: dict[_LayerRotary | None, int | None] = {None: None}
        kinds: list[_LayerRotary] = []
        for layer in parts.layers:
            kind = self._rotary_of[layer]
            if kind is not None and kind not in index_of_table:
                index_of_table[kind] = len(kinds)
                kinds.append(kind)
        length = self._length + SURPLUS
        input_rows = find_input_rows(parts, first_input)
        # Whoever has replaced the embedding may also read what the output layer is given: that is
        # called as a module then.
        head: nn.Module = ScaledHead(new_head, scaling)
        if input_rows.is_table:
            head = self._kernels.head(new_head, scaling)
        fused = FusedForward(
            input_rows=input_rows,
            layers=parts.layers,
            layers_path=parts.layers_path,
            tables=[rotary_table(*kind, length=length, like=self._like) for kind in kinds],
            table_of_layer=[index_of_table[self._rotary_of[layer]] for layer in parts.layers],
            norm=parts.norm,
            head=head,
            kernels=self._kernels,
        )
        for positions, right in zip(trials, expected, strict=True):
            got = run_model(module, positions, fused)
            self._checker.check_same("its result without transformers' forward", got, right)

        module.lm_head = new_head
        # A packed layer has no parameters: it holds a copy of the weight in another layout. If the
        # embedding shares the weight, that stays in memory as well.
        is_packed = not list(new_head.parameters())
        is_tied = old_head.weight is parts.embed.weight
        if is_packed and is_tied:
            self.report.added_bytes += old_head.weight.nbytes
        return fused


# ------------------------------------------------------------------ what a module computes


def _check_head_norms(norms: HeadNorms, form: AttentionForm) -> None:
    """Raise Misfit unless the two norms are alike: both of each head, or both of all heads
    together."""
    query, key = norms
    heads_in_query_norm = query.scale.numel() // form.head_size
    heads_in_key_norm = key.scale.numel() // form.head_size
    of_each_head = heads_in_query_norm == 1 and heads_in_key_norm == 1
    of_all_heads = heads_in_query_norm == form.query_heads and heads_in_key_norm == form.key_heads
    of_one_kind = query.epsilon == key.epsilon and query.centred == key.centred
    if not (of_each_head or of_all_heads) or not of_one_kind:
        raise Misfit("its query and key norms differ")


def _norm_forms(norm: Any) -> Iterator[NormForm]:
    """What a norm may compute, the usual first: some multiply by their weight, others by 1 +
    weight; some subtract the mean, others do not."""
    # Architectures have one of two names for it.
    epsilon = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
    if not isinstance(epsilon, float):
        return
    weight = norm.weight.detach().float().contiguous()
    parameters = dict(norm.named_parameters())
    bias = None
    if "bias" in parameters:
        bias = parameters["bias"].detach().float().contiguous()
    else:
        for scale in (weight, 1.0 + weight):
            yield NormForm(scale, epsilon)
    for scale in (weight, 1.0 + weight):
        yield NormForm(scale, epsilon, centred=True, bias=bias)


def _wirings(layer: nn.Module, norms: LayerNorms) -> Iterator[Wiring]:
    """How the branches of a layer may be wired, the usual first. A factor is a number that the
    layer keeps."""
    numbers = [value for name, value in vars(layer).items() if not name.startswith("_")]
    factors = [1.0, *dict.fromkeys(each for each in numbers if isinstance(each, float))]
    # Without a norm of its own, and none behind attention, the MLP shares that of attention.
    shares_norm = norms.mlp is None and norms.after_attention is None
    for factor in factors:
        if not shares_norm:
            yield Wiring(factor=factor)
        if norms.after_attention is None:
            yield Wiring(parallel=True, factor=factor)


def _layer_paths(children: LayerChildren) -> LayerPaths:
    """Where the parts of a layer of these children stand."""
    attention = attention_children(children.mixer)
    if attention is None:
        return LayerPaths(mlp=children.mlp_name)
    return LayerPaths(
        mlp=children.mlp_name,
        qkv=[f"{children.mixer_name}.{name}" for name in attention.qkv],
        output=[f"{children.mixer_name}.{attention.output_name}"],
    )


def _rotation_of(mixer: Mixer) -> Rotation:
    """The rotary embedding of the module that ``mixer`` replaces, as far as a trial finds it."""
    if isinstance(mixer, FusedStates):
        return "none"
    return mixer.own_rotation if isinstance(mixer, FusedLatents) else mixer.form.rotation


def _first_fit(build: Callable[[_Choice], _Built], choices: Iterable[_Choice]) -> _Built:
    """What ``build`` makes of the first of the choices for which it does not raise Misfit. If none
    fits, the first Misfit is raised."""
    first_misfit: Misfit | None = None
    for choice in choices:
        try:
            return build(choice)
        except Misfit as misfit:
            # Without its traceback, which would hold modules that are to be freed.
            first_misfit = first_misfit or misfit.with_traceback(None)
    assert first_misfit is not None
    raise first_misfit


def _kind_of_mlp(mlp: nn.Module) -> str:
    children = mlp_children(mlp)
    if children is None:
        return "mixture of experts"
    return "gated MLP" if children.gated else "MLP"


def _sizes(linear: Any) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer, quantized or not."""
    if is_linear(linear):
        outputs, inputs = weight_of(linear).shape
        return inputs, outputs
    return linear.in_features, linear.out_features


def _copy_plain_values(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the public attributes of ``source`` that are strings and numbers. The model
    around a layer may read them, such as the layer's type."""
    for name, value in vars(source).items():
        is_public = not name.startswith("_") and name != "training"
        if is_public and isinstance(value, (str, int, float)):
            setattr(target, name, value)
