"""Paged attention for the GPU: plans a step and launches the kernels of ``attention_kernels``.

Imported by ``gpu_accelerator``, and only where the Triton language is installed.

A :class:`GpuAttention` keeps no state of a step. A launch depends on the shapes of the tensors and
on a :class:`LaunchPlan`, which the host makes without waiting for the device, and on nothing else.
So a CUDA graph that captured a launch is right for every step of the same shapes and plan, and for
shorter contexts. ``attention_tile`` explains tiles, ``attention_kernels`` parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import AttentionCall, LayerCache
from jitney.kernels.gpu.attention_kernels import attention_kernel, reduction_kernel
from jitney.kernels.gpu.tiles import Tiles, TileTable, tiles_for
from jitney.kernels.gpu.write_kernel import write_kernel

LOG2_E = 1.4426950408889634
_MOST_PARTS = 64
"""The most parts that a context is cut into: the reduction kernel loads them all at once, which
takes a power of 2."""
_HEADS_PER_PROGRAM = 8
"""KV heads that a program of the write kernel writes, at most: a power of 2."""
_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LaunchPlan(NamedTuple):
    """How a step is computed: what its launches depend on beside the shapes of its tensors."""

    only_decodes: bool
    """Each row has one new token."""
    parts: int
    """The most parts that the context of a decode is cut into."""
    tiles: Tiles


class HeadTransform(NamedTuple):
    """What is computed of the heads of Q and K before attention: an RMS norm of each head if there
    is one, then the rotary embedding. In the order of the kernel's arguments."""

    cos: Tensor | None = None
    """[T, R], and so is ``sin``: the first R elements of a head are rotated. Elements e and
    e + R / 2 are a pair. Both are None if there is no transform."""
    sin: Tensor | None = None
    query_norm: Tensor | None = None
    """[head size]: the scale of the norm; None: there is no norm. So is ``key_norm``."""
    key_norm: Tensor | None = None
    epsilon: float = 0.0
    """Of both norms."""


NO_TRANSFORM = HeadTransform()


class _Parts(NamedTuple):
    """What the parts of contexts give, for the reduction kernel to join: ``part_results``,
    ``part_tops`` and ``part_totals`` of the kernels."""

    results: Tensor
    tops: Tensor
    totals: Tensor


class GpuAttention:
    """The attention function ``gpu``; see :class:`execution.interface.AttentionFunction`.

    With ``batch_invariant``, a token's output is bitwise the same whatever other rows are in the
    step, however its sequence was cut into chunks, and whether it came in a chunk or alone.
    """

    name = "gpu"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        batch_invariant: bool = False,
        tiles: Tiles | None = None,
    ) -> None:
        """For caches of ``dtype`` on ``device``. Tests and benchmarks give ``tiles``: all steps
        then use these, not the table's."""
        self.batch_invariant = batch_invariant
        self._dtype = dtype
        self._heads = num_heads
        self._kv_heads = num_kv_heads
        self._head_size = head_size
        self._head_tile = triton.next_power_of_2(head_size)
        self._group = num_heads // num_kv_heads
        if tiles is None:
            self.tiles = tiles_for(device, dtype, head_size, self._group, batch_invariant)
        else:
            self.tiles = TileTable(tiles, tiles)
        self._reductions: set[tuple[torch.dtype, bool, bool, bool]] = set()
        """The forms whose reduction kernel is compiled: (dtype of the output, whether the cache has
        scales, whether there is no window, whether there are no sinks)."""

    def plan(
        self, num_rows: int, num_tokens: int, max_query_len: int, max_context_len: int
    ) -> LaunchPlan:
        """The plan of a step of at most these lengths. Asks nothing of the device."""
        if self.batch_invariant:
            # One plan for all steps: other tiles, or parts to join, would change the last bits.
            return LaunchPlan(only_decodes=False, parts=1, tiles=self.tiles.mixed)
        only_decodes = max_query_len == 1 and num_rows == num_tokens
        tiles = self.tiles.decodes if only_decodes else self.tiles.mixed
        # As many parts as keep the device busy, but not more than have enough keys.
        parts_to_be_busy = round(tiles.programs / (num_rows * self._kv_heads))
        most_parts = min(_MOST_PARTS, triton.cdiv(max_context_len, tiles.least_part))
        parts = max(1, min(parts_to_be_busy, most_parts))
        return LaunchPlan(only_decodes, parts, tiles)

    def __call__(
        self,
        call: AttentionCall,
        cache: LayerCache,
        meta: AttentionMetadata,
        transform: HeadTransform = NO_TRANSFORM,
    ) -> Tensor:
        """Write K and V to their slots, then attend: products in the cache's dtype (for float8 see
        :meth:`_operand`), all else in float32. The call's query and key are those before
        ``transform``."""
        self._check(call, cache, meta)
        q = self._write(call, cache, meta, transform)
        return self._attend(q, call, cache, meta)

    def _check(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> None:
        """The kernels trust addresses: what they point to is checked here."""
        keys = cache.keys
        values = cache.values
        assert keys.dtype == values.dtype == self._dtype
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert keys.shape == values.shape
        tokens = meta.slot_mapping.shape[0]
        assert call.query.shape == (tokens, self._heads, self._head_size)
        assert call.key.shape == (tokens, self._kv_heads, self._head_size)
        assert call.value.shape == call.key.shape
        blocks, cache_heads, block_size, padded = keys.shape
        assert cache_heads == self._kv_heads
        assert block_size == meta.block_size
        assert padded >= self._head_size
        assert meta.last_block < blocks

    def _write(
        self,
        call: AttentionCall,
        cache: LayerCache,
        meta: AttentionMetadata,
        transform: HeadTransform,
    ) -> Tensor:
        """Launch the kernel that writes K and V to their slots. Returns the query as it is to
        attend: transformed, and each head's elements side by side."""
        q = _with_dense_heads(call.query)
        k = _with_dense_heads(call.key)
        v = _with_dense_heads(call.value)
        padded = cache.keys.shape[3]
        heads_of_program = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(self._kv_heads))
        programs = triton.cdiv(self._kv_heads, heads_of_program)
        query_out = None
        rotary = 0
        cos_stride = 0
        sin_stride = 0
        if transform.cos is not None:
            assert transform.sin is not None
            query_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            programs += triton.cdiv(self._heads, heads_of_program)
            rotary = transform.cos.shape[1]
            cos_stride = transform.cos.stride(0)
            sin_stride = transform.sin.stride(0)
        # By position, here and below, as in the kernel's signature: a launch with keywords takes
        # the host longer.
        write_kernel[(q.shape[0], programs)](
            query_out, q, k, v, cache.keys, cache.values, meta.slot_mapping,
            *transform, cache.key_scale, cache.value_scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            cos_stride, sin_stride,
            self._heads, self._kv_heads, self._head_size, padded, self._head_tile,
            meta.block_size, rotary, heads_of_program,
        )  # fmt: skip
        return q if query_out is None else query_out

    def _attend(
        self, q: Tensor, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata
    ) -> Tensor:
        """Launch the kernel that attends, and the one that joins parts. ``q`` is taken in place of
        the call's query."""
        tokens = q.shape[0]
        rows = meta.num_rows
        plan = self.plan(rows, tokens, meta.max_query_len, meta.max_context_len)
        tiles = plan.tiles
        out = torch.empty((tokens, self._heads, self._head_size), dtype=q.dtype, device=q.device)
        parts = self._make_parts(rows, plan.parts, q.device)
        padded = cache.keys.shape[3]

        # A program for each part of a decode, and one for each tile of a longer row. How many tiles
        # these are, ``_row_of_tile`` explains.
        programs = rows * plan.parts
        if not plan.only_decodes:
            tokens_of_tile = tiles.chunk_rows // self._group
            programs += tokens // tokens_of_tile + rows
        attention_kernel[(programs, self._kv_heads)](
            out, *parts,
            q, cache.keys, cache.values, cache.key_scale, cache.value_scale, call.sinks,
            meta.block_table, meta.context_len, meta.query_start,
            call.scale * LOG2_E, call.softcap, call.window, rows, plan.parts,
            q.stride(0), q.stride(1), meta.block_table.stride(0),
            self._kv_heads, self._group, self._head_size, padded, self._head_tile,
            meta.block_size, self._operand(q.dtype), tiles.decode_rows, tiles.chunk_rows,
            tiles.block_n, tiles.least_part, plan.only_decodes, self.batch_invariant,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        self._join(out, parts, plan, call, cache, meta)
        return out

    def _make_parts(self, rows: int, parts: int, device: torch.device) -> _Parts:
        """Memory for what the parts give; none if contexts are not cut."""
        count = rows * self._heads * parts if parts > 1 else 0
        # One allocation for all three.
        sizes = [count * self._head_size, count, count]
        floats = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        results, tops, totals = floats.split(sizes)
        return _Parts(results, tops, totals)

    def _operand(self, query_dtype: torch.dtype) -> tl.dtype:
        """The dtype in which products are computed."""
        # The cache's.
        if self._dtype in _OPERANDS:
            return _OPERANDS[self._dtype]
        # Of a float8 cache the query's; or bfloat16 if that is float32, as the cache has fewer bits
        # than either.
        if query_dtype == torch.float32:
            return tl.bfloat16
        return _OPERANDS[query_dtype]

    def _join(
        self,
        out: Tensor,
        parts: _Parts,
        plan: LaunchPlan,
        call: AttentionCall,
        cache: LayerCache,
        meta: AttentionMetadata,
    ) -> None:
        """Launch the kernel that joins the parts, if there are any.

        It is compiled at the first step even if that has no parts: a later step, of longer
        contexts, must not wait for the compiler.
        """
        arguments = (
            out, *parts, cache.value_scale, call.sinks, meta.context_len, meta.query_start,
            call.window, plan.parts, self._kv_heads, self._group, self._head_size, self._head_tile,
            _MOST_PARTS,
        )  # fmt: skip
        # What it is compiled for, beside what is the same in all calls of this object.
        has_scales = cache.value_scale is not None
        form = (out.dtype, has_scales, call.window is None, call.sinks is None)
        if form not in self._reductions:
            self._reductions.add(form)
            # For both kinds of step.
            for tiles in self.tiles:
                reduction_kernel.warmup(*arguments, tiles.block_n, tiles.least_part, grid=(1,))
        if plan.parts > 1:
            grid = (meta.num_rows, self._heads)
            reduction_kernel[grid](*arguments, plan.tiles.block_n, plan.tiles.least_part)


def _with_dense_heads(x: Tensor) -> Tensor:
    """``x`` with the elements of each head side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()
