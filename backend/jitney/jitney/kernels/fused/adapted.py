"""A step with LoRA adapters, through a model that is fused as a whole. Built by ``fuse``.

The product of an adapter is added to that of the linear layer it belongs to, before anything is
computed from it: the rotary embedding, the sum with the residual, the activation. A step with
adapters therefore calls the parts of a fused layer one by one. Steps without adapters go the
model's usual way.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.low_rank import AddProducts, Part, Site, plain_products
from jitney.kernels.fused.forms import Norm
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP, call_mlp
from jitney.kernels.fused.rotary import CosSin
from jitney.kernels.fused.whole_model import FusedForward, Places


def find_places(model: FusedForward, sites: Mapping[str, Site]) -> list[Places]:
    """By decoder layer."""
    places = []
    for number, layer in enumerate(model.layers):
        attention = f"model.layers.{number}.self_attn."
        mlp = f"model.layers.{number}.mlp."
        is_fused = isinstance(layer.mlp, FusedMLP)  # one that is called as it is has no adapters
        gate_up = ("gate_proj", "up_proj", "gate_up_proj")
        found = Places(
            qkv=_parts(sites, attention, "q_proj", "k_proj", "v_proj", "qkv_proj"),
            output=_parts(sites, attention, "o_proj"),
            gated=_parts(sites, mlp, *gate_up) if is_fused else [],
            down=_parts(sites, mlp, "down_proj") if is_fused else [],
        )
        places.append(found)
    return places


def _parts(sites: Mapping[str, Site], prefix: str, *names: str) -> list[Part]:
    """Those of ``names`` that are sites, with the columns that they have in the result of the fused
    layer: one behind the other, in this order."""
    found: list[Part] = []
    first = 0
    for name in names:
        site = sites.get(prefix + name)
        if site is not None:
            last = first + site.outputs
            found.append(Part(prefix + name, first, last))
            first = last
    return found


class AdaptedForward:
    """An ``interface.StepFunction`` around a fused model."""

    def __init__(self, model: FusedForward, sites: Mapping[str, Site]) -> None:
        self._model = model
        self._places = find_places(model, sites)
        reached: set[str] = set()
        for places in self._places:
            for parts in places:
                reached.update(part.path for part in parts)
        self.sites = {path: site for path, site in sites.items() if path in reached}
        """Those that adapters may change: not inside of an MLP that is called as it is."""
        self.pack, self.program = model.kernels.adapted(model, self._places)

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, paged: PagedFunction
    ) -> Tensor:
        """As the model's."""
        model = self._model
        if not isinstance(paged, PagedStep) or not paged.meta.adapted:
            return model(ids, positions, rows, paged)
        if self.program is not None:
            logits = self.program(ids, rows, paged)
            if logits is not None:
                return model.cap(logits)

        angles = model.angles(positions)
        add = plain_products(paged.meta.adapted)
        residual: Tensor = model.embed(ids)
        layers = zip(model.layers, model.table_of_layer, self._places, strict=True)
        for layer, table, places in layers:
            residual = _run_layer(layer, residual, angles[table], paged, places, add)
        return model.cap(model.head(model.norm(residual[rows])))


def _run_layer(
    layer: FusedDecoderLayer,
    residual: Tensor,
    angles: CosSin,
    paged: PagedStep,
    places: Places,
    add: AddProducts,
) -> Tensor:
    """The residual [T, hidden size] behind a layer."""
    norms = layer.norms
    x = _normed(norms.attention, residual)
    attended = _attend(layer.self_attn, x, angles, paged, places, add)
    residual = residual + _normed(norms.attended, attended)

    x = _normed(norms.mlp, residual)
    if isinstance(layer.mlp, FusedMLP):
        out = _run_mlp(layer.mlp, x, places, add)
    else:
        out = call_mlp(layer.mlp, x)
    return residual + _normed(norms.mixed, out)


def _normed(norm: Norm, x: Tensor) -> Tensor:
    return x if norm is None else norm.kernel(x)


def _attend(
    attention: FusedAttention,
    x: Tensor,
    angles: CosSin,
    paged: PagedStep,
    places: Places,
    add: AddProducts,
) -> Tensor:
    qkv = attention.qkv(x)
    add(places.qkv, x, qkv)
    heads = attention.kernel(qkv, *angles, paged).reshape(len(x), -1)
    out: Tensor = attention.output(heads)
    add(places.output, heads, out)
    return out


def _run_mlp(mlp: FusedMLP, x: Tensor, places: Places, add: AddProducts) -> Tensor:
    gated: Any = mlp.gated
    if places.gated:
        # The activation is computed inside of ``gated``. Its method ``plus`` adds the second
        # argument to gate and up before that.
        from_adapters = x.new_zeros(len(x), places.gated[-1].last)
        add(places.gated, x, from_adapters)
        inner = gated.plus(x, from_adapters)
    else:
        inner = gated(x)
    out: Tensor = mlp.down(inner)
    add(places.down, inner, out)
    return out
