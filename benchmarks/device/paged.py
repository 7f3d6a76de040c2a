"""Batches over a paged cache for the attention kernels, and what they should give, in float64.

The reference here shares nothing with the kernels but the cache's layout: it gathers a row's blocks
and attends with dense float64 matrices, on whatever device the case is.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jitney.batch import Row
from jitney.execution.attention import AttentionMetadata, build_metadata, cache_shape
from jitney.execution.interface import AttentionCall, LayerCache
from jitney.kernels.gpu.gpu_attention import GpuAttention
from jitney.kernels.gpu.tiles import Tiles
from jitney.sampling_params import SamplingParams
from torch import Tensor

Spans = list[tuple[int, int]]
"""(tokens in the cache before this step, new tokens) of each row."""


@dataclass(frozen=True)
class Case:
    """A batch and the model's form of attention."""

    name: str
    spans: Spans
    heads: tuple[int, int, int] = (32, 8, 128)
    """Query heads, KV heads, head size."""
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    num_blocks: int | None = None
    """More than are used: the used ones are then the last ones."""

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(count for _, count in self.spans)

    @property
    def context(self) -> int:
        """Tokens of all rows once the step is written."""
        return sum(start + count for start, count in self.spans)

    def operations(self) -> int:
        """Of the two products, under the causal mask, without a window."""
        heads, _, size = self.heads
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.spans)
        return 4 * size * heads * pairs

    def kv_bytes(self) -> int:
        """K and V of all rows, read once."""
        _, kv_heads, size = self.heads
        return 2 * kv_heads * size * self.context * (self.cache_dtype or self.dtype).itemsize


@dataclass
class Batch:
    """A case's tensors on a device."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    meta: AttentionMetadata
    options: dict[str, Any] = field(default_factory=dict)
    """Of an ``AttentionCall``, and of a ``LayerCache``."""

    def run(self, attend: Any) -> Tensor:
        """Write and attend."""
        names = {"key_scale", "value_scale"} & self.options.keys()
        scales = {name: self.options[name] for name in names}
        others = {name: value for name, value in self.options.items() if name not in names}
        cache = LayerCache(self.keys, self.values, attend, **scales)
        out = attend(AttentionCall(0, self.q, self.k, self.v, **others), cache, self.meta)
        assert isinstance(out, Tensor)
        return out


def rows_of(case: Case, generator: torch.Generator) -> tuple[list[Row], int]:
    """The rows over shuffled blocks, and the number of blocks of the cache."""
    need = [-(-(start + count) // case.block_size) for start, count in case.spans]
    used = sum(need)
    total = case.num_blocks or used
    ids = (torch.randperm(used, generator=generator) + total - used).tolist()
    rows = []
    for (start, count), blocks in zip(case.spans, need, strict=True):
        table = ids[:blocks]
        ids = ids[blocks:]
        rows.append(
            Row(
                key=0, index=0, token_ids=[0] * count, start=start, block_table=table, sample=(),
                params=SamplingParams(), prompt=[], output=[], stop_ids=frozenset(),
                bad_words_ids=[],
            )
        )  # fmt: skip
    return rows, total


def make_batch(case: Case, device: torch.device, seed: int = 0) -> Batch:
    """Make a case of random values. Only blocks in use are filled where the cache is larger."""
    host = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    rows, total = rows_of(case, host)
    heads, kv_heads, size = case.heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    cache_dtype = case.cache_dtype or case.dtype
    shape = cache_shape(total, case.block_size, kv_heads, size)
    caches = []
    for _ in range(2):
        cache = torch.zeros(shape, dtype=cache_dtype, device=device)
        used = sum(len(row.block_table) for row in rows)
        for begin in range(total - used, total, 4096):  # float32 of all at once may not fit
            part = cache[begin : begin + 4096]
            part.copy_(random(*part.shape).to(cache_dtype))
        caches.append(cache)
    q, k, v = (random(case.tokens, n, size).to(case.dtype) for n in (heads, kv_heads, kv_heads))
    options: dict[str, Any] = {"scale": size**-0.5}
    for name in ("window", "softcap"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    if case.sinks:
        options["sinks"] = random(heads)
    if cache_dtype.itemsize == 1:
        options["key_scale"] = torch.linspace(0.5, 1.5, kv_heads, device=device)
        options["value_scale"] = torch.linspace(1.25, 0.75, kv_heads, device=device)
    meta = build_metadata(rows, case.block_size, device)
    return Batch(case, q, k, v, caches[0], caches[1], meta, options)


def function_of(
    case: Case, device: torch.device, *, batch_invariant: bool = False, tiles: Tiles | None = None
) -> GpuAttention:
    """The attention function for a case; ``tiles`` in place of the table's."""
    heads, kv_heads, size = case.heads
    return GpuAttention(
        device, case.cache_dtype or case.dtype, size, heads, kv_heads,
        batch_invariant=batch_invariant, tiles=tiles,
    )  # fmt: skip


def expected(batch: Batch) -> Tensor:
    """float64 [T, heads, head size] of a batch whose K and V have been written."""
    case = batch.case
    meta = batch.meta
    heads, _, size = case.heads
    out = torch.zeros(case.tokens, heads, size, dtype=torch.float64, device=batch.q.device)
    begin = 0
    for row, (start, count) in enumerate(case.spans):
        context = start + count
        blocks = meta.block_table[row, : -(-context // case.block_size)].long()
        keys, values = (
            _scaled(cache[blocks].double(), batch.options.get(scale))
            .transpose(1, 2)
            .flatten(0, 1)[:context, :, :size]
            for cache, scale in ((batch.keys, "key_scale"), (batch.values, "value_scale"))
        )
        q = batch.q[begin : begin + count].double()
        out[begin : begin + count] = _dense(batch, q, keys, values, start)
        begin += count
    return out


def _scaled(blocks: Tensor, scale: Tensor | None) -> Tensor:
    return blocks if scale is None else blocks * scale.double()[None, :, None, None]


def _dense(batch: Batch, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [n, heads, size]; keys and values [context, KV heads, size]."""
    case = batch.case
    count, heads, _ = q.shape
    group = heads // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * batch.options["scale"]
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    at = torch.arange(start, start + count, device=q.device)[:, None]
    seen = torch.arange(keys.shape[0], device=q.device)[None, :]
    hidden = seen > at
    if case.window is not None:
        hidden |= seen <= at - case.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if case.sinks:
        sink = batch.options["sinks"].double()[:, None, None].expand(heads, count, 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values)


def distance(got: Tensor, right: Tensor) -> float:
    """‖got − right‖ / ‖right‖ in float64; NaN stays NaN."""
    return float((got.double() - right).norm() / right.norm())
