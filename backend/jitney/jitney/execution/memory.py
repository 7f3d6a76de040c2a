"""The KV cache's size and its tensors, and the ledger of where the memory goes.

Called at load, by accelerators that measure, and (for a few blocks) by the probe. Sizes are bytes.
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

# The cache's default size: a share of what is free after loading, on a CPU with an upper limit.
_CPU_SHARE = 0.25
_CPU_MOST = 4 << 30
_GPU_SHARE = 0.9
# A cache whose size no option states leaves this share of the free memory unused. An engine that
# replaces this one after a crash must get the same size, and may find a little less memory free.
_SPARE = 1 / 64


class StepMemory(NamedTuple):
    """Bytes that steps need beside weights and cache."""

    activations: int
    """Of the largest step, the runner's own buffers included."""
    graphs: int = 0
    """Of CUDA graphs of decode steps, once all that can be needed are captured."""


@dataclass(frozen=True)
class Ledger:
    """What the device's memory is used for, as of the end of the load. Bytes."""

    weights: int
    cache: int
    steps: StepMemory
    """Measured on a GPU, else estimated."""
    free: int
    """What is left when everything else here is in use."""
    num_blocks: int
    block_size: int
    block_bytes: int
    adapters: int = 0
    """What as many adapters take as may be in memory at once."""

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


@dataclass(frozen=True)
class Needs:
    """What a load needs, in bytes, before the number of blocks is known."""

    device: torch.device
    max_model_len: int
    weights: int
    """Those in memory already, a draft model's included."""
    block: int
    """One block in the caches of all layers, a draft model's included."""
    steps: StepMemory
    adapters: int = 0
    """As many as may be in memory at once."""

    @property
    def beside_cache(self) -> int:
        """What must stay free for steps and adapters once the cache is allocated."""
        return sum(self.steps) + self.adapters


def plan_memory(config: EngineConfig, needs: Needs, available: int) -> Ledger:
    """Size the cache. ``available`` is what is free once the weights are in.

    An explicit size is taken as it is; a default never exceeds what ``max_num_seqs`` sequences of
    full length can use. Raises ConfigError naming the option if it is more than there is, or not
    enough for one block.
    """
    size = _cache_bytes(config, needs, available)
    num_blocks = size // needs.block
    if num_blocks < 1:
        key, value = _size_option(config, size)
        bound = f"enough for one block of {config.block_size}, {needs.block:,} bytes"
        raise ConfigError.of(key, value, bound)
    cache = num_blocks * needs.block
    return Ledger(
        weights=needs.weights,
        cache=cache,
        steps=needs.steps,
        free=available - cache - needs.beside_cache,
        adapters=needs.adapters,
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=needs.block,
    )


def _cache_bytes(config: EngineConfig, needs: Needs, available: int) -> int:
    """The cache's size by its option, or by default."""
    most = max(0, available - needs.beside_cache)
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes > most:
            users = "a step and adapters" if needs.adapters else "a step"
            raise ConfigError.of(
                "kv_cache_bytes",
                config.kv_cache_bytes,
                f"at most {most:,}, the free memory less {needs.beside_cache:,} for {users}",
            )
        return config.kv_cache_bytes

    most = max(0, most - int(available * _SPARE))
    if config.kv_cache_fraction is not None:
        share = int(available * config.kv_cache_fraction)
        return min(most, share // config.instances)
    if needs.device.type == "cuda":
        share = int(available * _GPU_SHARE)
    else:
        share = min(int(available * _CPU_SHARE), _CPU_MOST)
    # More than this is never in use: every sequence at its full length.
    blocks_a_sequence = math.ceil(needs.max_model_len / config.block_size)
    useful = config.max_num_seqs * blocks_a_sequence * needs.block
    return min(most, share // config.instances, useful)


def _size_option(config: EngineConfig, size: int) -> tuple[str, float]:
    """For an error: the option that decided the cache's size, and its value. By default that is
    ``kv_cache_bytes``, with the ``size`` that was found."""
    if config.kv_cache_bytes is None and config.kv_cache_fraction is not None:
        return "kv_cache_fraction", config.kv_cache_fraction or size
    return "kv_cache_bytes", config.kv_cache_bytes or size


def most_adapters(config: EngineConfig, model: LoadedModel, copied_rank: int) -> int:
    """Bytes of as many adapters as may be in memory at once, each of the highest rank allowed, and
    with a copy for kernels of rank ``copied_rank``."""
    rank = config.max_adapter_rank + copied_rank
    return config.max_adapters * adapter_bytes(model.sites, rank, model.dtype)


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of every layer."""
    elements = 0
    for layer in layers:
        shape = cache_shape(1, block_size, layer.num_kv_heads, layer.head_size, dtype)
        elements += 2 * math.prod(shape)
    return elements * dtype.itemsize


def estimate_steps(model: LoadedModel, tokens: int, logits_rows: int) -> StepMemory:
    """For a step of ``tokens``, from the widths that the configuration states: what the widest
    layer holds at once, and the logits, once as computed and once in float32."""
    hidden = model.config.hidden_size
    width = getattr(model.config, "intermediate_size", None) or 4 * hidden
    widest = width if isinstance(width, int) else max(width)  # some state one per layer
    # The layer's input and other rows of that size; the gate, the up projection, their product.
    layer = tokens * (4 * hidden + 3 * widest) * model.dtype.itemsize
    logits = min(tokens, logits_rows) * model.vocab_size * (model.dtype.itemsize + 4)
    return StepMemory(layer + logits)


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
    for layer, attend in zip(layers, attention, strict=True):
        shape = cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_size, dtype)
        keys = _zeros(shape, dtype, device)
        values = _zeros(shape, dtype, device)
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
