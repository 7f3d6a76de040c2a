"""The commands ``jitney batch``, whose options are the settings of a job (``job.py``)."""

import contextlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from jitney.errors import InvalidArgumentError

from jitney_jobs.addresses import without_keys
from jitney_jobs.job import Job
from jitney_jobs.job_making import make_job, read_job
from jitney_jobs.outcome import ExitStatus, SettingsError, TooManyBadRows, error_limit
from jitney_jobs.shards import Shard
from jitney_jobs.times import seconds_of
from jitney_jobs.worker import cancel, list_jobs, submit, worker

batch = typer.Typer(
    help="Run a job over files: each row once, whatever happens in between.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
_Output = Annotated[str, typer.Argument(help="The job's output folder.")]
_Journal = Annotated[str | None, typer.Option(help="Folder of the journal, if it is elsewhere.")]
_RetryBad = Annotated[
    bool, typer.Option("--retry-bad", help="Do again what failed: bad rows and bad files.")
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be read and written, and end.")
]


def run(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="A file, folder or glob; or a job file, .yaml.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", help="Folder; not for a job file.")
    ] = None,
    dry_run: _DryRun = False,
    retry_bad: _RetryBad = False,
    **settings: Any,
) -> None:
    """Run a job, or go on with the one in OUTPUT if it is the same.

    Every option is a setting of a job file too, with underscores: `max_tokens: 64`. An option
    given here replaces that of the job file.

    Examples:

        jitney batch run prompts.jsonl out --model path/to/checkpoint --prompt "Summarize: {text}"
        jitney batch run job.yaml
    """
    given = {name: value for name, value in settings.items() if value not in (None, [])}
    try:
        if output is None:
            job = make_job({**read_job(Path(source)), **given})
        else:
            job = make_job({**given, "input": source, "output": output})
    except InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    if dry_run:
        from jitney_jobs.preview import preview_of

        print(preview_of(job))
    else:
        _run_and_report(job, retry_bad)


def _option(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    """A setting's option."""
    # A type such as ``job.Count`` is itself Annotated, with a Meta: that is in the metadata, too.
    kind, *metadata = get_args(field.type)
    (help_text,) = [item for item in metadata if isinstance(item, str)]
    option_type: Any = _option_type(kind)
    option = Annotated[option_type | None, typer.Option(help=help_text)]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option
    )


def _option_type(kind: Any) -> Any:
    """What typer makes of an option's words. Most are texts here: ``make_job`` reads and checks
    them."""
    if kind is bool or get_origin(kind) is Literal:
        return kind
    alternatives = [kind, *get_args(kind)]  # of a union such as list[str] | None
    if any(get_origin(alternative) in (list, tuple) for alternative in alternatives):
        return list[str]
    return str


# typer reads the options of a command from its signature: in place of `settings` it has the fields
# of Job, but for those that are arguments.
_signature = inspect.signature(run)
_arguments = [
    parameter
    for parameter in _signature.parameters.values()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
]
_options = [
    _option(field) for field in msgspec.structs.fields(Job) if field.name not in ("input", "output")
]
run.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[*_arguments, *_options]
)


def resume(
    output: _Output,
    journal: _Journal = None,
    retry_bad: _RetryBad = False,
    shard: Annotated[str | None, typer.Option(help="Of a job of shards: I/N.")] = None,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster. Without it: on this machine.")
    ] = None,
) -> None:
    """Go on with a job that was stopped or killed, with the settings in its journal. Its output may
    have been moved since, and it may have run on a Ray cluster or not."""
    from jitney_jobs.job_record import read_record

    try:
        its_shard = None if shard is None else Shard.of(shard)
    except InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    if ray is not None and shard is not None:
        raise SettingsError("settings ray and shard exclude each other")
    begin = read_record(output, journal, its_shard).begin
    assert begin is not None, "read_record raises if there is none"
    if begin.job.ray is not None and ray is None:
        _say(f"without the Ray cluster at {without_keys(begin.job.ray)}: --ray goes on there")
    _run_and_report(msgspec.structs.replace(begin.job, journal=journal, ray=ray), retry_bad)


def status(output: _Output, journal: _Journal = None) -> None:
    """Say how far a job is, with each of its shards until they are merged. It may be running."""
    from jitney_jobs.job_record import read_record, unmerged_status
    from jitney_jobs.status import status_of

    if journal is None:
        of_shards = unmerged_status(output)
        if of_shards is not None:
            print(of_shards)
            return
    record = read_record(output, journal)
    assert record.begin is not None, "read_record raises if there is none"
    print(status_of(record, record.begin.job))


def report(output: _Output, journal: _Journal = None) -> None:
    """Write the job's report page, `_job/report.html` in its output."""
    from jitney_jobs.job_record import read_record
    from jitney_jobs.report import write_report

    print(write_report(read_record(output, journal)))


def merge(
    output: _Output,
    wait: Annotated[
        str, typer.Option(help="How long to wait for shards that are not complete: 30m, 4h.")
    ] = "0s",
    max_errors: Annotated[
        str | None, typer.Option(help="Bad rows of all shards, in place of what the job says.")
    ] = None,
) -> None:
    """Make one job of shards that are complete (`--shard`). It moves no rows; once more, it does
    nothing. The exit status is that of a job, or 6 if shards are missing."""
    from jitney_jobs.job_record import read_record
    from jitney_jobs.merging import merge_shards
    from jitney_jobs.status import exit_status, status_of

    try:
        wait_s = seconds_of("wait", wait)
        error_limit(max_errors or 0)
    except InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    merge_shards(output, wait_s, max_errors, _say)
    record = read_record(output, None)
    assert record.begin is not None, "read_record raises if there is none"
    job = record.begin.job
    print(status_of(record, job))
    if record.end is None:  # a run that retries what is bad was stopped
        raise typer.Exit(ExitStatus.STOPPED)
    status = exit_status(record, job)
    if status is not ExitStatus.COMPLETE:
        raise typer.Exit(status)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Until the first row, and behind the last one, SIGTERM does what Ctrl-C does: the command ends
    with the status of a stopped job."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_stopped_by_sigterm()
def _run_and_report(job: Job, retry_bad: bool) -> None:
    # Before the imports, which take a while.
    _say(f"{without_keys(job.input)} to {without_keys(job.output)}")
    from jitney_jobs.job_record import read_record
    from jitney_jobs.run import run_job
    from jitney_jobs.status import exit_status, status_of

    sys.path.insert(0, os.getcwd())  # functions of the user's, which workers import too
    status = ExitStatus.STOPPED
    try:
        is_done = run_job(job, retry_bad=retry_bad, say=_say)
    except TooManyBadRows as error:
        _say(f"error: {error}")
        is_done = False
        status = ExitStatus.TOO_MANY_BAD
    record = read_record(job.output, job.journal, job.its_shard)
    print(status_of(record, job))
    if is_done:
        status = exit_status(record, job)
    if status is not ExitStatus.COMPLETE:
        raise typer.Exit(status)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


for _command in (run, resume, status, merge, report, worker, submit, cancel):
    batch.command()(_command)
batch.command("list")(list_jobs)
