"""The command ``jitney tune``."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from jitney.errors import InvalidArgumentError
from jitney_server.interruptible import interruptible
from rich.console import Console

from jitney_measure import options

if TYPE_CHECKING:
    from jitney_measure.axes import Axes, AxisOptions, Setting
    from jitney_measure.tuner import Tuner

_out = Console(highlight=False)
_MAX_BUDGET_S = 7 * 86400


@dataclass(frozen=True)
class TuneOptions:
    """The options that ``jitney tune`` alone has, as they were given; texts are not yet checked."""

    model: str
    repository: Path
    axes: "AxisOptions"
    budget: str
    beside: tuple[str, ...]
    start_timeout_s: float


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
        str, typer.Option(help="max_num_seqs of a language model to try: 16,64.")
    ] = "",
    token_budgets: Annotated[
        str, typer.Option(help="max_num_batched_tokens of a language model to try: 256,512.")
    ] = "",
    budget: Annotated[str, typer.Option(help="Time for the whole run: 90s, 10m, 1h.")] = "10m",
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Load this model, too, unchanged; may be given several times."),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds that the server may take to start with the model.", min=1)
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
    from jitney_measure.axes import AxisOptions
    from jitney_measure.choose import print_end
    from jitney_measure.report import write_tuning

    given = TuneOptions(
        model=model,
        repository=repository,
        axes=AxisOptions(
            batch_sizes=batch_sizes,
            windows=windows,
            instances=instances,
            max_num_seqs=max_num_seqs,
            token_budgets=token_budgets,
        ),
        budget=budget,
        beside=tuple(beside or ()),
        start_timeout_s=start_timeout,
    )
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


def _tuner(shared: options.Shared, given: TuneOptions, folder: Path) -> "Tuner":
    """The options, checked, before any server is started. Raises JitneyError."""
    from jitney_measure import axes, slo
    from jitney_measure.inputs import Inputs
    from jitney_measure.loads import read_loads
    from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
    from jitney_measure.subject import read_subject
    from jitney_measure.tuner import Tuner

    subject = read_subject(given.repository, given.model)
    bounds = slo.parse(shared.slo, language=subject.language)
    max_batch = int(subject.config.max_batch_size)
    options.check_model(shared, language=subject.language, max_batch=max_batch)
    if shared.concurrency and shared.rate:
        expected = "left out where --concurrency is given"
        raise InvalidArgumentError.of("rate", shared.rate, expected)
    loads = read_loads(shared, default="1,2,4,8,16,32,64")
    subject.check_options(given.axes, shared)
    beside = subject.models_beside(given.beside)

    def make_axes(current: "Setting") -> "Axes":
        """Raises InvalidArgumentError for the values that were given."""
        if subject.language:
            highest = None if loads[0].kind == "rate" else loads[-1].level
            return axes.engine_axes(current, given.axes, highest, gpu=subject.is_on_gpu())
        return axes.scheduler_axes(
            current,
            given.axes,
            max_batch=max_batch,
            tightest_s=min((bound.seconds for bound in bounds), default=None),
            cores=len(os.sched_getaffinity(0)),
            can_change_instances=subject.can_change_instances,
        )

    make_axes(subject.current())  # for its errors: a tuner makes its own
    budget_s = _read_budget(given.budget)
    inputs = Inputs(shared, folder)
    driver = Driver(shared, loads, inputs, PerfAnalyzer.find(shared.perf_analyzer))
    options.make_folder(shared.out)
    return Tuner(
        subject=subject,
        beside=beside,
        timeout_s=given.start_timeout_s,
        make_axes=make_axes,
        bounds=bounds,
        budget_s=budget_s,
        driver=driver,
        terminal=_out,
    )


def _read_budget(text: str) -> float:
    from jitney_measure.slo import read_time

    seconds = read_time(text.strip())
    if seconds is None or not 0 < seconds <= _MAX_BUDGET_S:
        hours = _MAX_BUDGET_S // 3600
        expected = f"a time above 0 and up to {hours}h, like 90s, 10m or 1h"
        raise InvalidArgumentError.of("budget", text, expected)
    return seconds
