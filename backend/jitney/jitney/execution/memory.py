"""The KV cache's size and its tensors, and the ledger of where the memory goes.

Called at load, by the runner and (for a few blocks) by the probe. Sizes are bytes.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import AttentionFunction, cache_shape, select
from jitney.execution.interface import LayerCache

# Defaults of the cache: a share of what is free after loading, and at most so much on a CPU.
_CPU_SHARE, _CPU_MOST = 0.25, 4 << 30
_GPU_SHARE = 0.9


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps in the cache and how it attends."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None


@dataclass(frozen=True)
class Ledger:
    """Where the device's memory goes, as of the end of the load."""

    weights: int
    cache: int
    activations: int
    """The most that one step needs beside weights and cache: measured on a GPU, else estimated."""
    free: int
    """What is left when all of these are in use."""
    num_blocks: int
    block_size: int
    block_bytes: int
    graphs: int = 0
    """The most that CUDA graphs are expected to need, once all are captured."""

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        graphs = f"graphs at most about {_mib(self.graphs)}, " if self.graphs else ""
        return (
            f"memory: weights {_mib(self.weights)}, KV cache {_mib(self.cache)} "
            f"({self.num_blocks:,} blocks of {self.block_size}: {tokens:,} tokens, "
            f"{self.block_bytes // self.block_size:,} bytes each), activations at most about "
            f"{_mib(self.activations)}, {graphs}left {_mib(self.free)}"
        )


def plan_memory(
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: int,
    activations: int,
    available: int,
    max_model_len: int,
    graphs: int = 0,
) -> Ledger:
    """Size the cache. ``dtype`` is the cache's; ``available`` what is free once the weights are in.

    An explicit size is taken as it is; a default never exceeds what ``max_num_seqs`` sequences of
    full length can use. Raises ConfigError naming the option if it is more than there is, or not
    enough for one block.
    """
    per_block = block_bytes(layers, config.block_size, dtype)
    step = activations + graphs
    room = max(0, available - step)
    key: str
    value: float
    if config.kv_cache_bytes is not None:
        key, value, size = "kv_cache_bytes", config.kv_cache_bytes, config.kv_cache_bytes
        if size > room:
            raise ConfigError.of(
                key, value, f"at most {room:,}, the free memory less {step:,} for a step"
            )
    elif config.kv_cache_fraction is not None:
        key, value = "kv_cache_fraction", config.kv_cache_fraction
        size = min(room, int(available * value) // config.instances)
    else:
        key, value = "kv_cache_bytes", 0
        share = int(available * (_GPU_SHARE if device.type == "cuda" else _CPU_SHARE))
        most = share if device.type == "cuda" else min(share, _CPU_MOST)
        useful = per_block * config.max_num_seqs * math.ceil(max_model_len / config.block_size)
        size = min(room, most // config.instances, useful)
    num_blocks = size // per_block
    if num_blocks < 1:
        raise ConfigError.of(
            key, value or size, f"enough for one block of {config.block_size}, {per_block:,} bytes"
        )
    cache = num_blocks * per_block
    return Ledger(
        weights=weights,
        cache=cache,
        activations=activations,
        free=available - cache - step,
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=per_block,
        graphs=graphs,
    )


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of every layer."""
    values = sum(
        2 * math.prod(cache_shape(1, block_size, layer.num_kv_heads, layer.head_size))
        for layer in layers
    )
    return values * dtype.itemsize


def estimate_activations(
    tokens: int, *, hidden: int, intermediate: int, vocab: int, logits_rows: int, itemsize: int
) -> int:
    """Most memory of one step beside weights and cache: the widest layer (its input, a gate, an up
    projection and their product) and the logits, once as computed and once in float32."""
    widest = tokens * (4 * hidden + 3 * intermediate) * itemsize
    return widest + min(tokens, logits_rows) * vocab * (itemsize + 4)


def select_attention(
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    batch_invariant: bool = False,
) -> list[AttentionFunction]:
    """Each layer's attention function: one for all layers of the same heads."""
    shapes = [(spec.num_heads, spec.num_kv_heads, spec.head_size) for spec in layers]
    more = {"batch_invariant": True} if batch_invariant else {}
    functions = {
        (heads, kv_heads, size): select(attention, device, dtype, size, heads, kv_heads, **more)
        for heads, kv_heads, size in dict.fromkeys(shapes)
    }
    return [functions[shape] for shape in shapes]


def make_layer_caches(
    layers: Sequence[LayerSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    *,
    batch_invariant: bool = False,
) -> list[LayerCache]:
    """Empty caches, by layer, and each layer's attention function.

    Raises OSError, MemoryError or RuntimeError, by device, if the memory cannot be had.
    """
    functions = select_attention(layers, dtype, device, attention, batch_invariant)
    caches = []
    for spec, attend in zip(layers, functions, strict=True):
        shape = cache_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_size)
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
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; fewer address translations per row of a cache
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps `pages` alive


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
