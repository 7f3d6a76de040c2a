"""A job from its settings to its end, and what is said of it afterwards: status and report."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from jitney.errors import CancelledError, InvalidArgumentError, UnavailableError
from jitney.progress import Deadline, Progress, State, clock_text

from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import Models
from jitney_jobs.job import Job
from jitney_jobs.journal import JobJournal, OutputPart, Record
from jitney_jobs.output import Output
from jitney_jobs.pipeline import Gathering, Pipeline

_STAGES = {
    "read_s": "read: the reader's thread at work",
    "prepare_s": "prepare: over all workers",
    "waited_s": "the executor waited for prepared rows",
    "run_s": "run: the model at work",
    "write_s": "write: parts and journal",
}


def run_job(
    job: Job, models: Models | None = None, wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Run a job, or go on with it: whatever its journal has is done. Returns whether it is
    complete; not if a signal ended it. Whoever gives ``models`` closes them. Raises JitneyError
    for what is wrong with the settings, the input, the model or the output; UnavailableError if the
    input or the output is away now; CancelledError as soon as the job is not ``wanted``."""
    with ExitStack() as closing:
        try:
            journal = JobJournal(job)
            closing.callback(journal.close)
            dataset = Dataset(job)
            output = Output(job, dataset, journal)
            journal.begin(job, dataset.files, dataset.whole)
            output.recover()
            if journal.record.ended:
                return True
            begun = _state(journal.record, job, {"moved_at": time.time()})
            metrics = None
            if job.metrics_port is not None or job.push_gateway is not None:
                from jitney_jobs.metrics import Metrics  # prometheus_client may be missing

                metrics = Metrics(job, begun, closing)
            if job.ray:
                from jitney_jobs.ray_data import RayPipeline  # Ray may be missing

                pipeline: Gathering = RayPipeline(job, dataset, journal, output, closing)
            else:
                if models is None:
                    models = Models()
                    closing.callback(models.close)
                pipeline = Pipeline(job, dataset, journal, output, closing, models)
            progress = Progress()
            deadline = Deadline(begun.due)
            closing.callback(progress.close)

            def show(figures: dict[str, float]) -> None:
                if not wanted():
                    raise CancelledError("it was cancelled")
                state = replace(begun, figures=figures, complete=journal.record.ended is not None)
                if said := deadline.judge(figures["at"], figures["seconds"], state.left_s):
                    progress.say(said)
                progress.show(state)
                if metrics is not None:
                    metrics.show(replace(state, late=deadline.late))

            return pipeline.run(show)
        except OSError as error:
            raise UnavailableError(
                f"output {job.output} cannot be written: {error}; when it can be, `jitney "
                "batch resume` goes on"
            ) from error


def read_record(output: str, journal: str | None) -> Record:
    """The journal of an output. Raises InvalidArgumentError if there is none."""
    folder = Path(output, "_job") if journal is None else Path(journal)
    record = Record(folder / "journal.jsonl")
    if record.begin is None:
        raise InvalidArgumentError(f"{output} has no journal of a job ({folder})")
    return record


def _state(record: Record, job: Job, figures: dict[str, float]) -> State:
    """Where a job stands. ``figures`` tell of one run, the journal's parts of all other runs."""
    before = [part for part in record.parts if part.figures["run"] != figures.get("run")]
    bad = sum(part.failed for part in before)
    done = bad + sum(part.written for part in before)
    ended = record.ended is not None
    return State(figures, done, bad, record.due(job), record.late(job), ended)


def status_of(record: Record) -> str:
    """A few lines on where a job stands."""
    assert record.begin is not None
    files = record.begin.files
    written = record.written
    failed = record.failed
    figures = record.parts[-1].figures if record.parts else {}
    state = _state(record, record.begin.job, figures)
    total = "" if record.total is None else f" of {record.total:,}"
    text = [
        f"{record.begin.job.output}: {'complete' if state.complete else 'not complete'}",
        f"input   {len(files):,} files, {sum(file.size for file in files):,} bytes",
        f"rows    {written + failed:,}{total}: {written:,} written, {failed:,} bad",
        f"parts   {len(record.parts):,}",
    ]
    if figures:
        text.append(f"last    {clock_text(figures['at'])}")
        text.append(f"cost    {_rate(record)}; {_cost(record)}")
    if state.end_at and not state.complete:
        text.append(f"end     {clock_text(state.end_at)}, if it goes on at that rate")
    if state.due is not None:
        text.append(f"due     {clock_text(state.due)}{', late' if state.late else ''}")
    return "\n".join(text)


def _runs(record: Record) -> list[dict[str, float]]:
    """The figures of each run, which its last part has."""
    return list({part.figures["run"]: part.figures for part in record.parts}.values())


def _total(record: Record, name: str) -> float:
    return sum(figures.get(name, 0.0) for figures in _runs(record))


def _rate(record: Record) -> str:
    rows = record.written + record.failed
    seconds = max(1e-9, _total(record, "seconds"))
    said = f"{seconds:,.1f} s without loading: {rows / seconds:,.1f} rows/s"
    tokens = _total(record, "tokens")
    return f"{said}, {tokens / seconds:,.0f} tokens/s" if tokens else said


def _cost(record: Record) -> str:
    rows = max(1, record.written + record.failed)
    return f"{1000 * _total(record, 'cpu_s') / rows:,.2f} core-seconds a thousand rows"


def write_report(record: Record) -> Path:
    """``report.html`` in the journal's folder: throughput over time, and where the time went."""
    from jitney_measure.pages.page import Block, Table, TableRow, Text, write_page
    from jitney_measure.pages.plots import over_time  # matplotlib may be missing

    assert record.begin is not None
    job = record.begin.job
    size = sum(file.size for file in record.begin.files)
    rows = max(1, record.written + record.failed)
    seconds = max(1e-9, _total(record, "seconds"))
    said = (
        f"{'Complete' if record.ended else 'Not complete'}: {record.written:,} rows written, "
        f"{record.failed:,} bad, in {_rate(record)}"
    )
    blocks: list[Block] = [
        Text(f"{job.task} · {job.model or job.map} · {job.input} · {size:,} bytes", "dim"),
        Text(said, "best" if record.ended else "best caution"),
        Text(f"Cost: {_cost(record)}. Runs: {len(_runs(record))}."),
    ]
    if record.parts:
        caption = "Throughput over time, a point for each part."
        blocks.append([over_time("throughput", caption, *_throughput(record.parts))])
    head = ("stage", "seconds", "share of the time", "ms a row")
    stages = [
        TableRow([name, f"{s:,.2f}", f"{s / seconds:.0%}", f"{1e3 * s / rows:.3f}"])
        for name, s in ((name, _total(record, key)) for key, name in _STAGES.items())
    ]
    settings = {name: str(v) for name, v in job.essential.items() if v not in (None, [], {}, "")}
    blocks += [Table("Where the time went", head, stages), "Settings", settings]
    return write_page(f"Job {Path(job.output).name}", blocks, record.folder)


def _throughput(parts: list[OutputPart]) -> tuple[list[float], dict[str, list[float]]]:
    """Times, and values between each part's commit and the one before it, the pauses between runs
    left out."""
    ends: list[float] = [0.0]
    rates: list[float] = []
    full: list[float] = []
    before: dict[str, float] = {}
    for part in parts:
        now = part.figures
        if before.get("run") != now["run"]:
            before = {}
        grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
        seconds = max(1e-9, grown["seconds"])
        ends.append(ends[-1] + seconds)
        rates.append((part.written + part.failed) / seconds)
        room = now.get("most_rows", 0.0) * grown.get("steps", 0.0)
        full.append(grown["rows_in_steps"] / room if room else 0.0)
        before = now
    panels = {"rows/s": rates}
    return ends[1:], {**panels, "share of the batch filled": full} if any(full) else panels
