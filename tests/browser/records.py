"""Sweeps to draw reports of: requests made up by a formula, measured, judged and recorded by the
project's own modules. The figures are of the size that a small server really has."""

import math
from collections.abc import Callable

import numpy as np
from jitney_measure import loads, slo
from jitney_measure.exchanges import Exchange, measure
from jitney_measure.options import Shared
from jitney_measure.record import EngineWork, Load, LoadPoint, Result

OPTIONS = Shared(rate="4,16,60", concurrency="1,2,4,8,16,32,64", seconds=12.0, stability=0.35)
LOADS = loads.read_loads(OPTIONS, "")
Answer = Callable[[float], Exchange]
"""When a request was sent -> what becomes of it."""


def language_sweep(*, speed: float = 1.0, title: str = "chat-7b") -> Result:
    """Loads of both kinds; the last rate is more than the server can do, and so `behind`."""
    rng = np.random.default_rng(1)
    points = []
    for load in LOADS:
        users = min(load.level, 64.0)
        step = (0.008 + 0.0004 * users) / speed

        def stream(now: float, step: float = step, users: float = users) -> Exchange:
            counts = rng.integers(1, 3, 32)
            waits = now * 0.8 if users == 60 else 0.0
            first = now + waits + (0.03 + 0.002 * users) / speed * float(rng.lognormal(0, 0.3))
            times = first + np.cumsum(step * counts * rng.lognormal(0, 0.25, len(counts)))
            return Exchange(now, tuple(times), tuple(map(int, counts)), float(times[-1]), 128)

        work = EngineWork(400.0, users, 0.002, 5000.0, 3000.0, 2000.0, 3.0 if users > 40 else 0.0)
        points.append(_point(load, load.level if load.kind == "rate" else 3 * users, stream, work))
    return _result(title, points, "ttft-p95=200ms,itl-p95=25ms", language=True)


def unstable_sweep() -> Result:
    """A server that slows down, one load that was refused, one where perf_analyzer failed."""

    def slower(now: float) -> Exchange:
        ended = now + 0.01 * math.exp(now / 5)
        return Exchange(now, (ended,), None, ended)

    points = [_point(load, 20 * load.level, slower) for load in LOADS[:3]]
    points.append(_point(Load("concurrency", 64), 5.0, lambda now: (
        slower(now) if now < 6 else Exchange(now, (), None, None))))  # fmt: skip
    words = (
        "perf_analyzer ended with status 99: [StatusCode.UNAVAILABLE] failed to connect to all "
        "addresses; last error: UNKNOWN: ipv4:10.20.30.40:8001: Failed to connect to remote host: "
        "/opt/tritonserver/backends/python/a/path/without/any/place/to/break/it/models.py:1234 "
        "<script>alert('not run')</script> & so on"
    )
    points.append(LoadPoint(Load("concurrency", 256), "failed", (words,)))
    return _result("wavering", points, "latency-p95=50ms", language=False)


def _point(load: Load, rate: float, answer: Answer, work: EngineWork | None = None) -> LoadPoint:
    """Requests sent in even steps."""
    sent = np.arange(0, OPTIONS.seconds, 1 / rate)
    found = measure([answer(float(now)) for now in sent], language=work is not None)
    assessment = loads.assess(OPTIONS, load, found)
    return LoadPoint(load, assessment.state, assessment.remarks, found, (), work)


def _result(title: str, points: list[LoadPoint], bounds: str, *, language: bool) -> Result:
    made = Result(
        title=title, model=title.split(",")[0], language=language, address="10.20.30.40:8001",
        server="triton 2.64.0", perf_analyzer="2.59.0", began="2026-11-21T09:30:00+00:00",
        options={"arrivals": "poisson", "seconds": "12.0", "input_tokens": "96:160",
                 "output_tokens": "16:96", "protocol": "grpc", "stability": "0.35", "seed": "0"},
        points=tuple(points), slo=bounds,
    )  # fmt: skip
    return slo.judged(made, slo.parse(bounds, language=language))
