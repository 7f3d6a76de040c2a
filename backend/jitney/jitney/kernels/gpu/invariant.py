"""Option ``batch_invariant`` on a GPU: linear layers, and norms over the last dimension, by kernels
with fixed tiles. What is left is for ``fused.invariant`` to judge.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of
from jitney.kernels.fused.fuse import FuseReport, swap_children
from jitney.kernels.fused.layers import Misfit
from jitney.kernels.gpu.norm import MOST_WIDTH, LayerNorm
from jitney.kernels.gpu.products import InvariantLinear


def make_invariant(module: PreTrainedModel, config: EngineConfig, report: FuseReport) -> None:
    """Replace linear layers and layer norms. RMS norms are ``fuse``'s.

    Raises ConfigError if weights are quantized: their products are not ours to choose.
    """
    if config.quantization != "none" or any(
        isinstance(each, QuantizedLinear) for each in module.modules()
    ):
        raise ConfigError(
            "option batch_invariant is true, but the products of quantized weights depend on the "
            "batch: set it to false, or quantization to 'none' with a checkpoint that is not "
            "quantized"
        )
    swap_children(module, "product", is_linear, _product, report)
    swap_children(
        module, "layer norm", lambda each: type(each) is nn.LayerNorm, _layer_norm, report
    )


def _product(linear: Any) -> InvariantLinear:
    return InvariantLinear(weight_of(linear), linear.bias)


def _layer_norm(norm: Any) -> LayerNorm:
    if len(norm.normalized_shape) != 1 or norm.normalized_shape[0] > MOST_WIDTH:
        raise Misfit(f"it is not over one dimension of at most {MOST_WIDTH}")
    return LayerNorm(norm)
