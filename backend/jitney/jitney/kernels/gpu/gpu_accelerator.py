"""The GPU's kernels, as a load takes them: an ``execution.acceleration.Accelerator``.

Imports nothing that needs the Triton language until it is known to be there. Where the kernels are
interpreted on a CPU, the same path runs without graphs and without a measurement of memory.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError, install_extra
from jitney.execution.acceleration import NoKernelError
from jitney.execution.attention import AttentionMetadata, AttentionShape
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.interface import (
    NAME,
    AttentionFunction,
    KvScales,
    LayerCache,
    LoadedModel,
    PagedStep,
    paged_attention,
)
from jitney.execution.memory import StepMemory
from jitney.execution.options import refuse_int8
from jitney.execution.runner import TorchRunner
from jitney.kernels.gpu.graphs import DecodeGraphs, capture_on, padded_sizes
from jitney.kernels.gpu.measure import measure_steps
from jitney.kernels.gpu.tiles import why_not
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)


class GpuAccelerator:
    """Attention over the paged cache, fused modules, CUDA graphs, and a runner that overlaps
    steps."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Raises ConfigError for options that the GPU's kernels do not have; where they are
        interpreted on a CPU, also for those that need a GPU."""
        self._config = config
        self._capture = capture_on(device)
        refuse_int8(config)
        if config.batch_invariant and config.adapters is not None:
            bound = "left out with batch_invariant on a GPU"
            raise ConfigError.of("adapters", config.adapters, bound)
        if device.type != "cuda":
            _refuse_where_interpreted(config)

    @staticmethod
    def prepare() -> None:
        """See :class:`AcceleratorKind`. Does nothing: CUDA must not be initialised in the process
        that calls this, as it would not work in the processes forked from it. So each load imports
        what it needs for a GPU."""

    def widens_bfloat16(self, checkpoint: Checkpoint, *, has_quantized_weights: bool) -> bool:
        """See :class:`Accelerator`, here and below. False: a GPU multiplies bfloat16 itself."""
        return False

    def copied_rank(self, model: LoadedModel, rank: int) -> int:
        """0: there is no copy. An adapter's factors are used as they are."""
        return 0

    def attention(self, shape: AttentionShape) -> AttentionFunction:
        """A :class:`gpu_attention.GpuAttention`. Raises NoKernelError."""
        try:
            import triton
        except ImportError as error:
            install = install_extra("gpu")
            raise NoKernelError(
                f"the GPU's kernels need the Triton language ({install}): {error}"
            ) from None
        interpreted = shape.device.type == "cpu" and triton.knobs.runtime.interpret
        if shape.device.type != "cuda" and not interpreted:
            raise NoKernelError(f"the GPU's kernels need a CUDA device, not {shape.device.type}")
        triton.knobs.runtime.jit_cache_hook = _log_kernel
        # It imports the language.
        from jitney.kernels.gpu.gpu_attention import GpuAttention

        obstacle = why_not(
            device=shape.device,
            dtype=shape.dtype,
            head_size=shape.head_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )
        if obstacle is not None:
            raise NoKernelError(obstacle)
        return GpuAttention(
            device=shape.device,
            dtype=shape.dtype,
            head_size=shape.head_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            batch_invariant=shape.batch_invariant,
        )

    def fits(self, attention: Sequence[AttentionFunction]) -> bool:
        """Whether all layers attend through these kernels. Graphs and overlapped steps need a plan
        that is made without waiting for the device, and only these kernels have one."""
        return all(attend.name == "gpu" for attend in attention)

    def speed_up(self, model: LoadedModel, usual_tokens: int) -> LoadedModel:
        """Fuse what fits, or compile the module if option ``compile`` says so."""
        skip_padding_check(model.module)
        if self._config.compile:
            # The compiler fuses by itself, and cannot look into our kernels.
            compile_module(model.module)
            return model
        # It imports the language.
        from jitney.kernels.gpu.gpu_fuse import fuse_for_gpu

        report = fuse_for_gpu(model.module, self._config, model.max_model_len)
        return report.applied(model)

    def kv_scales(self, model: LoadedModel) -> list[KvScales] | None:
        """Those of a float8 cache: the checkpoint's, or found by a run over some tokens."""
        if self._config.kv_cache_dtype != "float8_e4m3":
            return None
        stated = model.cache_scales
        if len(stated) == len(model.layers):
            return [stated[layer] for layer in range(len(model.layers))]
        from jitney.kernels.gpu.kv_scales import find_kv_scales

        found = find_kv_scales(model, self._config.block_size)
        return [stated.get(layer, scales) for layer, scales in enumerate(found)]

    def step_memory(
        self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo
    ) -> StepMemory | None:
        """Measured on a GPU, by the largest steps there can be; None on a CPU."""
        if model.device.type != "cuda":
            return None
        try:
            return measure_steps(model, caches, info, self._config)
        except MemoryError as error:
            raise ConfigError.of(
                "max_num_batched_tokens",
                info.max_num_batched_tokens,
                f"so many that a step fits into memory ({error})",
            ) from None

    def runner(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> TorchRunner:
        """A runner that can launch a step while the one before it still runs, with graphs."""
        info = msgspec.structs.replace(info, overlap=self._config.overlap)
        if self._capture is None:
            return TorchRunner(model, caches, info)

        def run(ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
            return model.forward(ids, meta.positions, indices, PagedStep(caches, meta))

        graphs = DecodeGraphs(
            forward=run,
            sizes=padded_sizes(self._config, info),
            capture=self._capture,
            info=info,
            device=model.device,
        )
        if self._config.cuda_graphs == "load":
            graphs.capture_all()
        return TorchRunner(model, caches, info, graphs)


def _refuse_where_interpreted(config: EngineConfig) -> None:
    """Raise ConfigError for options that need a GPU: kernels are interpreted, on a CPU."""
    if config.cuda_graphs == "load":
        raise ConfigError.of("cuda_graphs", "load", "lazy or never on a CPU")
    if config.cuda_graph_sizes is not None:
        raise ConfigError.of("cuda_graph_sizes", config.cuda_graph_sizes, "left out on a CPU")
    if config.compile:
        raise ConfigError.of("compile", True, "false on a CPU")


def skip_padding_check(module: PreTrainedModel) -> None:
    """Keep transformers from looking for padding among the ids: the host would wait for the device.
    There is no padding here."""
    for each in module.modules():
        if isinstance(each, PreTrainedModel):
            vars(each)["warn_if_padding_and_no_attention_mask"] = lambda *_: None


def compile_module(module: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the module's forward for any number of tokens. Attention stays as it is: its kernels
    are compiled already, and it is called through an object that the compiler need not look into.
    """
    # Registering NAME again replaces the function for the whole process. For modules that are not
    # compiled, the wrapped one behaves like ``paged_attention``.
    AttentionInterface.register(NAME, torch.compiler.disable(paged_attention))
    module.forward = torch.compile(module.forward, dynamic=True, backend=backend)


def _log_kernel(*, fn: Any, **_: object) -> None:
    """Called by the Triton language before it compiles a kernel, or reads it from the disk.

    A kernel takes seconds to compile, and the watchdog ends an engine that is silent for too long.
    A log record ends the silence."""
    _log.info("preparing the kernel %s", fn.name)
