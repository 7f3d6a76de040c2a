"""Which fused layers can be part of a ``program``. Called by it."""

from collections.abc import Sequence
from typing import NamedTuple

from jitney.kernels.cpu.column_linear import ColumnLinear
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.program_list import products_of
from jitney.kernels.fused.layers import FusedAttention, FusedDecoderLayer, FusedMLP
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
