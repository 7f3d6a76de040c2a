"""What an attention over latents computes between its products, by the kernels of a CPU.

Made by ``layer_kernels``, for ``fused.latents``; called by it, or by ``program``, where the kernels
are steps of a native call.
"""

import ctypes
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import LayerCache, PagedFunction, PagedStep
from jitney.execution.latents import LatentAttention
from jitney.kernels.cpu.attention_kernel import TAGS
from jitney.kernels.cpu.compiled import Kernel, KernelCall
from jitney.kernels.cpu.emit import I64_BYTES, LANES, VECTOR_BYTES, ceil_div, host_has, round_up
from jitney.kernels.cpu.head_product import OUTPUTS_PER_ITEM, HeadProductCall, head_product_body
from jitney.kernels.cpu.latent_kernel import (
    KEYS,
    MOST_LATENT,
    LatentCall,
    attend_latents_body,
    enter_body,
)
from jitney.kernels.cpu.norm_rotary_kernel import NormRotaryCall, run_rows
from jitney.kernels.cpu.simd import BF16, WIDE
from jitney.kernels.fused.forms import LatentForm, Misfit

SLICE_TOKENS = 128
"""Tokens that are computed at once where the kernels are called one by one: what lies between them
takes 600 KiB a token with 128 heads and latents of 512."""
OF_STEP = slice(
    LatentCall.lanes.offset // I64_BYTES,  # type: ignore[attr-defined]
    ctypes.sizeof(LatentCall) // I64_BYTES,
)
"""The fields of LatentCall that are a step's, as int64."""
PRODUCT_OF_STEP = slice(
    HeadProductCall.lanes.offset // I64_BYTES,  # type: ignore[attr-defined]
    ctypes.sizeof(HeadProductCall) // I64_BYTES,
)
"""The same of HeadProductCall."""

# Compiled, or loaded from the cache of compiled code, at first use.


@lru_cache
def compiled_entry(dtype: torch.dtype) -> Kernel:
    tag = TAGS[dtype]
    product = _product_tag(dtype)
    return Kernel(lambda address: enter_body(tag, product, address))


@lru_cache
def compiled_attention(dtype: torch.dtype) -> Kernel:
    tag = TAGS[dtype]
    product = _product_tag(dtype)
    return Kernel(lambda address: attend_latents_body(tag, product, address))


@lru_cache
def compiled_head_product(dtype: torch.dtype) -> Kernel:
    tag = TAGS[dtype]
    product = _product_tag(dtype)
    return Kernel(lambda address: head_product_body(tag, product, address))


def _product_tag(dtype: torch.dtype) -> Any:
    """That of ``pair_products``."""
    if dtype == torch.bfloat16 and not host_has("avx512bf16"):
        return WIDE
    return TAGS[dtype]


class LatentStep(NamedTuple):
    """What the kernels must know of a step."""

    arguments: LatentCall
    """The fields :data:`OF_STEP` are filled in."""
    lanes: int
    """See ``head_product``, and so for the next one."""
    patterns: int
    owned: tuple[np.ndarray, ...]
    """The memory that the arguments point to, so that it lives as long as they do."""


class LatentMemory(NamedTuple):
    """Addresses of what the kernels of a layer read and write. Strides are in bytes."""

    query: int
    latent: int
    latent_stride: int
    turned: int
    absorbed: int
    mixed: int
    out: int
    """[tokens, heads * value size]"""


class ListedLatents(NamedTuple):
    """One kernel, and its arguments except for ``count``, which is in tokens."""

    kernel: Kernel
    arguments: KernelCall


def prepare_latents(meta: AttentionMetadata, heads: int) -> LatentStep:
    """The step of ``meta`` in layers of so many heads. It is made for the first of them; ``meta``
    keeps it for the others."""
    key = (LatentStep, heads)
    step = meta.plans.get(key)
    if step is None:
        # Where each row has one token, a lane group of two rows would have to read the keys of
        # both: so each token begins a group.
        lanes = heads
        if meta.max_query_len == 1 and heads > LANES // 2:
            lanes = round_up(heads, LANES)
        ends = meta.query_start[1:].numpy().astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        row_of_token = np.repeat(np.arange(len(ends)), lengths)
        # The last token of a row is the last of its context. (Its position may be a later one: a
        # trial of late positions has none before.)
        contexts = meta.context_len.numpy() - ends
        indices = np.arange(len(row_of_token)) + contexts[row_of_token]
        arguments = LatentCall(
            lanes=lanes,
            block_size=meta.block_size,
            table=meta.block_table.data_ptr(),
            table_width=meta.block_table.stride(0),
            slots=meta.slot_mapping.data_ptr(),
            indices=indices.ctypes.data,
            row_of_token=row_of_token.ctypes.data,
        )
        patterns = lanes // math.gcd(lanes, LANES)
        step = LatentStep(arguments, lanes, patterns, owned=(indices, row_of_token))
        meta.plans[key] = step
    assert isinstance(step, LatentStep)
    return step


class CpuLatentLayer:
    """A ``fused.forms.LatentKernel``."""

    def __init__(self, form: LatentForm, dtype: torch.dtype, norm_rotary: Kernel) -> None:
        """``norm_rotary`` is the kernel of ``norm_rotary_kernel``. Raises Misfit for sizes that no
        kernel has."""
        latents = form.latents
        self.form = form
        self._dtype = dtype
        self._norm_rotary = norm_rotary
        if latents.rank + latents.rotary_size > MOST_LATENT:
            raise Misfit(f"its latents have more than {MOST_LATENT} numbers")
        for size in (latents.rank, latents.value_size):
            if size % OUTPUTS_PER_ITEM != 0:
                raise Misfit(f"its sizes are no multiples of {OUTPUTS_PER_ITEM}")
        if form.key_size % 2 != 0 or latents.rotary_size % 2 != 0:
            raise Misfit("its queries have an odd number of elements")
        # [heads, outputs, inputs]
        self._key_up = _by_lanes(latents.key_up.transpose(1, 2), dtype)
        self._value_up = _by_lanes(latents.value_up.transpose(1, 2), dtype)
        self.added_bytes = self._key_up.nbytes + self._value_up.nbytes
        self._enter = compiled_entry(dtype)
        self._attend = compiled_attention(dtype)
        self._head_product = compiled_head_product(dtype)

    # ------------------------------------------------------------------ kernel by kernel

    def __call__(
        self, query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction
    ) -> Tensor:
        """See :class:`fused.forms.LatentKernel`."""
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos = cos.contiguous()
            sin = sin.contiguous()
        for call in self.norm_rotary_calls(query, latent, cos, sin):
            run_rows(self._norm_rotary, call, rows=len(query), row_bytes=call.stride)
        if isinstance(paged, PagedStep):
            cache = paged.take_cache(self.form.layer)
            if self.fits(cache):
                return self._attend_slices(query, latent, cache, paged.meta)
            return cache.attend(self.form.call(query, latent), cache, paged.meta)
        return paged(self.form.call(query, latent))

    def fits(self, cache: LayerCache) -> bool:
        """Whether the kernels can read and write this cache."""
        if not isinstance(cache.attend, LatentAttention) or cache.key_scale is not None:
            return False
        if cache.keys.shape[2] % KEYS != 0:
            return False
        return cache.keys.dtype == self._dtype and cache.keys.is_contiguous()

    def _attend_slices(
        self, query: Tensor, latent: Tensor, cache: LayerCache, meta: AttentionMetadata
    ) -> Tensor:
        tokens = len(query)
        form = self.form
        out = query.new_empty(tokens, form.heads, form.latents.value_size)
        step = prepare_latents(meta, form.heads)
        most = min(tokens, SLICE_TOKENS)
        spare = torch.empty(self.spare_floats(most), dtype=torch.float32)
        threads = torch.get_num_threads()
        for first in range(0, tokens, SLICE_TOKENS):
            last = min(first + SLICE_TOKENS, tokens)
            memory = self.memory(query[first:], latent[first:], spare, most, out[first:].data_ptr())
            for kernel, arguments in self.steps(memory, cache):
                if isinstance(arguments, LatentCall):
                    _set_step(arguments, step.arguments, first)
                else:
                    arguments.lanes = step.lanes
                    arguments.patterns = step.patterns
                arguments.count = last - first
                kernel.run(arguments, threads)
        return out

    # ------------------------------------------------------------------ the kernels

    def spare_floats(self, tokens: int) -> int:
        """float32 that lie between the kernels of a layer, for so many tokens."""
        return self._groups(tokens) * (self._head_size + 2 * self.form.latents.rank) * LANES

    def _groups(self, tokens: int) -> int:
        """The most lane groups of so many tokens (``head_product``)."""
        return tokens * ceil_div(self.form.heads, LANES)

    @property
    def _head_size(self) -> int:
        """Of a query."""
        return self.form.key_size + self.form.latents.rotary_size

    def memory(
        self, query: Tensor, latent: Tensor, spare: Tensor, tokens: int, out: int
    ) -> LatentMemory:
        """``spare`` has :meth:`spare_floats` of so many tokens, ``out`` is an address."""
        assert query.is_contiguous()
        groups = self._groups(tokens)
        turned = spare.data_ptr()
        absorbed = turned + groups * self._head_size * VECTOR_BYTES
        return LatentMemory(
            query=query.data_ptr(),
            latent=latent.data_ptr(),
            latent_stride=latent.stride(0) * self._dtype.itemsize,
            turned=turned,
            absorbed=absorbed,
            mixed=absorbed + groups * self.form.latents.rank * VECTOR_BYTES,
            out=out,
        )

    def steps(self, memory: LatentMemory, cache: LayerCache) -> list[ListedLatents]:
        """The kernels, in the order in which they run."""
        form = self.form
        latents = form.latents
        # Of 16 lanes of a pair (``pair_products``).
        is_packed = _product_tag(self._dtype) is BF16
        pair_bytes = VECTOR_BYTES if is_packed else 2 * VECTOR_BYTES
        call = LatentCall(
            heads=form.heads,
            rank=latents.rank,
            key_size=form.key_size,
            rotary_size=latents.rotary_size,
            scale=form.scale,
            window=form.window or 0,
            query=memory.query,
            latent=memory.latent,
            latent_stride=memory.latent_stride,
            turned=memory.turned,
            absorbed=memory.absorbed,
            mixed=memory.mixed,
            cache=cache.keys.data_ptr(),
            padded=cache.keys.shape[-1],
        )
        absorb = HeadProductCall(
            heads=form.heads,
            outputs=latents.rank,
            pairs=form.key_size // 2,
            x=memory.turned,
            x_stride=self._head_size // 2 * pair_bytes,
            weight=self._key_up.data_ptr(),
            out=memory.absorbed,
        )
        expand = HeadProductCall(
            heads=form.heads,
            outputs=latents.value_size,
            pairs=latents.rank // 2,
            x=memory.mixed,
            x_stride=latents.rank * VECTOR_BYTES,
            weight=self._value_up.data_ptr(),
            out=memory.out,
            to_rows=1,
        )
        return [
            ListedLatents(self._enter, call),
            ListedLatents(self._head_product, absorb),
            ListedLatents(self._attend, LatentCall.from_buffer_copy(call)),
            ListedLatents(self._head_product, expand),
        ]

    def norm_rotary_calls(
        self, query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, positions: int = 0
    ) -> list[NormRotaryCall]:
        """What normalises latents, and rotates these and the queries, in place; ``count`` is still
        to be set. cos and sin have the same strides. ``positions``: the address of their rows; 0:
        these are the tokens'."""
        if not cos.dtype == sin.dtype == self._dtype:
            raise Misfit("the angles of its rotary embedding are of another dtype")
        form = self.form
        latents = form.latents
        size = self._dtype.itemsize
        rotation: dict[str, Any] = {
            "rows_per_item": 4,
            "cos": cos.data_ptr(),
            "sin": sin.data_ptr(),
            "angle_stride": cos.stride(0) * size,
            "positions": positions,
            "rotary_size": latents.rotary_size,
        }
        rotate_query = NormRotaryCall(
            data=query.data_ptr(),
            out=query.data_ptr(),
            stride=query.stride(0) * size,
            query_heads=form.heads,
            head_size=form.key_size + latents.rotary_size,
            rotary_offset=form.key_size * size,
            **rotation,
        )
        of_latents = {
            "stride": latent.stride(0) * size,
            "query_heads": 1,
        }
        norm = NormRotaryCall(
            rows_per_item=4,
            data=latent.data_ptr(),
            out=latent.data_ptr(),
            head_size=latents.rank,
            query_scale=form.norm.scale.data_ptr(),
            epsilon=form.norm.epsilon,
            **of_latents,
        )
        shared = latent.data_ptr() + latents.rank * size
        rotate_latent = NormRotaryCall(
            data=shared, out=shared, head_size=latents.rotary_size, **of_latents, **rotation
        )
        return [rotate_query, norm, rotate_latent]


def _by_lanes(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight [heads, outputs, inputs] as [patterns, outputs, pairs of inputs, 16 lanes]: in
    bfloat16 both inputs of a lane are neighbours, in float32 all lanes are."""
    heads = len(weight)
    patterns = heads // math.gcd(heads, LANES)
    of_lanes = torch.arange(patterns * LANES) % heads
    by_lane = weight[of_lanes].to(dtype).unflatten(0, (patterns, LANES)).unflatten(-1, (-1, 2))
    # [patterns, lanes, outputs, pairs, 2]
    order = (0, 2, 3, 1, 4) if dtype == torch.bfloat16 else (0, 2, 3, 4, 1)
    return by_lane.permute(*order).contiguous()


def _set_step(arguments: LatentCall, of_step: LatentCall, first: int) -> None:
    """Fill in the fields of a step, for tokens from ``first`` on."""
    offset = first * I64_BYTES
    arguments.lanes = of_step.lanes
    arguments.block_size = of_step.block_size
    arguments.table = of_step.table
    arguments.table_width = of_step.table_width
    arguments.slots = of_step.slots + offset
    arguments.indices = of_step.indices + offset
    arguments.row_of_token = of_step.row_of_token + offset
