"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Imported only where Numba is (``accelerator``). One :class:`CpuAttention` belongs to one engine and
is called by one thread at a time; two objects may run at once.
"""

import logging
import platform
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.kernels.cpu import layout
from jitney.kernels.cpu.amx import may_use_amx
from jitney.kernels.cpu.attention_kernel import attend_body
from jitney.kernels.cpu.blocks import write_body
from jitney.kernels.cpu.compiled import Kernel, source_version
from jitney.kernels.cpu.layout import AttentionCall
from jitney.kernels.cpu.plan import Plan, make_plan
from jitney.kernels.cpu.products import GROUP_TOKENS
from jitney.kernels.cpu.simd import BF16, F16, F32, host_has

_log = logging.getLogger(__name__)

_TAGS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_PAGE = 4096


def supported_dtypes() -> list[torch.dtype]:
    """Cache types that the kernel has on this processor."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    # LLVM would call a function that is not there to convert float16.
    return [t for t in _TAGS if t != torch.float16 or not x86 or host_has("f16c")]


@dataclass(slots=True)
class Prepared:
    """The arguments for the layers of one kind in one step, and what they point to."""

    call: AttentionCall
    """Without the layer's part."""
    items: int
    write_items: int
    """0 if the works write their own tokens."""
    threads: int
    last_block: int
    """The highest block in use."""
    owned: tuple[np.ndarray, ...]


class CpuAttention:
    """The attention function ``cpu``; see :class:`execution.attention.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or load from Numba's cache, the kernel for caches of ``dtype``."""
        began = time.perf_counter()
        self._dtype = dtype
        self._attend, self._write = _compile(_TAGS[dtype])
        self.attend_address, self.write_address = self._attend.address, self._write.address
        self.compile_seconds = time.perf_counter() - began
        cached = self._attend.was_cached and self._write.was_cached
        _log.info(
            "attention kernel for %s %s in %.1f s",
            dtype,
            "loaded" if cached else "compiled",
            self.compile_seconds,
        )
        self._tiles = int(dtype == torch.bfloat16 and may_use_amx())
        self._scratch = np.empty(0, np.uint8)
        self._areas = np.empty((0, 0), np.int64)
        self._scratch_for = (0, 0, 0, 0)
        self._parts = np.empty(0, np.float32)
        self._parts_done = np.zeros(0, np.int64)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V to their slots, then attend, in the cache's dtype with float32 sums."""
        dtype = self._dtype
        # The kernel trusts addresses: what they point to is checked here.
        assert key_cache.dtype == value_cache.dtype == dtype
        assert key_cache.is_contiguous()
        assert value_cache.is_contiguous()
        assert key_cache.shape == value_cache.shape
        assert k.shape == v.shape == (q.shape[0], key_cache.shape[1], q.shape[2])
        asked = q.dtype
        q, k, v = _rows(q, dtype), _rows(k, dtype), _rows(v, dtype)
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        out = torch.empty(q.shape, dtype=dtype)
        shape = (q.shape[1], k.shape[1], q.shape[2], key_cache.shape[3])
        ready = self.prepare(meta, shape, scale, window, softcap)
        call = ready.call
        assert (call.tokens, call.block_size) == (q.shape[0], key_cache.shape[2])
        assert ready.last_block < key_cache.shape[0]
        call.query, call.query_token_stride, call.query_head_stride = _address(q)
        call.key, call.key_token_stride, call.key_head_stride = _address(k)
        call.value, call.value_token_stride, call.value_head_stride = _address(v)
        call.key_cache, call.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        call.sinks = 0 if sinks is None else sinks.data_ptr()
        call.out = out.data_ptr()
        for run, items in ((self._write.run, ready.write_items), (self._attend.run, ready.items)):
            if items:
                call.counter, call.threads, call.num_items = 0, 0, items
                run(call, min(ready.threads, items))
        return out if dtype == asked else out.to(asked)

    def prepare(
        self,
        meta: AttentionMetadata,
        shape: tuple[int, int, int, int],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Prepared:
        """The arguments for layers of this kind; all but one layer of a step find them made.

        ``shape`` is (heads, KV heads, head size, head size in the cache).
        """
        threads = torch.get_num_threads()
        key = (self, shape, scale, window, softcap, threads)
        if key in meta.plans:
            ready = meta.plans[key]
            assert isinstance(ready, Prepared)
            return ready
        assert meta.block_size % GROUP_TOKENS == 0
        heads, kv_heads, head_size, padded = shape
        group, table, tokens = heads // kv_heads, meta.block_table, meta.slot_mapping.shape[0]
        plan = make_plan(meta.query_start.numpy(), meta.context_len.numpy(), group, window)
        decode, width = meta.max_query_len == 1, table.stride(0)
        longest = width * meta.block_size
        self._reserve_scratch(threads, max(layout.TILE_ROWS, group), padded, longest)
        self._reserve_parts(plan, group, kv_heads, padded)
        call = AttentionCall(
            works=plan.works.ctypes.data,
            scratch=self._areas.ctypes.data,
            parts=self._parts.ctypes.data,
            parts_done=self._parts_done.ctypes.data,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            padded=padded,
            block_size=meta.block_size,
            table=table.data_ptr(),
            table_width=width,
            slots=meta.slot_mapping.data_ptr(),
            tokens=tokens,
            decode=decode,
            tiles=self._tiles,
            scale=scale,
            window=window or 0,
            softcap=softcap or 0.0,
        )
        ready = meta.plans[key] = Prepared(
            call,
            items=len(plan.works) * kv_heads,
            write_items=0 if decode else -(-tokens // layout.WRITE_TOKENS) * kv_heads,
            threads=threads,
            last_block=meta.last_block,
            owned=(plan.works, self._scratch, self._areas, self._parts, self._parts_done),
        )
        return ready

    def _reserve_scratch(self, threads: int, rows: int, padded: int, longest: int) -> None:
        """A scratch area for each of ``threads``, for contexts of ``longest`` tokens."""
        if self._scratch_for == (threads, rows, padded, longest):
            return
        sizes = layout.scratch_sizes(self._dtype.itemsize, rows, padded, longest)
        stride = -(-sum(sizes) // _PAGE) * _PAGE
        if self._scratch.size < (threads + 1) * stride:
            self._scratch = np.empty((threads + 1) * stride, np.uint8)
        first = -(-self._scratch.ctypes.data // _PAGE) * _PAGE
        self._areas = first + stride * np.arange(threads)[:, None] + np.cumsum([0, *sizes[:-1]])
        self._scratch_for = (threads, rows, padded, longest)

    def _reserve_parts(self, plan: Plan, group: int, kv_heads: int, padded: int) -> None:
        """Room for the records of split rows and for their counters."""
        floats = plan.parts * kv_heads * group * (padded + 2)
        if self._parts.size < floats:
            self._parts = np.empty(floats, np.float32)
        if self._parts_done.size < plan.split_rows * kv_heads:
            self._parts_done = np.zeros(plan.split_rows * kv_heads, np.int64)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, heads, head] in ``dtype``, each head contiguous."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


def _address(x: Tensor) -> tuple[int, int, int]:
    """Of ``x`` [T, heads, head], with the bytes from token to token and from head to head."""
    token, head, _ = x.stride()
    size = x.element_size()
    return x.data_ptr(), token * size, head * size


def _compile(tag: object) -> tuple[Kernel, Kernel]:
    """The compiled attend and write bodies."""
    version = source_version()

    def attend(arguments: int) -> None:
        if version != 0:
            attend_body(tag, arguments)

    def write(arguments: int) -> None:
        if version != 0:
            write_body(tag, arguments)

    return Kernel(attend), Kernel(write)
