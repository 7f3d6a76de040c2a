"""Fused modules on a GPU."""

import torch
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.kernels.fused.fuse import FuseReport, fuse
from jitney.kernels.gpu.invariant import check_invariant, make_invariant
from jitney.kernels.gpu.layer_kernels import GpuLayerKernels


def fuse_for_gpu(module: PreTrainedModel, config: EngineConfig, length: int) -> FuseReport:
    """See :func:`fused.fuse.fuse`. Run once, after loading and quantization.

    With option ``batch_invariant``, products and norms that depend on the batch are replaced as
    well, whatever could be fused (``invariant``). Raises ConfigError if that cannot be.
    """
    for each in module.modules():
        if isinstance(each, PreTrainedModel):
            # It looks for padding among the ids, which makes the host wait for the device. There is
            # none here.
            vars(each)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    report = FuseReport()
    if config.fuse or config.batch_invariant:
        kernels = GpuLayerKernels(batch_invariant=config.batch_invariant)
        report = fuse(module, kernels, length, norms_alone=not config.fuse)
    if config.batch_invariant:
        make_invariant(module, config, report)
        check_invariant(module, report.forward)
    if module.device.type == "cuda":
        torch.cuda.empty_cache()  # unmerged weights have left gaps that nothing else fits into
    return report
