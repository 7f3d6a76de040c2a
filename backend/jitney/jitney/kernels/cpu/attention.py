"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Imported only where Numba is (``accelerator``). One :class:`CpuAttention` belongs to one engine and
is called by one thread at a time; two objects may run at once.
"""

import logging
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.byte_cache import SCALE_BYTES
from jitney.execution.interface import AttentionCall, LayerCache
from jitney.kernels.cpu import ahead, layout
from jitney.kernels.cpu.attention_kernel import attention_kernels
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.layout import AttentionArguments
from jitney.kernels.cpu.products import GROUP_TOKENS, instruction_set, may_use_amx

_log = logging.getLogger(__name__)

_PAGE = 4096


@dataclass(slots=True)
class Prepared:
    """The arguments for the layers of one kind in one step, and what they point to."""

    arguments: AttentionArguments
    """Without the layer's part."""
    items: int
    write_items: int
    """0 if the works write their own tokens."""
    threads: int
    owned: tuple[np.ndarray, ...]


class CpuAttention:
    """The attention function ``cpu``; see :class:`execution.interface.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype, model_dtype: torch.dtype = torch.bfloat16) -> None:
        """For caches of ``dtype``; ``model_dtype`` matters for int8 only."""
        self.cache_dtype, self.dtype = dtype, model_dtype if dtype == torch.int8 else dtype
        self._tiles = int(self.dtype == torch.bfloat16 and may_use_amx())
        self._scratch = np.empty(0, np.uint8)
        self._areas = np.empty((0, 0), np.int64)
        self._scratch_for = (0, 0, 0, 0)
        self._parts = np.empty(0, np.float32)
        self._parts_done = np.zeros(0, np.int64)

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
        q, k, v = (_rows(each, self.dtype) for each in (call.query, call.key, call.value))
        assert k.shape == v.shape == (q.shape[0], cache.keys.shape[1], q.shape[2])
        out = torch.empty(q.shape, dtype=self.dtype)
        ready = self.prepare(call, cache, meta)
        arguments = ready.arguments
        assert arguments.tokens == q.shape[0]
        set_layer(arguments, q, k, v, cache, out.data_ptr())
        sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
        arguments.sinks = 0 if sinks is None else sinks.data_ptr()
        attend, write = self.kernels
        for kernel, items in ((write, ready.write_items), (attend, ready.items)):
            if items:
                arguments.counter, arguments.threads, arguments.count = 0, 0, items
                kernel.run(arguments, min(ready.threads, items))
        return out.to(call.query.dtype)

    def prepare(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Prepared:
        """The arguments for layers of this kind; all but one layer of a step find them made."""
        _, heads, head_size = call.query.shape
        blocks, kv_heads, block_size, padded = shape = cache.keys.shape
        padded -= SCALE_BYTES if self.cache_dtype == torch.int8 else 0
        threads = torch.get_num_threads()
        key = (self, heads, head_size, shape, call.scale, call.window, call.softcap, threads)
        if key in meta.plans:
            ready = meta.plans[key]
            assert isinstance(ready, Prepared)
            return ready
        assert meta.block_size == block_size
        assert block_size % GROUP_TOKENS == 0
        assert meta.last_block < blocks
        group, table, tokens = heads // kv_heads, meta.block_table, meta.slot_mapping.shape[0]
        works, parts, split_rows = layout.cut_works(
            meta.query_start.numpy(),
            meta.context_len.numpy(),
            max(1, layout.TILE_ROWS // group),
            call.window or meta.max_context_len,
            layout.PART_TOKENS,
            GROUP_TOKENS,
        )
        decode, width = meta.max_query_len == 1, table.stride(0)
        rows = max(layout.TILE_ROWS, group)
        self._reserve_scratch(threads, rows, padded, width * block_size)
        floats = parts * group * (padded + layout.STATE_EXTRA) * kv_heads
        if self._parts.size < floats:
            self._parts = np.empty(floats, np.float32)
        if self._parts_done.size < split_rows * kv_heads:
            self._parts_done = np.zeros(split_rows * kv_heads, np.int64)
        arguments = AttentionArguments(
            works=works.ctypes.data,
            scratch=self._areas.ctypes.data,
            parts=self._parts.ctypes.data,
            parts_done=self._parts_done.ctypes.data,
            heads=heads,
            kv_heads=kv_heads,
            group=group,
            head_size=head_size,
            padded=padded,
            block_size=block_size,
            table=table.data_ptr(),
            table_width=width,
            slots=meta.slot_mapping.data_ptr(),
            tokens=tokens,
            decode=decode,
            tiles=self._tiles,
            scale=call.scale,
            window=call.window or 0,
            softcap=call.softcap or 0.0,
        )
        ready = meta.plans[key] = Prepared(
            arguments,
            items=len(works) * kv_heads,
            write_items=0 if decode else -(-tokens // layout.WRITE_TOKENS) * kv_heads,
            threads=threads,
            owned=(works, self._scratch, self._areas, self._parts, self._parts_done),
        )
        return ready

    def _reserve_scratch(self, threads: int, rows: int, padded: int, longest: int) -> None:
        """A scratch area for each of ``threads``, for contexts of ``longest`` tokens."""
        if self._scratch_for == (threads, rows, padded, longest):
            return
        sizes = layout.scratch_sizes(self.cache_dtype.itemsize, rows, padded, longest)
        stride = -(-sum(sizes) // _PAGE) * _PAGE
        if self._scratch.size < (threads + 1) * stride:
            self._scratch = np.empty((threads + 1) * stride, np.uint8)
        first = -(-self._scratch.ctypes.data // _PAGE) * _PAGE
        self._areas = first + stride * np.arange(threads)[:, None] + np.cumsum([0, *sizes[:-1]])
        self._scratch_for = (threads, rows, padded, longest)


def set_layer(
    arguments: AttentionArguments, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, out: int
) -> None:
    """Set what is of a layer, but for its sinks. ``out`` is the address of the result."""
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
    arguments.key_cache, arguments.value_cache = cache.keys.data_ptr(), cache.values.data_ptr()
    arguments.out = out


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, heads, head] in ``dtype``, each head contiguous."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


def _address(x: Tensor) -> tuple[int, int, int]:
    """Of ``x`` [T, heads, head], with the bytes from token to token and from head to head."""
    token, head, _ = x.stride()
    size = x.element_size()
    return x.data_ptr(), token * size, head * size
