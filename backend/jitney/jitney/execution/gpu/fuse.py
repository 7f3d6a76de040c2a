"""The pass over a loaded model that puts fused modules in the place of its own, on a GPU.

What fits is told by structure and behaviour (``structure``): candidates are found by the parts they
have (``parts``), and a fused module is swapped in only if it gives the same on the same input. The
largest first: whole decoder layers (``layers.FusedLayer``), attentions, gated MLPs, RMS norms. If
all layers of a causal model could be swapped, its ``forward`` is swapped too (``forward``).

Run once, after loading and quantization. With option ``batch_invariant``, products and norms that
depend on the batch are replaced as well, whatever could be fused (``invariant``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.execution.gpu.forward import FusedForward, RotaryTable
from jitney.execution.gpu.invariant import check_invariant, make_invariant
from jitney.execution.gpu.layers import (
    AttentionForm,
    FusedAttention,
    FusedLayer,
    FusedMlp,
    JoinedLinear,
    LayerNorms,
)
from jitney.execution.gpu.norm import RmsNorm
from jitney.execution.gpu.parts import (
    activation_of,
    gate_projections,
    is_attention,
    is_gated_mlp,
    is_layer,
    layer_norms,
    merged,
    query_projections,
)
from jitney.execution.interface import AttentionCall
from jitney.execution.linear import known_activation
from jitney.execution.quantize_fp8 import Fp8Linear
from jitney.execution.structure import (
    TOKENS,
    Checker,
    FuseReport,
    Misfit,
    Mixer,
    copy_marks,
    is_norm,
    largest_finite,
    record_calls,
    refuse_bounds,
    run_trial,
    swap_children,
    trial_input,
)

_ATTENTION_SCALES = (1.0, 2.0**8)
"""An attention that clips its projections shows it only where they are large."""
_SURPLUS = 64
"""Positions behind the longest sequence that a step launched before its end was known may have."""
# Options that bound values: of the logits, which the whole model does; of attention's scores, which
# a call of attention carries; and of what happens inside of MLPs, by words in their names.
_HEAD_BOUND = "final_logit_softcapping"
_SCORE_BOUND = "attn_logit_softcapping"
_MLP_WORDS = ("glu", "mlp", "expert", "router")


def fuse_for_gpu(module: PreTrainedModel, config: EngineConfig) -> FuseReport:
    """Swap whatever fits in ``module``, on the device it is on.

    Never fails on a model that does not fit: then nothing is swapped. Memory beyond the module's
    own is that of one layer, as each is freed when its successor is in place. Raises ConfigError if
    ``batch_invariant`` is set and the model cannot be made so.
    """
    report = FuseReport()
    _silence_padding(module)
    with torch.inference_mode():
        work = _Pass(module, config, report)
        if config.fuse:
            work.swap_parts()
        if config.batch_invariant:
            work.swap_norms()
            make_invariant(module, config, report)
        if config.fuse:
            work.swap_forward()
        if config.batch_invariant:
            check_invariant(module)
    if module.device.type == "cuda":
        torch.cuda.empty_cache()  # unmerged weights have left gaps that nothing else fits into
    return report


class _RotaryCall(NamedTuple):
    """One call of a rotary module in a trial."""

    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """The call for other input."""
    cos: Tensor


class _Pass:
    """One run over one model."""

    def __init__(self, module: PreTrainedModel, config: EngineConfig, report: FuseReport) -> None:
        self._module: Any = module
        self._config = config
        self._report = report
        weight = module.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        self._like = weight.new_zeros(1)
        coarse = any(isinstance(each, Fp8Linear) for each in module.modules())
        self._checker = Checker(weight.dtype, weight.device, coarse=coarse)
        self._calls: dict[int, dict[str, Any]] = {}
        self._rotaries: list[_RotaryCall] = []
        self._rotary_of: dict[nn.Module, int] = {}
        """Fused layer -> place among the rotary calls."""

    def swap_parts(self) -> None:
        """Layers first: what is inside of one that fits needs no swap of its own."""
        module, report = self._module, self._report
        hooks = self._record_rotaries()
        try:
            self._calls = record_calls(module, lambda m: is_layer(m) or is_attention(m))
        finally:
            for hook in hooks:
                hook.remove()
        report.layers = swap_children(module, "layer", is_layer, self._fused_layer, report)
        report.attentions = swap_children(
            module, "attention", is_attention, self._fused_attention, report
        )
        report.mlps = swap_children(module, "gated MLP", is_gated_mlp, self._fused_mlp, report)
        self.swap_norms()
        self._calls = {}

    def swap_norms(self) -> None:
        """Those that are left."""
        found = swap_children(self._module, "norm", is_norm, self._fused_norm, self._report)
        self._report.norms += found

    def swap_forward(self) -> None:
        """The whole model, if all of it is fused."""
        try:
            self._module.forward = self._whole()
            self._report.whole = True
        except Misfit as misfit:
            self._report.kept("model", str(misfit))

    # ------------------------------------------------------------------ the model

    def _record_rotaries(self) -> list[Any]:
        """Hooks that note what gives pairs of tensors, as rotary modules do."""

        def note(made: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            pair = isinstance(output, tuple) and len(output) == 2
            if not pair or not all(isinstance(part, Tensor) for part in output):
                return
            rest = args[2:] if len(args) >= 2 else ()
            named = {k: v for k, v in kwargs.items() if k not in ("x", "position_ids")}
            call = lambda x, positions: made(x, positions, *rest, **named)  # noqa: E731
            self._rotaries.append(_RotaryCall(call, output[0]))

        inner = getattr(self._module, "model", None)
        found = [] if inner is None else list(inner.children())
        return [each.register_forward_hook(note, with_kwargs=True) for each in found]

    def _whole(self) -> FusedForward:
        module = self._module
        inner = getattr(module, "model", None)
        if set(dict(module.named_children())) != {"model", "lm_head"} or inner is None:
            raise Misfit("it is more than an inner model and a head")
        parts = dict(inner.named_children())
        if not {"embed_tokens", "layers", "norm", "rotary_emb"} == set(parts):
            raise Misfit("its inner model has other parts")
        layers = list(inner.layers)
        if not isinstance(inner.norm, RmsNorm) or not all(
            isinstance(layer, FusedLayer) and layer in self._rotary_of for layer in layers
        ):
            raise Misfit("not all of its parts are fused")
        right = run_trial(module)
        fused = FusedForward(
            inner.embed_tokens,
            *self._tables(layers),
            inner.norm,
            module.lm_head,
            getattr(module.config, _HEAD_BOUND, None),
        )
        got = fused.step(*trial_input(module), Mixer())
        self._checker.check("its result without transformers' forward", got, right)
        return fused

    def _tables(
        self, layers: list[FusedLayer]
    ) -> tuple[list[RotaryTable], list[FusedLayer], list[int]]:
        """The tables that ``layers`` need, and for each layer which of them it is."""
        length = self._config.max_model_len or getattr(
            self._module.config, "max_position_embeddings", None
        )
        if length is not None:
            length += _SURPLUS
        tables: list[RotaryTable] = []
        places: dict[tuple[int, bool], int] = {}
        for layer in layers:
            key = self._rotary_of[layer], layer.self_attn.half_rotary
            if key not in places:
                places[key] = len(tables)
                rotary = self._rotaries[key[0]].rotary
                tables.append(RotaryTable(rotary, key[1], length, self._like))
        numbers = [places[self._rotary_of[x], x.self_attn.half_rotary] for x in layers]
        return tables, layers, numbers

    # ------------------------------------------------------------------ layers

    def _fused_layer(self, layer: Any) -> FusedLayer:
        call = self._call_of(layer)
        found = layer_norms(layer)
        assert found is not None
        attention = self._fused_attention(layer.self_attn)
        norms = LayerNorms(*(None if norm is None else self._fused_norm(norm) for norm in found))
        mlp = self._mlp_of(layer)
        hidden = self._checker.hidden(self._module.config.hidden_size)
        right = _alone(layer, hidden, **{**call, "paged": Mixer()})
        if not isinstance(right, Tensor):
            raise Misfit("it returns more than one tensor")
        fused = FusedLayer(attention, mlp, norms)
        got = fused(hidden, **{**call, "paged": Mixer()})
        self._checker.check("its result", got - hidden, right - hidden, residual=hidden)
        copy_marks(layer, fused)
        cos = call["position_embeddings"][0]
        for place, made in enumerate(self._rotaries):
            if made.cos is cos:
                self._rotary_of[fused] = place
        return fused.eval()

    def _call_of(self, module: nn.Module) -> dict[str, Any]:
        call = self._calls.get(id(module))
        if call is None or not isinstance(call.get("position_embeddings"), tuple):
            raise Misfit("it takes no rotary embedding")
        return {k: v for k, v in call.items() if k != "hidden_states"}

    def _mlp_of(self, layer: Any) -> nn.Module:
        """The layer's MLP, fused if it is a gated one; any other is called as it is."""
        mlp: nn.Module = layer.mlp
        if is_gated_mlp(mlp):
            try:
                return self._fused_mlp(mlp)
            except Misfit as misfit:
                self._report.kept("gated MLP", str(misfit))
        return mlp

    # ------------------------------------------------------------------ parts

    def _fused_attention(self, attention: Any) -> FusedAttention:
        self._refuse_bounds(of_mlps=False)
        call = self._call_of(attention)
        width = self._module.config.hidden_size
        inputs, rights, mixers = [], [], []
        for scale in _ATTENTION_SCALES:
            tried: list[Mixer] = []

            def attend(x: Tensor, tried: list[Mixer] = tried) -> Any:
                tried.append(Mixer())
                return _alone(attention, **{**call, "hidden_states": x, "paged": tried[-1]})[0]

            x, right = largest_finite(attend, self._checker.draw(1, TOKENS, width), scale)
            inputs.append(x)
            rights.append(right)
            mixers.append(tried[-1])
        if any(len(each.calls) != 1 for each in mixers):
            raise Misfit("it does not attend once")
        reason = ""
        for half in (False, True):
            fused = self._build_attention(attention, mixers[0].calls[0], half)
            try:
                for x, right, before in zip(inputs, rights, mixers, strict=True):
                    self._check_attention(fused, call, x, right, before)
                return fused.eval()
            except Misfit as misfit:  # its text alone: an error kept would keep the weights
                reason = str(misfit)
        raise Misfit(reason)

    def _check_attention(
        self, fused: FusedAttention, call: dict[str, Any], x: Tensor, right: Tensor, before: Mixer
    ) -> None:
        cos = call["position_embeddings"][0]
        size = fused.form.head_size
        if cos.shape[-1] * (2 if fused.half_rotary else 1) > size:
            raise Misfit("its rotary embedding is wider than a head")
        after = Mixer()
        got = fused(hidden_states=x, **{**call, "paged": after})[0]
        self._checker.check_calls(after.calls[0], before.calls[0])
        self._checker.check("its result", got, right)

    def _build_attention(self, attention: Any, call: AttentionCall, half: bool) -> FusedAttention:
        query_heads, head_size = call.query.shape[1:]
        key_heads = call.key.shape[1]
        if call.value.shape != call.key.shape:
            raise Misfit("its keys and values differ in shape")
        norms = None
        if hasattr(attention, "q_norm"):
            query, key = self._fused_norm(attention.q_norm), self._fused_norm(attention.k_norm)
            widths = query.scale.numel() // head_size, key.scale.numel() // head_size
            if widths not in ((1, 1), (query_heads, key_heads)) or query.epsilon != key.epsilon:
                raise Misfit("its query and key norms differ")
            norms = (query, key)
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
        projections = query_projections(attention)
        assert projections is not None
        return FusedAttention(form, _joined(projections), norms, attention.o_proj, half)

    def _fused_mlp(self, mlp: Any) -> FusedMlp:
        self._refuse_bounds(of_mlps=True)
        activation = known_activation(activation_of(mlp))
        if activation is None:
            raise Misfit("its activation is unknown")
        projections = gate_projections(mlp)
        assert projections is not None
        fused = FusedMlp(_joined(projections), mlp.down_proj, activation)
        width: Any = projections[0].in_features
        self._checker.check_mlp(mlp, fused, width)
        return fused.eval()

    def _fused_norm(self, norm: Any) -> RmsNorm:
        fused: RmsNorm = self._checker.norm_form(norm, RmsNorm)
        return fused

    def _refuse_bounds(self, *, of_mlps: bool) -> None:
        """Refuse options that bound what an MLP, or what an attention computes."""
        names = vars(self._module.config)
        mlps = {name for name in names if any(word in name for word in _MLP_WORDS)}
        known = set(names) - mlps if of_mlps else mlps | {_HEAD_BOUND, _SCORE_BOUND}
        refuse_bounds(self._module.config, known)


def _alone(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a module of the model's own gives by itself. Raises Misfit if it needs more around it:
    what another layer has left for it, say."""
    try:
        return module(*args, **kwargs)
    except (TypeError, LookupError, AttributeError, ValueError, AssertionError) as error:
        raise Misfit(f"it cannot be run alone ({type(error).__name__})") from error


def _silence_padding(module: nn.Module) -> None:
    """Some models look for padding among the ids in each call, to warn of it, which makes the host
    wait for the device. There is no padding here."""
    for each in module.modules():
        if hasattr(each, "warn_if_padding_and_no_attention_mask"):
            vars(each)["warn_if_padding_and_no_attention_mask"] = _nothing


def _nothing(*_: object) -> None:
    pass


def _joined(products: list[nn.Module]) -> nn.Module:
    together = merged(products)
    return JoinedLinear(products) if together is None else together
