"""Sweeps to draw reports of: simulated clients, measured, judged and recorded by the project's own
modules. The simulation is coarse, the figures are of the size that a small server really has."""

import heapq
import math
from collections.abc import Callable
from functools import cache

import numpy as np
from jitney.sweep import slo
from jitney.sweep.plan import Plan, loads
from jitney.sweep.profile import Exchange, measure
from jitney.sweep.record import EngineWork, Load, Point, Result, Stage

SECONDS = 12.0
Serve = Callable[[float, int], Exchange]
"""(sent at, requests under way) -> what becomes of a request."""


def plan(concurrency: str, rate: str = "") -> Plan:
    """As the command line makes it, with a stability that noise alone does not break."""
    return Plan(loads(concurrency, rate), SECONDS, None, poisson=True, stability=0.35, batch=1)


@cache
def language_sweep(
    *, bounds: str = "ttft-p95=200ms,itl-p95=25ms", speed: float = 1.0, title: str = "chat-7b"
) -> Result:
    """Loads of both kinds; the last rate is more than the server can do, and so `behind`."""
    rng = np.random.default_rng(1)
    asked = plan("1,2,4,8,16,32,64", "4,16,60")
    points = []
    for load in asked.loads:
        exchanges = play(load, _stream(rng, speed), rng)
        found = measure(exchanges, language=True)
        state, remarks = asked.doubts(load, found)
        mean = min(64.0, load.level if load.kind == "concurrency" else load.level * 0.7)
        assert found.output_tokens is not None
        work = _engine(found.output_tokens, mean, queue_s=0.002 * math.exp(mean / 20))
        points.append(Point(load, state, tuple(remarks), found, (), work))
    return _result(title, points, bounds, language=True)


@cache
def batching_sweep(
    *, bounds: str = "latency-p99=20ms", speed: float = 1.0, title: str = "digits"
) -> Result:
    """A model of one call, in an ensemble of two parts."""
    rng = np.random.default_rng(2)
    asked = plan("1,4,16,64", "100,400,1600")
    points = []
    for load in asked.loads:
        found = measure(play(load, _call(rng, speed), rng), language=False)
        state, remarks = asked.doubts(load, found)
        stages = tuple(
            _stage(name, found.requests, load.level, rng) for name in ("digits-pre", "digits-cnn")
        )
        points.append(Point(load, state, tuple(remarks), found, stages))
    return _result(title, points, bounds, language=False)


def unstable_sweep() -> Result:
    """A server that slows down, one load that was refused, one where perf_analyzer failed."""
    rng = np.random.default_rng(3)
    asked = plan("1,4,16")
    points = []
    for load in asked.loads:
        slower: Serve = lambda now, under_way: Exchange(  # noqa: E731
            now, (now + 0.01 * math.exp(now / 5),), None, now + 0.01 * math.exp(now / 5)
        )
        found = measure(play(load, slower, rng), language=False)
        state, remarks = asked.doubts(load, found)
        points.append(Point(load, state, tuple(remarks), found))
    failed = [Exchange(0.01 * i, (), None, None) for i in range(30)]
    found = measure(play(asked.loads[0], _call(rng, 1.0), rng) + failed, language=False)
    refused = Load("concurrency", 64)
    state, remarks = asked.doubts(refused, found)
    points.append(Point(refused, state, tuple(remarks), found))
    words = (
        "perf_analyzer ended with status 99: [StatusCode.UNAVAILABLE] failed to connect to all "
        "addresses; last error: UNKNOWN: ipv4:10.20.30.40:8001: Failed to connect to remote host: "
        "/opt/tritonserver/backends/python/a/path/without/any/place/to/break/it/models.py:1234 "
        "<script>alert('not run')</script> & so on"
    )
    points.append(Point(Load("concurrency", 256), "failed", (words,)))
    return _result("wavering", points, "latency-p95=50ms", language=False)


def hopeless_sweep() -> Result:
    """Nothing meets the bounds."""
    return language_sweep(bounds="ttft-p95=1ms,itl-p95=1ms", title="chat-7b, strict")


def play(load: Load, serve: Serve, rng: np.random.Generator) -> list[Exchange]:
    """The clients: users who ask again once answered, or arrivals by chance."""
    done: list[Exchange] = []
    ends: list[float] = []
    if load.kind == "rate":
        now = 0.0
        while now < SECONDS:
            while ends and ends[0] <= now:
                heapq.heappop(ends)
            done.append(serve(now, len(ends) + 1))
            heapq.heappush(ends, done[-1].ended or now)
            now += float(rng.exponential(1 / load.level))
        return done
    ends = [0.0] * int(load.level)
    while ends and ends[0] < SECONDS:
        now = heapq.heappop(ends)
        done.append(serve(now, int(load.level)))
        heapq.heappush(ends, done[-1].ended or now)
    return done


def _stream(rng: np.random.Generator, speed: float) -> Serve:
    """A step takes longer the more sequences share it; a few tokens leave together."""

    def serve(now: float, under_way: int) -> Exchange:
        step = (0.008 + 0.0004 * min(under_way, 64)) / speed
        waits = step * max(0, under_way - 64) * 2
        first = now + waits + (0.03 + 0.002 * under_way) / speed * float(rng.lognormal(0, 0.3))
        counts = [1, *map(int, rng.integers(1, 3, int(rng.integers(16, 48))))]
        gaps = step * np.array(counts[1:]) * rng.lognormal(0, 0.25, len(counts) - 1)
        times = (first, *map(float, first + np.cumsum(gaps)))
        return Exchange(now, times, tuple(counts), times[-1], int(rng.integers(96, 160)))

    return serve


def _call(rng: np.random.Generator, speed: float) -> Serve:
    """Batches make the queue short until the model is full."""

    def serve(now: float, under_way: int) -> Exchange:
        took = (0.002 + 0.00025 * under_way) / speed * float(rng.lognormal(0, 0.35))
        return Exchange(now, (now + took,), None, now + took)

    return serve


def _engine(tokens: int, mean: float, queue_s: float) -> EngineWork:
    """Steps around the mean batch, in the powers of two that the engine's metrics have."""
    limits = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    steps = round(tokens / mean)
    weights = [math.exp(-2 * (math.log2(limit) - math.log2(mean)) ** 2) for limit in limits]
    counts = [float(round(steps * weight / sum(weights))) for weight in weights]
    return EngineWork(
        sum(counts), limits, (*counts, 0.0), mean, queue_s, 128.0 * tokens / 40, float(tokens),
        0.6 * 128 * tokens / 40, 3.0 if mean > 40 else 0.0,
    )  # fmt: skip


def _stage(name: str, requests: int, level: float, rng: np.random.Generator) -> Stage:
    """Batches up to 32, around a third of what is under way."""
    left, batches = requests, dict[int, int]()
    while left > 0:
        size = int(np.clip(rng.poisson(min(level, 96) / 3) + 1, 1, min(32, left)))
        batches[size] = batches.get(size, 0) + 1
        left -= size
    executions = sum(batches.values())
    return Stage(name, requests, executions, 0.0004 + level * 2e-5, 0.0016, batches)


def _result(title: str, points: list[Point], bounds: str, *, language: bool) -> Result:
    parsed = slo.parse(bounds, language=language)
    verdicts = tuple(slo.judge(point, parsed) for point in points)
    return Result(
        title=title,
        model=title.split(",")[0],
        language=language,
        address="10.20.30.40:8001",
        server="triton 2.64.0",
        perf_analyzer="2.59.0",
        began="2026-11-21T09:30:00+00:00",
        options={"arrivals": "poisson", "seconds": "12.0", "input_tokens": "96:160",
                 "output_tokens": "16:96", "protocol": "grpc", "stability": "0.35", "seed": "0"},
        points=tuple(points),
        slo=bounds,
        verdicts=verdicts,
        best=slo.best(points, verdicts),
    )  # fmt: skip
