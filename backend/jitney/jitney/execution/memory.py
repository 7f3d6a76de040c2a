"""The KV cache's size and its tensors, and the ledger of where the memory goes.

Called at load, by accelerators that measure, by ``weigh``, and (for a few blocks) by the probe.
Sizes are bytes.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import cache_shape
from jitney.execution.interface import AttentionFunction, LayerCache, LayerSpec, LoadedModel
from jitney.execution.low_rank import adapter_bytes

# The cache's default size: a share of what is free after loading, on a CPU with an upper limit.
_CPU_SHARE = 0.25
_CPU_MOST = 4 << 30
_GPU_SHARE = 0.9
_SLOT_TOKENS = 1024
"""If there are fewer slots than sequences may run, so many tokens of blocks are left beside each
slot."""
_SLOT_SHARE = 1 / 4
"""Slots may take this share of the cache, even if fewer tokens are left beside each."""
_SNAPSHOT_SHARE = 1 / 8
"""Snapshots get this share of the cache at most, for when all sequences run: else they are also in
the slots that no sequence holds. So at worst an eighth fewer tokens fit, and that many sequences
are preempted earlier; but a sequence that is preempted begins again at a snapshot."""
_SEQUENCE_SNAPSHOTS = 4
"""There are at most so many snapshots for each sequence that may run, however small they are."""
_SPARE_SHARE = 1 / 64
"""This share of the free memory stays unused, unless ``kv_cache_bytes`` is set. An engine that
replaces this one after a crash must get a cache of the same size, and may find a little less memory
free."""


class StepMemory(NamedTuple):
    """Bytes that steps need beside weights and cache."""

    activations: int
    """Of the largest step, the runner's own buffers included."""
    graphs: int = 0
    """Of CUDA graphs of decode steps, once all that can be needed are captured."""

    @property
    def total(self) -> int:
        """Both together."""
        return self.activations + self.graphs


@dataclass(frozen=True)
class Ledger:
    """What the device's memory is used for, as of the end of the load. Bytes."""

    weights: int
    cache: int
    """Blocks, slots and snapshots."""
    steps: StepMemory
    """Measured on a GPU, else estimated."""
    free: int
    """What is left when all of the above and all adapters are in use."""
    num_blocks: int
    block_size: int
    block_bytes: int
    adapters: int
    """Of the adapters that may be in memory at once."""
    num_slots: int = 0
    """See ``core.slots``; 0: the model has none."""
    slot_bytes: int = 0
    """Of one slot: all states of one sequence."""
    num_snapshots: int = 0
    """Slots beside ``num_slots``, for snapshots (see ``core.snapshots``)."""

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        token_bytes = self.block_bytes // self.block_size
        parts = [
            f"weights {_mib(self.weights)}",
            f"KV cache {_mib(self.cache)} ({self.num_blocks:,} blocks of {self.block_size}: "
            f"{tokens:,} tokens, {token_bytes:,} bytes each)",
            f"activations at most about {_mib(self.steps.activations)}",
        ]
        if self.num_slots:
            slots = f"in it {self.num_slots:,} slots of {self.slot_bytes:,} bytes"
            if self.num_snapshots:
                slots += f" and {self.num_snapshots:,} more for snapshots"
            parts.insert(2, slots)
        if self.steps.graphs:
            parts.append(f"graphs at most about {_mib(self.steps.graphs)}")
        if self.adapters:
            parts.append(f"adapters at most {_mib(self.adapters)}")
        parts.append(f"left {_mib(self.free)}")
        return f"memory: {', '.join(parts)}"


@dataclass(frozen=True)
class Needs:
    """What a load needs, in bytes, before the number of blocks is known."""

    device: torch.device
    max_model_len: int
    weight_bytes: int
    """Of the weights, which are in memory already; a draft model's included."""
    block_bytes: int
    """Of one block in the caches of all layers, a draft model's included."""
    steps: StepMemory
    adapter_bytes: int
    """Of the adapters that may be in memory at once."""
    slot_bytes: int = 0
    """Of one slot (see ``core.slots``): what a sequence keeps beside its blocks."""
    most_slots: int = 0
    """How many sequences may run, if each holds a slot; 0: the model has no slots."""
    keeps_snapshots: bool = False
    """Whether snapshots of slots are kept."""

    @property
    def beside_cache(self) -> int:
        """What must stay free for steps and adapters once the cache is allocated."""
        return self.steps.total + self.adapter_bytes


def plan_memory(config: EngineConfig, needs: Needs, available: int) -> Ledger:
    """Size the cache. ``available`` bytes are free once the weights are loaded.

    Raises ConfigError, naming the option, if ``kv_cache_bytes`` is more than there is, or if the
    size is not enough for one block.
    """
    size = _cache_bytes(config, needs, available)
    num_snapshots = _num_snapshots(config, needs, size)
    num_slots = _num_slots(config, needs, size - num_snapshots * needs.slot_bytes)
    all_slots = num_slots + num_snapshots
    for_blocks = size - all_slots * needs.slot_bytes
    if needs.block_bytes:
        num_blocks = for_blocks // needs.block_bytes
    else:  # slots hold all that is kept: there are blocks for every sequence and snapshot
        num_blocks = all_slots * _sequence_blocks(config, needs)
    if num_blocks < 1:
        bound = f"enough for one block of {config.block_size}, {needs.block_bytes:,} bytes"
        raise wrong_size(config, size, bound)
    cache = num_blocks * needs.block_bytes + all_slots * needs.slot_bytes
    return Ledger(
        weights=needs.weight_bytes,
        cache=cache,
        steps=needs.steps,
        free=available - cache - needs.beside_cache,
        adapters=needs.adapter_bytes,
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=needs.block_bytes,
        num_slots=num_slots,
        slot_bytes=needs.slot_bytes,
        num_snapshots=num_snapshots,
    )


def _num_snapshots(config: EngineConfig, needs: Needs, size: int) -> int:
    """How many slots a cache of this size has for snapshots: as many as fit into
    ``_SNAPSHOT_SHARE`` of it. If a sequence of full length fits at all, it does so beside them."""
    if not needs.keeps_snapshots:
        return 0
    for_snapshots = int(size * _SNAPSHOT_SHARE)
    beside_longest = size - _longest_bytes(config, needs)
    if beside_longest >= 0:
        for_snapshots = min(for_snapshots, beside_longest)
    return min(_most_snapshots(needs), for_snapshots // needs.slot_bytes)


def _num_slots(config: EngineConfig, needs: Needs, size: int) -> int:
    """How many slots the cache of this size has beside its blocks: as many as there are sequences
    of ``_SLOT_TOKENS`` tokens that fit, or as fit into ``_SLOT_SHARE`` of it, if that is more.
    Raises ConfigError if not even one slot and block do."""
    if not needs.slot_bytes:  # there are none, or they cost nothing
        return needs.most_slots
    tokens = min(_SLOT_TOKENS, needs.max_model_len)
    sequence_bytes = needs.slot_bytes + math.ceil(tokens / config.block_size) * needs.block_bytes
    if size < needs.slot_bytes + needs.block_bytes:
        bound = f"enough for a slot of {needs.slot_bytes:,} bytes and a block of "
        raise wrong_size(config, size, f"{bound}{needs.block_bytes:,}")
    by_share = int(size * _SLOT_SHARE) // needs.slot_bytes
    return min(needs.most_slots, max(1, size // sequence_bytes, by_share))


def _sequence_blocks(config: EngineConfig, needs: Needs) -> int:
    """Blocks of a sequence of full length."""
    return math.ceil(needs.max_model_len / config.block_size)


def _cache_bytes(config: EngineConfig, needs: Needs, available: int) -> int:
    """The cache's size.

    - ``kv_cache_bytes`` is taken as it is.
    - ``kv_cache_fraction`` is a share of what is available, but leaves room for steps, adapters
      and :data:`_SPARE_SHARE`: a larger share is cut without an error.
    - By default the size is a share, too, and not more than ``max_num_seqs`` sequences of full
      length fill.
    """
    free = max(0, available - needs.beside_cache)
    if config.kv_cache_bytes is not None:
        _check_stated_bytes(config.kv_cache_bytes, needs, free)
        return config.kv_cache_bytes
    spare = int(available * _SPARE_SHARE)
    most_allowed = max(0, free - spare)
    if config.kv_cache_fraction is not None:
        share = int(available * config.kv_cache_fraction)
        return min(most_allowed, share // config.instances)
    share = _default_share(needs.device, available)
    most_useful = _most_useful_bytes(config, needs)
    return min(most_allowed, share // config.instances, most_useful)


def _check_stated_bytes(stated: int, needs: Needs, free: int) -> None:
    """Raise ConfigError if option ``kv_cache_bytes`` asks for more than is free."""
    if stated > free:
        users = "a step and adapters" if needs.adapter_bytes else "a step"
        bound = f"at most {free:,}, the free memory less {needs.beside_cache:,} for {users}"
        raise ConfigError.of("kv_cache_bytes", stated, bound)


def _default_share(device: torch.device, available: int) -> int:
    """What the caches of all instances on a device take by default."""
    if device.type == "cuda":
        return int(available * _GPU_SHARE)
    return min(int(available * _CPU_SHARE), _CPU_MOST)


def _most_useful_bytes(config: EngineConfig, needs: Needs) -> int:
    """The size of a cache that ``max_num_seqs`` sequences of full length fill, and snapshots."""
    snapshots = _most_snapshots(needs) * needs.slot_bytes
    return config.max_num_seqs * _longest_bytes(config, needs) + snapshots


def _most_snapshots(needs: Needs) -> int:
    """How many snapshots are of use."""
    return _SEQUENCE_SNAPSHOTS * needs.most_slots if needs.keeps_snapshots else 0


def _longest_bytes(config: EngineConfig, needs: Needs) -> int:
    """What a sequence of full length holds."""
    return _sequence_blocks(config, needs) * needs.block_bytes + needs.slot_bytes


def wrong_size(config: EngineConfig, size: int, bound: str) -> ConfigError:
    """The error for a cache of ``size`` bytes, which must be ``bound``. It names the option that
    led to the size. If neither option is set, it names ``kv_cache_bytes``, which the user can
    set."""
    if config.kv_cache_bytes is None and config.kv_cache_fraction is not None:
        return ConfigError.of("kv_cache_fraction", config.kv_cache_fraction, bound)
    return ConfigError.of("kv_cache_bytes", size, bound)


def resident_adapters_bytes(config: EngineConfig, model: LoadedModel, copied_rank: int) -> int:
    """Bytes of all adapters that may be in memory at once, if each has the highest rank allowed.
    Kernels have a copy of each, of rank ``copied_rank``; it is 0 if they need none."""
    factors = adapter_bytes(model.sites, config.max_adapter_rank, model.dtype)
    copies = adapter_bytes(model.sites, copied_rank, model.dtype)
    return config.max_adapters * (factors + copies)


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of every layer."""
    elements = 0
    for layer in layers:
        for shape in _cache_shapes(layer, 1, block_size, dtype):
            elements += math.prod(shape)
    return elements * dtype.itemsize


def estimate_steps(model: LoadedModel, tokens: int, logits_rows: int) -> StepMemory:
    """An estimate of what a step needs, from the widths that the configuration states: what one
    layer holds at once of all ``tokens``, and the logits of ``logits_rows`` of them."""
    layer = tokens * token_bytes(model.config, model.dtype)
    if model.states is not None:
        layer += tokens * model.states.scan_bytes
    logits = min(tokens, logits_rows) * logits_bytes(model.vocab_size, model.dtype)
    return StepMemory(layer + logits)


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """An estimate of what a step needs for each of its tokens, beside logits."""
    hidden: int = config.hidden_size
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    widest = width if isinstance(width, int) else max(width)  # some state one per layer
    # Four rows of the hidden size, the layer's input among them. Three rows of the MLP's width: the
    # gate, the up projection, and their product.
    return (4 * hidden + 3 * widest) * dtype.itemsize


def logits_bytes(vocab_size: int, dtype: torch.dtype) -> int:
    """What a step needs for one row of logits."""
    # Each logit is there twice: as the model computes it, and in float32 for the sampler.
    return vocab_size * (dtype.itemsize + torch.float32.itemsize)


def make_layer_caches(
    layers: Sequence[LayerSpec],
    attention: Sequence[AttentionFunction],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_blocks: int,
) -> list[LayerCache]:
    """Empty caches, by layer, each with its attention function.

    Raises OSError, MemoryError or RuntimeError, by device, if the memory cannot be allocated.
    """
    caches = []
    for layer, attend in zip(layers, attention, strict=True):
        of_keys, of_values = _cache_shapes(layer, num_blocks, block_size, dtype)
        keys = _zeros(of_keys, dtype, device)
        values = _zeros(of_values, dtype, device)
        caches.append(LayerCache(keys, values, attend, again=layer.again))
    return caches


class _CacheShapes(NamedTuple):
    """Of one layer's key cache and value cache."""

    keys: tuple[int, ...]
    values: tuple[int, ...]


def _cache_shapes(
    layer: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> _CacheShapes:
    """The shapes of a layer's caches."""
    shapes = [
        cache_shape(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=head_size,
            dtype=dtype,
        )
        for head_size in (layer.head_size, layer.cached_value_size)
    ]
    return _CacheShapes(*shapes)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because an unwritten slot that is masked out must not hold a NaN.

    On a CPU the pages are the kernel's zero pages until they are written: loading does not spend
    seconds on gigabytes that may never be used, and the tensor begins at a page, not 16 bytes after
    one as malloc's does.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if math.prod(shape) == 0:  # of latents, which have no values, and of layers without attention
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    # Huge pages need fewer address translations per row of a cache. This is advice only: a kernel
    # without huge pages refuses it, and the cache works without them.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # the tensor keeps ``pages`` alive


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
