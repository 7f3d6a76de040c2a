"""A job from its settings to its end, and what is said of it afterwards: status and report."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError
from jitney.progress import Deadline, Progress, State, clock_text

from jitney_jobs.addresses import errors_without_keys, name_of_output, without_keys
from jitney_jobs.arrow import pa
from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import Models
from jitney_jobs.fingerprints import fingerprints_of
from jitney_jobs.input_changes import ChangeKind, texts_of
from jitney_jobs.input_files import kinds_text
from jitney_jobs.job import Job, job_without_keys
from jitney_jobs.job_run import JobRun
from jitney_jobs.journal import End, InputNow, JobJournal, OutputPart, Record, read_journal
from jitney_jobs.line_survey import model_of_lines, survey_lines
from jitney_jobs.outcome import ExitStatus, final_status
from jitney_jobs.output import Output, write_errors
from jitney_jobs.pipeline import Pipeline
from jitney_jobs.preview import Preview
from jitney_jobs.rows import RowId
from jitney_jobs.shard_checks import (
    check_division,
    is_merged,
    merged_text,
    rows_text,
    unmerged_text,
)
from jitney_jobs.shard_journals import status_of_shards
from jitney_jobs.shard_plan import plan_of
from jitney_jobs.shard_planning import plan_for
from jitney_jobs.shards import Shard

if TYPE_CHECKING:
    from jitney_measure.pages.page import TableRow

    from jitney_jobs.metrics import Metrics

_STAGES = {
    "read_s": "read: the reader's thread at work",
    "prepare_s": "prepare: over all workers",
    "waited_s": "the executor waited for prepared rows",
    "run_s": "run: the model at work",
    "write_s": "write: parts and journal",
}
"""Figures of a run -> their names in the report."""
_SHOWN_FILES = 10
"""Most bad files that the status names."""
_LONG_TEXTS = {"end": "cut", "chunk-mean": "run in chunks"}
"""Setting ``truncate`` -> what becomes of long texts."""


@errors_without_keys()
def run_job(
    job: Job,
    models: Models | None = None,
    wanted: Callable[[], bool] = lambda: True,
    retry_bad: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Run a job. Rows that are committed in its journal are skipped; with ``retry_bad`` not those
    that are bad. Returns whether the job is complete; it is not if a signal ended it. A caller who
    passes ``models`` closes it. ``say`` gets what the user should know at once.

    Raises JitneyError for what is wrong with the settings, the input, the model or the output;
    TooManyBadRows; UnavailableError if the input or the output is away now; CancelledError as soon
    as the job is not ``wanted``, which is asked often."""
    shard = job.its_shard
    plan = None if shard is None else plan_for(job, shard, say)
    with ExitStack() as closing:
        with write_errors(job):
            journal = JobJournal(job, retry_bad)
        closing.callback(journal.close)
        check_division(job, plan, journal.record)
        if plan is not None and (journal.record.is_sealed or is_merged(plan, job)):
            say(merged_text(job, retry_bad))
            return True
        listed = journal.record.listed_files
        if listed is None and plan is not None:
            listed = plan.files
        dataset = Dataset(job, listed)
        say(f"{without_keys(job.input)}: {dataset.summary}")
        repeated: frozenset[RowId] = frozenset()
        if plan is not None:
            say(rows_text(plan, job))
            repeated = frozenset(RowId(*row) for row in plan.repeated)
            if job.model is None:
                job = msgspec.structs.replace(job, model=plan.job.model)
        elif job.input_format == "openai" and job.task != "map":
            survey = survey_lines(dataset)
            repeated = survey.repeated
            if job.model is None and job.server is None:
                job = msgspec.structs.replace(job, model=model_of_lines(survey.models))
        prints = fingerprints_of(job)
        with write_errors(job):
            output = Output(job, dataset, journal)
            if not journal.record.written:
                # The journal may begin anew. Until its first line is written, no part may be there:
                # after a kill it would be one without a journal.
                output.recover()
            journal.begin_or_resume(
                job,
                dataset.files,
                dataset.files_are_rows,
                prints,
                partial(_look_ahead, dataset, output),
                dataset.passed_over,
                plan,
            )
            were_bad = frozenset(journal.record.bad_files)
            if journal.reopens:
                journal.reopen_bad(output.bad_rows())
            output.recover()
        if journal.record.end is not None:
            say(_nothing_to_do(job, journal.record.end.at))
            return True
        _go_on_with_list(dataset, journal, were_bad)
        _set_schema(dataset, output, journal.record)
        if plan is not None and not plan.ranges_of(job):
            with write_errors(job):
                journal.append(End(at=time.time(), rows=0))
            return True
        preview = Preview(job, dataset)
        # Before a model is loaded, which takes long; but a server is asked first whether it is
        # there.
        if job.server is None:
            preview.check_named()
        # This run has no part yet, so its figures lack ``run``, and ``_state`` takes every part in
        # the journal for one of an earlier run. The metrics need ``moved_at``.
        figures = {"moved_at": time.time()}
        observer = _Observer(job, journal, _state(journal.record, job, figures), closing)
        pipeline: JobRun
        if job.ray:
            from jitney_jobs.ray_data import RayPipeline  # Ray may be missing

            pipeline = RayPipeline(job, dataset, journal, output, closing)
        else:
            if models is None:
                models = Models()
                closing.callback(models.close)
            pipeline = Pipeline(job, dataset, journal, output, closing, models)
        pipeline.refuse_repeated(repeated)
        if job.server is not None:
            preview.check_named()
        preview.check_needed(pipeline.columns)
        observer.begin_display()
        show = partial(_show, pipeline, observer)
        is_complete = pipeline.run(show, wanted, lambda: _differences_at_end(dataset))
        with write_errors(job):
            output.list_bad_files()
        return is_complete


def _go_on_with_list(dataset: Dataset, journal: JobJournal, were_bad: frozenset[int]) -> None:
    """Say how the input differs from the journal's list, which is what is read. ``were_bad``: files
    that were damaged when the run began. Raises InvalidArgumentError if another one, of which some
    rows are committed, has been replaced.

    A file that is gone is read like any other: then it is a bad file.
    """
    record = journal.record
    changes = dataset.changes()
    for change in list(changes):
        was_bad = change.index in were_bad
        # A file that was cut off, and is whole now, counts as grown.
        is_other = change.kind is ChangeKind.REPLACED or (
            change.kind is ChangeKind.GROWN and was_bad
        )
        if not is_other or dataset.files_are_rows:
            continue
        assert change.index is not None, "what was replaced is in the list"
        assert change.now is not None, "what was replaced is there"
        shard_rows = record.shard_rows
        if shard_rows is not None and change.index not in shard_rows.ranges:
            continue
        if record.is_done(change.index):
            continue
        if shard_rows is not None and not was_bad:
            raise InvalidArgumentError(
                f"input {change.text}, since the job was divided into shards; put it back, or "
                "begin a job with another output"
            )
        if record.done.touches(change.index) and not was_bad:
            raise InvalidArgumentError(
                f"input {change.text}, and some of its rows are done; put it back, or begin a job "
                "with another output"
            )
        # None of its rows is done, or it was damaged and is put right: it is read as it is now.
        with write_errors(dataset.job):
            journal.append(InputNow(change.index, change.now))
        dataset.files[change.index] = change.now
        if change.kind is ChangeKind.GROWN:
            changes.remove(change)  # what it has grown by is read
    for text in texts_of(changes):
        print(f"input: {text}", file=sys.stderr)


def _differences_at_end(dataset: Dataset) -> list[str]:
    """How the input differs, after the last row, from the list of files that were read. It is
    said."""
    try:
        texts = texts_of(dataset.changes_meanwhile())
    except JitneyError as error:  # every row is done: that counts
        texts = [f"it cannot be compared with the list of its files: {error}"]
    for text in texts:
        print(f"input: {text}", file=sys.stderr)
    return texts


def _show(pipeline: JobRun, observer: "_Observer", figures: dict[str, float]) -> None:
    """What is new, and how far the run is."""
    news = pipeline.take_news()
    if news is not None:
        observer.say(news)
    observer.show(figures)


def _nothing_to_do(job: Job, ended_at: float) -> str:
    return (
        f"{without_keys(job.output)} is complete since {clock_text(ended_at)}: nothing is done. "
        "For another run name another output, such as one with {date} or {run}"
    )


@errors_without_keys()
def preview_of(job: Job) -> str:
    """What a job would read and write. Nothing is written. Raises as :func:`run_job` does before
    the model is loaded."""
    dataset = Dataset(job)
    dataset.set_schema(dataset.look_ahead(is_typed=False))
    preview = Preview(job, dataset)
    preview.check_named()
    return preview.text()


def _look_ahead(dataset: Dataset, output: Output) -> bytes | None:
    """The input's schema, as Arrow serializes it."""
    schema = dataset.look_ahead(output.maker.columns.is_table)
    return None if schema is None else schema.serialize().to_pybytes()


def _set_schema(dataset: Dataset, output: Output, record: Record) -> None:
    """The one with which the job began, whatever the files have now."""
    assert record.begin is not None, "the job has begun"
    stated = record.begin.schema
    if stated is None:  # lines that are written as they came, or a journal of an earlier version
        stated = _look_ahead(dataset, output)
    dataset.set_schema(None if stated is None else pa.ipc.read_schema(pa.py_buffer(stated)))


class _Observer:
    """Shows the user and Prometheus how far a run is, and warns if it will be late."""

    def __init__(self, job: Job, journal: JobJournal, begun: State, closing: ExitStack) -> None:
        """``begun``: the state at the beginning of the run. Metrics are served from now on, until
        ``closing`` closes. Raises UnavailableError if they cannot be."""
        self._journal = journal
        self._begun = begun
        self._closing = closing
        self._progress: Progress | None = None
        self._deadline = Deadline(begun.due)
        self._metrics: Metrics | None = None
        if job.metrics_port is not None or job.push_gateway is not None:
            from jitney_jobs import metrics  # prometheus_client may be missing

            self._metrics = metrics.Metrics(job, begun)
            closing.callback(self._metrics.close)

    def begin_display(self) -> None:
        """Show a line from now on: loading the model may have printed some."""
        self._progress = Progress()
        self._closing.callback(self._progress.close)

    def say(self, text: str) -> None:
        assert self._progress is not None, "the display has begun"
        self._progress.say(text)

    def show(self, figures: dict[str, float]) -> None:
        assert self._progress is not None, "the display has begun"
        complete = self._journal.record.end is not None
        state = replace(self._begun, figures=figures, complete=complete)
        warning = self._deadline.judge(figures["at"], figures["seconds"], state.left_s)
        if warning is not None:
            self._progress.say(warning)
        self._progress.show(state)
        if self._metrics is not None:
            self._metrics.show(replace(state, late=self._deadline.late))


@errors_without_keys()
def read_record(output: str, journal: str | None, shard: Shard | None = None) -> Record:
    """The journal of an output, or of one of its shards. Its job names the output where it is now:
    the folder may have been moved since the job began. Raises InvalidArgumentError if there is no
    journal, and UnavailableError if its storage fails."""
    try:
        record = read_journal(output, journal, shard)
        plan = None
        if record.begin is None and shard is None and journal is None:
            plan = plan_of(output)
    except OSError as error:
        raise UnavailableError(f"the journal of {output} cannot be read: {error}") from None
    if plan is not None:
        raise InvalidArgumentError(unmerged_text(output, plan))
    if record.begin is None:
        raise InvalidArgumentError(f"{output} has no journal of a job ({record.where})")
    output = output if "://" in output else os.path.abspath(output)
    # Journals of version 2 may have keys.
    job = msgspec.structs.replace(job_without_keys(record.begin.job), output=output)
    record.begin = msgspec.structs.replace(record.begin, job=job)
    return record


@errors_without_keys()
def unmerged_status(output: str) -> str | None:
    """Where the shards of an output stand. None if it has none, or if they are merged. Raises as
    :func:`read_record`."""
    try:
        plan = plan_of(output)
        if plan is None or read_journal(output, None).begin is not None:
            return None
        return status_of_shards(output, plan)
    except OSError as error:
        raise UnavailableError(f"the journal of {output} cannot be read: {error}") from None


def _state(record: Record, job: Job, figures: dict[str, float]) -> State:
    """Where a job stands in one of its runs, or did at its end. ``figures`` are those of the run.

    Their figure ``run`` names the run, and every part names its own in the same way. Parts that
    name another run are those of earlier runs. A run that has committed nothing may lack the
    figure: then all parts are of earlier runs.
    """
    this_run = figures.get("run")
    parts_before = [part for part in record.parts if part.figures["run"] != this_run]
    bad_before = sum(part.failed for part in parts_before)
    written_before = sum(part.written for part in parts_before)
    return State(
        figures=figures,
        done_before=written_before + bad_before,
        bad_before=bad_before,
        due=record.due(job),
        late=record.is_late(job),
        complete=record.end is not None,
    )


def status_of(record: Record, job: Job) -> str:
    """A few lines on where a job stands. Its deadline is that of ``job``, which has the settings of
    one run."""
    assert record.begin is not None
    files = record.begin.files
    written = record.written
    failed = record.failed
    figures = record.parts[-1].figures if record.parts else {}
    state = _state(record, job, figures)
    total = "" if record.total is None else f" of {record.total:,}"
    of_shard = "" if job.shard is None else f", shard {job.shard}"
    lines = [
        f"{without_keys(job.output)}{of_shard}: {'complete' if state.complete else 'not complete'}",
        f"input   {len(files):,} files, {sum(file.size for file in files):,} bytes",
    ]
    if record.begin.passed_over:
        lines.append(f"        passed over: {kinds_text(record.begin.passed_over)}")
    lines += [
        f"rows    {written + failed:,}{total}: {written:,} written, {failed:,} bad",
        *_lines_of_bad_files(record),
        f"parts   {len(record.parts):,}",
    ]
    if job.limit is not None and not state.complete:
        lines.append(f"limit   {job.limit:,} rows; without it the job goes on")
    non_finite = int(_total(record, "non_finite"))
    if non_finite:
        became = "texts" if job.non_finite == "text" else "null"
        lines.append(f"values  {non_finite:,} were NaN or infinite: they are {became} in JSON")
    long_texts = _total(record, "long_texts")
    replaced = _total(record, "replaced")
    if replaced:
        lines.append(f"replaced {replaced:,.0f} characters that are no text in the file's encoding")
    if long_texts:
        done_with = _LONG_TEXTS[job.truncate]
        lines.append(f"texts   {long_texts:,.0f} longer than the encoder takes: {done_with}")
    if figures:
        lines.append(f"last    {clock_text(figures['at'])}")
        lines.append(f"cost    {_rate(record)}; {_cost(record)}")
    if state.end_at and not state.complete:
        lines.append(f"end     {clock_text(state.end_at)}, if it goes on at that rate")
    if record.end is not None:
        lines += [f"input   {text}" for text in record.end.input_changes]
    if state.due is not None:
        lines.append(f"due     {clock_text(state.due)}{', late' if state.late else ''}")
    return "\n".join(lines)


def _lines_of_bad_files(record: Record) -> list[str]:
    if not record.bad_files:
        return []
    assert record.begin is not None, "a file was read"
    reasons = list(record.bad_files.values())
    lines = [
        f"files   {len(reasons):,} of {len(record.begin.files):,} cannot be read to their end:"
    ]
    lines += [f"        {reason}" for reason in reasons[:_SHOWN_FILES]]
    if len(reasons) > _SHOWN_FILES:
        lines.append(f"        and {len(reasons) - _SHOWN_FILES:,} more: _errors/files.jsonl")
    return lines


def exit_status(record: Record, job: Job) -> ExitStatus:
    """Of a job that has done all that it was to do."""
    return final_status(record.failed, len(record.bad_files), record.is_late(job))


def note_of(record: Record, began: float) -> str | None:
    """What to say of a job that is complete: what is bad, and whether it was complete before it was
    begun this time. None if there is nothing to say."""
    notes = []
    if record.end is not None and record.end.at < began:
        notes.append("it was complete before, and nothing was done")
    if record.failed:
        notes.append(f"{record.failed:,} bad rows")
    if record.bad_files:
        notes.append(f"{len(record.bad_files):,} bad files")
    return "; ".join(notes) or None


def _runs(record: Record) -> list[dict[str, float]]:
    """The figures of each run: those that its last part has."""
    runs: dict[float, dict[str, float]] = {}
    for part in record.parts:
        runs[part.figures["run"]] = part.figures
    return list(runs.values())


def _total(record: Record, name: str) -> float:
    """A figure, added up over all runs."""
    return sum(figures.get(name, 0.0) for figures in _runs(record))


def _rate(record: Record) -> str:
    rows = record.written + record.failed
    seconds = max(1e-9, _total(record, "seconds"))
    text = f"{seconds:,.1f} s without loading: {rows / seconds:,.1f} rows/s"
    tokens = _total(record, "tokens")
    return f"{text}, {tokens / seconds:,.0f} tokens/s" if tokens else text


def _cost(record: Record) -> str:
    rows = max(1, record.written + record.failed)
    return f"{1000 * _total(record, 'cpu_s') / rows:,.2f} core-seconds a thousand rows"


def write_report(record: Record) -> Path | str:
    """``report.html`` beside the journal: throughput over time, and where the time went. Returns
    where it is."""
    assert record.begin is not None
    if record.folder is not None:
        return _write_report(record, record.folder)
    from jitney_jobs.object_storage import Objects  # boto3 may be missing

    job = record.begin.job
    objects = Objects(job.output, job.retries)
    with tempfile.TemporaryDirectory() as folder:
        page = _write_report(record, Path(folder))
        with write_errors(job):
            objects.put(f"_job/{page.name}", page.read_bytes())
    return objects.address_of(f"_job/{page.name}")


def _write_report(record: Record, folder: Path) -> Path:
    from jitney_measure.pages.page import Block, Heading, Table, Terms, Text, write_page
    from jitney_measure.pages.plots import over_time  # matplotlib may be missing

    assert record.begin is not None
    job = record.begin.job
    size = sum(file.size for file in record.begin.files)
    summary = (
        f"{'Complete' if record.end else 'Not complete'}: {record.written:,} rows written, "
        f"{record.failed:,} bad, in {_rate(record)}"
    )
    blocks: list[Block] = [
        Text(f"{job.task} · {job.model or job.map} · {job.input} · {size:,} bytes", "dim"),
        Text(summary, "best" if record.end else "best caution"),
        Text(f"Cost: {_cost(record)}. Runs: {len(_runs(record))}."),
    ]
    if record.parts:
        caption = "Throughput over time, a point for each part."
        throughput = _throughput(record.parts)
        curves = {"rows/s": throughput.rates}
        if any(throughput.filled):
            curves["share of the batch filled"] = throughput.filled
        blocks.append([over_time("throughput", caption, throughput.ends, curves)])
    head = ("stage", "seconds", "share of the time", "ms a row")
    blocks.append(Table("Where the time went", head, _stage_rows(record)))
    fields = job.fields_that_shape_output.items()
    settings = {name: str(value) for name, value in fields if value not in (None, [], {}, "")}
    blocks += [Heading("Settings"), Terms(settings)]
    return write_page(f"Job {name_of_output(job.output)}", blocks, folder)


def _stage_rows(record: Record) -> "list[TableRow]":
    from jitney_measure.pages.page import TableRow

    row_count = max(1, record.written + record.failed)
    total_s = max(1e-9, _total(record, "seconds"))
    rows = []
    for figure, name in _STAGES.items():
        stage_s = _total(record, figure)
        share = stage_s / total_s
        ms_a_row = 1000 * stage_s / row_count
        rows.append(TableRow([name, f"{stage_s:,.2f}", f"{share:.0%}", f"{ms_a_row:.3f}"]))
    return rows


class Throughput(NamedTuple):
    """Values between each part's commit and the one before it. The pauses between runs are left
    out."""

    ends: list[float]
    """When each part was committed, in seconds of all runs."""
    rates: list[float]
    """Rows a second."""
    filled: list[float]
    """The share of the batch that was filled. 0 for executors without steps."""


def _throughput(parts: list[OutputPart]) -> Throughput:
    throughput = Throughput([], [], [])
    end = 0.0
    before: dict[str, float] = {}  # the figures of the part before
    for part in parts:
        figures = part.figures
        if before.get("run") != figures["run"]:
            before = {}  # the figures of a run begin with 0
        # What each figure has grown by since the part before.
        growth = {name: value - before.get(name, 0.0) for name, value in figures.items()}
        seconds = max(1e-9, growth["seconds"])
        end += seconds
        throughput.ends.append(end)
        throughput.rates.append((part.written + part.failed) / seconds)
        most_rows_in_steps = figures.get("most_rows", 0.0) * growth.get("steps", 0.0)
        filled = 0.0
        if most_rows_in_steps:
            filled = growth["rows_in_steps"] / most_rows_in_steps
        throughput.filled.append(filled)
        before = figures
    return throughput
