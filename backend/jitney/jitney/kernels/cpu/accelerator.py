"""The CPU's kernels, as a load takes them: an ``execution.acceleration.Accelerator``.

Imports nothing that needs Numba until it is used: without it there is no attention function, and
modules stay as they are.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.acceleration import NoKernelError
from jitney.execution.attention import AttentionShape
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.interface import AttentionFunction, KvScales, LayerCache, LoadedModel
from jitney.execution.memory import StepMemory
from jitney.execution.options import refuse_gpu_options
from jitney.execution.probe import embedding_weight
from jitney.execution.runner import TorchRunner
from jitney.kernels.cpu.linear import prepack_linears
from jitney.kernels.fused.fuse import FuseReport, fuse
from jitney.kernels.fused.invariant import check_invariant
from jitney.messages import ModelInfo

_ROW_UNIT = 32
"""A weight fits our kernels if its rows have a multiple of so many values."""
_RANK_UNIT = 16
"""Our kernels fill up the rank of an adapter to a multiple of this."""


class CpuAccelerator:
    """Attention, and fused and packed modules."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Raises ConfigError for an option that needs a GPU's kernels, or excludes another one."""
        refuse_gpu_options(config)
        if config.batch_invariant and not config.prepack:
            raise ConfigError.of(
                "prepack", False, "True with batch_invariant: torch's products depend on the batch"
            )
        self._config = config

    @staticmethod
    def prepare() -> None:
        """Import what a load needs for kernels, if Numba is there: a second of work. On a machine
        with a GPU, models run there, and need none of it."""
        if torch.backends.cuda.is_built():
            return
        with suppress(ImportError):
            from jitney.kernels.cpu import compiled, layer_kernels, paged_attention  # noqa: F401

            compiled.import_compiler()

    def attention(self, shape: AttentionShape) -> AttentionFunction:
        """See :class:`Accelerator`."""
        if shape.device.type != "cpu":
            raise NoKernelError(f"the CPU kernel does not run on {shape.device.type}")
        try:
            from jitney.kernels.cpu.attention_kernel import TAGS
            from jitney.kernels.cpu.paged_attention import CpuAttention
        except ImportError as error:
            raise NoKernelError(
                f"the CPU kernel needs numba (pip install 'triton-jitney[cpu]'): {error}"
            ) from None
        if self._config.block_size % 16 != 0:
            raise NoKernelError(
                f"the CPU kernel needs a block_size of whole 16s, not {self._config.block_size}"
            )
        if shape.dtype not in TAGS:
            raise NoKernelError(
                f"the CPU kernel has caches of float32, bfloat16 and int8, not {shape.dtype}"
            )
        return CpuAttention(shape.dtype, shape.model_dtype)

    def fits(self, attention: Sequence[AttentionFunction]) -> bool:
        """Always: modules are fused whatever function their layers attend through."""
        return True

    def widens_bfloat16(self, checkpoint: Checkpoint, *, rounded: bool) -> bool:
        """Whether our kernels compute all of the model's products, and the processor has AVX2."""
        if not (self._config.fuse and self._config.prepack):
            return False
        # Experts are no linear layers, so torch computes their products.
        if "expert" in " ".join(checkpoint.config):
            return False
        if not torch.cpu.get_capabilities().get("avx2") or find_spec("numba") is None:
            return False
        shapes = [stored.shape for stored in checkpoint.tensors.values()]
        # Products of other sizes are torch's.
        all_fit = all(shape[1] % _ROW_UNIT == 0 for shape in shapes if len(shape) == 2)
        return rounded or all_fit

    def speed_up(self, model: LoadedModel, usual_tokens: int) -> LoadedModel:
        """Fuse what fits, then pack the linear layers that are left. With ``batch_invariant``,
        raises ConfigError if a result may still depend on the batch."""
        module = model.module
        report = FuseReport()
        make = None
        fuses = self._config.fuse
        invariant = self._config.batch_invariant
        if not fuses and not self._config.prepack:
            return model
        try:
            from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
        except ImportError as error:
            report.kept("model", f"Numba is missing ({error})")
        else:
            dtype = embedding_weight(module).dtype
            kernels = CpuLayerKernels(dtype, usual_tokens, batch_invariant=invariant)
            make = kernels.linear
            if fuses or invariant:
                report = fuse(module, kernels, model.max_model_len, norms_alone=not fuses)
        if self._config.prepack:
            prepack_linears(module, usual_tokens, report, make, batch_invariant=invariant)
        faster = report.applied(model)
        if invariant:
            check_invariant(module, report.forward)
            if model.sites and (faster.pack is None or self._config.kv_cache_dtype != "auto"):
                bound = "left out with batch_invariant: a step of this model is no native call"
                raise ConfigError.of("adapters", self._config.adapters, bound)
        return faster

    def kv_scales(self, model: LoadedModel) -> list[KvScales] | None:
        """No cache of this device has scales."""
        return None

    def step_memory(
        self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo
    ) -> StepMemory | None:
        """An estimate will do."""
        return None

    def copied_rank(self, model: LoadedModel, rank: int) -> int:
        """Kernels read copies of the factors, their rank padded to whole _RANK_UNITs."""
        return 0 if model.pack is None else math.ceil(rank / _RANK_UNIT) * _RANK_UNIT

    def runner(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> TorchRunner:
        """The plain runner."""
        return TorchRunner(model, caches, info)
