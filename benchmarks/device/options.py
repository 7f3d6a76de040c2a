"""Part ``options``: what an option changes of a steady decode step. There are no bars here.

Quantized weights, a float8 cache, batch invariance; each beside the plain step of part ``decode``.
"""

from functools import partial

import torch
from jitney.quantization.packages import missing_package

from benchmarks.device.decode import (
    FULL,
    REHEARSAL,
    Plan,
    Steady,
    close,
    measure_steps,
    steady_engine,
)
from benchmarks.device.environment import device_of
from benchmarks.device.shapes import LLAMA_8B, TINY, Shape
from benchmarks.device.supervise import Bench

BATCHES = (1, 64)
OPTIONS: dict[str, dict[str, object]] = {
    "fp8 weights": {"quantization": "fp8"},
    "float8 cache": {"kv_cache_dtype": "float8_e4m3"},
    "batch invariant": {"batch_invariant": True},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
}
TINY_OPTIONS = ("float8 cache",)


def run(bench: Bench) -> None:
    """One engine per option, all batches with it."""
    device = device_of(bench)
    shape, plan = (TINY, REHEARSAL) if bench.tiny else (LLAMA_8B, FULL)
    for name in TINY_OPTIONS if bench.tiny else OPTIONS:
        missing = missing_package("torchao") if name.startswith("int") else None
        if missing is None:
            bench.case(name, partial(_steps, bench, name, shape, plan, device), seconds=30)
        else:
            bench.add(name, note=f"skipped: {missing}")


def _steps(bench: Bench, name: str, shape: Shape, plan: Plan, device: torch.device) -> None:
    batches = plan.batches[:1] if bench.tiny else BATCHES
    engine = steady_engine(bench, shape, device, plan, max(batches), **OPTIONS[name])
    try:
        for batch in batches:
            steady = Steady(engine, shape, plan, batch)
            found = measure_steps(steady, plan.steps)
            plain = bench.facts.get("step_ms", {}).get(batch)
            bench.add(
                f"batch {batch}, {name}", value=1e3 * found.mean, unit="ms",
                ratio=plain / (1e3 * found.mean) if plain else None,
                note="ratio: of the plain step" if plain else "",
                details={"median_ms": 1e3 * found.median, "host_ms": 1e3 * found.host},
            )  # fmt: skip
            steady.end()
    finally:
        close(engine)
