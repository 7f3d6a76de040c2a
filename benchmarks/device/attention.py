"""Part ``attention``: time of the paged attention kernels against what the device can do.

Decode reads K and V once: its bar is a share of the copy bandwidth. A chunk of a prompt computes:
its bar is a share of the rate of matrix products. A call is the whole of a layer's: the write of
the new tokens and the attention. Several caches take turns, so that L2 serves none of them.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.device.environment import device_of
from benchmarks.device.paged import Batch, Case, function_of, make_batch
from benchmarks.device.supervise import Bench
from benchmarks.device.timing import Timing, time_calls

DECODE_BAR = 0.85
CHUNK_BAR = 0.5
_ROTATED = 512 << 20  # bytes of caches in turn: many times L2

DECODES = [
    (Case("decode 64 x 2,048", [(2047, 1)] * 64), DECODE_BAR),
    (Case("decode 64 x 8,192", [(8191, 1)] * 64), DECODE_BAR),
    (Case("decode 256 x 1,024", [(1023, 1)] * 256), None),
    (Case("decode 1 x 8,192", [(8191, 1)]), None),
    (Case("decode 4 x 8,192", [(8191, 1)] * 4), None),
    (Case("decode 1 x 32,768", [(32767, 1)]), None),
    (Case("decode 64 x 8,192, float8", [(8191, 1)] * 64, cache_dtype=torch.float8_e4m3fn), None),
]
CHUNKS = [
    (Case("chunk of 2,048 after 0", [(0, 2048)]), CHUNK_BAR),
    (Case("chunk of 2,048 after 6,144", [(6144, 2048)]), CHUNK_BAR),
    (Case("4 chunks of 2,048 after 0", [(0, 2048)] * 4), None),
    (Case("63 decodes x 2,048, chunk of 2,048", [(2047, 1)] * 63 + [(0, 2048)]), None),
]
TINY_DECODES = [(Case("decode 2 x 40", [(39, 1)] * 2, (4, 2, 16), torch.float32), DECODE_BAR)]
TINY_CHUNKS = [(Case("chunk of 24 after 8", [(8, 24)], (4, 2, 16), torch.float32), CHUNK_BAR)]


def run(bench: Bench) -> None:
    """Decodes, then chunks of prompts."""
    device = device_of(bench)
    decodes = TINY_DECODES if bench.tiny else DECODES
    chunks = TINY_CHUNKS if bench.tiny else CHUNKS
    for case, bar in decodes:
        bench.case(case.name, partial(_decode, bench, case, bar, device), seconds=5)
    for case, bar in chunks:
        bench.case(case.name, partial(_chunk, bench, case, bar, device), seconds=5)


def rotated(bench: Bench, case: Case, device: torch.device) -> list[Batch]:
    """Equal batches over as many caches as keep L2 out of it."""
    first = make_batch(case, device)
    size = 2 * first.keys.numel() * first.keys.element_size()
    count = 1 if bench.tiny else max(2, min(64, -(-_ROTATED // size)))
    others = [
        Batch(
            case, first.q, first.k, first.v, first.keys.clone(), first.values.clone(), first.meta,
            first.options,
        )
        for _ in range(count - 1)
    ]  # fmt: skip
    return [first, *others]


def time_batches(batches: list[Batch], attend: Any, device: torch.device, seconds: float) -> Timing:
    """Of one call over one of the batches."""
    return time_calls([partial(batch.run, attend) for batch in batches], device, seconds)


def _decode(bench: Bench, case: Case, bar: float | None, device: torch.device) -> None:
    batches = rotated(bench, case, device)
    timing = time_batches(batches, function_of(case, device), device, 0.0 if bench.tiny else 0.5)
    bandwidth = bench.facts.get("bandwidth")
    floor = case.kv_bytes() / bandwidth if bandwidth else None
    bench.add(
        case.name, value=1e6 * timing.seconds, unit="µs", bar=bar,
        floor=1e6 * floor if floor else None,
        ratio=floor / timing.seconds if floor else None,
        note="" if timing.graphed else "not graphed",
        details={**timing.details, "GB/s": case.kv_bytes() / timing.seconds / 1e9},
    )  # fmt: skip


def _chunk(bench: Bench, case: Case, bar: float | None, device: torch.device) -> None:
    batches = rotated(bench, case, device)
    timing = time_batches(batches, function_of(case, device), device, 0.0 if bench.tiny else 0.5)
    rate = bench.facts.get("matrix_rate")
    floor = case.operations() / rate if rate else None
    bench.add(
        case.name, value=1e6 * timing.seconds, unit="µs", bar=bar,
        floor=1e6 * floor if floor else None,
        ratio=floor / timing.seconds if floor else None,
        note="" if timing.graphed else "not graphed",
        details={**timing.details, "TFLOP/s": case.operations() / timing.seconds / 1e12},
    )  # fmt: skip
