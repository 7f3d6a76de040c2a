"""The search of a loaded model for modules that fused ones can take the place of.

Candidates are told by the names and kinds of their children and never by a model's name. A fused
module is built from those, and both are run on the same random input (``trial``). Only what agrees
is swapped; the rest stays as it was, and the report says why. The largest first: whole decoder
layers, gated MLPs, RMS norms. If all layers of a causal model could be swapped, the whole of it is
fused too (``FusedForward``).
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import LoadedModel
from jitney.execution.probe import embedding_weight
from jitney.execution.quantized import QuantizedLinear, coarse_layers, find_children
from jitney.kernels.fused.adapted import AdaptedForward
from jitney.kernels.fused.layers import (
    ACTIVATIONS,
    Activation,
    AttentionForm,
    FusedAttention,
    FusedDecoderLayer,
    FusedForward,
    FusedMLP,
    FusedNorm,
    LayerKernels,
    LayerNorms,
    Misfit,
    NormForm,
    rotary_table,
)
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

_log = logging.getLogger(__name__)

_SURPLUS = 64
"""Positions behind the longest sequence that a step launched before its end was known may have."""

# The children that a module of each kind may have: products, norms and others, told by their names.
# The last product is that of the output. "" stands where a layer has no norm in LayerNorms.
_ATTENTIONS = tuple(
    (*qkv, "o_proj", *norms)
    for qkv in (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
    for norms in ((), ("q_norm", "k_norm"))
)
_MLPS = tuple(
    (*gate_up, "down_proj", activation)
    for gate_up in (("gate_proj", "up_proj"), ("gate_up_proj",))
    for activation in ("act_fn", "activation_fn")
)
_IN, _BETWEEN = "input_layernorm", "post_attention_layernorm"
_MLP_IN, _OUT = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_LAYERS = tuple(
    ("self_attn", "mlp", *norms)
    for norms in ((_IN, "", _BETWEEN, ""), (_IN, _BETWEEN, _MLP_IN, _OUT), ("", _BETWEEN, "", _OUT))
)


class Parts(NamedTuple):
    """The children of a module of a known form."""

    products: list[Any]
    """Those of one input, which may be merged already, and the one of the output."""
    norms: list[nn.Module | None]
    """Of query and key, or of a layer."""
    others: list[Any]


def _parts(module: nn.Module, forms: Sequence[tuple[str, ...]]) -> Parts | None:
    """The children that one of ``forms`` names, if they are of its kinds and all there is."""
    idle = (nn.Dropout, nn.Identity)  # in service
    parts = {name: part for name, part in module.named_children() if type(part) not in idle}
    names = next((names for names in forms if set(parts) == set(names) - {""}), None)
    if names is None or any(n != "sinks" for n, _ in module.named_parameters(recurse=False)):
        return None
    found = Parts([], [], [])
    for name in names:
        part = parts.get(name)
        if name.endswith("_proj"):
            if type(part) is not nn.Linear and not isinstance(part, QuantizedLinear):
                return None
            found.products.append(part)
        elif name in ("self_attn", "mlp", "act_fn", "activation_fn"):
            found.others.append(part)
        elif part is None or is_norm(part):
            found.norms.append(part)
        else:
            return None
    return found


attention_parts = partial(_parts, forms=_ATTENTIONS)
"""Products, perhaps norms of query and key, perhaps sinks, and nothing else."""
mlp_parts = partial(_parts, forms=_MLPS)
"""Products of gate, up and down, and an activation."""


def layer_parts(module: nn.Module) -> Parts | None:
    """An attention of a known form, any MLP, and the norms in the order of LayerNorms."""
    parts = _parts(module, _LAYERS)
    return parts if parts and attention_parts(parts.others[0]) else None


def is_norm(module: nn.Module | None) -> bool:
    """One vector of weights and nothing else."""
    if module is None:
        return False
    parameters = dict(module.named_parameters())
    alone = list(parameters) == ["weight"] and not any(True for _ in module.buffers())
    return alone and parameters["weight"].dim() == 1


def known_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Which activation ``function`` is, told by what it gives; None if it is none of ours."""
    x = torch.linspace(-6.0, 6.0, 97)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), rtol=1e-6, atol=1e-6):
            return name
    return None


@dataclass
class FuseReport:
    """What was swapped, and what kept other modules from it."""

    swapped: Counter[str] = field(default_factory=Counter)
    """Kind of module -> how many: those inside of swapped layers are not counted."""
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
        counts = ", ".join(f"{count} x {what}" for what, count in self.swapped.items())
        _log.info("replaced: %s", counts or "nothing")
        if self.forward is not None and self.forward.program is not None:
            _log.info("a step's layers are one native call")
        for why, count in self.reasons.items():
            _log.info("not replaced (%d): %s", count, why)
        faster = replace(model, weight_bytes=model.weight_bytes + self.added_bytes)
        if self.forward is None:
            return faster
        if not model.sites:
            return replace(faster, forward=self.forward, fused=True)
        adapted = AdaptedForward(self.forward, model.sites)
        made = replace(faster, forward=adapted, fused=True, sites=adapted.sites)
        return replace(made, pack=adapted.pack)


def fuse(
    module: PreTrainedModel, kernels: LayerKernels, length: int, *, norms_alone: bool = False
) -> FuseReport:
    """Swap whatever fits in ``module``, on the device it is on; ``length`` is that of the longest
    sequence.

    Never fails on a model that does not fit: then nothing is swapped. Memory beyond the module's
    own is that of one layer, as each is freed when its successor is in place.
    """
    with torch.inference_mode():
        fuser = _Fuser(module, kernels, length)
        report = fuser.report
        if not norms_alone:
            swap_children(module, "layer", layer_parts, fuser.layer, report)
            swap_children(module, "gated MLP", mlp_parts, fuser.mlp, report)
        swap_children(module, "norm", is_norm, fuser.norm, report)
        if not norms_alone:
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
    while found:  # taken out, so that what was replaced goes before the next one is built
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
    """One search of one model."""

    def __init__(self, module: PreTrainedModel, kernels: LayerKernels, length: int) -> None:
        self.report = FuseReport()
        self._module: Any = module
        self._config: Any = module.config
        self._kernels, self._length = kernels, length
        self._like = embedding_weight(module).new_zeros(1)
        self._checker = Checker(self._like, coarse=bool(coarse_layers(module)))
        self._calls = record_calls(module, lambda m: layer_parts(m) or attention_parts(m))
        self._angles: dict[FusedDecoderLayer, Angles] = {}

    def forward(self) -> FusedForward:
        """The whole model."""
        module = self._module
        parts = dict(module.named_children())
        if set(parts) != {"model", "lm_head"}:
            raise Misfit("it is more than an inner model and a head")
        inner = dict(parts["model"].named_children())
        if set(inner) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise Misfit("its inner model has other parts")
        layers = list(module.model.layers)
        norm, embed, old = inner["norm"], inner["embed_tokens"], module.lm_head
        if not isinstance(norm, FusedNorm) or not all(x in self._angles for x in layers):
            raise Misfit("not all of its parts are fused")
        right = run_trial(module)
        keys = [(self._angles[x].rotary, x.self_attn.half_rotary) for x in layers]
        kinds, length = list(dict.fromkeys(keys)), self._length + _SURPLUS
        tables = [rotary_table(*kind, length, self._like) for kind in kinds]
        head = self._kernels.linear([old])
        softcap = vars(self._config).get("final_logit_softcapping")
        of_layers = [kinds.index(key) for key in keys]
        fused = FusedForward(embed, layers, tables, of_layers, norm, head, softcap, self._kernels)
        self._checker.same(
            "its result without transformers' forward", run_trial(module, fused), right
        )
        module.lm_head = head
        if old.weight is embed.weight and not list(head.parameters()):  # tied, but packed apart
            self.report.added_bytes += old.weight.nbytes
        return fused

    def norm(self, norm: Any) -> FusedNorm:
        """An RMS norm. It multiplies by its weight or by 1 + weight: what it gives tells."""
        epsilon = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
        if not isinstance(epsilon, float):
            raise Misfit("it has no epsilon")
        weight = norm.weight.detach().float()

        def build(scale: Tensor) -> FusedNorm:
            form = NormForm(scale.contiguous(), epsilon)
            fused = FusedNorm(form, self._kernels.norm(form))
            self._checker.check(norm, fused, scale.numel(), NORM_SCALES, {})
            return fused

        try:
            return build(weight)
        except Misfit:
            return build(1.0 + weight)

    def mlp(self, mlp: nn.Module) -> FusedMLP:
        """A gated MLP."""
        parts = mlp_parts(mlp)
        assert parts is not None
        *gate_up, down = parts.products
        activation = known_activation(parts.others[0])
        if activation is None:
            raise Misfit("its activation is unknown")
        kernels = self._kernels
        fused = FusedMLP(kernels.linear(gate_up, activation), kernels.linear([down])).eval()
        self._checker.check(mlp, fused, gate_up[0].in_features, MODULE_SCALES, {})
        return fused

    def layer(self, layer: nn.Module) -> FusedDecoderLayer:
        """A decoder layer."""
        parts, call = layer_parts(layer), self._calls.get(layer, {})
        assert parts is not None
        angles = call.get("position_embeddings")
        if not isinstance(angles, tuple):
            raise Misfit("it takes no rotary embedding")
        old, mlp = parts.others
        attention = self._attention(old, self._calls.get(old, {}))
        if mlp_parts(mlp) is not None:
            try:
                mlp = self.mlp(mlp)
            except Misfit as misfit:  # it is called as it is
                self.report.kept("gated MLP", str(misfit))
        norms = LayerNorms(*(None if norm is None else self.norm(norm) for norm in parts.norms))
        fused = FusedDecoderLayer(attention, mlp, norms, self._kernels).eval()
        self._checker.check(layer, fused, self._config.hidden_size, LAYER_SCALES, call)
        for name, value in vars(layer).items():  # the model around it may ask for its type, say
            if name[0] != "_" and name != "training" and isinstance(value, (str, int, float)):
                setattr(fused, name, value)
        if isinstance(angles, Angles):
            self._angles[fused] = angles
        return fused

    def _attention(self, attention: nn.Module, call: dict[str, Any]) -> FusedAttention:
        parts, width = attention_parts(attention), self._config.hidden_size
        assert parts is not None
        *qkv, output = parts.products
        _, calls = run_alone(attention, self._checker.random(width), call)
        if len(calls) != 1:
            raise Misfit("it does not attend once")
        made, cos, kernels = calls[0], call["position_embeddings"][0], self._kernels
        heads, size = made.query.shape[1:]
        form = AttentionForm(
            made.layer, heads, made.key.shape[1], size,
            made.scale, made.window, made.softcap, made.sinks,
        )  # fmt: skip
        outputs = sum(each.out_features for each in qkv)
        if made.value.shape != made.key.shape or outputs != sum(form.qkv_heads) * size:
            raise Misfit("its projections do not give the heads alone")
        # Else its second half is its first once more.
        half = not torch.equal(*cos.tensor_split(2, -1))
        if cos.shape[-1] * (2 if half else 1) > size:
            raise Misfit("its rotary embedding is wider than a head")
        if parts.norms:
            query, key = (self.norm(norm).form for norm in parts.norms)
            widths = query.scale.numel() // size, key.scale.numel() // size
            if widths not in ((1, 1), form.qkv_heads[:2]) or query.epsilon != key.epsilon:
                raise Misfit("its query and key norms differ")
            form = replace(form, norms=(query, key))
        products = kernels.linear(qkv), kernels.linear([output])
        fused = FusedAttention(form, *products, half, kernels).eval()
        self._checker.check(attention, fused, width, MODULE_SCALES, call)
        return fused
