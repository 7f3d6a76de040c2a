"""A step with LoRA adapters, through a model that is fused as a whole (:class:`AdaptedForward`) or
in parts (:class:`AdaptedModules`). Built by ``fuse``.

An adapter's product is added to the result of a linear layer, before anything else is computed from
that result: the rotary embedding, the activation, the sum with the residual. Fused modules compute
these together with the linear layer. So a step with adapters calls the parts of a fused module one
by one. Linear layers that were not fused get hooks. Steps without adapters go the model's usual
way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.interface import PagedFunction, PagedStep, call_module
from jitney.execution.low_rank import (
    AdapterSpan,
    AddProducts,
    BeginProducts,
    Hooks,
    Part,
    Site,
    changed_paths,
)
from jitney.kernels.fused.forms import Norm
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP, call_mlp
from jitney.kernels.fused.rotary import CosSin, whole_rotary
from jitney.kernels.fused.whole_model import FusedForward, ModelKernels, Places

# ------------------------------------------------------------------ what adapters may change


def find_places(model: FusedForward, sites: Mapping[str, Site]) -> list[Places]:
    """What adapters may change in each decoder layer: those of ``sites`` that are joined into its
    four products."""
    return [
        _places_of(layer, f"model.layers.{number}", sites)
        for number, layer in enumerate(model.layers)
    ]


def _places_of(layer: FusedDecoderLayer, path: str, sites: Mapping[str, Site]) -> Places:
    """The same for one layer, which stands at ``path``."""
    attention = f"{path}.self_attn."
    of_mlp = Places(qkv=[], output=[], gated=[], down=[])
    if isinstance(layer.mlp, FusedMLP):  # another one is called as it is: see _CalledModules
        of_mlp = _places_of_mlp(f"{path}.mlp", sites)
    return of_mlp._replace(
        qkv=_parts(sites, attention, "q_proj", "k_proj", "v_proj", "qkv_proj"),
        output=_parts(sites, attention, "o_proj"),
    )


def _places_of_mlp(path: str, sites: Mapping[str, Site]) -> Places:
    """The same for a fused MLP."""
    return Places(
        qkv=[],
        output=[],
        gated=_parts(sites, f"{path}.", "gate_proj", "up_proj", "gate_up_proj"),
        down=_parts(sites, f"{path}.", "down_proj"),
    )


def _parts(sites: Mapping[str, Site], prefix: str, *names: str) -> list[Part]:
    """The sites among ``names`` as parts of one product. Their results stand side by side in its
    result, in the order of ``names``.

    ``names`` has those of separate linear layers and that of a merged one. ``sites`` has all linear
    layers of the decoder layer, which are either the separate ones or the merged one. So there is
    no gap between the parts."""
    found: list[Part] = []
    first = 0
    for name in names:
        site = sites.get(prefix + name)
        if site is not None:
            last = first + site.outputs
            found.append(Part(prefix + name, first, last))
            first = last
    return found


# ------------------------------------------------------------------ modules that are called


class _Fused(NamedTuple):
    """A fused module that transformers' code calls, and what adapters may change in it."""

    module: FusedDecoderLayer | FusedMLP
    places: Places


class _CalledModules:
    """Modules that transformers' code calls: what adapters may change in them."""

    def __init__(self, roots: Mapping[str, nn.Module], sites: Mapping[str, Site]) -> None:
        """``roots``: by path, the modules in which to look."""
        self._fused: list[_Fused] = []
        self._linears: dict[str, nn.Module] = {}
        """By path: linear layers that stand there as they were loaded."""
        of_layers: set[nn.Module] = set()
        for root_path, root in roots.items():
            for path, module in root.named_modules(prefix=root_path):  # outer modules come first
                if isinstance(module, FusedDecoderLayer):
                    self._fused.append(_Fused(module, _places_of(module, path, sites)))
                    of_layers.add(module.mlp)
                elif isinstance(module, FusedMLP):
                    if module not in of_layers:
                        self._fused.append(_Fused(module, _places_of_mlp(path, sites)))
                elif path in sites:
                    self._linears[path] = module

    def products(self, sites: Mapping[str, Site]) -> list[list[Part]]:
        """All products, by their parts. A linear layer is a product of one part."""
        products = [parts for fused in self._fused for parts in fused.places if parts]
        for path in self._linears:
            products.append([Part(path, first=0, last=sites[path].outputs)])
        return products

    @contextmanager
    def adding(self, spans: Sequence[AdapterSpan], add: AddProducts) -> Iterator[None]:
        """A context in which the modules add what a step's adapters give."""
        changed = changed_paths(spans)
        linears = {path: each for path, each in self._linears.items() if path in changed}
        with ExitStack() as stack:
            stack.enter_context(Hooks(linears, add))
            for fused in self._fused:
                paths = {part.path for parts in fused.places for part in parts}
                if not paths.isdisjoint(changed):
                    stack.enter_context(_calling(fused.module, _adapted_forward(fused, add)))
            yield


@contextmanager
def _calling(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """A context in which ``forward`` takes the place of the module's own."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _adapted_forward(fused: _Fused, add: AddProducts) -> Callable[..., Tensor]:
    """What computes a fused module with its adapters."""
    if isinstance(fused.module, FusedDecoderLayer):
        return partial(_call_layer, fused.module, fused.places, add)
    return partial(_call_fused_mlp, fused.module, fused.places, add)


def _call_layer(
    layer: FusedDecoderLayer,
    places: Places,
    add: AddProducts,
    hidden_states: Tensor,
    *,
    position_embeddings: CosSin,
    paged: PagedStep,
    **unused: object,
) -> Tensor:
    """As :meth:`FusedDecoderLayer.forward`."""
    total = _run_layer(
        layer=layer,
        residual=hidden_states[0],
        cos_sin=whole_rotary(position_embeddings, layer.self_attn.half_rotary),
        paged=paged,
        places=places,
        add=add,
    )
    return total.unsqueeze(0)


def _call_fused_mlp(mlp: FusedMLP, places: Places, add: AddProducts, x: Tensor) -> Tensor:
    """As :meth:`FusedMLP.forward`."""
    rows = x.reshape(-1, x.shape[-1])
    return _run_mlp(mlp, x=rows, places=places, add=add).view(x.shape)


def _reached(sites: Mapping[str, Site], products: Sequence[Sequence[Part]]) -> dict[str, Site]:
    """Those of ``sites`` that are a part of any product."""
    paths = {part.path for parts in products for part in parts}
    return {path: site for path, site in sites.items() if path in paths}


# ------------------------------------------------------------------ steps


class AdaptedModules:
    """An ``interface.StepFunction``: transformers' module, in which some modules may be fused."""

    def __init__(
        self, module: PreTrainedModel, kernels: ModelKernels, sites: Mapping[str, Site]
    ) -> None:
        """``sites``: the linear layers of the module as it was loaded."""
        self._module = module
        self._called = _CalledModules({"": module}, sites)
        products = self._called.products(sites)
        self.sites = _reached(sites, products)
        """Those that adapters may change."""
        adapted = kernels.adapted_products(products)
        self.pack = adapted.pack
        self._begin_products = adapted.begin_products

    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, paged: PagedFunction
    ) -> Tensor:
        """As ``interface.forward_module``."""
        if not isinstance(paged, PagedStep) or not paged.meta.adapted:
            return call_module(self._module, ids, positions, rows, paged)
        spans = paged.meta.adapted
        with self._called.adding(spans, self._begin_products(spans)):
            return call_module(self._module, ids, positions, rows, paged)


class AdaptedForward:
    """An ``interface.StepFunction`` around a fused model."""

    def __init__(self, model: FusedForward, sites: Mapping[str, Site]) -> None:
        """``sites``: the linear layers of the module as it was loaded."""
        self._model = model
        self._places = find_places(model, sites)
        self._unfused_mlps = _CalledModules(
            {
                f"model.layers.{number}.mlp": layer.mlp
                for number, layer in enumerate(model.layers)
                if not isinstance(layer.mlp, FusedMLP)
            },
            sites,
        )
        products = [parts for places in self._places for parts in places]
        products += self._unfused_mlps.products(sites)
        self.sites = _reached(sites, products)
        """Those that adapters may change."""
        adapted = model.kernels.adapted_program(model, self._places)
        if adapted is None:
            adapted = model.kernels.adapted_products(products)
        self.pack = adapted.pack
        self.program = adapted.program
        self._begin_products: BeginProducts = adapted.begin_products

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

        cos_sin = model.cos_sin(positions)
        add = self._begin_products(paged.meta.adapted)
        residual: Tensor = model.embed(ids)
        layers = zip(model.layers, model.table_of_layer, self._places, strict=True)
        with self._unfused_mlps.adding(paged.meta.adapted, add):
            for layer, table, places in layers:
                residual = _run_layer(
                    layer=layer,
                    residual=residual,
                    cos_sin=cos_sin[table],
                    paged=paged,
                    places=places,
                    add=add,
                )
        return model.cap(model.head(model.norm(residual[rows])))


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
    x = _normed(norms.attention, residual)
    attended = _attend(layer.self_attn, x=x, cos_sin=cos_sin, paged=paged, places=places, add=add)
    residual = residual + _normed(norms.after_attention, attended)

    x = _normed(norms.mlp, residual)
    if isinstance(layer.mlp, FusedMLP):
        out = _run_mlp(layer.mlp, x=x, places=places, add=add)
    else:
        out = call_mlp(layer.mlp, x)
    return residual + _normed(norms.after_mlp, out)


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
