"""A step with LoRA adapters, through a model that is fused as a whole.

What adapters give is added between the fused modules, where the module that they replace had it:
before the rotary embedding, the residual sum or the activation. Steps without adapters go the
model's usual way.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.low_rank import AddProducts, Part, Site, plain_products
from jitney.kernels.fused.layers import (
    FusedDecoderLayer,
    FusedForward,
    FusedMLP,
    Places,
    first_of,
)


def find_places(model: FusedForward, sites: Mapping[str, Site]) -> list[Places]:
    """By decoder layer."""

    def parts(prefix: str, *names: str) -> list[Part]:
        found = list[Part]()
        for path in (prefix + name for name in names):
            if path in sites:
                first = found[-1].last if found else 0
                found.append(Part(path, first, first + sites[path].outputs))
        return found

    places = []
    for number, layer in enumerate(model.layers):
        own = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
        qkv = parts(own[0], "q_proj", "k_proj", "v_proj", "qkv_proj")
        gated, down = list[Part](), list[Part]()
        if isinstance(layer.mlp, FusedMLP):
            gated = parts(own[1], "gate_proj", "up_proj", "gate_up_proj")
            down = parts(own[1], "down_proj")
        places.append(Places(qkv, parts(own[0], "o_proj"), gated, down))
    return places


class AdaptedForward:
    """An ``interface.StepFunction`` around a fused model."""

    def __init__(self, model: FusedForward, sites: Mapping[str, Site]) -> None:
        self._model, self._places = model, find_places(model, sites)
        paths = {part.path for place in self._places for parts in place for part in parts}
        self.sites = {path: site for path, site in sites.items() if path in paths}
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
        logits = None if self.program is None else self.program(ids, rows, paged)
        if logits is not None:
            return model.cap(logits)
        residual: Tensor = model.embed(ids)
        angles = model.angles(positions)
        add = plain_products(paged.meta.adapted)
        for layer, kind, places in zip(model.layers, model.kinds, self._places, strict=True):
            residual = _run(layer, residual, angles[kind], paged, places, add)
        return model.cap(model.head(model.norm(residual[rows])))


def _run(
    layer: FusedDecoderLayer,
    residual: Tensor,
    angles: tuple[Tensor, Tensor],
    paged: PagedStep,
    places: Places,
    add: AddProducts,
) -> Tensor:
    """The residual [T, hidden size] behind a layer."""
    attention, mlp, norms = layer.self_attn, layer.mlp, layer.norms
    x = residual if norms.attention is None else norms.attention(residual)
    qkv = attention.qkv(x)
    add(places.qkv, x, qkv)
    x = attention.kernel(qkv, *angles, paged).reshape(len(x), -1)
    out = attention.output(x)
    add(places.output, x, out)
    residual = residual + (out if norms.attended is None else norms.attended(out))
    x = residual if norms.mlp is None else norms.mlp(residual)
    if isinstance(mlp, FusedMLP):
        gated: Any = mlp.gated
        if places.gated:
            more = x.new_zeros(len(x), places.gated[-1].last)
            add(places.gated, x, more)
            x = gated.plus(x, more)
        else:
            x = gated(x)
        out = mlp.down(x)
        add(places.down, x, out)
    else:
        out = first_of(mlp, x)
    return residual + (out if norms.mixed is None else norms.mixed(out))
