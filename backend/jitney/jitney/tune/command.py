"""The command line of ``jitney tune``. Imports nothing heavy before it is called."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jitney.errors import InstallationError, InvalidArgumentError

if TYPE_CHECKING:
    from jitney.sweep.inputs import Prompts
    from jitney.sweep.slo import Bound
    from jitney.tune.setting import Setting, Space
    from jitney.tune.subject import Subject
    from jitney.tune.tuner import Wanted

_out = Console(highlight=False)
_INTERRUPTED = 130
_CONCURRENCY = {False: "1,2,4,8,16,32,64", True: "1,2,4,8,16,32"}
"""Loads, by whether it is a language model."""


def tune(
    model: Annotated[str, typer.Argument(help="A model of the repository.")],
    slo: Annotated[
        str, typer.Option(help="Bounds: latency-p99=20ms, or ttft-p95=200ms,itl-p95=50ms.")
    ] = "",
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
    concurrency: Annotated[
        str, typer.Option(help="Requests kept under way, a load each. Default: 1 to 64 or 32.")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="In place of it: requests begun each second, a load each.")
    ] = "",
    arrivals: Annotated[
        str, typer.Option(help="How a rate's requests come: poisson or constant.")
    ] = "poisson",
    seconds: Annotated[float, typer.Option(help="How long each load lasts.", min=0.1)] = 3.0,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each load, in place of --seconds.", min=1)
    ] = None,
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
    rows: Annotated[
        int, typer.Option(help="Rows of a request (not of a language model).", min=1)
    ] = 1,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="NAME:SIZE,SIZE of an input of free size; may be given several times."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Requests in perf_analyzer's own JSON format.")
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Load this model, too, unchanged; may be given several times."),
    ] = None,
    stability: Annotated[
        float, typer.Option(help="How far thirds of a run may differ and count as steady.", min=0)
    ] = 0.2,
    seed: Annotated[int, typer.Option(help="Of made prompts and rows.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("tune"),
    start_timeout: Annotated[
        float, typer.Option(help="Seconds that the model may take to load.", min=1)
    ] = 600.0,
    perf_analyzer: Annotated[
        Path | None, typer.Option(help="The binary. Default: the environment's, then the path's.")
    ] = None,
) -> None:
    """Find the batching that a model should be served with, by measuring it.

    Starts a server of its own, loads the model with one setting after the other, puts loads on it
    with perf_analyzer, and prints the lines for config.pbtxt of the setting with the greatest
    throughput within the bounds. Batch size, queue delay and instances; of a language model
    max_num_seqs and the token budget of a step. Writes OUT/report.html, pictures and OUT/tune.json.

    Examples:

        jitney tune digits --slo latency-p99=20ms
        jitney tune digits --slo latency-p95=10ms --batch-sizes 1,8,32 --windows 0,1ms --budget 5m
        jitney tune pylm --slo ttft-p95=500ms,itl-p95=50ms --budget 20m
    """
    wanted = _wanted(locals())
    from jitney.tune.report import write_report
    from jitney.tune.terminal import print_end
    from jitney.tune.tuner import Tuner

    with _interruptible():
        tuning = Tuner(wanted, _out).run()
    print_end(tuning, _out, str(repository / model / "config.pbtxt"))
    page = write_report(tuning, out)
    _out.print(f"Report: {page}", soft_wrap=True, markup=False)
    if tuning.ending == "interrupted":
        raise typer.Exit(_INTERRUPTED)
    if tuning.choice is None:
        raise typer.Exit(1)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and the closing of the terminal end a run as Ctrl-C does. What the caller has
    switched off (``nohup``) stays off."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wanted(given: dict[str, Any]) -> "Wanted":
    """The options, checked, before any server is started. Raises JitneyError."""
    from jitney.sweep import inputs, plan, slo, tool
    from jitney.tune import candidates
    from jitney.tune.budget import Budget
    from jitney.tune.subject import read_subject
    from jitney.tune.tuner import Wanted

    _need_matplotlib()
    subject = read_subject(given["repository"], given["model"])
    bounds = slo.parse(given["slo"], language=subject.language)
    for name, allowed in (("arrivals", ("poisson", "constant")), ("protocol", ("grpc", "http"))):
        if given[name] not in allowed:
            raise InvalidArgumentError.of(name, given[name], " or ".join(allowed))
    if subject.language and given["protocol"] == "http":
        raise InvalidArgumentError.of("protocol", "http", "grpc: HTTP has no streams here")
    if given["concurrency"] and given["rate"]:
        raise InvalidArgumentError.of(
            "rate", given["rate"], "left out where --concurrency is given"
        )
    if given["data"] is not None:
        _check_data(given["data"])
    if given["rows"] > max(1, subject.max_batch):
        raise InvalidArgumentError.of(
            "rows", given["rows"], f"at most {max(1, subject.max_batch)}, max_batch_size"
        )
    levels = given["concurrency"] or ("" if given["rate"] else _CONCURRENCY[subject.language])
    loads = plan.loads(levels, given["rate"])
    shapes = inputs.read_shapes(given["shape"] or [])
    described = subject.model()
    if described is not None and given["data"] is None and not subject.language:
        inputs.rows(described, shapes, given["seed"])  # refuses here what it would refuse later
    wanted = Wanted(
        subject=subject,
        beside=tuple(given["beside"] or ()),
        timeout_s=given["start_timeout"],
        space=_space(subject, given, bounds, greatest=_greatest(loads)),
        loads=loads,
        slo=given["slo"],
        bounds=bounds,
        budget_s=candidates.duration("budget", given["budget"]),
        tool=tool.find(given["perf_analyzer"]),
        plan=plan.Plan(
            loads=loads,
            seconds=given["seconds"],
            requests=given["requests"],
            poisson=given["arrivals"] == "poisson",
            stability=given["stability"],
            batch=given["rows"],
        ),
        protocol=given["protocol"],
        prompts=_prompts(given),
        shapes=shapes,
        data=given["data"],
        options={
            name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in given.items()
            if name in _REPORTED and value not in (None, "", False, "{}")
        },
        out=given["out"],
    )
    wanted.space(subject.current())  # its values are checked here
    if given["slo"] and not bounds:
        raise InvalidArgumentError.of("slo", given["slo"], "like latency-p99=20ms, or left out")
    least = Budget(0.0, given["seconds"], len(loads), subject.language).least_s
    if wanted.budget_s < least:
        raise InvalidArgumentError.of(
            "budget", given["budget"], f"at least {least:.0f}s: two settings, a load each"
        )
    _check_writable(given["out"])
    return wanted


def _check_writable(out: Path) -> None:
    """Make the folder, before minutes are spent measuring. Raises InvalidArgumentError."""
    import tempfile

    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise InvalidArgumentError.of(
            "out", str(out), f"a folder that can be written to: {error.strerror}"
        ) from None


def _check_data(path: Path) -> None:
    """Raises InvalidArgumentError for what perf_analyzer would refuse at each load."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        read = None
    if not isinstance(read, dict) or not isinstance(read.get("data"), list):
        raise InvalidArgumentError(f"{path} is not a JSON object with a list 'data'")


_REPORTED = {
    *("arrivals", "seconds", "requests", "input_tokens", "output_tokens", "prompts", "sampling"),
    *("natural_end", "protocol", "rows", "shape", "data", "beside", "stability", "seed", "budget"),
}
"""Options that shape the figures."""


def _greatest(loads: Any) -> float | None:
    return None if loads[0].kind == "rate" else float(loads[-1].level)


def _space(
    subject: "Subject", given: dict[str, Any], bounds: "tuple[Bound, ...]", greatest: float | None
) -> Any:
    """The current setting -> the space. An option of the other kind of model is refused."""
    from jitney.tune.space import check_options, engine_space, scheduler_space

    check_options(subject, given)

    def space(current: "Setting") -> "Space":
        if subject.language:
            return engine_space(current, given, greatest_load=greatest, gpu=subject.gpu())
        tightest = min((bound.seconds for bound in bounds), default=None)
        return scheduler_space(
            current, given, subject.max_batch, tightest, len(os.sched_getaffinity(0)),
            counts=subject.counts_instances,
        )  # fmt: skip

    return space


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


def _need_matplotlib() -> None:
    """Before minutes are spent measuring. Raises InstallationError."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise InstallationError(
            "the report is drawn by matplotlib, which is not installed: "
            "pip install 'triton-jitney[bench]'"
        )
