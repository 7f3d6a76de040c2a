"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Imported only where Numba is (``attention.select``). The kernel runs on the very thread pool that
torch uses (``GOMP_parallel`` of torch's own OpenMP library): a second pool would fight the first,
whose threads spin for a while after each operation, and this one is already awake. One
:class:`CpuAttention` belongs to one engine and is called by one thread at a time; two objects may
run at once.
"""

import hashlib
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor

from jitney.execution.attention import kernel, layout
from jitney.execution.attention.metadata import AttentionMetadata
from jitney.execution.attention.openmp import ask_for_tiles, team_runner
from jitney.execution.attention.products import GROUP_TOKENS, host_has_amx
from jitney.execution.attention.simd import BF16, F16, F32

_log = logging.getLogger(__name__)

_TAGS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
SUPPORTED_DTYPES = tuple(_TAGS)
_PAGE = 4096


@dataclass(slots=True)
class _Plan:
    """A step's works for tiles of one size and one window."""

    works: np.ndarray
    """int64 [works, fields of layout.Work]"""
    parts: int
    split_rows: int


class CpuAttention:
    """The attention function ``cpu``; see :class:`attention.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or load from Numba's cache, the kernel for caches of ``dtype``."""
        began = time.perf_counter()
        self._dtype = dtype
        self._functions, cached = _compile(_TAGS[dtype])  # they own the code
        self._attend, self._write = (function.address for function in self._functions)
        self.compile_seconds = time.perf_counter() - began
        _log.info(
            "attention kernel for %s %s in %.1f s",
            dtype,
            "loaded" if cached else "compiled",
            self.compile_seconds,
        )
        self._run = team_runner()
        self._tiles = int(dtype == torch.bfloat16 and host_has_amx() and ask_for_tiles())
        self._arguments = np.zeros(len(layout.Call._fields), np.int64)
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
        size = dtype.itemsize
        table = meta.block_table
        scratch, scratch_bytes = self._reserve_scratch(
            threads, max(layout.TILE_ROWS, group), padded, table.shape[1] * meta.block_size
        )
        parts, parts_done = self._reserve_parts(plan, group, kv_heads, padded)
        call = layout.Call(
            counter=0,
            threads=0,
            num_items=0,
            works=plan.works.ctypes.data,
            scratch=scratch,
            scratch_bytes=scratch_bytes,
            query=q_.data_ptr(),
            query_token_stride=q_.stride(0) * size,
            query_head_stride=q_.stride(1) * size,
            out=out.data_ptr(),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            padded=padded,
            key_cache=key_cache.data_ptr(),
            value_cache=value_cache.data_ptr(),
            block_size=meta.block_size,
            table=table.data_ptr(),
            table_width=table.shape[1],
            window=window or 0,
            scale=_float_bits(scale),
            softcap=_float_bits(softcap or 0.0),
            sinks=0 if sinks is None else sinks.data_ptr(),
            parts=parts,
            parts_done=parts_done,
            key=k.data_ptr(),
            key_token_stride=k.stride(0) * size,
            key_head_stride=k.stride(1) * size,
            value=v.data_ptr(),
            value_token_stride=v.stride(0) * size,
            value_head_stride=v.stride(1) * size,
            slots=meta.slot_mapping.data_ptr(),
            tokens=tokens,
            tiles=self._tiles,
        )
        self._arguments[:] = call
        self._launch(self._write, -(-tokens // layout.WRITE_TOKENS) * kv_heads, threads)
        self._launch(self._attend, len(plan.works) * kv_heads, threads)
        return out if out.dtype == q.dtype else out.to(q.dtype)

    def _launch(self, body: int, items: int, threads: int) -> None:
        a = self._arguments
        a[layout.COUNTER] = a[layout.THREADS] = 0
        a[layout.NUM_ITEMS] = items
        self._run(body, a.ctypes.data, min(threads, items))

    def _reserve_scratch(
        self, threads: int, rows: int, padded: int, longest: int
    ) -> tuple[int, int]:
        """Address of at least ``threads`` scratch areas, and bytes of one."""
        need = layout.scratch_bytes(self._dtype.itemsize, rows, padded, longest)
        stride = -(-need // _PAGE) * _PAGE
        if self._scratch.size < (threads + 1) * stride:
            self._scratch = np.empty((threads + 1) * stride, np.uint8)
        return -(-self._scratch.ctypes.data // _PAGE) * _PAGE, stride

    def _reserve_parts(
        self, plan: _Plan, group: int, kv_heads: int, padded: int
    ) -> tuple[int, int]:
        """Addresses of the records and of the counters of split rows."""
        floats = plan.parts * kv_heads * group * (padded + 2)
        if self._parts.size < floats:
            self._parts = np.empty(floats, np.float32)
        if self._parts_done.size < plan.split_rows * kv_heads:
            self._parts_done = np.zeros(plan.split_rows * kv_heads, np.int64)
        return self._parts.ctypes.data, self._parts_done.ctypes.data

    def _plan(self, meta: AttentionMetadata, group: int, window: int | None) -> _Plan:
        tile = max(1, layout.TILE_ROWS // group)
        key = (tile, window)
        plan = meta.plans.get(key)
        if plan is None:
            plan = meta.plans[key] = make_plan(
                meta.query_start.numpy(), meta.context_len.numpy(), tile, window
            )
        assert isinstance(plan, _Plan)
        return plan


def _float_bits(x: float) -> int:
    """The bits of a float32, to be stored in the lower half of an int64."""
    return int.from_bytes(struct.pack("<f", x), "little")


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
    reach = int(context.max()) if window is None else window
    first = _group_start(context - reach)
    parts = np.where(length == 1, -(-(context - first) // layout.SPLIT_TOKENS), 1)
    count = np.where(length == 1, parts, -(-length // tile))

    row = np.repeat(np.arange(len(length)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    split = length[row] == 1
    offset = np.where(split, 0, nth * tile)
    tokens = np.minimum(length[row] - offset, tile)
    position = (context - length)[row] + offset
    begin = _group_start(position + 1 - reach) + np.where(split, nth * layout.SPLIT_TOKENS, 0)
    limit = position + tokens
    finish = np.where(split, np.minimum(limit, begin + layout.SPLIT_TOKENS), limit)
    in_parts = np.where(parts > 1, parts, 0)
    columns = {
        "row": row,
        "first_token": start[row] + offset,
        "num_tokens": tokens,
        "position": position,
        "keys_begin": begin,
        "keys_end": finish,
        "part": np.where(split, nth, 0),
        "num_parts": parts[row],
        "first_part": (np.cumsum(in_parts) - in_parts)[row],
        "split_row": (np.cumsum(parts > 1) - (parts > 1))[row],
    }
    order = np.argsort(-tokens * (finish - begin), kind="stable")
    works = np.stack([columns[name] for name in layout.Work._fields], axis=1)[order]
    return _Plan(works, int(in_parts.sum()), int((parts > 1).sum()))


def _group_start(position: np.ndarray) -> np.ndarray:
    """The first position of the group of 16 that ``position``, at least 0, lies in."""
    return np.maximum(position, 0) // GROUP_TOKENS * GROUP_TOKENS


# --------------------------------------------------------------------------- compiling and running


def _compile(tag: object) -> tuple[list[Any], bool]:
    """The compiled attend and write bodies, and whether both came from Numba's cache.

    Numba's cache sees changes of the file that defines the compiled function only. ``version``, a
    closure variable and so part of the cache's key, covers the kernel's own modules.
    """
    version = _source_version()

    def attend(arguments: int) -> None:
        if version != 0:
            kernel.attend_body(tag, arguments)

    def write(arguments: int) -> None:
        if version != 0:
            kernel.write_body(tag, arguments)

    functions = [_compile_body(body) for body in (attend, write)]
    cached = all(function.cache_hits > 0 for function in functions)
    return functions, cached


def _compile_body(body: Callable[[int], None]) -> Any:
    """``void (*)(void *)``, from Numba's cache if there is one and it has it."""
    options: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}
    signature = types.void(types.intp)
    try:
        return cfunc(signature, cache=True, **options)(body)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        _log.warning("no folder for compiled code can be written, so each load compiles: %s", error)
        return cfunc(signature, **options)(body)


def _source_version() -> int:
    digest = hashlib.sha256()
    for name in ("kernel.py", "blocks.py", "layout.py", "products.py", "simd.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return int.from_bytes(digest.digest()[:7], "little") | 1
