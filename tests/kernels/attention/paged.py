"""Sequences over a paged cache full of NaN (of int8: of scales that are), for tests of the kernels
of a CPU and of a GPU; and what attention over them should give, by dense matrices in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from jitney.execution.attention import BlockTables, build_metadata, cache_shape
from jitney.execution.interface import AttentionFunction
from torch import Tensor

from tests.kernels.attention.rows import attend_over, row

FLOAT8 = torch.float8_e4m3fn
Spans = list[tuple[int, int, int]]
"""(sequence, start, end) of a batch's rows."""


@dataclass(frozen=True)
class Case:
    """A layer's form of attention."""

    heads: tuple[int, int] = (4, 2)
    """Query heads, KV heads."""
    size: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None

    def attention(self, device: str = "cpu", **options: Any) -> AttentionFunction:
        """The GPU's."""
        from jitney.kernels.gpu.gpu_attention import GpuAttention

        dtype = self.cache_dtype or self.dtype
        return GpuAttention(torch.device(device), dtype, self.size, *self.heads, **options)


class Sequences:
    """Each has its own random q, k and v; :meth:`step` feeds spans of them to the cache."""

    def __init__(self, case: Case, lengths: list[int], device: str = "cpu", seed: int = 0) -> None:
        self.case, self.lengths = case, lengths
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads = case.heads

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.inputs = [
            [normal(n, each, case.size).to(device, case.dtype) for each in (heads, *[kv_heads] * 2)]
            for n in lengths
        ]
        self.sinks = 2 * normal(heads).to(device) if case.sinks else None
        self.scale = 1.3 * case.size**-0.5
        need = [-(-n // case.block_size) for n in lengths]
        ids = (torch.randperm(sum(need) + 2, generator=generator) + 1).tolist()
        self.tables = [[ids.pop() for _ in range(n)] for n in need]
        self.spare = [0, *ids]  # nobody's; tables are padded with block 0
        self.block_tables = BlockTables()  # kept between steps, as in service
        dtype = case.cache_dtype or case.dtype
        shape = cache_shape(sum(need) + 3, case.block_size, kv_heads, case.size, dtype)
        # Four bytes of -1 are a scale that is NaN.
        fill = -1 if dtype == torch.int8 else float("nan")
        self.caches = [torch.full(shape, fill, device=device).to(dtype) for _ in ("keys", "values")]
        self.scales: dict[str, Tensor] = {}
        if dtype == FLOAT8:  # some values are beyond e4m3's largest, some below its smallest
            self.scales = {
                "key_scale": torch.linspace(0.004, 0.02, kv_heads, device=device),
                "value_scale": torch.linspace(0.5, 0.01, kv_heads, device=device),
            }

    def options(self) -> dict[str, Any]:
        case = self.case
        return {
            "scale": self.scale,
            "window": case.window,
            "softcap": case.softcap,
            "sinks": self.sinks,
            **self.scales,
        }

    def batch(self, spans: Spans) -> tuple[list[Tensor], Any]:
        """q, k and v [T, …] of a batch, and its metadata."""
        rows = [row(self.tables[i], start, end) for i, start, end in spans]
        device = self.caches[0].device
        meta = build_metadata(rows, self.case.block_size, device, self.block_tables)
        parts = [
            torch.cat([self.inputs[i][x][start:end] for i, start, end in spans]) for x in range(3)
        ]
        return parts, meta

    def step(self, attend: AttentionFunction, spans: Spans) -> list[Tensor]:
        """The output of each row."""
        parts, meta = self.batch(spans)
        out = attend_over(attend, *parts, *self.caches, meta, **self.options())
        assert out.dtype == self.case.dtype
        assert out.shape == parts[0].shape
        return list(out.split([end - start for _, start, end in spans]))

    def write(self, index: int, end: int) -> None:
        """Put a sequence's first ``end`` K and V into the cache, without attention."""
        _, k, v = self.inputs[index]
        table = torch.tensor(self.tables[index], device=k.device)
        position = torch.arange(end, device=k.device)
        at = table[position // self.case.block_size], position % self.case.block_size
        for cache, new in zip(self.caches, (k, v), strict=True):
            assert cache.dtype == new.dtype, "quantizing is the kernel's"
            cache[at[0], :, at[1], : self.case.size] = new[:end]

    def expected(self, index: int, start: int, end: int) -> Tensor:
        """float64 [end - start, heads, size] from a sequence's q and what its K and V become in the
        cache: rounded by torch to the cache's dtype."""
        case = self.case
        q, k, v = (x[:end].double() for x in self.inputs[index])
        if case.cache_dtype == torch.int8:
            k, v = (rounded_to_bytes(x[:end]).double() for x in self.inputs[index][1:])
        if self.scales:
            k, v = (
                quantized(x, scale) for x, scale in zip((k, v), self.scales.values(), strict=True)
            )
        group = case.heads[0] // case.heads[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:], k) * self.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        at = torch.arange(start, end, device=q.device)[:, None]
        seen = torch.arange(end, device=q.device)[None, :]
        hidden = seen > at
        if case.window is not None:
            hidden |= seen <= at - case.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, column], -1)
        return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :end], v)

    def error(self, out: list[Tensor], spans: Spans) -> float:
        """The largest of the rows' ‖out - expected‖ / ‖expected‖; NaN if one is NaN."""
        errors = [
            distance(part, self.expected(*span)) for part, span in zip(out, spans, strict=True)
        ]
        return float("nan") if any(e != e for e in errors) else max(errors)


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    """float64: ``x`` [T, KV heads, size] after e4m3 and its heads' scales."""
    factor = scale.double()[None, :, None]
    return (x / factor).clamp(-448, 448).float().to(FLOAT8).double() * factor


def rounded_to_bytes(x: Tensor) -> Tensor:
    """float32: ``x`` [T, KV heads, size] after int8 with a scale per token and head."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (x.float() * (1 / scale)).round() * scale


def distance(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())
