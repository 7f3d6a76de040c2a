"""The command ``jitney tune``."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from jitney.errors import InvalidArgumentError
from jitney_server.stopping import interruptible
from rich.console import Console

from jitney_measure import options

if TYPE_CHECKING:
    from jitney_measure.axes import Axes, Setting
    from jitney_measure.tuner import Tuner

_out = Console(highlight=False)


@options.with_shared(seconds=3.0, out=Path("tune"))
def tune(
    shared: options.Shared,
    model: Annotated[str, typer.Argument(help="A model of the repository.")],
    repository: Annotated[
        Path, typer.Option(help="Folder of models. It is read, never written.")
    ] = Path("model_repository"),
    batch_sizes: Annotated[
        str, typer.Option(help="Preferred batch sizes to try: 1,4,16. 1: no batching.")
    ] = "",
    windows: Annotated[str, typer.Option(help="Queue delays to try: 0,500us,2ms.")] = "",
    instances: Annotated[str, typer.Option(help="Instance counts to try: 1,2.")] = "",
    max_num_seqs: Annotated[
        str, typer.Option(help="Of a language model: sequences of a step to try: 16,64.")
    ] = "",
    token_budgets: Annotated[
        str, typer.Option(help="Of a language model: max_num_batched_tokens to try: 256,512.")
    ] = "",
    budget: Annotated[str, typer.Option(help="For everything: 90s, 10m, 1h.")] = "10m",
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Load this model, too, unchanged; may be given several times."),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds that the model may take to load.", min=1)
    ] = 600.0,
) -> None:
    """Find the batching that a model should be served with, by measuring it.

    Starts a server of its own, loads the model with each setting in turn, puts loads on it with
    perf_analyzer, and prints the lines for config.pbtxt of the setting with the highest throughput
    within the bounds. Batch size, queue delay and instances; of a language model max_num_seqs and
    the token budget of a step. Writes OUT/report.html, the plots and OUT/tune.json.

    Examples:

        jitney tune digits --slo latency-p99=20ms
        jitney tune digits --slo latency-p95=10ms --batch-sizes 1,8,32 --windows 0,1ms --budget 5m
        jitney tune pylm --slo ttft-p95=500ms,itl-p95=50ms --budget 20m
    """
    given = vars(shared) | locals()
    from jitney_measure.choose import print_end
    from jitney_measure.report import write_tuning

    with tempfile.TemporaryDirectory(prefix="jitney-tune-") as folder:
        tuner = _tuner(shared, given, Path(folder))
        with interruptible():
            tuning = tuner.run()
    print_end(tuning, _out, str(repository / model / "config.pbtxt"))
    page = write_tuning(tuning, shared.out)
    _out.print(f"Report: {page}", soft_wrap=True, markup=False)
    if tuning.ending == "interrupted":
        raise typer.Exit(options.INTERRUPTED)
    if tuning.choice is None:
        raise typer.Exit(1)


def _tuner(shared: options.Shared, given: dict[str, Any], folder: Path) -> "Tuner":
    """The options, checked, before any server is started. Raises JitneyError."""
    from jitney_measure import axes, slo
    from jitney_measure.inputs import Inputs
    from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
    from jitney_measure.subject import read_subject
    from jitney_measure.tuner import Tuner

    subject = read_subject(given["repository"], given["model"])
    bounds = slo.parse(shared.slo, language=subject.language)
    max_batch = int(subject.config.max_batch_size)
    options.check_model(shared, language=subject.language, max_batch=max_batch)
    if shared.concurrency and shared.rate:
        bound = "left out where --concurrency is given"
        raise InvalidArgumentError.of("rate", shared.rate, bound)
    loads = slo.loads(shared, default="1,2,4,8,16,32,64")
    subject.check_options(given)

    def make_axes(current: "Setting") -> "Axes":
        if subject.language:
            highest = None if loads[0].kind == "rate" else loads[-1].level
            return axes.engine_axes(current, given, highest, gpu=subject.gpu())
        tightest = min((bound.seconds for bound in bounds), default=None)
        return axes.scheduler_axes(
            current, given, max_batch, tightest, len(os.sched_getaffinity(0)),
            counts=subject.counts_instances,
        )  # fmt: skip

    make_axes(subject.current())  # its values are checked here
    budget_s = slo.read_time(given["budget"].strip())
    if budget_s is None or not 0 < budget_s <= 7 * 86400:
        bound = "a time above 0 like 90s, 10m or 1h"
        raise InvalidArgumentError.of("budget", given["budget"], bound)
    inputs = Inputs(shared, folder)
    driver = Driver(shared, loads, inputs, PerfAnalyzer.find(shared.perf_analyzer))
    options.make_folder(shared.out)
    return Tuner(
        subject, tuple(given["beside"] or ()), given["start_timeout"], make_axes, bounds, budget_s,
        driver, _out,
    )  # fmt: skip
