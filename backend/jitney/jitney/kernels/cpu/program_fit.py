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
from jitney.kernels.fused.latents import FusedLatents
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP, Mixer
from jitney.kernels.fused.states import FusedStates
from jitney.kernels.fused.whole_model import Places


def have_whole_columns(places: Sequence[Places]) -> bool:
    """Whether each linear layer that adapters may change gives whole columns of a product's result.
    (A ``Part`` counts single outputs, a column is 16 of them.)"""
    for places_of_layer in places:
        for parts in places_of_layer:
            for part in parts:
                if part.first % LANES != 0 or part.last % LANES != 0:
                    return False
    return True


def can_run_layer(layer: FusedDecoderLayer) -> bool:
    """Whether a program can run all parts of the layer."""
    norms = layer.norms
    # One norm before each branch, and none behind.
    if norms.attention is None or norms.mlp is None:
        return False
    if norms.after_attention is not None or norms.after_mlp is not None:
        return False
    if not isinstance(layer.mlp, FusedMLP):
        return False
    # The arguments that the program writes down have no sinks.
    if isinstance(layer.mixer, FusedAttention) and layer.mixer.form.sinks is not None:
        return False
    for product in products_of(layer):
        if not isinstance(product, ColumnLinear):
            return False
        # Rows that are filled up would have to be cut between two kernels.
        if product.width != product.out_features:
            return False
    return True


def can_be_adapted(layers: Sequence[FusedDecoderLayer]) -> bool:
    """Whether a program can have adapters for the products of these layers: its tables of adapters
    take all layers to be alike."""
    shapes = [_shape(layer) for layer in layers]
    return all(shape == shapes[0] for shape in shapes)


class _ProductShape(NamedTuple):
    """What must be the same for a product in all layers."""

    in_features: int
    width: int
    has_conversion: bool
    """Whether a conversion stands before it."""


def _shape(layer: FusedDecoderLayer) -> list[_ProductShape]:
    """What must be the same in all layers."""
    shapes = []
    for product in products_of(layer):
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
    mlps: list[Any] = [layer.mlp for layer in layers]
    return Widths(
        projected=max(projection_of(mixer).out_features for mixer in mixers),
        convolved=max((mixer.form.conv.channels for mixer in states), default=0),
        low=max((product.out_features for product in low), default=0),
        latent=max((mixer.latent.out_features for mixer in over_latents), default=0),
        mixed=max(output.in_features for output in outputs),
        inside=max(mlp.down.in_features for mlp in mlps),
    )
