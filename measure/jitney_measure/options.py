"""The options that ``jitney bench`` and ``jitney tune`` share, and what is made of them.

Imports nothing heavy before a command runs, so that ``jitney --help`` stays quick.
"""

import inspect
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

from jitney.errors import InvalidArgumentError
from typer import Option

from jitney_measure.pages.text import printable

INTERRUPTED = 130
"""The exit status that shells expect of an interrupted command."""
_UNREPORTED = ("concurrency", "rate", "slo", "out", "perf_analyzer")
"""Options that the page of a report has elsewhere, or that shape no figure."""


@dataclass(frozen=True)
class Shared:
    """The shared options as they were given; texts are not yet checked."""

    concurrency: Annotated[
        str, Option(help="Requests kept in flight, a load each: 1,4,16. Default: powers of two.")
    ] = ""
    rate: Annotated[str, Option(help="Requests sent each second, a load each: 5,10,20.")] = ""
    arrivals: Annotated[
        Literal["poisson", "constant"], Option(help="How requests of a rate arrive.")
    ] = "poisson"
    seconds: Annotated[float, Option(help="How long each load lasts.", min=0.1)] = 10.0
    requests: Annotated[
        int | None, Option(help="Requests of each load, in place of --seconds.", min=1)
    ] = None
    slo: Annotated[
        str, Option(help="Bounds: latency-p99=20ms, or ttft-p95=200ms,itl-p95=50ms.")
    ] = ""
    input_tokens: Annotated[str, Option(help="Length of random prompts: N or LOW:HIGH.")] = "128"
    output_tokens: Annotated[str, Option(help="Length of answers: N or LOW:HIGH.")] = "64"
    prompts: Annotated[Path | None, Option(help="Prompts to send, one a line.")] = None
    sampling: Annotated[str, Option(help='Parameters as JSON: {"temperature": 0.7}.')] = "{}"
    natural_end: Annotated[bool, Option("--natural-end", help="Let the model end answers.")] = False
    protocol: Annotated[Literal["grpc", "http"], Option(help="Streams need grpc.")] = "grpc"
    rows: Annotated[int, Option("--rows", "--batch-size", help="Rows of a request.", min=1)] = 1
    shape: Annotated[
        list[str] | None,
        Option(help="NAME:SIZE,SIZE of an input of free size; may be given several times."),
    ] = None
    data: Annotated[
        Path | None, Option(help="Requests in perf_analyzer's own JSON format.", exists=True)
    ] = None
    stability: Annotated[
        float, Option(help="A run is steady if its thirds differ by at most this share.", min=0)
    ] = 0.2
    seed: Annotated[int, Option(help="Seed of random prompts and rows.")] = 0
    out: Annotated[Path, Option(help="Folder of the report.")] = Path("report")
    perf_analyzer: Annotated[
        Path | None, Option(help="The binary. Default: the environment's, then the path's.")
    ] = None

    def reported(self) -> dict[str, str]:
        """The options that shape the figures, as text for a report."""
        return {
            name: printable(" ".join(value) if isinstance(value, list) else str(value))
            for name, value in asdict(self).items()
            if name not in _UNREPORTED and _is_given(value)
        }


def _is_given(value: Any) -> bool:
    """Whether it says anything."""
    # ``value not in (False, …)`` would leave out 0, which equals False.
    return value is not False and value not in (None, "", "{}")


def with_shared(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function ``f(shared, own options…)`` into a command that takes the fields of Shared as
    flat options, after the function's own. ``defaults`` replace those of Shared.

    typer reads the list of options from ``__signature__``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        fields = inspect.signature(Shared).parameters.values()

        @wraps(function)
        def command(**given: Any) -> None:
            of_shared = {field.name: given.pop(field.name) for field in fields}
            function(Shared(**of_shared), **given)

        # In place of the function's first parameter, ``shared``, the command has its fields.
        _, *own = inspect.signature(function).parameters.values()
        of_fields = []
        for field in fields:
            default = defaults.get(field.name, field.default)
            of_fields.append(field.replace(default=default))
        command.__signature__ = inspect.Signature([*own, *of_fields])  # type: ignore[attr-defined]
        return command

    return decorate


def check_model(shared: Shared, *, language: bool, max_batch: int) -> None:
    """Raises InvalidArgumentError for HTTP, which has no streams, to a language model, and for more
    rows than the model takes in one request."""
    if language and shared.protocol == "http":
        raise InvalidArgumentError.of("protocol", "http", "grpc: HTTP has no streams here")
    if shared.rows > max(1, max_batch):
        expected = f"at most {max(1, max_batch)}, max_batch_size"
        raise InvalidArgumentError.of("rows", shared.rows, expected)


def make_folder(out: Path) -> None:
    """Make the folder of the report, before minutes are spent. Raises InvalidArgumentError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        expected = f"a folder that can be written to: {error.strerror}"
        raise InvalidArgumentError.of("out", str(out), expected) from None
