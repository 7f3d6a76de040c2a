"""Rearranges a loaded model for a GPU: fused modules, and what option ``batch_invariant`` needs.

Called by ``gpu_accelerator``, once for each load, after the weights are quantized. Imported only
where the Triton language is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of
from jitney.kernels.fused.forms import Misfit, NormForm
from jitney.kernels.fused.fuse import FuseReport, fuse, swap_children
from jitney.kernels.fused.invariant import check_invariant
from jitney.kernels.gpu.gpu_layers import GpuLayerKernels
from jitney.kernels.gpu.invariant_product import InvariantLinear
from jitney.kernels.gpu.norm_kernels import MOST_WIDTH, norm_rows


def fuse_for_gpu(module: PreTrainedModel, config: EngineConfig, length: int) -> FuseReport:
    """Replace what can be replaced in ``module``; ``length`` is that of the longest sequence. See
    :func:`fused.fuse.fuse`.

    With option ``batch_invariant``, linear layers and norms that could not be fused are replaced as
    well. Raises ConfigError if a result may still depend on the batch.
    """
    invariant = config.batch_invariant
    kernels = GpuLayerKernels(batch_invariant=invariant)
    report = FuseReport(kernels)
    # torch's norms depend on the batch: with ``batch_invariant`` they are always replaced.
    if config.fuse or invariant:
        report = fuse(module, kernels, length, norms_alone=not config.fuse)
    if invariant:
        _replace_variant_layers(module, config, report)
        check_invariant(module, report.forward, on_gpu=True)
    if module.device.type == "cuda":
        # The memory of the joined weights is free now, but torch keeps it, in pieces into which
        # nothing else may fit: give it back to the device.
        torch.cuda.empty_cache()
    return report


def _replace_variant_layers(
    module: PreTrainedModel, config: EngineConfig, report: FuseReport
) -> None:
    """Replace linear layers and layer norms by kernels that do not depend on the batch. What is
    left is for ``fused.invariant`` to judge.

    Raises ConfigError if weights are quantized: there are no such kernels for their products.
    """
    is_quantized = any(isinstance(each, QuantizedLinear) for each in module.modules())
    if is_quantized or config.quantization != "none":
        raise ConfigError(
            "option batch_invariant is true, but the products of quantized weights depend on the "
            "batch: set it to false, or quantization to 'none' with a checkpoint that is not "
            "quantized"
        )
    swap_children(module, what="product", fits=is_linear, build=_invariant_linear, report=report)
    swap_children(
        module, what="layer norm", fits=_is_layer_norm, build=InvariantLayerNorm, report=report
    )


def _invariant_linear(linear: Any) -> InvariantLinear:
    return InvariantLinear(weight_of(linear), linear.bias)


def _is_layer_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm


class InvariantLayerNorm(nn.Module):
    """A layer norm whose result for a row does not depend on the other rows."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        """Computes what ``norm`` does. Raises Misfit if that has no weight, or is over several
        dimensions or too many values."""
        super().__init__()
        if norm.weight is None:
            raise Misfit("it has no weight")
        if len(norm.normalized_shape) != 1 or norm.normalized_shape[0] > MOST_WIDTH:
            raise Misfit(f"it is not over one dimension of at most {MOST_WIDTH} values")
        scale = norm.weight.detach().float().contiguous()
        self._form = NormForm(scale, norm.eps)
        self._bias = torch.zeros_like(scale)
        if norm.bias is not None:
            self._bias = norm.bias.detach().float().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width]."""
        return norm_rows(x, self._form, self._bias)
