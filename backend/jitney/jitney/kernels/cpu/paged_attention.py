"""Paged attention for the CPU: plans a step's work and runs the Numba kernel on torch's threads.

Called by the runner through ``execution.interface.AttentionFunction``, or, where a whole step is
one native call, by ``program``, which takes what :meth:`CpuAttention.prepare` gives. Imported only
where Numba is (``accelerator``).

One :class:`CpuAttention` belongs to one engine and is called by one thread at a time; two objects
may run at once.
"""

import logging
import time
from collections.abc import Hashable
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
from jitney.kernels.cpu.attention_kernel import AttentionKernels, attention_kernels
from jitney.kernels.cpu.attention_plan import AttentionPlan, plan_step
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
from jitney.kernels.cpu.emit import ceil_div, round_up
from jitney.kernels.cpu.processor import instruction_set, may_use_amx

_log = logging.getLogger(__name__)

_PAGE = 4096
"""Bytes of a page of memory."""


@dataclass(slots=True)
class AttentionStep:
    """What attention needs for all layers of one kind in one step."""

    arguments: AttentionArguments
    """Its second part, that of the step, is filled in; :func:`set_layer` fills in the first, except
    ``sinks``."""
    attend_items: int
    """Items of ``attend_body``."""
    write_items: int
    """Items of ``write_body``. 0 if the items of ``attend_body`` write their own tokens."""
    threads: int
    owned: tuple[np.ndarray, ...]
    """The memory that the arguments point to, so that it lives as long as they do."""


class _ScratchShape(NamedTuple):
    """What the size of scratch memory depends on."""

    threads: int
    rows: int
    """The most rows of an item."""
    padded: int
    longest: int
    """The longest context in tokens."""


class CpuAttention:
    """The attention function ``cpu``; see :class:`execution.interface.AttentionFunction`."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype, model_dtype: torch.dtype = torch.bfloat16) -> None:
        """For caches of ``dtype``. If that is int8, queries and results are of ``model_dtype``,
        else they are of the cache's dtype."""
        self.cache_dtype = dtype
        self.dtype = model_dtype if dtype == torch.int8 else dtype
        self._use_tiles = int(self.dtype == torch.bfloat16 and may_use_amx())
        # The memory below is shared by all steps. It grows where a step needs more.
        self._scratch = np.empty(0, np.uint8)
        self._areas = np.empty((0, 0), np.int64)
        """[threads, fields of Scratch]: the addresses of each thread's areas in ``_scratch``."""
        self._scratch_shape: _ScratchShape | None = None
        """What ``_areas`` were made for."""
        self._split_states = np.empty(0, np.float32)
        """See the field of AttentionArguments of this name, and so for the next one."""
        self._splits_done = np.zeros(0, np.int64)

    @cached_property
    def kernels(self) -> AttentionKernels:
        """Compiled, or loaded from the cache of compiled code, at first use.

        Another process may be compiling these kernels (``ahead``). A load uses them for the first
        time when it has all other kernels: by then that process has often ended."""
        began = time.perf_counter()
        # ``ahead`` compiles the kernels of one dtype: those of other dtypes need not wait for it.
        if self.cache_dtype == self.dtype == ahead.DTYPE:
            ahead.wait_for_compiler()
        kernels = attention_kernels(self.cache_dtype, self.dtype)
        were_cached = kernels.attend.was_cached and kernels.write.was_cached
        _log.info(
            "attention kernel for %s, of %s instructions, %s in %.1f s",
            self.cache_dtype,
            instruction_set(),
            "loaded" if were_cached else "compiled",
            time.perf_counter() - began,
        )
        return kernels

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write K and V to their slots, then attend, in ``dtype`` with float32 sums."""
        q = _as_kernel_input(call.query, self.dtype)
        k = _as_kernel_input(call.key, self.dtype)
        v = _as_kernel_input(call.value, self.dtype)
        assert k.shape == v.shape == (q.shape[0], cache.keys.shape[1], q.shape[2])
        out = torch.empty(q.shape, dtype=self.dtype)
        step = self.prepare(call, cache, meta)
        arguments = step.arguments
        assert arguments.tokens == q.shape[0]
        set_layer(arguments, q, k, v, cache=cache, out=out.data_ptr())
        arguments.sinks = 0
        if call.sinks is not None:
            keep_alive = call.sinks.to(torch.float32).contiguous()  # until the kernel ends
            arguments.sinks = keep_alive.data_ptr()
        kernels = self.kernels
        _run(kernels.write, arguments, step.write_items, step.threads)
        _run(kernels.attend, arguments, step.attend_items, step.threads)
        return out.to(call.query.dtype)

    def prepare(
        self, attention_call: AttentionCall, cache: LayerCache, meta: AttentionMetadata
    ) -> AttentionStep:
        """What layers of this kind (:func:`kind_of`) need in the step of ``meta``. It is made for
        the first layer of the kind; ``meta`` keeps it for the others."""
        threads = torch.get_num_threads()
        key = (kind_of(attention_call, cache), threads)
        step = meta.plans.get(key)
        if step is None:
            step = self._prepare(attention_call, cache, meta, threads)
            meta.plans[key] = step
        assert isinstance(step, AttentionStep)
        return step

    def _prepare(
        self,
        attention_call: AttentionCall,
        cache: LayerCache,
        meta: AttentionMetadata,
        threads: int,
    ) -> AttentionStep:
        """See :meth:`prepare`. What differs among layers of one kind must not be read here."""
        _, heads, head_size = attention_call.query.shape
        blocks, kv_heads, block_size, padded = cache.keys.shape
        if self.cache_dtype == torch.int8:
            padded -= SCALE_BYTES  # the cache's last dimension has the scale of each token, too
        # The kernel does not check what it reads from the metadata.
        assert meta.block_size == block_size
        assert block_size % GROUP_TOKENS == 0
        assert meta.last_block < blocks
        heads_per_kv = heads // kv_heads
        table = meta.block_table
        tokens = meta.slot_mapping.shape[0]
        only_decodes = meta.max_query_len == 1
        plan = plan_step(
            meta.query_start.numpy(),
            meta.context_len.numpy(),
            piece_tokens=max(1, ITEM_ROWS // heads_per_kv),
            reach=attention_call.window or meta.max_context_len,
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
        self._reserve_splits(plan, kv_heads, state_floats=heads_per_kv * (padded + STATE_EXTRA))
        arguments = AttentionArguments(
            plan=plan.pieces.ctypes.data,
            scratch=self._areas.ctypes.data,
            split_states=self._split_states.ctypes.data,
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
            only_decodes=only_decodes,
            use_tiles=self._use_tiles,
            scale=attention_call.scale,
            window=attention_call.window or 0,
            softcap=attention_call.softcap or 0.0,
        )
        write_items = 0
        if not only_decodes:
            write_items = ceil_div(tokens, WRITE_TOKENS) * kv_heads
        return AttentionStep(
            arguments,
            attend_items=len(plan.pieces) * kv_heads,
            write_items=write_items,
            threads=threads,
            owned=(
                plan.pieces,
                self._scratch,
                self._areas,
                self._split_states,
                self._splits_done,
            ),
        )

    def _reserve_splits(self, plan: AttentionPlan, kv_heads: int, state_floats: int) -> None:
        """Reserve memory for the states of all splits, ``state_floats`` for each split and KV head,
        and for a counter for each KV head of each batch row that has several splits."""
        floats = plan.splits * kv_heads * state_floats
        counters = plan.split_batch_rows * kv_heads
        if self._split_states.size < floats:
            self._split_states = np.empty(floats, np.float32)
        if self._splits_done.size < counters:
            self._splits_done = np.zeros(counters, np.int64)

    def _reserve_scratch(self, shape: _ScratchShape) -> None:
        """Reserve scratch memory of this shape, for each thread on pages of its own."""
        if self._scratch_shape == shape:
            return
        area_sizes = scratch_sizes(
            element_size=self.cache_dtype.itemsize,
            rows=shape.rows,
            padded=shape.padded,
            longest=shape.longest,
        )
        thread_bytes = round_up(sum(area_sizes), _PAGE)
        # NumPy's memory need not begin at a page. So one thread's share more is reserved, and the
        # first thread's areas begin at the first page within.
        needed = (shape.threads + 1) * thread_bytes
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.uint8)
        first_page = round_up(self._scratch.ctypes.data, _PAGE)
        thread_begins = first_page + thread_bytes * np.arange(shape.threads)
        area_offsets = np.cumsum([0, *area_sizes[:-1]])
        self._areas = thread_begins[:, None] + area_offsets
        self._scratch_shape = shape


def kind_of(attention_call: AttentionCall, cache: LayerCache) -> Hashable:
    """What the second part of :class:`AttentionArguments`, that of a step, depends on in a layer.
    Layers with the same kind share that part."""
    return (
        cache.attend,
        cache.keys.shape,
        attention_call.query.shape,
        attention_call.scale,
        attention_call.window,
        attention_call.softcap,
    )


def set_layer(
    arguments: AttentionArguments, q: Tensor, k: Tensor, v: Tensor, *, cache: LayerCache, out: int
) -> None:
    """Set the arguments that are a layer's, except ``sinks``.

    ``q``, ``k`` and ``v`` are [T, heads, head size]; the elements of a head are neighbours. ``out``
    is the address of the result.
    """
    # The kernel trusts addresses: what they point to is checked here.
    assert isinstance(cache.attend, CpuAttention)
    assert q.dtype == k.dtype == v.dtype == cache.attend.dtype
    assert cache.keys.dtype == cache.values.dtype == cache.attend.cache_dtype
    assert cache.keys.is_contiguous()
    assert cache.values.is_contiguous()
    assert cache.keys.shape == cache.values.shape
    size = q.element_size()
    arguments.query = q.data_ptr()
    arguments.query_token_stride = q.stride(0) * size
    arguments.query_head_stride = q.stride(1) * size
    arguments.key = k.data_ptr()
    arguments.key_token_stride = k.stride(0) * size
    arguments.key_head_stride = k.stride(1) * size
    arguments.value = v.data_ptr()
    arguments.value_token_stride = v.stride(0) * size
    arguments.value_head_stride = v.stride(1) * size
    arguments.key_cache = cache.keys.data_ptr()
    arguments.value_cache = cache.values.data_ptr()
    arguments.out = out


def _run(kernel: Kernel, arguments: AttentionArguments, items: int, threads: int) -> None:
    """Run a kernel over so many items, if there are any."""
    if items == 0:
        return
    arguments.counter = 0
    arguments.threads_begun = 0
    arguments.count = items
    kernel.run(arguments, min(threads, items))


def _as_kernel_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, heads, head size] in ``dtype``. The elements of a head are neighbours."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()
