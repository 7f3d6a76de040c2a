"""Exports of perf_analyzer as it writes them (2.48), points made of them, and stand-ins for it."""

import json
from pathlib import Path

from jitney.sweep.plan import Plan
from jitney.sweep.point import Driver
from jitney.sweep.profile import Exchange
from jitney.sweep.record import Load, Measurement, Point
from jitney.sweep.target import Model, Target, Tensor
from jitney.sweep.tool import PerfAnalyzer

MS = 1_000_000
START = 1_795_306_424_000 * MS
"""Its clock counts from 1970."""


def write_export(path: Path, requests: list[tuple[int, list[tuple[int, object]]]]) -> Path:
    """Requests as (sent, [(at, tokens)]) in milliseconds. ``tokens``: a number; None is a final
    response without outputs; a text is the only output of a model that counts no tokens."""
    made = [
        {
            "timestamp": START + sent * MS,
            "request_inputs": {"text_input": "x"},
            "response_timestamps": [START + at * MS for at, _ in responses],
            "response_outputs": [_outputs(content) for _, content in responses],
        }
        for sent, responses in requests
    ]
    profile = {"experiments": [{"experiment": {}, "requests": made, "window_boundaries": []}]}
    # The raw bytes of a tensor stand in its strings, control characters escaped.
    path.write_bytes(json.dumps(profile, ensure_ascii=False).encode("latin-1"))
    return path


def _outputs(content: object) -> dict[str, str]:
    if content is None:
        return {}
    if isinstance(content, int):
        raw = content.to_bytes(4, "little").decode("latin-1")
        fifty = (50).to_bytes(4, "little").decode("latin-1")
        return {"text_output": "\xff", "num_output_tokens": raw, "num_input_tokens": fifty}
    return {"text_output": str(content)}


def calls(count: int, every_s: float, lasting_s: float) -> list[Exchange]:
    """Requests of one answer each, in even steps."""
    return [
        Exchange(i * every_s, (i * every_s + lasting_s,), None, i * every_s + lasting_s)
        for i in range(count)
    ]


PLAN = Plan((Load("concurrency", 1),), 1.0, None, poisson=False, stability=0.2, batch=1)


def point(load: Load, measured: Measurement) -> Point:
    """As the plan judges it."""
    state, remarks = PLAN.doubts(load, measured)
    return Point(load, state, tuple(remarks), measured)


def driver(binary: Path, protocol: str = "grpc", *, language: bool = False) -> Driver:
    """Over a server that is not there."""
    inputs = (Tensor("text_input", "BYTES", (1,), True),) if language else ()
    model = Model("m", inputs, 0 if language else 8, language, (), ())
    target = Target.of("here:8001", None, None)
    return Driver(PerfAnalyzer(binary, "0"), target, model, PLAN, protocol)


def script(folder: Path, text: str) -> Path:
    """A perf_analyzer that is a shell script."""
    path = folder / "perf_analyzer"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
