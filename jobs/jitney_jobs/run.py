"""Runs a job from its settings to its end. Each step is one call, and stands in its own module."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from jitney.progress import clock_text

from jitney_jobs.addresses import errors_without_keys, without_keys
from jitney_jobs.arrow import pa
from jitney_jobs.changed_input import differences_at_end, go_on_with_list
from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import Models
from jitney_jobs.fingerprints import fingerprints_of
from jitney_jobs.job import Job
from jitney_jobs.job_run import JobRun, RowPipeline
from jitney_jobs.journal import End, JobJournal, Record
from jitney_jobs.line_survey import SurveyedJob, survey_job
from jitney_jobs.observer import Observer
from jitney_jobs.output import Output, write_errors
from jitney_jobs.pipeline import Pipeline
from jitney_jobs.preview import Preview
from jitney_jobs.rows import RowId
from jitney_jobs.shard_checks import check_division, is_merged, merged_text, rows_text
from jitney_jobs.shard_plan import Plan
from jitney_jobs.shard_planning import plan_for
from jitney_jobs.status import state_of


@errors_without_keys()
def run_job(
    job: Job,
    models: Models | None = None,
    wanted: Callable[[], bool] = lambda: True,
    retry_bad: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Run a job. Rows that are committed in its journal are skipped; with ``retry_bad`` bad ones
    are done again. Returns whether the job is complete: it is not if a signal ended it. A caller
    who passes ``models`` closes it. ``say`` gets what the user should know at once.

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
        dataset = _open_input(job, journal.record, plan)
        say(f"{without_keys(job.input)}: {dataset.summary}")
        if plan is None:
            surveyed = survey_job(job, dataset)
        else:
            say(rows_text(plan, job))
            surveyed = _as_planned(job, plan)
        job = surveyed.job
        output = _begin_or_resume(job, dataset, journal, plan)
        were_bad = frozenset(journal.record.bad_files)
        _reopen_and_recover(job, journal, output)
        if journal.record.end is not None:
            say(_nothing_to_do(job, journal.record.end.at))
            return True
        go_on_with_list(dataset, journal, were_bad)
        _set_schema(dataset, output, journal.record)
        if plan is not None and not plan.ranges_of(job):
            # There are more shards than rows, and none for this one.
            with write_errors(job):
                journal.append(End(at=time.time(), rows=0))
            return True
        is_complete = _run_rows(
            job,
            dataset,
            journal,
            output,
            repeated=surveyed.repeated,
            models=models,
            wanted=wanted,
            say=say,
            closing=closing,
        )
        with write_errors(job):
            output.list_bad_files()
        return is_complete


def _open_input(job: Job, record: Record, plan: Plan | None) -> Dataset:
    """The input. Its files are those that the journal lists, or else the plan. Without either they
    are those that are there now."""
    listed = record.listed_files
    if listed is None and plan is not None:
        listed = plan.files
    return Dataset(job, listed)


def _as_planned(job: Job, plan: Plan) -> SurveyedJob:
    """The job with what the survey of all lines found when the job was divided."""
    repeated = frozenset(RowId(*row) for row in plan.repeated)
    return SurveyedJob(plan.with_model(job), repeated)


def _begin_or_resume(job: Job, dataset: Dataset, journal: JobJournal, plan: Plan | None) -> Output:
    """Have the journal's first line written, or check that the one that is there is of this job.
    Raises as :meth:`JobJournal.begin_or_resume`."""
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
            prints=prints,
            look_ahead=partial(_look_ahead, dataset, output),
            passed_over=dataset.passed_over,
            plan=plan,
        )
    return output


def _reopen_and_recover(job: Job, journal: JobJournal, output: Output) -> None:
    """Have what is bad done again, if this run is to do so, and remove what earlier runs have not
    committed."""
    with write_errors(job):
        if journal.reopens:
            journal.reopen_bad(output.bad_rows())
        output.recover()


def _nothing_to_do(job: Job, ended_at: float) -> str:
    return (
        f"{without_keys(job.output)} is complete since {clock_text(ended_at)}: nothing is done. "
        "For another run name another output, such as one with {date} or {run}"
    )


# ------------------------------------------------------------------ the schema


def _look_ahead(dataset: Dataset, output: Output) -> bytes | None:
    """The input's schema, as Arrow serializes it."""
    schema = dataset.look_ahead(output.maker.columns.is_table)
    return None if schema is None else schema.serialize().to_pybytes()


def _set_schema(dataset: Dataset, output: Output, record: Record) -> None:
    """Give the dataset the schema with which the job began, whatever the files have now."""
    assert record.begin is not None, "the job has begun"
    stated = record.begin.schema
    if stated is None:  # lines that are written as they came, or a journal of an earlier version
        stated = _look_ahead(dataset, output)
    dataset.set_schema(None if stated is None else pa.ipc.read_schema(pa.py_buffer(stated)))


# ------------------------------------------------------------------ the rows


def _run_rows(
    job: Job,
    dataset: Dataset,
    journal: JobJournal,
    output: Output,
    *,
    repeated: frozenset[RowId],
    models: Models | None,
    wanted: Callable[[], bool],
    say: Callable[[str], None],
    closing: ExitStack,
) -> bool:
    """Load the model, and run all rows that are left. Returns whether the job is complete."""
    preview = Preview(job, dataset)
    # Before a model is loaded, which takes long; but a server is asked first whether it is there.
    if job.server is None:
        preview.check_named()
    # This run has no part yet, so its figures lack ``run``, and ``state_of`` takes every part in
    # the journal for one of an earlier run. The metrics need ``moved_at``.
    state = state_of(journal.record, job, {"moved_at": time.time()})
    observer = Observer(job, journal, state, closing)
    pipeline = _make_pipeline(
        job, dataset, journal, output, models=models, say=say, closing=closing
    )
    pipeline.refuse_repeated(repeated)
    if job.server is not None:
        preview.check_named()
    preview.check_needed(pipeline.columns)
    observer.begin_display()
    run = JobRun(job, journal, output, pipeline)
    return run.run(partial(_show, run, observer), wanted, partial(differences_at_end, dataset))


def _make_pipeline(
    job: Job,
    dataset: Dataset,
    journal: JobJournal,
    output: Output,
    *,
    models: Models | None,
    say: Callable[[str], None],
    closing: ExitStack,
) -> RowPipeline:
    """A pipeline on a cluster, or on this machine. Raises what loading the model raises."""
    if job.ray:
        from jitney_jobs.ray_pipeline import RayPipeline  # Ray may be missing

        return RayPipeline(job, dataset, journal, output, closing, say)
    if models is None:
        models = Models()
        closing.callback(models.close)
    return Pipeline(job, dataset, journal, output, closing, models)


def _show(run: JobRun, observer: Observer, figures: dict[str, float]) -> None:
    """Tell the user what the run waits for, and how far it is."""
    news = run.take_news()
    if news is not None:
        observer.say(news)
    observer.show(figures)
