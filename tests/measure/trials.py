"""Trials as a run would have measured them, made of a few figures."""

from jitney_measure.record import (
    PERCENTS,
    Distribution,
    Load,
    LoadPoint,
    LoadState,
    Measurement,
    Phase,
    Result,
    Trial,
)
from jitney_measure.slo import Bound, judged, parse

SLO = "latency-p95=20ms"
BOUNDS: tuple[Bound, ...] = parse(SLO, language=False)


def point(
    level: float, throughput: float, latency_s: float, state: LoadState = "steady"
) -> LoadPoint:
    """All requests took the same time."""
    every = Distribution(100, latency_s, (latency_s,) * len(PERCENTS))
    measured = Measurement(100, 0, 1.0, throughput, throughput, throughput, every)
    remarks = () if state == "steady" else (f"it is {state}",)
    return LoadPoint(Load("concurrency", level), state, remarks, measured)


def unmeasured(level: float, remark: str) -> LoadPoint:
    return LoadPoint(Load("concurrency", level), "failed", (remark,))


def trial(values: dict[str, int], phase: Phase, *points: LoadPoint, cut: bool = False) -> Trial:
    result = Result("t", "m", False, "here:1", "triton 2", "2", "2026", {}, points, SLO)
    return Trial(values, phase, 1.0, "", judged(result, BOUNDS), cut)


def failed(values: dict[str, int], reason: str = "out of memory") -> Trial:
    return Trial(values, "search", failure=reason)
