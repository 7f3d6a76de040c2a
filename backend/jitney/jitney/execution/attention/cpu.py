"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Imported only where Numba is (``attention.select``). The kernel runs on the very thread pool that
torch uses (``GOMP_parallel`` of torch's own OpenMP library): a second pool would fight the first,
whose threads spin for a while after each operation, and this one is already awake. One
:class:`CpuAttention` belongs to one engine and is called by one thread at a time; two objects may
run at once.
"""

import logging
import platform
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jitney.execution.attention import kernel, layout
from jitney.execution.attention.metadata import AttentionMetadata
from jitney.execution.attention.openmp import ask_for_tiles, team_runner
from jitney.execution.attention.plan import Plan, make_plan
from jitney.execution.attention.products import host_has_amx
from jitney.execution.attention.simd import BF16, F16, F32, host_has
from jitney.execution.compiled import compile_body, source_version

_log = logging.getLogger(__name__)

_TAGS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_PAGE = 4096
_LAYER = struct.Struct(f"={layout.NUM_LAYER_FIELDS}q")
# The other fields, in the order of layout.Call: 64-bit integers, then two float32 in the lower
# halves of as many.
_STEP = struct.Struct(f"={len(layout.Call._fields) - layout.NUM_LAYER_FIELDS - 2}qf4xf4x")
_STEP_OFFSET = _LAYER.size


def supported_dtypes() -> list[torch.dtype]:
    """Cache types that the kernel has on this processor."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    # LLVM would call a function that is not there to convert float16.
    return [t for t in _TAGS if t != torch.float16 or not x86 or host_has("f16c")]


@dataclass(slots=True)
class Prepared:
    """The arguments for the layers of one kind in one step, and what they point to."""

    buffer: memoryview
    address: int
    items: int
    write_items: int
    """0 if the works write their own tokens."""
    threads: int
    tokens: int
    block_size: int
    last_block: int
    """The highest block in use."""
    owned: tuple[np.ndarray, ...]


class CpuAttention:
    """The attention function ``cpu``; see :class:`attention.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or load from Numba's cache, the kernel for caches of ``dtype``."""
        began = time.perf_counter()
        self._dtype = dtype
        self._functions, cached = _compile(_TAGS[dtype])  # they own the code
        self.attend_address, self.write_address = (
            int(function.address) for function in self._functions
        )
        self.compile_seconds = time.perf_counter() - began
        _log.info(
            "attention kernel for %s %s in %.1f s",
            dtype,
            "loaded" if cached else "compiled",
            self.compile_seconds,
        )
        self._run = team_runner()
        self._tiles = int(dtype == torch.bfloat16 and host_has_amx() and ask_for_tiles())
        self._scratch = np.empty(0, np.uint8)
        self._scratch_address = self._scratch_bytes = 0
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
        assert (ready.tokens, ready.block_size) == (q.shape[0], key_cache.shape[2])
        assert ready.last_block < key_cache.shape[0]
        size = dtype.itemsize
        q_token, q_head, _ = q.stride()
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        layer = (
            q.data_ptr(),
            q_token * size,
            q_head * size,
            k.data_ptr(),
            k_token * size,
            k_head * size,
            v.data_ptr(),
            v_token * size,
            v_head * size,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        if ready.write_items:
            _LAYER.pack_into(ready.buffer, 0, 0, 0, ready.write_items, *layer)
            self._run(self.write_address, ready.address, min(ready.threads, ready.write_items))
        _LAYER.pack_into(ready.buffer, 0, 0, 0, ready.items, *layer)
        self._run(self.attend_address, ready.address, min(ready.threads, ready.items))
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
        ready = meta.plans.get(key)
        if ready is None:
            ready = meta.plans[key] = self._prepare_new(
                meta, shape, scale, window, softcap, threads
            )
        assert isinstance(ready, Prepared)
        return ready

    def _prepare_new(
        self,
        meta: AttentionMetadata,
        shape: tuple[int, int, int, int],
        scale: float,
        window: int | None,
        softcap: float | None,
        threads: int,
    ) -> Prepared:
        heads, kv_heads, head_size, padded = shape
        group = heads // kv_heads
        plan = self._plan(meta, group, window)
        table = meta.block_table
        tokens = meta.slot_mapping.shape[0]
        decode = meta.max_query_len == 1
        width = table.stride(0)
        longest = width * meta.block_size  # as the kernel has it: it lays the scratch memory out
        self._reserve_scratch(threads, max(layout.TILE_ROWS, group), padded, longest)
        self._reserve_parts(plan, group, kv_heads, padded)
        arguments = np.zeros(len(layout.Call._fields), np.int64)
        buffer = arguments.data
        _STEP.pack_into(
            buffer, _STEP_OFFSET,
            plan.works.ctypes.data, self._scratch_address, self._scratch_bytes,
            self._parts.ctypes.data, self._parts_done.ctypes.data,
            heads, kv_heads, head_size, padded, meta.block_size,
            table.data_ptr(), width, meta.slot_mapping.data_ptr(),
            tokens, decode, self._tiles, window or 0, scale, softcap or 0.0,
        )  # fmt: skip
        return Prepared(
            buffer,
            arguments.ctypes.data,
            items=len(plan.works) * kv_heads,
            write_items=0 if decode else -(-tokens // layout.WRITE_TOKENS) * kv_heads,
            threads=threads,
            tokens=tokens,
            block_size=meta.block_size,
            last_block=meta.last_block,
            owned=(plan.works, self._scratch, self._parts, self._parts_done),
        )

    def _reserve_scratch(self, threads: int, rows: int, padded: int, longest: int) -> None:
        """A scratch area or more for each of ``threads``, for contexts of ``longest`` tokens."""
        if self._scratch_for == (threads, rows, padded, longest):
            return
        need = layout.scratch_bytes(self._dtype.itemsize, rows, padded, longest)
        stride = -(-need // _PAGE) * _PAGE
        if self._scratch.size < (threads + 1) * stride:
            self._scratch = np.empty((threads + 1) * stride, np.uint8)
        self._scratch_address = -(-self._scratch.ctypes.data // _PAGE) * _PAGE
        self._scratch_bytes = stride
        self._scratch_for = (threads, rows, padded, longest)

    def _reserve_parts(self, plan: Plan, group: int, kv_heads: int, padded: int) -> None:
        """Room for the records of split rows and for their counters."""
        floats = plan.parts * kv_heads * group * (padded + 2)
        if self._parts.size < floats:
            self._parts = np.empty(floats, np.float32)
        if self._parts_done.size < plan.split_rows * kv_heads:
            self._parts_done = np.zeros(plan.split_rows * kv_heads, np.int64)

    @staticmethod
    def _plan(meta: AttentionMetadata, group: int, window: int | None) -> Plan:
        key = ("plan", group, window)
        plan = meta.plans.get(key)
        if plan is None:
            plan = meta.plans[key] = make_plan(
                meta.query_start.numpy(), meta.context_len.numpy(), group, window
            )
        assert isinstance(plan, Plan)
        return plan


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, heads, head] in ``dtype``, each head contiguous."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


# --------------------------------------------------------------------------- compiling and running


def _compile(tag: object) -> tuple[list[Any], bool]:
    """The compiled attend and write bodies, and whether both came from Numba's cache."""
    names = ("kernel.py", "blocks.py", "layout.py", "products.py", "simd.py")
    version = source_version(*(f"attention/{name}" for name in names))

    def attend(arguments: int) -> None:
        if version != 0:
            kernel.attend_body(tag, arguments)

    def write(arguments: int) -> None:
        if version != 0:
            kernel.write_body(tag, arguments)

    functions = [compile_body(body) for body in (attend, write)]
    cached = all(function.cache_hits > 0 for function in functions)
    return functions, cached
