"""Paged attention for the GPU: plans a step and launches the kernels of ``attention_kernels``.

Imported only where the Triton language is installed. A :class:`GpuAttention` keeps no state of a
step: beside the tensors' shapes a launch depends only on its :class:`LaunchPlan`, which the host
makes without looking at the device. So a CUDA graph that captured a call is right for every step of
the same shapes and plan, and for shorter contexts.
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
_HEADS_PER_PROGRAM = 8
_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LaunchPlan(NamedTuple):
    """What a step's kernels bake in beside the shapes of its tensors."""

    only_decodes: bool
    """Each of the T tokens is its own row."""
    parts: int
    """Most parts that a row of one token is cut into."""
    tiles: Tiles


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
        """For caches of ``dtype`` on ``device``. ``tiles``: in place of the table's."""
        self.batch_invariant = batch_invariant
        self._dtype = dtype
        self._group = num_heads // num_kv_heads
        self._shape = num_heads, num_kv_heads, head_size
        table = tiles_for(device, dtype, head_size, self._group, batch_invariant)
        self.tiles = table if tiles is None else TileTable(tiles, tiles)
        self._compiled: set[tuple[object, ...]] = set()  # forms that have a reduction kernel

    def plan(
        self, num_rows: int, num_tokens: int, max_query_len: int, max_context_len: int
    ) -> LaunchPlan:
        """The plan of a step of at most these lengths. Asks nothing of the device."""
        if self.batch_invariant:  # another kernel, or parts to join, would change bits
            return LaunchPlan(False, 1, self.tiles.mixed)
        only_decodes = max_query_len == 1 and num_rows == num_tokens
        tiles = self.tiles.decodes if only_decodes else self.tiles.mixed
        most = min(_MOST_PARTS, triton.cdiv(max_context_len, tiles.least_part))
        enough = round(tiles.programs / (num_rows * self._shape[1]))
        return LaunchPlan(only_decodes, max(1, min(most, enough)), tiles)

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write K and V to their slots, then attend: products in the cache's dtype (for float8, in
        q's), all else in float32."""
        self._check(call, cache, meta)
        self._write(call, cache, meta)
        return self._attend(call, cache, meta)

    def _check(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> None:
        """The kernels trust addresses: what they point to is checked here."""
        keys, values = cache.keys, cache.values
        assert keys.dtype == values.dtype == self._dtype
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert keys.shape == values.shape
        heads, kv_heads, head_size = self._shape
        tokens = meta.slot_mapping.shape[0]
        assert call.query.shape == (tokens, heads, head_size)
        assert call.key.shape == call.value.shape == (tokens, kv_heads, head_size)
        blocks, cache_heads, block_size, padded = keys.shape
        assert (cache_heads, block_size) == (kv_heads, meta.block_size)
        assert padded >= head_size
        assert meta.last_block < blocks

    def _write(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> None:
        """Launch the kernel that writes K and V to their slots."""
        k = _dense(call.key)
        v = _dense(call.value)
        _, kv_heads, head_size = self._shape
        heads_tile = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(kv_heads))
        grid = (k.shape[0], triton.cdiv(kv_heads, heads_tile))
        write_kernel[grid](
            k, v, cache.keys, cache.values, meta.slot_mapping, cache.key_scale, cache.value_scale,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            kv_heads, head_size, cache.keys.shape[3], triton.next_power_of_2(head_size),
            meta.block_size, heads_tile,
        )  # fmt: skip

    def _attend(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        q = _dense(call.query)
        window, sinks = call.window, call.sinks
        heads, kv_heads, head_size = self._shape
        tokens, rows = q.shape[0], meta.num_rows
        plan = self.plan(rows, tokens, meta.max_query_len, meta.max_context_len)
        tiles = plan.tiles
        out = torch.empty((tokens, heads, head_size), dtype=q.dtype, device=q.device)
        in_parts = plan.parts > 1
        size = rows * heads * plan.parts if in_parts else 0
        floats = torch.empty(size * (head_size + 2), dtype=torch.float32, device=q.device)
        results, tops, totals = floats.split([size * head_size, size, size])
        operand = self._dtype if self._dtype in _OPERANDS else q.dtype
        if operand == torch.float32 and self._dtype not in _OPERANDS:
            operand = torch.bfloat16
        head_tile = triton.next_power_of_2(head_size)
        programs = rows * plan.parts
        if not plan.only_decodes:
            programs += tokens // (tiles.chunk_rows // self._group) + rows
        attention_kernel[(programs, kv_heads)](
            out, results, tops, totals,
            q, cache.keys, cache.values, cache.key_scale, cache.value_scale, sinks,
            meta.block_table, meta.context_len, meta.query_start,
            call.scale * LOG2_E, call.softcap, window, rows, plan.parts,
            q.stride(0), q.stride(1), meta.block_table.stride(0),
            kv_heads, self._group, head_size, cache.keys.shape[3], head_tile, meta.block_size,
            _OPERANDS[operand], tiles.decode_rows, tiles.chunk_rows, tiles.block_n,
            tiles.least_part, plan.only_decodes, self.batch_invariant,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        joined = (
            out, results, tops, totals, cache.value_scale, sinks, meta.context_len,
            meta.query_start, window, plan.parts, kv_heads, self._group, head_size, head_tile,
            _MOST_PARTS,
        )  # fmt: skip
        form = q.dtype, window is None, sinks is None
        if form not in self._compiled:  # before a request's context grows long enough to need it
            self._compiled.add(form)
            for each in self.tiles:
                reduction_kernel.warmup(*joined, each.block_n, each.least_part, grid=(1,))
        if in_parts:
            reduction_kernel[(rows, heads)](*joined, tiles.block_n, tiles.least_part)
        return out


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()
