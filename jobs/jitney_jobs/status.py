"""Where a job stands, as its journal says: its state in numbers, some lines for the user, and the
exit status. It may be running."""

from jitney.progress import State, clock_text

from jitney_jobs.addresses import without_keys
from jitney_jobs.input_files import kinds_text
from jitney_jobs.job import Job
from jitney_jobs.job_figures import JobFigures
from jitney_jobs.journal import Record
from jitney_jobs.outcome import ExitStatus, final_status

_SHOWN_FILES = 10
"""Most bad files that the status names."""
_LONG_TEXTS = {"end": "cut", "chunk-mean": "run in chunks"}
"""Setting ``truncate`` -> what becomes of long texts."""


def state_of(record: Record, job: Job, figures: dict[str, float]) -> State:
    """Where a job stands in one of its runs, or stood at its end. ``figures`` are those of the run.

    The figure ``run`` tells which run it is. Each part has the figure of its own run, so parts with
    another one are of earlier runs. A run that has committed nothing may lack the figure: then all
    parts are of earlier runs.
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
    last_figures = record.parts[-1].figures if record.parts else {}
    state = state_of(record, job, last_figures)
    lines = _lines_of_input(record, job) + _lines_of_rows(record)
    if job.limit is not None and not state.complete:
        lines.append(f"limit   {job.limit:,} rows; without it the job goes on")
    figures = JobFigures(record)
    lines += _lines_of_values(figures, job)
    if last_figures:
        lines.append(f"last    {clock_text(last_figures['at'])}")
        lines.append(f"cost    {figures.rate_text}; {figures.cost_text}")
    if state.end_at and not state.complete:
        lines.append(f"end     {clock_text(state.end_at)}, if it goes on at that rate")
    if record.end is not None:
        lines += [f"input   {text}" for text in record.end.input_changes]
    if state.due is not None:
        lines.append(f"due     {clock_text(state.due)}{', late' if state.late else ''}")
    return "\n".join(lines)


def _lines_of_input(record: Record, job: Job) -> list[str]:
    """What is read, and whether all of it is done."""
    assert record.begin is not None, "the job has begun"
    files = record.begin.files
    size = sum(file.size for file in files)
    state = "not complete" if record.end is None else "complete"
    of_shard = "" if job.shard is None else f", shard {job.shard}"
    lines = [
        f"{without_keys(job.output)}{of_shard}: {state}",
        f"input   {len(files):,} files, {size:,} bytes",
    ]
    if record.begin.passed_over:
        lines.append(f"        passed over: {kinds_text(record.begin.passed_over)}")
    return lines


def _lines_of_rows(record: Record) -> list[str]:
    """What is in committed parts, and what is bad."""
    done = record.written + record.failed
    total = "" if record.total is None else f" of {record.total:,}"
    return [
        f"rows    {done:,}{total}: {record.written:,} written, {record.failed:,} bad",
        *_lines_of_bad_files(record),
        f"parts   {len(record.parts):,}",
    ]


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


def _lines_of_values(figures: JobFigures, job: Job) -> list[str]:
    """Values and texts that could not be taken or written as they are."""
    lines = []
    non_finite = figures.total("non_finite")
    if non_finite:
        became = "texts" if job.non_finite == "text" else "null"
        lines.append(f"values  {non_finite:,.0f} were NaN or infinite: they are {became} in JSON")
    replaced = figures.total("replaced")
    if replaced:
        lines.append(f"replaced {replaced:,.0f} characters that are no text in the file's encoding")
    long_texts = figures.total("long_texts")
    if long_texts:
        done_with = _LONG_TEXTS[job.truncate]
        lines.append(f"texts   {long_texts:,.0f} longer than the encoder takes: {done_with}")
    return lines


def exit_status(record: Record, job: Job) -> ExitStatus:
    """The exit status of a job that has done all that it was to do."""
    return final_status(record.failed, len(record.bad_files), record.is_late(job))


def note_of(record: Record, began: float) -> str | None:
    """What to say of a complete job: what is bad, and whether it was complete before this run.
    None if there is nothing to say. ``began``: when this run began, in seconds since 1970."""
    notes = []
    if record.end is not None and record.end.at < began:
        notes.append("it was complete before, and nothing was done")
    if record.failed:
        notes.append(f"{record.failed:,} bad rows")
    if record.bad_files:
        notes.append(f"{len(record.bad_files):,} bad files")
    return "; ".join(notes) or None
