"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Called by the runner through ``execution.interface.AttentionFunction``, or, where a whole step is
one native call, by ``program``, which takes what :meth:`CpuAttention.prepare` gives. Imported only
where Numba is (``accelerator``).

One :class:`CpuAttention` belongs to one engine and is called by one thread at a time; two objects
may run at once.
"""

import logging
import time
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.byte_cache import SCALE_BYTES
from jitney.execution.interface import AttentionCall, LayerCache
from jitney.kernels.cpu import ahead
from jitney.kernels.cpu.attention_kernel import attention_kernels
from jitney.kernels.cpu.attention_plan import plan_step
from jitney.kernels.cpu.attention_records import (
    ITEM_ROWS,
    SPLIT_TOKENS,
    STATE_EXTRA,
    WRITE_TOKENS,
    AttentionArguments,
    scratch_sizes,
)
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.processor import instruction_set, may_use_amx

_log = logging.getLogger(__name__)

_PAGE = 4096


@dataclass(slots=True)
class Prepared:
    """The arguments for the layers of one kind in one step, and what they point to."""

    arguments: AttentionArguments
    """Without the layer's part."""
    items: int
    write_items: int
    """0 if the items write their own tokens."""
    threads: int
    owned: tuple[np.ndarray, ...]
    """The memory that the arguments point to, so that it lives as long as they do."""


class _ScratchShape(NamedTuple):
    """What the size of scratch memory depends on."""

    threads: int
    rows: int
    padded: int
    longest: int


class CpuAttention:
    """The attention function ``cpu``; see :class:`execution.interface.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype, model_dtype: torch.dtype = torch.bfloat16) -> None:
        """For caches of ``dtype``; ``model_dtype`` matters for int8 only."""
        self.cache_dtype = dtype
        self.dtype = model_dtype if dtype == torch.int8 else dtype
        self._tiles = int(self.dtype == torch.bfloat16 and may_use_amx())
        # Memory that steps share; it grows where a step needs more.
        self._scratch = np.empty(0, np.uint8)
        # int64 [threads, fields of Scratch]: where in it each thread's areas are.
        self._areas = np.empty((0, 0), np.int64)
        self._scratch_shape: _ScratchShape | None = None
        # See the fields of AttentionArguments of these names.
        self._states = np.empty(0, np.float32)
        self._splits_done = np.zeros(0, np.int64)

    @cached_property
    def kernels(self) -> tuple[Kernel, Kernel]:
        """What attends, and what writes: compiled, or loaded from Numba's cache, when first used,
        which is after all other kernels of a load."""
        began = time.perf_counter()
        if self.cache_dtype == self.dtype == ahead.DTYPE:
            ahead.wait_for_compiler()
        attend, write = attention_kernels(self.cache_dtype, self.dtype)
        done = "loaded" if attend.was_cached and write.was_cached else "compiled"
        seconds = time.perf_counter() - began
        text = "attention kernel for %s, of %s instructions, %s in %.1f s"
        _log.info(text, self.cache_dtype, instruction_set(), done, seconds)
        return attend, write

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write K and V to their slots, then attend, in ``dtype`` with float32 sums."""
        q = _rows(call.query, self.dtype)
        k = _rows(call.key, self.dtype)
        v = _rows(call.value, self.dtype)
        assert k.shape == v.shape == (q.shape[0], cache.keys.shape[1], q.shape[2])
        out = torch.empty(q.shape, dtype=self.dtype)
        ready = self.prepare(call, cache, meta)
        arguments = ready.arguments
        assert arguments.tokens == q.shape[0]
        set_layer(arguments, q, k, v, cache=cache, out=out.data_ptr())
        sinks = None
        arguments.sinks = 0
        if call.sinks is not None:
            sinks = call.sinks.to(torch.float32).contiguous()  # it lives until the kernel ends
            arguments.sinks = sinks.data_ptr()
        attend, write = self.kernels
        _run(write, arguments, ready.write_items, ready.threads)
        _run(attend, arguments, ready.items, ready.threads)
        return out.to(call.query.dtype)

    def prepare(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Prepared:
        """The arguments for layers of this kind. The first layer of a step makes them; ``meta``
        keeps them for the others."""
        _, heads, head_size = call.query.shape
        shape = cache.keys.shape
        threads = torch.get_num_threads()
        key = (self, heads, head_size, shape, call.scale, call.window, call.softcap, threads)
        ready = meta.plans.get(key)
        if ready is None:
            ready = self._prepare(call, cache, meta, threads)
            meta.plans[key] = ready
        assert isinstance(ready, Prepared)
        return ready

    def _prepare(
        self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata, threads: int
    ) -> Prepared:
        """See :meth:`prepare`."""
        _, heads, head_size = call.query.shape
        blocks, kv_heads, block_size, padded = cache.keys.shape
        if self.cache_dtype == torch.int8:
            padded -= SCALE_BYTES  # the cache holds a scale with each token's bytes
        assert meta.block_size == block_size
        assert block_size % GROUP_TOKENS == 0
        assert meta.last_block < blocks
        heads_per_kv = heads // kv_heads
        table = meta.block_table
        tokens = meta.slot_mapping.shape[0]
        plan = plan_step(
            meta.query_start.numpy(),
            meta.context_len.numpy(),
            entry_tokens=max(1, ITEM_ROWS // heads_per_kv),
            reach=call.window or meta.max_context_len,
            split_tokens=SPLIT_TOKENS,
            group_tokens=GROUP_TOKENS,
        )
        scratch_shape = _ScratchShape(
            threads=threads,
            rows=max(ITEM_ROWS, heads_per_kv),
            padded=padded,
            longest=table.stride(0) * block_size,  # what a full row of the table could hold
        )
        self._reserve_scratch(scratch_shape)
        self._reserve_splits(
            floats=plan.splits * kv_heads * heads_per_kv * (padded + STATE_EXTRA),
            counters=plan.split_rows * kv_heads,
        )
        decode = meta.max_query_len == 1
        arguments = AttentionArguments(
            plan=plan.entries.ctypes.data,
            scratch=self._areas.ctypes.data,
            states=self._states.ctypes.data,
            splits_done=self._splits_done.ctypes.data,
            heads=heads,
            kv_heads=kv_heads,
            heads_per_kv=heads_per_kv,
            head_size=head_size,
            padded=padded,
            block_size=block_size,
            table=table.data_ptr(),
            table_width=table.stride(0),
            slots=meta.slot_mapping.data_ptr(),
            tokens=tokens,
            decode=decode,
            tiles=self._tiles,
            scale=call.scale,
            window=call.window or 0,
            softcap=call.softcap or 0.0,
        )
        write_items = 0 if decode else -(-tokens // WRITE_TOKENS) * kv_heads
        return Prepared(
            arguments,
            items=len(plan.entries) * kv_heads,
            write_items=write_items,
            threads=threads,
            owned=(plan.entries, self._scratch, self._areas, self._states, self._splits_done),
        )

    def _reserve_splits(self, floats: int, counters: int) -> None:
        """Memory for the states of split rows, and a counter for each of them and KV head."""
        if self._states.size < floats:
            self._states = np.empty(floats, np.float32)
        if self._splits_done.size < counters:
            self._splits_done = np.zeros(counters, np.int64)

    def _reserve_scratch(self, shape: _ScratchShape) -> None:
        """Scratch memory of this shape, each thread's on pages of its own."""
        if self._scratch_shape == shape:
            return
        sizes = scratch_sizes(
            self.cache_dtype.itemsize, shape.rows, padded=shape.padded, longest=shape.longest
        )
        stride = -(-sum(sizes) // _PAGE) * _PAGE
        needed = (shape.threads + 1) * stride  # one more, as the first begins at the next page
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.uint8)
        first = -(-self._scratch.ctypes.data // _PAGE) * _PAGE
        starts = first + stride * np.arange(shape.threads)
        offsets = np.cumsum([0, *sizes[:-1]])
        self._areas = starts[:, None] + offsets
        self._scratch_shape = shape


def set_layer(
    arguments: AttentionArguments, q: Tensor, k: Tensor, v: Tensor, *, cache: LayerCache, out: int
) -> None:
    """Set the fields of a layer, except ``sinks``. ``out`` is the address of the result."""
    # The kernel trusts addresses: what they point to is checked here.
    assert isinstance(cache.attend, CpuAttention)
    assert q.dtype == cache.attend.dtype
    assert cache.keys.dtype == cache.values.dtype == cache.attend.cache_dtype
    assert cache.keys.is_contiguous()
    assert cache.values.is_contiguous()
    assert cache.keys.shape == cache.values.shape
    arguments.query, arguments.query_token_stride, arguments.query_head_stride = _address(q)
    arguments.key, arguments.key_token_stride, arguments.key_head_stride = _address(k)
    arguments.value, arguments.value_token_stride, arguments.value_head_stride = _address(v)
    arguments.key_cache = cache.keys.data_ptr()
    arguments.value_cache = cache.values.data_ptr()
    arguments.out = out


def _run(kernel: Kernel, arguments: AttentionArguments, items: int, threads: int) -> None:
    """Run so many items, if there are any."""
    if items == 0:
        return
    arguments.counter = 0
    arguments.threads = 0
    arguments.count = items
    kernel.run(arguments, min(threads, items))


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, heads, head] in ``dtype``, each head contiguous."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


def _address(x: Tensor) -> tuple[int, int, int]:
    """Of ``x`` [T, heads, head]: its address, and the bytes from token to token and from head to
    head."""
    token, head, _ = x.stride()
    size = x.element_size()
    return x.data_ptr(), token * size, head * size
