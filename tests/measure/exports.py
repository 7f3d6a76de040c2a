"""Exports of perf_analyzer as it writes them (2.48), points made of them, and stand-ins for it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from jitney_measure import loads, slo
from jitney_measure.exchanges import Exchange
from jitney_measure.inputs import Inputs
from jitney_measure.options import Shared
from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
from jitney_measure.record import Load, LoadPoint, Measurement, Result
from jitney_measure.target import Model, Target

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


OPTIONS = Shared(seconds=1.0, arrivals="constant")


def point(load: Load, measured: Measurement) -> LoadPoint:
    """As the plan judges it."""
    found = loads.assess(OPTIONS, load, measured)
    return LoadPoint(load, found.state, found.remarks, measured)


def result_of(points: Sequence[LoadPoint], *, language: bool, bounds: str) -> Result:
    """A sweep of these points, judged."""
    made = Result(
        title="a <b>title</b> & more",
        model="m",
        language=language,
        address="here:8001",
        server="triton 2.51.0",
        perf_analyzer="2.48.0",
        began="2026-01-01T00:00:00+00:00",
        options={"seconds": "3.0"},
        points=tuple(points),
        slo=bounds,
    )
    return slo.judged(made, slo.parse(bounds, language=language))


MODEL = Model((), "m", 8)
SPEAKING = msgspec.convert(
    {
        "name": "m",
        "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}],
        "model_transaction_policy": {"decoupled": True},
    },
    Model,
)
TARGET = Target.of("here:8001", None, None)


def driver(binary: Path, **options: Any) -> Driver:
    """Its requests are in a file that nobody reads."""
    given = replace(OPTIONS, data=Path("none"), **options)
    inputs, tool = Inputs(given, Path("none")), PerfAnalyzer(binary, "0")
    return Driver(given, (Load("concurrency", 1),), inputs, tool)


def script(folder: Path, text: str) -> Path:
    """A perf_analyzer that is a shell script."""
    path = folder / "perf_analyzer"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
