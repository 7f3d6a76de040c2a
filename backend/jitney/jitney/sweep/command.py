"""The command line of ``jitney bench`` and of ``python -m benchmarks.sweep``.

Imports nothing heavy before it is called, so that ``jitney --help`` stays quick.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from jitney.errors import InstallationError, InvalidArgumentError

if TYPE_CHECKING:
    from jitney.sweep.inputs import Prompts
    from jitney.sweep.record import Result

_out = Console(highlight=False)
_INTERRUPTED = 130
"""The exit status that shells expect of an interrupted command."""


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A loaded model. Default: the server's only language model."),
    ] = None,
    url: Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC.")] = "localhost:8001",
    http_url: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of its HTTP. Default: port 8000; with TLS the same as --url."),
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(help="Its metrics. Default: http://HOST:8002/metrics; with TLS none."),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS, to gRPC and HTTP.")] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="Certificates to trust, in PEM form, in place of the machine's; --tls."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A key to send as a bearer token: the first of the file, [NAME:]KEY."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME:VALUE to send with every request, or @FILE with such lines, which keeps "
            "the value out of the list of processes; may be given several times."
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests kept under way, a load each: 1,4,16. Default: 1 to 32.")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Requests begun each second, a load each, e.g. 5,10,20.")
    ] = "",
    arrivals: Annotated[
        str, typer.Option(help="How a rate's requests come: poisson or constant.")
    ] = "poisson",
    seconds: Annotated[float, typer.Option(help="How long each load lasts.", min=0.1)] = 10.0,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each load, in place of --seconds.", min=1)
    ] = None,
    slo: Annotated[
        str, typer.Option(help="Bounds for the best setting: ttft-p95=200ms,itl-p95=50ms.")
    ] = "",
    input_tokens: Annotated[
        str, typer.Option(help="Length of made prompts: N or LOW:HIGH.")
    ] = "128",
    output_tokens: Annotated[str, typer.Option(help="Length of answers: N or LOW:HIGH.")] = "64",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts to send, one a line, or .jsonl with text_input, max_tokens."),
    ] = None,
    sampling: Annotated[
        str, typer.Option(help='More sampling parameters as JSON: {"temperature": 0.7}.')
    ] = "{}",
    natural_end: Annotated[
        bool, typer.Option("--natural-end", help="Let the model end its answers by itself.")
    ] = False,
    protocol: Annotated[
        str, typer.Option(help="grpc or http; a language model streams over grpc.")
    ] = "grpc",
    batch_size: Annotated[
        int, typer.Option(help="Rows of a request (not of a language model).", min=1)
    ] = 1,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="NAME:SIZE,SIZE of an input of free size; may be given several times."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Requests in perf_analyzer's own JSON format.")
    ] = None,
    stability: Annotated[
        float, typer.Option(help="How far thirds of a run may differ and count as steady.", min=0)
    ] = 0.2,
    seed: Annotated[int, typer.Option(help="Of made prompts and rows.")] = 0,
    title: Annotated[str, typer.Option(help="Of the report. Default: the model.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("bench"),
    perf_analyzer: Annotated[
        Path | None, typer.Option(help="The binary. Default: the environment's, then the path's.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: set two results (their .json files) side by side."),
    ] = None,
) -> None:
    """Put load after load on a running server with perf_analyzer and draw what it found.

    A language model is asked in streams, any other by its inputs. Writes OUT/report.html, which
    needs nothing beside it, the pictures as PNG, and OUT/result.json with everything.

    Examples:

        jitney bench pylm --concurrency 1,4,16 --slo ttft-p95=200ms,itl-p95=50ms
        jitney bench digits --rate 100,200,400 --slo latency-p99=20ms
        jitney bench pylm --url example.net:8443 --tls --api-key-file key
        jitney bench --compare before/result.json after/result.json
    """
    _need_matplotlib()
    from jitney.sweep import record, report

    if compare is not None:
        from jitney.sweep.compare import write_comparison

        page = write_comparison(record.read(compare[0]), record.read(compare[1]), out)
        _out.print(f"Report: {page}", soft_wrap=True, markup=False)
        return
    made = _sweep(locals())
    out.mkdir(parents=True, exist_ok=True)
    result = made.run(_out)
    record.write(result, out / "result.json")
    page = report.write_report(result, out)
    _conclude(result, page)
    if len(result.points) < len(made.plan.loads):
        raise typer.Exit(_INTERRUPTED)


def _sweep(given: dict[str, Any]) -> Any:
    """The options, checked, as a Sweep. Raises JitneyError."""
    from jitney.sweep import inputs, plan, record, slo, tool
    from jitney.sweep.access import Access
    from jitney.sweep.sweep import Sweep
    from jitney.sweep.target import Target

    for name, allowed in (("arrivals", ("poisson", "constant")), ("protocol", ("grpc", "http"))):
        if given[name] not in allowed:
            raise InvalidArgumentError.of(name, given[name], " or ".join(allowed))
    if given["data"] is not None and not given["data"].is_file():
        raise InvalidArgumentError(f"there is no file {given['data']}")
    concurrency = given["concurrency"] or ("" if given["rate"] else plan.DEFAULT_CONCURRENCY)
    planned = plan.Plan(
        loads=plan.loads(concurrency, given["rate"]),
        seconds=given["seconds"],
        requests=given["requests"],
        poisson=given["arrivals"] == "poisson",
        stability=given["stability"],
        batch=given["batch_size"],
    )
    prompts = _prompts(given)
    shapes = inputs.read_shapes(given["shape"] or [])
    access = Access.of(given["tls"], given["ca_file"], given["api_key_file"], given["header"] or ())
    if access.headers and not access.tls:
        _out.print("[yellow]The headers go out in clear: --tls or --ca-file.[/]")
    found = tool.find(given["perf_analyzer"])
    target = Target.of(given["url"], given["http_url"], given["metrics_url"], access)
    model = target.model(given["model"])
    if model.language and given["protocol"] == "http":
        raise InvalidArgumentError.of("protocol", "http", "grpc: HTTP has no streams here")
    if planned.batch > max(1, model.max_batch):
        raise InvalidArgumentError.of(
            "batch_size", planned.batch, f"at most {max(1, model.max_batch)} for {model.name}"
        )
    slo.parse(given["slo"], language=model.language)  # before minutes are spent measuring
    return Sweep(
        tool=found,
        target=target,
        model=model,
        plan=planned,
        protocol=given["protocol"],
        prompts=prompts,
        data=given["data"],
        shapes=shapes,
        slo=given["slo"],
        title=record.printable(given["title"]) or model.name,
        options={
            name: record.printable(
                " ".join(map(str, value)) if isinstance(value, list) else str(value)
            )
            for name, value in given.items()
            if name in _REPORTED and value not in (None, "", False, "{}")
        },
    )


_REPORTED = {
    *("arrivals", "seconds", "requests", "input_tokens", "output_tokens", "prompts", "sampling"),
    *("natural_end", "protocol", "batch_size", "shape", "data", "stability", "seed"),
}
"""Options that shape the figures."""


def _prompts(given: dict[str, Any]) -> "Prompts":
    from jitney.sweep import inputs, plan

    try:
        sampling = json.loads(given["sampling"])
    except ValueError:
        sampling = None
    if not isinstance(sampling, dict):
        raise InvalidArgumentError.of("sampling", given["sampling"], "a JSON object")
    return inputs.Prompts(
        input_tokens=plan.span("input_tokens", given["input_tokens"]),
        output_tokens=plan.span("output_tokens", given["output_tokens"]),
        given=inputs.read_prompts(given["prompts"]) if given["prompts"] else (),
        sampling=sampling,
        natural_end=given["natural_end"],
        seed=given["seed"],
    )


def _conclude(result: "Result", page: Path) -> None:
    from jitney.sweep.sweep import conclusion

    _out.print(f"\n[bold]{escape(conclusion(result))}[/]", soft_wrap=True)
    _out.print(f"Report: {page}", soft_wrap=True, markup=False)
    if all(point.measured is None for point in result.points):
        raise typer.Exit(1)


def _need_matplotlib() -> None:
    """Before minutes are spent measuring. Raises InstallationError."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise InstallationError(
            "the report is drawn by matplotlib, which is not installed: "
            "pip install 'triton-jitney[bench]'"
        )
