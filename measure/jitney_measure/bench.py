"""The command ``jitney bench``, which is also ``python -m benchmarks.sweep``."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from jitney_server.interruptible import interruptible
from rich.console import Console
from rich.markup import escape

from jitney_measure import options
from jitney_measure.pages.text import printable

if TYPE_CHECKING:
    from jitney_measure.perf_analyzer import Driver
    from jitney_measure.record import Result
    from jitney_measure.target import Model, Target

_out = Console(highlight=False)


@options.with_shared(out=Path("bench"))
def bench(
    shared: options.Shared,
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
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS for gRPC and HTTP.")] = False,
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
    title: Annotated[str, typer.Option(help="Title of the report. Default: the model.")] = "",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: set two results (their .json files) side by side."),
    ] = None,
) -> None:
    """Put load after load on a running server with perf_analyzer and report what it measured.

    A language model is asked in streams, any other by its inputs. Writes OUT/report.html, which
    needs no other file, the plots as PNG, and OUT/result.json with every figure.

    Examples:

        jitney bench pylm --concurrency 1,4,16 --slo ttft-p95=200ms,itl-p95=50ms
        jitney bench digits --rate 100,200,400 --slo latency-p99=20ms
        jitney bench pylm --url example.net:8443 --tls --api-key-file key
        jitney bench --compare before/result.json after/result.json
    """
    from jitney.access import Access

    from jitney_measure import loads, record, slo
    from jitney_measure.inputs import Inputs
    from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
    from jitney_measure.report import write_comparison, write_report
    from jitney_measure.target import Target

    if compare is not None:
        first = record.read(compare[0])
        second = record.read(compare[1])
        options.make_folder(shared.out)
        page = write_comparison(first, second, shared.out)
        _out.print(f"Report: {page}", soft_wrap=True, markup=False)
        return
    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as folder, interruptible():
        asked = loads.read_loads(shared, default="1,2,4,8,16,32")
        access = Access.of(tls, ca_file, api_key_file, header or ())
        if access.headers and not access.tls:
            _out.print("[yellow]The headers are sent in clear text: use --tls or --ca-file.[/]")
        inputs = Inputs(shared, Path(folder))
        driver = Driver(shared, asked, inputs, PerfAnalyzer.find(shared.perf_analyzer))
        target = Target.of(url, http_url, metrics_url, access)
        found = target.model(model)
        options.check_model(shared, language=found.language, max_batch=found.max_batch_size)
        slo.parse(shared.slo, language=found.language)  # before minutes are spent measuring
        options.make_folder(shared.out)
        result = _sweep(driver, target, found, printable(title) or found.name)
    record.write(result, shared.out / "result.json")
    page = write_report(result, shared.out)
    _out.print(f"\n[bold]{escape(slo.conclusion(result))}[/]", soft_wrap=True)
    _out.print(f"Report: {page}", soft_wrap=True, markup=False)
    if result.empty:
        raise typer.Exit(1)
    if len(result.points) < len(asked):
        raise typer.Exit(options.INTERRUPTED)


def _sweep(driver: "Driver", target: "Target", model: "Model", title: str) -> "Result":
    """One load after the other, with a line on the terminal; one that fails is a point, too.

    Interrupted (KeyboardInterrupt) after the first load, it returns what was measured: fewer points
    than there are loads. Raises InvalidArgumentError, UnavailableError.
    """
    from jitney_measure import record, slo

    points: list[record.LoadPoint] = []
    server = target.server()
    began = record.now()
    with _out.status("") as status:
        for load in driver.loads:
            status.update(f"{escape(model.name)}, {load} …")
            try:
                points.append(driver.run(target, model, load))
            except KeyboardInterrupt:
                if not points:
                    raise
                _out.print("Interrupted: the report is of the loads before.")
                break
            _out.print(slo.point_line(points[-1], model.language), soft_wrap=True)
    return driver.result(target, model, points, title=title, server=server, began=began)
