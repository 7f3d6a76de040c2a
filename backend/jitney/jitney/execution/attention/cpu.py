"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Imported only where Numba is (``attention.select``). The kernel runs on the very thread pool that
torch uses (``GOMP_parallel`` of torch's own OpenMP library): a second pool would fight the first,
whose threads spin for a while after each operation, and this one is already awake. One
:class:`CpuAttention` belongs to one engine and is called by one thread at a time; two objects may
run at once.
"""

import ctypes
import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor

from jitney.execution.attention import kernel
from jitney.execution.attention.metadata import AttentionMetadata
from jitney.execution.attention.simd import BF16, F16, F32

_log = logging.getLogger(__name__)

_TAGS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
SUPPORTED_DTYPES = tuple(_TAGS)


@dataclass(slots=True)
class _Plan:
    """A step's work for tiles of one size and one window; ``items`` is int64 [works, fields]."""

    items: np.ndarray
    parts: int
    split_rows: int


class CpuAttention:
    """The attention function ``cpu``; see :class:`attention.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or load from Numba's cache, the kernel for caches of ``dtype``."""
        began = time.perf_counter()
        self._dtype = dtype
        self._attend, self._write, cached = _compile(_TAGS[dtype])
        self.compile_seconds = time.perf_counter() - began
        _log.info(
            "attention kernel for %s %s in %.1f s",
            dtype,
            "loaded" if cached else "compiled",
            self.compile_seconds,
        )
        self._run = _team_runner()
        self._arguments = np.zeros(kernel.ARGUMENTS, np.int64)
        self._floats = self._arguments.view(np.float32)
        self._scratch = np.empty(0, np.uint8)
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
        assert key_cache.dtype == dtype and value_cache.dtype == dtype  # noqa: PT018
        q_, k, v = (_rows(x, dtype) for x in (q, k, v))
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        tokens, heads, head_size = q_.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        plan = self._plan(meta, group, window)
        out = torch.empty((tokens, heads, head_size), dtype=dtype)
        threads = torch.get_num_threads()
        padded = key_cache.shape[-1]
        self._reserve(threads, plan, group, kv_heads, padded)

        a = self._arguments
        a[kernel.ITEMS] = plan.items.ctypes.data
        size = q_.element_size()
        a[kernel.QUERY : kernel.TABLE_WIDTH + 1] = (
            q_.data_ptr(),
            q_.stride(0) * size,
            q_.stride(1) * size,
            out.data_ptr(),
            heads,
            kv_heads,
            head_size,
            padded,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            meta.block_size,
            meta.block_table.data_ptr(),
            meta.block_table.shape[1],
        )
        a[kernel.WINDOW] = window or 0
        self._floats[2 * kernel.SCALE] = scale
        self._floats[2 * kernel.SOFTCAP] = softcap or 0.0
        a[kernel.SINKS] = 0 if sinks is None else sinks.data_ptr()
        a[kernel.KEY :] = (
            k.data_ptr(),
            k.stride(0) * size,
            k.stride(1) * size,
            v.data_ptr(),
            v.stride(0) * size,
            v.stride(1) * size,
            meta.slot_mapping.data_ptr(),
            tokens,
        )
        self._launch(self._write, -(-tokens // kernel.WRITE_TOKENS) * kv_heads, threads)
        self._launch(self._attend, len(plan.items) * kv_heads, threads)
        return out if out.dtype == q.dtype else out.to(q.dtype)

    def _launch(self, body: int, items: int, threads: int) -> None:
        a = self._arguments
        a[kernel.COUNTER] = a[kernel.THREADS] = 0
        a[kernel.NUM_ITEMS] = items
        self._run(body, a.ctypes.data, min(threads, items))

    def _reserve(self, threads: int, plan: _Plan, group: int, kv_heads: int, padded: int) -> None:
        """Grow the scratch memory to what this call needs."""
        rows = max(kernel.TILE_ROWS, group)
        size = self._dtype.itemsize
        stride = -(-kernel.scratch_layout.py_func(size, rows, padded)[-1] // 4096) * 4096
        if self._scratch.size < (threads + 1) * stride:
            self._scratch = np.empty((threads + 1) * stride, np.uint8)
        a = self._arguments
        a[kernel.SCRATCH] = -(-self._scratch.ctypes.data // 4096) * 4096
        a[kernel.SCRATCH_BYTES] = stride
        if plan.parts:
            floats = plan.parts * kv_heads * group * (padded + 2)
            if self._parts.size < floats:
                self._parts = np.empty(floats, np.float32)
            if self._parts_done.size < plan.split_rows * kv_heads:
                self._parts_done = np.zeros(plan.split_rows * kv_heads, np.int64)
            a[kernel.PARTS] = self._parts.ctypes.data
            a[kernel.PARTS_DONE] = self._parts_done.ctypes.data

    def _plan(self, meta: AttentionMetadata, group: int, window: int | None) -> _Plan:
        tile = max(1, kernel.TILE_ROWS // group)
        key = (tile, window)
        plan = meta.plans.get(key)
        if plan is None:
            plan = meta.plans[key] = make_plan(
                meta.query_start.numpy(), meta.context_len.numpy(), tile, window
            )
        assert isinstance(plan, _Plan)
        return plan


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, heads, head] in ``dtype``, each head contiguous."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


def make_plan(
    query_start: np.ndarray, context_len: np.ndarray, tile: int, window: int | None
) -> _Plan:
    """Cut a step into works, the longest first.

    A row of one token is split by its keys into parts of SPLIT_TOKENS, a longer one by its tokens
    into tiles. Neither looks at any other row.
    """
    start, end = query_start[:-1].astype(np.int64), query_start[1:].astype(np.int64)
    context = context_len.astype(np.int64)
    length = end - start
    begin = np.maximum(0, context - (window or math.inf)).astype(np.int64) // 16 * 16
    parts = np.where(length == 1, -(-(context - begin) // kernel.SPLIT_TOKENS), 1)
    count = np.where(length == 1, parts, -(-length // tile))

    row = np.repeat(np.arange(len(length)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    decode = length[row] == 1
    items = np.zeros((len(row), kernel.ITEM_FIELDS), np.int64)
    offset = np.where(decode, 0, nth * tile)
    tokens = np.minimum(length[row] - offset, tile)
    position = (context - length)[row] + offset
    last = position + tokens
    first_key = np.maximum(0, position - (window or math.inf) + 1).astype(np.int64) // 16 * 16
    first_key += np.where(decode, nth * kernel.SPLIT_TOKENS, 0)
    split = parts > 1
    split_parts = np.where(split, parts, 0)
    items[:, kernel.ROW] = row
    items[:, kernel.FIRST_TOKEN] = start[row] + offset
    items[:, kernel.NUM_TOKENS] = tokens
    items[:, kernel.POSITION] = position
    items[:, kernel.KEYS_BEGIN] = first_key
    items[:, kernel.KEYS_END] = np.where(
        decode, np.minimum(last, first_key + kernel.SPLIT_TOKENS), last
    )
    items[:, kernel.PART] = np.where(decode, nth, 0)
    items[:, kernel.NUM_PARTS] = parts[row]
    items[:, kernel.FIRST_PART] = (np.cumsum(split_parts) - split_parts)[row]
    items[:, kernel.SPLIT_ROW] = (np.cumsum(split) - split)[row]
    cost = tokens * (items[:, kernel.KEYS_END] - first_key)
    return _Plan(
        np.ascontiguousarray(items[np.argsort(-cost, kind="stable")]),
        int(split_parts.sum()),
        int(split.sum()),
    )


# --------------------------------------------------------------------------- compiling and running


def _compile(tag: object) -> tuple[int, int, bool]:
    """Addresses of the two bodies for a cache type, and whether both came from Numba's cache.

    Numba's cache sees changes of the file that defines the compiled function only. ``version``, a
    closure variable and so part of the cache's key, covers the kernel's other modules.
    """
    version = _source_version()

    def attend(arguments: int) -> None:
        if version != 0:
            kernel.attend_body(tag, arguments)

    def write(arguments: int) -> None:
        if version != 0:
            kernel.write_body(tag, arguments)

    compiled: list[Any] = []
    for body in (attend, write):
        options: Any = {"error_model": "numpy", "boundscheck": False}
        signature = types.void(types.intp)
        try:
            compiled.append(cfunc(signature, cache=True, **options)(body))
        except RuntimeError as error:
            if "no locator" not in str(error):
                raise
            _log.warning("the kernel is compiled anew at each load: %s", error)
            compiled.append(cfunc(signature, **options)(body))
    # The objects own the code; they live as long as the process, as Numba's functions do.
    _KEEP.extend(compiled)
    return compiled[0].address, compiled[1].address, all(c.cache_hits for c in compiled)


_KEEP: list[Any] = []


def _source_version() -> int:
    digest = hashlib.sha256()
    for name in ("kernel.py", "products.py", "simd.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return int.from_bytes(digest.digest()[:7], "little") | 1


def _team_runner() -> Callable[[int, int, int], None]:
    """``run(body, arguments, threads)``: call body(arguments) on so many of torch's threads."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    run = library.GOMP_parallel
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run.restype = None
    return lambda body, arguments, threads: run(body, arguments, threads, 0)
