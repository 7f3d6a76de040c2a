"""The KV cache's size and its tensors, and the ledger of where the memory goes.

Called at load, by the runner and (for a few blocks) by the probe. Sizes are bytes.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import cache_shape
from jitney.execution.interface import AttentionFunction, LayerCache, LayerSpec, LoadedModel
from jitney.execution.low_rank import adapter_bytes

# Defaults of the cache: a share of what is free after loading, and at most so much on a CPU.
_CPU_SHARE, _CPU_MOST = 0.25, 4 << 30
_GPU_SHARE = 0.9
# Of what is free, left beside a cache of derived size: an engine that takes this one's place asks
# for the same size, and may find a little less.
_SPARE = 1 / 64
_PACKED_RANKS = 16  # a CPU's kernels read copies, their rank padded to whole such


class StepMemory(NamedTuple):
    """Bytes that steps need beside weights and cache."""

    activations: int
    """Of the largest step, the runner's own buffers included."""
    graphs: int = 0
    """Of CUDA graphs of decode steps, once all that can be needed are captured."""


@dataclass(frozen=True)
class Ledger:
    """Where the device's memory goes, as of the end of the load."""

    weights: int
    cache: int
    steps: StepMemory
    """Measured on a GPU, else estimated."""
    free: int
    """What is left when all of these are in use."""
    num_blocks: int
    block_size: int
    block_bytes: int
    adapters: int = 0
    """Of as many adapters as may be in memory."""

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        activations, graphs = map(_mib, self.steps)
        of_adapters = f"adapters at most {_mib(self.adapters)}, " if self.adapters else ""
        of_graphs = f"graphs at most about {graphs}, " if self.steps.graphs else ""
        return (
            f"memory: weights {_mib(self.weights)}, KV cache {_mib(self.cache)} "
            f"({self.num_blocks:,} blocks of {self.block_size}: {tokens:,} tokens, "
            f"{self.block_bytes // self.block_size:,} bytes each), activations at most about "
            f"{activations}, {of_graphs}{of_adapters}left {_mib(self.free)}"
        )


def plan_memory(
    config: EngineConfig,
    model: LoadedModel,
    dtype: torch.dtype,
    steps: StepMemory,
    available: int,
    adapters: int = 0,
    states: int = 0,
) -> Ledger:
    """Size the cache. ``dtype`` is the cache's; ``available`` what is free once the weights are in;
    ``adapters`` what they may take of it; ``states`` what a block has beside K and V.

    An explicit size is taken as it is; a default never exceeds what ``max_num_seqs`` sequences of
    full length can use. Raises ConfigError naming the option if it is more than there is, or not
    enough for one block.
    """
    per_block = block_bytes(model.layers, config.block_size, dtype) + states
    step, uses = sum(steps) + adapters, "a step and adapters" if adapters else "a step"
    room = max(0, available - step)
    spared = max(0, room - int(available * _SPARE))
    key: str = "kv_cache_bytes"
    value: float = config.kv_cache_bytes or 0
    if config.kv_cache_bytes is not None:
        size = config.kv_cache_bytes
        if size > room:
            raise ConfigError.of(
                key,
                size,
                f"at most {room:,}, the free memory less {step:,} for {uses}",
            )
    elif config.kv_cache_fraction is not None:
        key, value = "kv_cache_fraction", config.kv_cache_fraction
        size = min(spared, int(available * value) // config.instances)
    else:
        most = (
            int(available * _GPU_SHARE)
            if model.device.type == "cuda"
            else min(int(available * _CPU_SHARE), _CPU_MOST)
        )
        blocks = config.max_num_seqs * math.ceil(model.max_model_len / config.block_size)
        size = min(spared, most // config.instances, per_block * blocks)
    num_blocks = size // per_block
    if num_blocks < 1:
        raise ConfigError.of(
            key, value or size, f"enough for one block of {config.block_size}, {per_block:,} bytes"
        )
    cache = num_blocks * per_block
    return Ledger(
        weights=model.weight_bytes,
        cache=cache,
        steps=steps,
        free=available - cache - step,
        adapters=adapters,
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=per_block,
    )


def most_adapters(config: EngineConfig, model: LoadedModel) -> int:
    """Bytes of as many adapters as may be in memory, each as large as it may be."""
    rank = config.max_adapter_rank
    copied = model.pack is not None and model.device.type == "cpu"
    packed = math.ceil(rank / _PACKED_RANKS) * _PACKED_RANKS if copied else 0
    return config.max_adapters * adapter_bytes(model.sites, rank + packed, model.dtype)


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of every layer."""
    values = sum(
        2 * math.prod(cache_shape(1, block_size, layer.num_kv_heads, layer.head_size, dtype))
        for layer in layers
    )
    return values * dtype.itemsize


def estimate_steps(model: LoadedModel, tokens: int, logits_rows: int) -> StepMemory:
    """For a step of ``tokens``, from the widths that the configuration states: the widest layer
    (its input, a gate, an up projection and their product) and the logits, once as computed and
    once in float32."""
    hidden = model.config.hidden_size
    width = getattr(model.config, "intermediate_size", None) or 4 * hidden
    widest = width if isinstance(width, int) else max(width)  # some state one per layer
    layer = tokens * (4 * hidden + 3 * widest) * model.dtype.itemsize
    return StepMemory(
        layer + min(tokens, logits_rows) * model.vocab_size * (model.dtype.itemsize + 4)
    )


def make_layer_caches(
    layers: Sequence[LayerSpec],
    attention: Sequence[AttentionFunction],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_blocks: int,
) -> list[LayerCache]:
    """Empty caches, by layer, each with its attention function.

    Raises OSError, MemoryError or RuntimeError, by device, if the memory cannot be had.
    """
    caches = []
    for spec, attend in zip(layers, attention, strict=True):
        shape = cache_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_size, dtype)
        keys, values = (_zeros(shape, dtype, device) for _ in range(2))
        caches.append(LayerCache(keys, values, attend))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because an unwritten slot that is masked out must not hold a NaN.

    On a CPU the pages are the kernel's zero pages until they are written: loading does not spend
    seconds on gigabytes that may never be used, and the tensor begins at a page, not 16 bytes after
    one as malloc's does.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    pages.madvise(mmap.MADV_HUGEPAGE)  # fewer address translations per row of a cache
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps `pages` alive


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
