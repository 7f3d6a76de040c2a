"""Part ``decode``: steady decode steps with Llama-3.1-8B's shape, through the whole engine.

Step time is wall time per step of an engine that has nothing to do but decode, median over many
steps; with overlap on that is the time of whichever of host and device is slower. The floor is the
step's weights and its K and V read once at the copy bandwidth. Idle is the share of the time in
which the device ran nothing, by the profiler's record of every kernel; the host's time is that of
a step less what it waited for the device.
"""

import gc
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jitney.engine.engine import Engine
from jitney.messages import Cancel, Failed, Finished, Tokens

from benchmarks.device.environment import device_of
from benchmarks.device.serving import make_engine, submit
from benchmarks.device.shapes import LLAMA_8B, TINY, Shape
from benchmarks.device.supervise import Bench
from benchmarks.device.timing import WaitWatch

STEP_BAR = 0.8
IDLE_BAR = 0.03
HOST_BAR_MS = 1.5
CONTEXT = 1024
_GAP_US = 5.0  # a shorter gap is between two kernels of one graph


@dataclass(frozen=True)
class Plan:
    """How long to look."""

    context: int
    steps: int
    profiled: int
    warm: int
    batches: tuple[int, ...]


FULL = Plan(CONTEXT, 64, 12, 4, (1, 64, 256))
REHEARSAL = Plan(16, 2, 2, 1, (1, 2))


def run(bench: Bench) -> None:
    """The default first, in all batches; then what it would be without overlap, without graphs."""
    device = device_of(bench)
    shape, plan = (TINY, REHEARSAL) if bench.tiny else (LLAMA_8B, FULL)
    most = max(plan.batches)
    bench.case("decode steps", partial(_default, bench, shape, plan, device))
    others: list[tuple[str, dict[str, object], int]] = [
        ("without overlap", {"overlap": False}, most),
        ("without graphs", {"cuda_graphs": "never"}, plan.batches[-2]),
    ]
    for name, options, batch in others[:1] if bench.tiny else others:
        label = f"batch {batch}, {name}"
        bench.case(
            label, partial(_other, bench, shape, plan, device, label, options, batch), seconds=25
        )


def steady_engine(
    bench: Bench, shape: Shape, device: torch.device, plan: Plan, batch: int, **options: object
) -> Engine:
    """An engine with room for ``batch`` sequences of the plan's context, and no more."""
    length = plan.context + 4 * plan.steps + 64
    blocks = batch * -(-length // 16) + 8
    chosen: dict[str, object] = {
        "max_num_seqs": batch,
        "max_model_len": length,
        "kv_cache_bytes": blocks * 16 * shape.kv_bytes,
    }
    if device.type == "cuda" and options.get("cuda_graphs") != "never":
        # Contexts grow past what a graph was captured for: no capture may fall into the timing.
        sizes = [size for size in plan.batches if size <= batch]
        chosen |= {"cuda_graphs": "load", "cuda_graph_sizes": sizes}
    return make_engine(bench, shape, device, **(chosen | options))


def close(engine: Engine) -> None:
    """Give its memory back."""
    engine.runner.close()  # type: ignore[attr-defined]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Steady:
    """A batch of equal requests in the middle of their outputs."""

    def __init__(self, engine: Engine, shape: Shape, plan: Plan, batch: int, seed: int = 0) -> None:
        self.engine = engine
        self.batch = batch
        random = np.random.RandomState(seed)
        before = plan.steps // 2 + 8  # so that the measured steps lie around the context
        prompt = plan.context - before
        most = engine.runner.info.max_model_len - prompt
        prompts = [random.randint(10, shape.vocab - 10, prompt).tolist() for _ in range(batch)]
        self._made = {submit(engine, each, most): 0 for each in prompts}
        self._prompt = prompt
        # Until prompts are done, kernels compiled and graphs captured.
        while min(self._made.values()) < plan.warm:
            self.step()

    def step(self) -> float:
        """Seconds of one step. Raises RuntimeError if a request ends."""
        began = time.perf_counter()
        report = self.engine.step()
        seconds = time.perf_counter() - began
        for event in report.events if report else ():
            if isinstance(event, Failed):
                raise RuntimeError(f"{event.code}: {event.message}")
            if isinstance(event, Finished):
                raise RuntimeError("a request ended: the batch is not what it is said to be")
            if isinstance(event, Tokens):
                self._made[event.key] += len(event.ids)
        return seconds

    @property
    def context(self) -> float:
        """Mean tokens in the cache of a sequence."""
        return self._prompt + sum(self._made.values()) / self.batch

    def end(self) -> None:
        """Cancel all, and see it done."""
        for key in self._made:
            self.engine.send(Cancel(key))
        while self.engine.has_work:
            self.engine.step()


@dataclass(frozen=True)
class StepTime:
    """Of steady steps, in seconds."""

    median: float
    mean: float
    host: float
    context: float


def measure_steps(steady: Steady, steps: int) -> StepTime:
    """Time ``steps`` steps, beginning and ending with an idle device."""
    before = steady.context
    _synchronize()
    with WaitWatch() as waits:
        began = time.perf_counter()
        each = [steady.step() for _ in range(steps)]
        looped = time.perf_counter() - began
        waited = waits.seconds
    _synchronize()
    total = time.perf_counter() - began
    return StepTime(
        statistics.median(each),
        total / steps,
        (looped - waited) / steps,
        (before + steady.context) / 2,
    )


def report_steps(
    bench: Bench, name: str, shape: Shape, batch: int, found: StepTime, bar: float | None
) -> None:
    """A row of a step's time against its floor."""
    bandwidth = bench.facts.get("bandwidth")
    rate = bench.facts.get("matrix_rate")
    floor = shape.step_bytes(batch, round(found.context)) / bandwidth if bandwidth else None
    computing = shape.step_operations(batch) / rate if rate else None
    bench.add(
        name, value=1e3 * found.mean, unit="ms", bar=bar, floor=1e3 * floor if floor else None,
        ratio=floor / found.mean if floor else None,
        note=f"{batch / found.mean:,.0f} tok/s",
        details={
            "median_ms": 1e3 * found.median, "host_ms": 1e3 * found.host,
            "context": found.context, "products_alone_ms": 1e3 * computing if computing else None,
        },
    )  # fmt: skip


def _default(bench: Bench, shape: Shape, plan: Plan, device: torch.device) -> None:
    engine = steady_engine(bench, shape, device, plan, max(plan.batches))
    for batch in plan.batches:
        steady = Steady(engine, shape, plan, batch)
        for _ in range(plan.warm):
            steady.step()
        found = measure_steps(steady, plan.steps)
        report_steps(bench, f"batch {batch}, context {plan.context}", shape, batch, found, STEP_BAR)
        times = bench.facts.get("step_ms", {})
        bench.fact("step_ms", {**times, batch: 1e3 * found.mean})
        if batch == max(plan.batches):
            bench.add(
                f"batch {batch}: host time per step", value=1e3 * found.host, unit="ms",
                ratio=1e3 * found.host, bar=HOST_BAR_MS, at_most=True,
            )  # fmt: skip
        if not bench.tiny:
            bench.case(f"batch {batch}: idle", partial(_idle, bench, steady, plan, batch))
        steady.end()
    close(engine)


def _other(
    bench: Bench, shape: Shape, plan: Plan, device: torch.device, name: str,
    options: dict[str, object], batch: int,
) -> None:  # fmt: skip
    engine = steady_engine(bench, shape, device, plan, batch, **options)
    steady = Steady(engine, shape, plan, batch)
    report_steps(bench, name, shape, batch, measure_steps(steady, plan.steps), None)
    steady.end()
    close(engine)


def _idle(bench: Bench, steady: Steady, plan: Plan, batch: int) -> None:
    """Gaps between what ran on the device, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(plan.warm + plan.profiled):
            steady.step()
        _synchronize()
    spans = _device_spans(profiler)
    # The profiler's own first records, and a graph's first launch under it, take long. All steps
    # launch the same.
    spans = spans[len(spans) * plan.warm // (plan.warm + plan.profiled) :]
    idle, between, total = gaps([(begin, end) for _, begin, end in spans])
    bench.add(
        f"batch {batch}: device idle", value=100 * idle / total, unit="%", ratio=idle / total,
        bar=IDLE_BAR if batch == max(plan.batches) else None, at_most=True,
        note=f"{100 * between / total:.1f} % in gaps over {_GAP_US:.0f} µs",
        details={"kernels": _by_kernel(spans, plan.profiled), "ms": total / 1e3 / plan.profiled},
    )  # fmt: skip


def _device_spans(profiler: Any) -> list[tuple[str, float, float]]:
    """(name, begin, end) in µs of all kernels, copies and fills."""
    cuda = torch.autograd.DeviceType.CUDA
    return sorted(
        (
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == cuda
        ),
        key=lambda span: span[1],
    )


def gaps(spans: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(idle, idle in gaps over _GAP_US, whole time) of spans sorted by their begin."""
    if not spans:
        raise RuntimeError("the profiler recorded nothing on the device")
    idle = between = 0.0
    until = spans[0][1]
    for begin, end in spans[1:]:
        gap = begin - until
        if gap > 0:
            idle += gap
            between += gap if gap > _GAP_US else 0.0
        until = max(until, end)
    return idle, between, until - spans[0][0]


def _by_kernel(spans: list[tuple[str, float, float]], steps: int) -> list[list[object]]:
    """[name, launches per step, µs per step] of the longest."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in spans:
        times[name].append(end - begin)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))[:20]
    return [[name[:80], len(each) / steps, sum(each) / steps] for name, each in ordered]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
