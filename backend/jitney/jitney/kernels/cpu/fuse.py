"""Fused modules on a CPU."""

from transformers import PreTrainedModel

from jitney.execution.probe import embedding_weight
from jitney.kernels.cpu.linear import can_pack
from jitney.kernels.fused.fuse import FuseReport, fuse


def fuse_for_cpu(module: PreTrainedModel, rows: int, length: int) -> FuseReport:
    """See :func:`fused.fuse.fuse`. ``rows`` is the number of tokens of a usual step.

    Run once, after loading and before ``linear.prepack_linears``, which takes the layers left over.
    """
    report = FuseReport()
    dtype = embedding_weight(module).dtype
    obstacle = can_pack(dtype)
    if obstacle is None:
        try:
            from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
        except ImportError as error:
            obstacle = f"Numba is missing ({error})"
        else:
            return fuse(module, CpuLayerKernels(dtype, rows), length)
    report.kept("model", obstacle)
    return report
