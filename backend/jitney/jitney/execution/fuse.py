"""The pass over a loaded model that puts fused CPU modules in the place of its own.

What fits is told by structure and behaviour, never by a model's name: candidates are found by the
parts they have, a fused module is built from those, and both are run on the same random input. Only
what agrees is swapped; the rest stays as it was, and the report says why. Three levels, the largest
first: whole pre-norm decoder layers (:class:`fused.FusedDecoderLayer`), gated MLPs, RMS norms. If
all layers of a plain causal model could be swapped, its ``forward`` is swapped too.

Run once, after loading and before ``linear.prepack_linears``, which takes the layers left over.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import AttentionCall
from jitney.execution.linear import Activation, PackedLinear, can_pack, known_activation
from jitney.execution.structure import (
    PROJECTIONS,
    Checker,
    FuseReport,
    Misfit,
    Mixer,
    NormForm,
    copy_marks,
    is_layer,
    is_mlp,
    is_norm,
    join_linears,
    record_calls,
    refuse_bounds,
    run_trial,
    swap_children,
    trial_input,
)

if TYPE_CHECKING:  # needs Numba
    from jitney.execution.fused import FusedDecoderLayer, FusedMLP, FusedRMSNorm, Kernels
    from jitney.execution.panels import GatedPanels, PanelKernel, PanelLinear


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
        self._checker = Checker(dtype)

    def run(self) -> None:
        """Layers first: a norm or an MLP inside of one that fits needs no swap of its own."""
        module, report = self._module, self._report
        calls = record_calls(module, is_layer)
        report.layers = swap_children(
            module, "layer", is_layer, lambda m: self._fused_layer(m, calls.get(id(m))), report
        )
        report.mlps = swap_children(module, "gated MLP", is_mlp, self._checked_mlp, report)
        report.norms = swap_children(module, "norm", is_norm, self._fused_norm, report)
        try:
            self._swap_forward()
        except Misfit as misfit:
            report.kept("model", str(misfit))

    def _swap_forward(self) -> None:
        from jitney.execution.fused import FusedDecoderLayer, FusedRMSNorm
        from jitney.execution.fused_model import FusedForward

        module: Any = self._module
        inner = getattr(module, "model", None)
        if set(dict(module.named_children())) != {"model", "lm_head"} or inner is None:
            raise Misfit("it is more than an inner model and a head")
        parts = dict(inner.named_children())
        if set(parts) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise Misfit("its inner model has other parts")
        if not (
            type(parts["embed_tokens"]) is nn.Embedding
            and type(module.lm_head) is nn.Linear
            and isinstance(parts["norm"], FusedRMSNorm)
            and all(isinstance(layer, FusedDecoderLayer) for layer in inner.layers)
        ):
            raise Misfit("not all of its parts are fused")
        refuse_bounds(module.config)
        right = run_trial(module)
        ids, positions, some = trial_input(module)
        fused = FusedForward(module)
        got = fused(ids[None], positions[None], some, Mixer()).logits
        self._checker.check("its result without transformers' forward", got[0], right)
        self._report.added_bytes += self._pack_head(module)
        module.forward = FusedForward(module)
        self._report.whole, self._report.program = True, module.forward.has_program

    def _pack_head(self, module: Any) -> int:
        """Pack ``lm_head``, before its place is bound; returns the bytes that this adds."""
        head = module.lm_head
        shared = head.weight is module.model.embed_tokens.weight
        module.lm_head = self._pack(head)
        return head.weight.numel() * head.weight.element_size() if shared else 0

    # ------------------------------------------------------------------ norms

    def _fused_norm(self, norm: Any) -> "FusedRMSNorm":
        from jitney.execution.fused import FusedRMSNorm

        def build(form: NormForm) -> FusedRMSNorm:
            return FusedRMSNorm(form.scale, form.epsilon, self._dtype, self._kernels)

        fused: FusedRMSNorm = self._checker.norm_form(norm, build)
        return fused

    # ------------------------------------------------------------------ gated MLPs

    def _fused_mlp(self, mlp: Any) -> "FusedMLP | GatedPanels":
        from jitney.execution.fused import FusedMLP
        from jitney.execution.panels import ACTIVATIONS, GatedPanels, fits_panels

        activation = known_activation(mlp.act_fn)
        if activation is None:
            raise Misfit(f"activation {type(mlp.act_fn).__name__} is unknown")
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
        self._checker.check_mlp(mlp, fused, mlp.gate_proj.in_features)
        return fused

    # ------------------------------------------------------------------ layers

    def _fused_layer(self, layer: Any, call: dict[str, Any] | None) -> "FusedDecoderLayer":
        refuse_bounds(self._module.config)
        if call is None or "position_embeddings" not in call:
            raise Misfit("it takes no rotary embedding")
        hidden = self._checker.hidden(layer.self_attn.q_proj.in_features)
        before, after = Mixer(), Mixer()
        right = layer(hidden, **{**call, "paged": before})
        if not isinstance(right, Tensor) or len(before.calls) != 1:
            raise Misfit("it returns more than one tensor, or attends more than once")
        fused = self._build_layer(layer, before.calls[0])
        got = fused(hidden, **{**call, "paged": after})
        self._checker.check_calls(after.calls[0], before.calls[0])
        self._checker.check("its result", got - hidden, right - hidden, residual=hidden)
        copy_marks(layer, fused)
        return fused.eval()

    def _build_layer(self, layer: Any, call: AttentionCall) -> "FusedDecoderLayer":
        from jitney.execution.fused import AttentionForm, FusedDecoderLayer, HeadRotation

        attention = layer.self_attn
        query_heads, head_size = call.query.shape[1:]
        key_heads = call.key.shape[1]
        sizes = [getattr(attention, name).out_features // head_size for name in PROJECTIONS]
        if sizes != [query_heads, key_heads, key_heads] or call.value.shape != call.key.shape:
            raise Misfit("its projections do not give the heads alone")
        norms = None
        if hasattr(attention, "q_norm"):
            query_norm, key_norm = (
                self._fused_norm(attention.q_norm),
                self._fused_norm(attention.k_norm),
            )
            if {query_norm.scale.numel(), key_norm.scale.numel()} != {head_size}:
                raise Misfit("it norms queries or keys over all heads")
            if query_norm.epsilon != key_norm.epsilon:
                raise Misfit("its query and key norms differ")
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
            self._pack(*(getattr(attention, name) for name in PROJECTIONS)),
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
        weight, bias = join_linears(linears)
        return PackedLinear(weight, bias, self._rows)

    def _panel_linear(
        self, linears: list[nn.Linear], activation: Activation | None = None
    ) -> "PanelLinear":
        from jitney.execution.panels import PanelLinear

        assert self._panels is not None
        return PanelLinear(*join_linears(linears), self._panels, activation)
