"""The options that ``jitney bench`` and ``jitney tune`` share, and what is made of them.

Imports nothing heavy before a command runs, so that ``jitney --help`` stays quick.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitney.errors import InstallationError, InvalidArgumentError
from jitney.report.text import printable

if TYPE_CHECKING:
    from jitney.measure.perf_analyzer import Driver
    from jitney.measure.record import Load

INTERRUPTED = 130
"""The exit status that shells expect of an interrupted command."""

Concurrency = Annotated[
    str, typer.Option(help="Requests kept in flight, a load each: 1,4,16. Default: powers of two.")
]
Rate = Annotated[str, typer.Option(help="Requests sent each second, a load each: 5,10,20.")]
Slo = Annotated[str, typer.Option(help="Bounds: latency-p99=20ms, or ttft-p95=200ms,itl-p95=50ms.")]
Arrivals = Annotated[str, typer.Option(help="How a rate's requests come: poisson or constant.")]
Seconds = Annotated[float, typer.Option(help="How long each load lasts.", min=0.1)]
Requests = Annotated[
    int | None, typer.Option(help="Requests of each load, in place of --seconds.", min=1)
]
InputTokens = Annotated[str, typer.Option(help="Length of random prompts: N or LOW:HIGH.")]
OutputTokens = Annotated[str, typer.Option(help="Length of answers: N or LOW:HIGH.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option(help="Prompts to send, one a line, or .jsonl with text_input, max_tokens."),
]
Sampling = Annotated[
    str, typer.Option(help='More sampling parameters as JSON: {"temperature": 0.7}.')
]
NaturalEnd = Annotated[
    bool, typer.Option("--natural-end", help="Let the model end its answers by itself.")
]
Protocol = Annotated[str, typer.Option(help="grpc or http; a language model streams over grpc.")]
Rows = Annotated[int, typer.Option(help="Rows of a request (not of a language model).", min=1)]
Shape = Annotated[
    list[str] | None,
    typer.Option(help="NAME:SIZE,SIZE of an input of free size; may be given several times."),
]
Data = Annotated[Path | None, typer.Option(help="Requests in perf_analyzer's own JSON format.")]
Stability = Annotated[
    float, typer.Option(help="How far thirds of a run may differ and count as steady.", min=0)
]
Seed = Annotated[int, typer.Option(help="Of random prompts and rows.")]
Out = Annotated[Path, typer.Option(help="Folder of the report.")]
PerfAnalyzerPath = Annotated[
    Path | None, typer.Option(help="The binary. Default: the environment's, then the path's.")
]
_REPORTED = {
    *("arrivals", "seconds", "requests", "input_tokens", "output_tokens", "prompts", "sampling"),
    *("natural_end", "protocol", "batch_size", "rows", "shape", "data", "beside", "stability"),
    *("seed", "budget"),
}
"""Options that shape the figures."""


def check_matplotlib() -> None:
    """Raises InstallationError, before minutes are spent measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InstallationError(
            "the report's plots need matplotlib, which is not installed: "
            "pip install 'triton-jitney[bench]'"
        )


def check_model(given: dict[str, Any], rows: str, *, language: bool, max_batch: int) -> None:
    """Raises InvalidArgumentError for HTTP, which has no streams, to a language model, and for more
    rows, given by the option ``rows``, than the model takes in one request."""
    if language and given["protocol"] == "http":
        raise InvalidArgumentError.of("protocol", "http", "grpc: HTTP has no streams here")
    if given[rows] > max(1, max_batch):
        bound = f"at most {max(1, max_batch)}, max_batch_size"
        raise InvalidArgumentError.of(rows, given[rows], bound)


def make_folder(out: Path) -> None:
    """Make the folder of the report, before minutes are spent. Raises InvalidArgumentError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        bound = f"a folder that can be written to: {error.strerror}"
        raise InvalidArgumentError.of("out", str(out), bound) from None


def read_driver(
    given: dict[str, Any], loads: "tuple[Load, ...]", rows: int, folder: Path
) -> "Driver":
    """The options of loads and requests, checked, perf_analyzer's binary last. Raises JitneyError.

    ``given``: option -> value. The driver keeps its input files in ``folder``.
    """
    import msgspec

    from jitney.measure import inputs, slo
    from jitney.measure.perf_analyzer import Driver, PerfAnalyzer

    for name, allowed in (("arrivals", ("poisson", "constant")), ("protocol", ("grpc", "http"))):
        if given[name] not in allowed:
            raise InvalidArgumentError.of(name, given[name], " or ".join(allowed))
    if given["data"] is not None:
        inputs.check_data(given["data"])
    try:
        sampling = msgspec.json.decode(given["sampling"], type=dict[str, Any])
    except msgspec.MsgspecError:
        raise InvalidArgumentError.of("sampling", given["sampling"], "a JSON object") from None
    prompts = inputs.Prompts(
        input_tokens=slo.span("input_tokens", given["input_tokens"]),
        output_tokens=slo.span("output_tokens", given["output_tokens"]),
        given=inputs.read_prompts(given["prompts"]) if given["prompts"] else (),
        sampling=sampling,
        natural_end=given["natural_end"],
        seed=given["seed"],
    )
    poisson = given["arrivals"] == "poisson"
    planned = slo.LoadPlan(
        loads, given["seconds"], given["requests"], poisson, given["stability"], rows
    )
    shapes = inputs.read_shapes(given["shape"] or [])
    tool = PerfAnalyzer.find(given["perf_analyzer"])
    return Driver(tool, planned, given["protocol"], prompts, shapes, given["data"], folder)


def reported(given: dict[str, Any]) -> dict[str, str]:
    """The options that a report names, as text."""
    return {
        name: printable(" ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in given.items()
        if name in _REPORTED and value not in (None, "", False, "{}")
    }
