"""Attention over the paged cache: time per layer of the CPU kernel, over a cache of the queries'
dtype and of int8, of the reference and of torch's SDPA.

    python benchmarks/attention.py [--dtype bfloat16] [--heads 12 4 64] [--thread-time] [--quick]

Every call sees another of several caches in turn, as the layers of a model do, so that decoding
reads from memory and not from a processor cache. Contenders take turns; the least and the median
time are printed. GB/s (of the first) counts K and V read once, GFLOP/s the two products under the
causal mask.
"""

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from jitney.batch import Row
from jitney.execution.acceleration import attention_for
from jitney.execution.attention import (
    SCALE_BYTES,
    AttentionMetadata,
    AttentionShape,
    build_metadata,
    cache_shape,
)
from jitney.execution.interface import AttentionCall, AttentionFunction, LayerCache
from jitney.kernels.cpu.accelerator import CpuAccelerator
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_SIZE = 16
LAYERS = 12

# Name -> (start, tokens) of each row.
CASES: dict[str, list[tuple[int, int]]] = {
    "decode 8 x 400": [(399, 1)] * 8,
    "decode 32 x 400": [(399, 1)] * 32,
    "decode 1 x 256": [(255, 1)],
    "decode 1 x 2,048": [(2047, 1)],
    "prefill 32 after 0": [(0, 32)],
    "prefill 512 after 0": [(0, 512)],
    "prefill 512 after 1,536": [(1536, 512)],
    "28 decodes x 400, prefill 484": [(399, 1)] * 28 + [(0, 484)],
}


def rows_of(spans: list[tuple[int, int]]) -> list[Row]:
    """Rows over shuffled blocks."""
    need = [-(-(start + n) // BLOCK_SIZE) for start, n in spans]
    ids = np.random.RandomState(0).permutation(sum(need)).tolist()
    return [
        Row(
            key=0,
            index=0,
            token_ids=[0] * n,
            start=start,
            block_table=[ids.pop() for _ in range(blocks)],
            sample=(),
            params=SamplingParams(),
            prompt=[],
            output=[],
            stop_ids=frozenset(),
            bad_words_ids=[],
        )
        for (start, n), blocks in zip(spans, need, strict=True)
    ]


def gathered_sdpa(call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
    """What one would write without a kernel: gather each row's blocks, then SDPA.

    Of plain [token, head] blocks; the new tokens are written as the reference does.
    """
    block = torch.div(meta.slot_mapping, meta.block_size, rounding_mode="floor")
    for new, stored in ((call.key, cache.keys), (call.value, cache.values)):
        stored[block, :, meta.slot_mapping % meta.block_size] = new
    q = call.query
    out = torch.empty_like(q)
    bounds = meta.query_start.tolist()
    for r, context in enumerate(meta.context_len.tolist()):
        blocks = meta.block_table[r, : -(-context // meta.block_size)].long()
        keys, values = (
            stored[blocks].transpose(0, 1).flatten(1, 2)[None, :, :context]
            for stored in (cache.keys, cache.values)
        )
        begin = bounds[r]
        end = bounds[r + 1]
        n = end - begin
        mask = None
        if n > 1 and n < context:
            mask = torch.ones(n, context, dtype=torch.bool).tril(context - n)
        result = scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], keys, values, mask,
            is_causal=n == context and n > 1, scale=call.scale, enable_gqa=True,
        )  # fmt: skip
        out[begin:end] = result[0].transpose(0, 1)
    return out


def random_bytes(shape: tuple[int, ...]) -> Tensor:
    """A cache of int8 as the kernel has it: the scales of 16 tokens follow their elements."""
    cache = torch.randint(-127, 128, shape, dtype=torch.int8)
    scales = cache.view(-1, 16 * shape[3])[:, -16 * SCALE_BYTES :]
    scales.copy_(torch.full((16,), 1 / 64).view(torch.int8))
    return cache


def measure(
    calls: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> dict[str, tuple[float, float]]:
    """Least and median seconds of each call, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            for _ in range(5 if name in ("cpu", "int8") else 1):
                began = clock()
                call()
                times[name].append(clock() - began)
    return {name: (min(t), float(np.median(t))) for name, t in times.items()}


def bench(
    spans: list[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, tuple[float, float]]:
    """Seconds per layer of each contender on one batch."""
    heads, kv_heads, head_size = shape
    rows = rows_of(spans)
    meta = build_metadata(rows, BLOCK_SIZE)
    blocks = sum(len(row.block_table) for row in rows)
    tokens = sum(n for _, n in spans)
    shape_of = functools.partial(cache_shape, blocks, BLOCK_SIZE, kv_heads, head_size)
    caches = [[torch.randn(shape_of()).to(dtype) for _ in "kv"] for _ in range(LAYERS)]
    of_bytes = [[random_bytes(shape_of(torch.int8)) for _ in "kv"] for _ in range(LAYERS)]
    q, k, v = (torch.randn(tokens, n, head_size).to(dtype) for n in (heads, kv_heads, kv_heads))
    device = torch.device("cpu")
    accelerator = CpuAccelerator(make_config({"model": "none"}), device)

    def chosen(name: str, kept: torch.dtype) -> AttentionFunction:
        each = AttentionShape(device, kept, dtype, head_size, heads, kv_heads)
        return attention_for(name, each, accelerator)

    contenders: dict[str, Callable[..., Tensor]] = {
        "cpu": chosen("cpu", dtype),
        "int8": chosen("cpu", torch.int8),
        "reference": chosen("reference", dtype),
        "sdpa": gathered_sdpa,
    }

    def turn(name: str) -> Callable[[], Tensor]:
        function = contenders[name]
        layers = of_bytes if name == "int8" else caches
        count = iter(range(1 << 62))
        call = AttentionCall(0, q, k, v, scale=head_size**-0.5)
        return lambda: function(call, LayerCache(*layers[next(count) % LAYERS], function), meta)

    return measure({name: turn(name) for name in contenders}, seconds, clock)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--heads", nargs=3, type=int, default=(12, 4, 64), metavar=("Q", "KV", "D"))
    parser.add_argument("--threads", type=int, help="threads of torch; default: its own choice")
    parser.add_argument(
        "--thread-time", action="store_true",
        help="CPU time on one thread instead of wall time: on a busy machine",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    options = parser.parse_args()
    threads = 1 if options.thread_time else options.threads
    if threads is not None:
        torch.set_num_threads(threads)
    clock = time.thread_time if options.thread_time else time.perf_counter
    seconds = 0.6 if options.quick else 3.0
    heads, kv_heads, head_size = options.heads
    dtype = getattr(torch, options.dtype)
    print(
        f"{options.dtype}, {heads} query and {kv_heads} KV heads of {head_size}, "
        f"{torch.get_num_threads()} threads; ms per layer: least (median)"
    )
    names = "".join(f"{name:>18}" for name in ("cpu", "int8", "reference", "sdpa"))
    print(f"{'':28}{names} {'cpu GB/s':>9} {'GFLOP/s':>8}")
    for name, spans in CASES.items():
        times = bench(spans, (heads, kv_heads, head_size), dtype, seconds, clock)
        flops = sum(4 * head_size * heads * n * (start + (n + 1) / 2) for start, n in spans)
        read = sum(2 * kv_heads * head_size * dtype.itemsize * (start + n) for start, n in spans)
        cells = "".join(
            f" {1e3 * least:8.3f} ({1e3 * median:6.2f})" for least, median in times.values()
        )
        best = times["cpu"][0]
        print(f"{name:30}{cells} {read / best / 1e9:9.1f} {flops / best / 1e9:8.0f}", flush=True)


if __name__ == "__main__":
    main()
