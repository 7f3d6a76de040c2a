"""The way in: the CPU's kernels as an ``execution.acceleration.Accelerator``. Each load has one.

It imports nothing that needs Numba before it is asked for a kernel. Without Numba there is no
attention function, and nothing is fused; linear layers are packed for oneDNN alone (``linear``).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError, install_extra
from jitney.execution.acceleration import NoKernelError
from jitney.execution.attention import AttentionShape
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.interface import AttentionFunction, KvScales, LayerCache, LoadedModel
from jitney.execution.memory import StepMemory
from jitney.execution.options import cache_dtype, refuse_gpu_options
from jitney.execution.probe import embedding_weight
from jitney.execution.runner import TorchRunner
from jitney.kernels.cpu.linear import prepack_linears
from jitney.kernels.cpu.own_weights import layers_read_by_others
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.fuse import FuseReport, fuse
from jitney.kernels.fused.invariant import check_invariant
from jitney.kernels.fused.rotary_lookup import look_up_rotary
from jitney.messages import ModelInfo

_INPUTS_MULTIPLE = 32
"""A weight of bfloat16 fits our kernels if it has a multiple of so many inputs."""
_RANK_MULTIPLE = 16
"""Our kernels fill up the rank of an adapter to a multiple of so many."""


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
        """Import what a load needs for kernels, if Numba is there. That takes a second; the loads
        after it need not import it again. Where torch was built for a GPU, models run there:
        nothing is imported."""
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
                f"the CPU kernel needs numba ({install_extra('cpu')}): {error}"
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
        """See :class:`Accelerator`. Always true: fused modules of a CPU work with any attention
        function."""
        return True

    def widens_bfloat16(self, checkpoint: Checkpoint, *, has_quantized_weights: bool) -> bool:
        """Whether bfloat16 is as fast as float32 even where kernels must widen it: see
        :class:`Accelerator`. It is if our kernels compute all products of the model, and the
        processor has AVX2, which they need."""
        if not (self._config.fuse and self._config.prepack):
            return False
        # Experts are no linear layers: their products are torch's. Models that have any say so in
        # the names of their configuration, as ``num_experts``.
        if any("expert" in name for name in checkpoint.config):
            return False
        if not torch.cpu.get_capabilities().get("avx2") or find_spec("numba") is None:
            return False
        # Every size of a quantized weight has a kernel. The layers that stay floats cannot be
        # checked here: a quantized checkpoint may store tensors in other shapes than the weights
        # have.
        if has_quantized_weights:
            return True
        for stored in checkpoint.tensors.values():
            is_matrix = len(stored.shape) == 2
            if is_matrix and stored.shape[1] % _INPUTS_MULTIPLE != 0:
                return False
        return True

    def speed_up(self, model: LoadedModel, usual_tokens: int) -> LoadedModel:
        """Fuse what fits, then pack the linear layers that are left. ``usual_tokens`` are those of
        a usual step. With ``batch_invariant``, raises ConfigError if a result may still depend on
        the batch."""
        fuses = self._config.fuse
        invariant = self._config.batch_invariant
        if not fuses and not self._config.prepack:
            return model
        module = model.module
        report = FuseReport()
        make_linear = None  # without Numba there is no linear layer of ours
        try:
            from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
        except ImportError as error:
            report.kept("model", f"Numba is missing ({error})")
        else:
            dtype = embedding_weight(module).dtype
            kernels = CpuLayerKernels(dtype, usual_tokens, batch_invariant=invariant)
            make_linear = kernels.linear
            # torch's norms depend on the batch: with ``batch_invariant`` they are always replaced.
            if fuses or invariant:
                report = fuse(module, kernels, model.max_model_len, norms_alone=not fuses)
        if self._config.prepack:
            prepack_linears(
                module,
                usual_tokens,
                report,
                make_linear,
                keep=layers_read_by_others(module),
                batch_invariant=invariant,
            )
        if invariant and report.forward is None:
            try:
                look_up_rotary(module, model.max_model_len)
            except Misfit as misfit:
                report.kept("rotary embedding", str(misfit))
        faster = report.applied(model)
        if invariant:
            check_invariant(module, report.forward, on_gpu=False)
            self._check_adapters_invariant(model, faster)
        return faster

    def _check_adapters_invariant(self, model: LoadedModel, faster: LoadedModel) -> None:
        """Raises ConfigError if torch might compute adapters, as its products depend on the batch.

        Our kernels compute them where they are part of a step's native call. That takes kernels for
        them (``pack``), and a cache of the model's dtype or of int8."""
        if not model.sites:
            return
        if faster.pack is None:
            bound = "left out with batch_invariant: a step of this model is no native call"
            raise ConfigError.of("adapters", self._config.adapters, bound)
        held = cache_dtype(self._config, model.dtype, torch.device("cpu"))
        if held not in (model.dtype, torch.int8):
            bound = f"auto or int8 with batch_invariant and adapters: the model is in {model.dtype}"
            raise ConfigError.of("kv_cache_dtype", self._config.kv_cache_dtype, bound)

    def kv_scales(self, model: LoadedModel) -> list[KvScales] | None:
        """None: only a float8 cache has :class:`KvScales`, and a CPU has none. (An int8 cache holds
        its scales itself, one for each token and head.)"""
        return None

    def step_memory(
        self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo
    ) -> StepMemory | None:
        """See :class:`Accelerator`. None: an estimate will do."""
        return None

    def copied_rank(self, model: LoadedModel, rank: int) -> int:
        """See :class:`Accelerator`. Kernels read copies of the factors, with the rank filled up; if
        the model has no kernels for adapters, there are no copies."""
        if model.pack is None:
            return 0
        return math.ceil(rank / _RANK_MULTIPLE) * _RANK_MULTIPLE

    def runner(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> TorchRunner:
        """The plain runner."""
        return TorchRunner(model, caches, info)
