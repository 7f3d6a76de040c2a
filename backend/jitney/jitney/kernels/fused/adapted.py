"""A step with LoRA adapters, through a model that is fused as a whole. Built by ``fuse``.

An adapter's product is added to the result of a linear layer, before anything else is computed from
that result: the rotary embedding, the activation, the sum with the residual. Fused modules compute
these together with the linear layer. So a step with adapters calls the parts of a fused layer one
by one. Steps without adapters go the model's usual way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.low_rank import AddProducts, Part, Site
from jitney.kernels.fused.forms import Norm
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP, call_mlp
from jitney.kernels.fused.rotary import CosSin
from jitney.kernels.fused.whole_model import FusedForward, Places


def find_places(model: FusedForward, sites: Mapping[str, Site]) -> list[Places]:
    """What adapters may change in each decoder layer: those of ``sites`` that are joined into its
    four products."""
    places = []
    for number, layer in enumerate(model.layers):
        prefix = f"{model.layers_path}.{number}."
        paths = layer.linear_paths
        found = Places(
            qkv=_parts(sites, prefix, paths.qkv),
            output=_parts(sites, prefix, paths.output),
            gated=_parts(sites, prefix, paths.gated),
            down=_parts(sites, prefix, paths.down),
        )
        places.append(found)
    return places


def _parts(sites: Mapping[str, Site], prefix: str, names: Sequence[str]) -> list[Part]:
    """The linear layers ``names`` as parts of one product. Their results stand side by side in its
    result. All of them are among ``sites``, so there is no gap between the parts."""
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
        """``sites``: the linear layers of the module as it was loaded."""
        self._model = model
        self._places = find_places(model, sites)
        reached: set[str] = set()
        for places in self._places:
            for parts in places:
                reached.update(part.path for part in parts)
        self.sites = {path: site for path, site in sites.items() if path in reached}
        """Those that adapters may change."""
        kernels = model.kernels.adapted(model, self._places)
        self.pack = kernels.pack
        self.program = kernels.program
        self._begin_products = kernels.begin_products

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
                return logits

        cos_sin = model.cos_sin(positions)
        add = self._begin_products(paged.meta.adapted)
        residual = model.input_rows(ids, positions)
        layers = zip(model.layers, model.table_of_layer, self._places, strict=True)
        for layer, table, places in layers:
            residual = _run_layer(
                layer=layer,
                residual=residual,
                cos_sin=cos_sin[table],
                paged=paged,
                places=places,
                add=add,
            )
        found: Tensor = model.head(model.norm(residual[rows]))
        return found


def _run_layer(
    layer: FusedDecoderLayer,
    residual: Tensor,
    cos_sin: CosSin,
    paged: PagedStep,
    places: Places,
    add: AddProducts,
) -> Tensor:
    """The residual [T, hidden size] after a layer. ``add`` adds what the step's adapters give."""
    norms = layer.norms
    wiring = layer.wiring
    x = _normed(norms.attention, residual)
    attended = _attend(layer.self_attn, x=x, cos_sin=cos_sin, paged=paged, places=places, add=add)
    middle = residual + _scaled(_normed(norms.after_attention, attended), wiring.factor)

    if not wiring.parallel:
        x = _normed(norms.mlp, middle)
    elif norms.mlp is not None:
        x = norms.mlp(residual)
    if isinstance(layer.mlp, FusedMLP):
        out = _run_mlp(layer.mlp, x=x, places=places, add=add)
    else:
        out = call_mlp(layer.mlp, x)
    return middle + _scaled(_normed(norms.after_mlp, out), wiring.factor)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _normed(norm: Norm, x: Tensor) -> Tensor:
    return x if norm is None else norm.kernel(x)


def _attend(
    attention: FusedAttention,
    x: Tensor,
    cos_sin: CosSin,
    paged: PagedStep,
    places: Places,
    add: AddProducts,
) -> Tensor:
    """The output of attention [T, hidden size]."""
    qkv = attention.qkv(x)
    add(places.qkv, x, qkv)
    heads = attention.kernel(qkv, *cos_sin, paged).reshape(len(x), -1)
    out: Tensor = attention.output(heads)
    add(places.output, heads, out)
    return out


def _run_mlp(mlp: FusedMLP, x: Tensor, places: Places, add: AddProducts) -> Tensor:
    """The output of an MLP [T, hidden size]."""
    gated: Any = mlp.gated
    if places.gated:
        # ``gated`` computes the activation as well, but adapters change gate and up before that.
        # Its method ``plus`` takes what is to be added to them.
        from_adapters = x.new_zeros(len(x), places.gated[-1].last)
        add(places.gated, x, from_adapters)
        inner = gated.plus(x, from_adapters)
    else:
        inner = gated(x)
    out: Tensor = mlp.down(inner)
    add(places.down, inner, out)
    return out
