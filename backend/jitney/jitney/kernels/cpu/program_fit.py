"""Which fused layers can be part of a ``program``, over which caches, and the memory they need.

Called by it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from jitney.execution.interface import LayerCache
from jitney.kernels.cpu.column_linear import ColumnLinear
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.paged_attention import CpuAttention
from jitney.kernels.cpu.program_list import products_of, projection_of
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.latents import FusedLatents
from jitney.kernels.fused.layers import (
    FusedAttention,
    FusedDecoderLayer,
    FusedMixture,
    FusedMLP,
    Mixer,
)
from jitney.kernels.fused.states import FusedStates
from jitney.kernels.fused.whole_model import FusedForward, Places


def _have_whole_columns(places: Sequence[Places]) -> bool:
    """Whether each linear layer that adapters may change gives whole columns of a product's result.
    (A ``Part`` counts single outputs, a column is 16 of them.)"""
    for places_of_layer in places:
        for parts in places_of_layer:
            for part in parts:
                if part.first % LANES != 0 or part.last % LANES != 0:
                    return False
    return True


def check_layer(layer: FusedDecoderLayer) -> None:
    """Raise Misfit if a program cannot run all parts of the layer."""
    if isinstance(layer.mlp, FusedMixture):
        if not isinstance(layer.mlp.router, ColumnLinear):
            raise Misfit("the product of its router is torch's")
        if layer.wiring.factor != 1.0:
            raise Misfit("it has a factor on what its experts give")
    elif not isinstance(layer.mlp, FusedMLP):
        raise Misfit("its MLP is of another kind")
    for product in products_of(layer).values():
        if not isinstance(product, ColumnLinear):
            raise Misfit("its products are torch's")
        # Rows that are filled up would have to be cut between two kernels.
        if product.width != product.out_features:
            raise Misfit("its products have no whole pairs of columns")


def check_adapters(model: FusedForward, places: Sequence[Places]) -> None:
    """Raise Misfit if a program of this model cannot have adapters."""
    if not _have_whole_columns(places):
        raise Misfit("adapters change layers that are no whole columns")
    # The kernels of adapters have no other dtype.
    if model.input_rows.embed.weight.dtype != torch.bfloat16:
        raise Misfit("adapters are bfloat16")
    for layer in model.layers:
        if not isinstance(layer.mixer, FusedAttention) or not isinstance(layer.mlp, FusedMLP):
            raise Misfit("adapters change layers with states, latents or experts")
        # What these add to a product is not scaled with it, and is in the order of gate and up.
        gated: Any = layer.mlp.gated
        if layer.wiring.factor != 1.0 or not gated.is_gated:
            raise Misfit("adapters change layers with a factor, or without a gate")
    # The tables of adapters take all layers to have the same kernels.
    shapes = [_shape(layer) for layer in model.layers]
    if any(shape != shapes[0] for shape in shapes):
        raise Misfit("adapters change layers of different sizes or norms")


class _ProductShape(NamedTuple):
    """What must be the same for a product in all layers."""

    in_features: int
    width: int
    has_conversion: bool
    """Whether a conversion stands before it."""


def _shape(layer: FusedDecoderLayer) -> list[object]:
    """What must be the same in all layers."""
    shapes: list[object] = [layer.wiring.parallel]
    shapes += [norm is not None for norm in layer.norms]
    shapes.append(isinstance(layer.mixer, FusedAttention) and layer.mixer.form.is_gated)
    for product in products_of(layer).values():
        has_conversion = product.converted_row_bytes > 0
        shapes.append(_ProductShape(product.in_features, product.width, has_conversion))
    return shapes


# --------------------------------------------------------------------------- caches and memory


def fits_cache(mixer: Mixer, caches: Sequence[LayerCache], dtype: torch.dtype) -> bool:
    """Whether the kernels of a layer can read and write its cache. ``dtype`` is the model's."""
    if isinstance(mixer, FusedStates):
        return True
    cache = caches[mixer.form.layer]
    if isinstance(mixer, FusedLatents):
        kernel: Any = mixer.kernel
        return cache.again is None and bool(kernel.fits(cache))
    return isinstance(cache.attend, CpuAttention) and cache.attend.dtype == dtype


class Widths(NamedTuple):
    """Of the rows of ``program_list.Activations``: as wide as the widest layer needs."""

    projected: int
    convolved: int
    low: int
    latent: int
    mixed: int
    inside: int


def spare_floats(layers: Sequence[FusedDecoderLayer], tokens: int) -> int:
    """Of ``Activations.spare``, for so many tokens."""
    most = 0
    for layer in layers:
        if isinstance(layer.mixer, FusedLatents):
            kernel: Any = layer.mixer.kernel
            most = max(most, kernel.spare_floats(tokens))
    return most


def widths_of(layers: Sequence[FusedDecoderLayer]) -> Widths:
    """What these layers need."""
    mixers = [layer.mixer for layer in layers]
    states = [mixer for mixer in mixers if isinstance(mixer, FusedStates)]
    over_latents: list[Any] = [mixer for mixer in mixers if isinstance(mixer, FusedLatents)]
    low: list[Any] = [mixer.query_low for mixer in over_latents if mixer.query_low is not None]
    outputs: list[Any] = [mixer.output for mixer in mixers]
    # Experts have memory of their own.
    mlps: list[Any] = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedMLP)]
    return Widths(
        projected=max(projection_of(mixer).out_features for mixer in mixers),
        convolved=max((mixer.form.conv.channels for mixer in states), default=0),
        low=max((product.out_features for product in low), default=0),
        latent=max((mixer.latent.out_features for mixer in over_latents), default=0),
        mixed=max(output.in_features for output in outputs),
        inside=max((mlp.down.in_features for mlp in mlps), default=0),
    )
