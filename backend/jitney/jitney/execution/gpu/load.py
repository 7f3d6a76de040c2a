"""Loading a GPU's runner: fused modules, scales, memory by measurement, first steps, graphs.

Called by ``runner.load_runner`` once it knows that the GPU's attention kernels run.
"""

import logging
import time

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.gpu.calibrate import calibrate
from jitney.execution.gpu.device import CudaDevice, Device, HostDevice
from jitney.execution.gpu.fuse import fuse_for_gpu
from jitney.execution.gpu.measure import StepMemory, measure_steps
from jitney.execution.gpu.runner import GpuRunner
from jitney.execution.interface import NAME, LayerCache, paged_attention
from jitney.execution.load import (
    FLOAT8,
    allocate_caches,
    cache_dtype,
    describe,
    log_loaded,
    step_activations,
    warm_up,
)
from jitney.execution.machine import available_memory
from jitney.execution.memory import Ledger, make_layer_caches, plan_memory
from jitney.execution.models import LoadedModel
from jitney.execution.probe import check_same, probe_logits

_log = logging.getLogger(__name__)


def load_gpu_runner(
    config: EngineConfig, model: LoadedModel, budget: int, begin: float
) -> GpuRunner:
    """See ``runner.load_runner``; ``begin`` is when the load began."""
    device = _device(config, model)
    added = _speed_up(config, model)
    dtype = cache_dtype(config, model)
    scales = _cache_scales(config, model)
    memory = _step_memory(config, model, budget, dtype, device)
    ledger = plan_memory(
        config,
        model.layers,
        dtype=dtype,
        device=model.device,
        weights=model.weight_bytes + added,
        activations=memory.activations,
        graphs=memory.graphs,
        available=available_memory(model.device),
        max_model_len=model.max_model_len,
    )
    caches = allocate_caches(config, model, ledger, dtype)
    if scales is not None:
        caches = [
            cache._replace(key_scale=keys, value_scale=values)
            for cache, (keys, values) in zip(caches, scales, strict=True)
        ]
    info = describe(model, caches, ledger, budget, overlap=config.overlap)
    runner = GpuRunner(model, caches, info, config, device)
    warm_up(runner)
    if model.device.type == "cuda":  # nothing is compiled elsewhere
        runner.warm_up_sampler()
    if config.cuda_graphs == "load":
        _capture(runner)
    log_loaded(model, info, ledger, begin)
    return runner


def _device(config: EngineConfig, model: LoadedModel) -> Device:
    """Raises ConfigError for options that interpreted kernels give no meaning."""
    if model.device.type == "cuda":
        return CudaDevice(model.device)
    if config.cuda_graphs == "load":
        raise ConfigError.of("cuda_graphs", "load", "lazy or never on a CPU")
    if config.cuda_graph_sizes is not None:
        raise ConfigError.of("cuda_graph_sizes", config.cuda_graph_sizes, "left out on a CPU")
    if config.compile:
        raise ConfigError.of("compile", True, "false on a CPU")
    return HostDevice()


def _speed_up(config: EngineConfig, model: LoadedModel) -> int:
    """Rearrange the module and check that it still gives the same. Returns the bytes added."""
    before = probe_logits(model.module, model.layers)
    if config.compile:  # which fuses by itself, and cannot look into kernels
        compile_module(model.module)
        after = probe_logits(model.module, model.layers, config.attention, config.block_size)
        check_same(before, after, model.module)
        return 0
    fused = fuse_for_gpu(model.module, config)
    _log.info("fused %d layers, %d gated MLPs, %d norms", fused.layers, fused.mlps, fused.norms)
    for reason, count in fused.reasons.items():
        _log.info("not fused (%d): %s", count, reason)
    after = probe_logits(model.module, model.layers, config.attention, config.block_size)
    check_same(before, after, model.module)
    return fused.added_bytes


def compile_module(module: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the module's forward for any number of tokens. Attention stays as it is: its kernels
    are compiled already, and it is called through an object that the compiler need not look into.
    """
    # The name belongs to the process; for whoever does not compile, the function is the same.
    AttentionInterface.register(NAME, torch.compiler.disable(paged_attention))
    module.forward = torch.compile(module.forward, dynamic=True, backend=backend)


def _cache_scales(config: EngineConfig, model: LoadedModel) -> list[tuple[Tensor, Tensor]] | None:
    """Key and value scales of every layer of a float8 cache: the checkpoint's, or calibrated."""
    if config.kv_cache_dtype != FLOAT8:
        return None
    stated = model.cache_scales
    if len(stated) == len(model.layers):
        return [stated[layer] for layer in range(len(model.layers))]
    found = calibrate(config, model)
    return [stated.get(layer, scales) for layer, scales in enumerate(found)]


def _step_memory(
    config: EngineConfig,
    model: LoadedModel,
    budget: int,
    dtype: torch.dtype,
    device: Device,
) -> StepMemory:
    """Measured on a GPU, estimated where the kernels are interpreted."""
    if model.device.type != "cuda":
        return StepMemory(step_activations(config, model, budget), 0)
    caches: list[LayerCache] = make_layer_caches(
        model.layers, 1, config.block_size, dtype, model.device, config.attention,
        batch_invariant=config.batch_invariant,
    )  # fmt: skip
    one = Ledger(0, 0, 0, 0, num_blocks=1, block_size=config.block_size, block_bytes=0)
    info = describe(model, caches, one, budget)
    try:
        return measure_steps(model, caches, info, config, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError.of(
            "max_num_batched_tokens", budget, f"so many that a step fits into memory ({error})"
        ) from None


def _capture(runner: GpuRunner) -> None:
    """Capture all graphs; say what they cost."""
    begin = time.monotonic()
    before = torch.cuda.memory_reserved()
    count = runner.capture_graphs()
    _log.info(
        "captured %d decode steps as CUDA graphs in %.1f s, %d MiB",
        count,
        time.monotonic() - begin,
        (torch.cuda.memory_reserved() - before) >> 20,
    )
