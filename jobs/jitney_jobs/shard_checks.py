"""Whether a run may begin: a job as a whole and its shards exclude each other, and a shard has
nothing to do once all are merged."""

from jitney.errors import InvalidArgumentError

from jitney_jobs.addresses import without_keys
from jitney_jobs.job import Job
from jitney_jobs.journal import Record, read_journal
from jitney_jobs.output import write_errors
from jitney_jobs.row_ranges import row_count_of
from jitney_jobs.shard_plan import Plan, plan_of


def is_merged(plan: Plan, job: Job) -> bool:
    """Whether the shards are merged. Raises InvalidArgumentError if the output has a job that is
    not divided."""
    with write_errors(job):
        begin = read_journal(job.output, None).begin
    if begin is None:
        return False
    if begin.id != plan.id:
        raise InvalidArgumentError(f"{undivided_text(job.output)}: choose another output")
    return True


def check_division(job: Job, plan: Plan | None, record: Record) -> None:
    """Raises InvalidArgumentError if a job as a whole would run beside its shards. Call it while
    the job has its lock, or its claim: from then on no shard can begin."""
    if plan is not None or job.journal is not None or record.begin is not None:
        return
    with write_errors(job):
        division = plan_of(job.output)
    if division is not None:
        raise InvalidArgumentError(unmerged_text(job.output, division))


def undivided_text(output: str) -> str:
    return f"{without_keys(output)} holds a job that is not divided into shards"


def unmerged_text(output: str, plan: Plan) -> str:
    return (
        f"{without_keys(output)} has a job of {len(plan.shards):,} shards that are not merged: go "
        "on with each of them (--shard), then `jitney batch merge`"
    )


def merged_text(job: Job, retry_bad: bool) -> str:
    """What a shard says if the job is merged. Raises InvalidArgumentError if it was to retry bad
    rows."""
    if retry_bad:
        raise InvalidArgumentError(
            f"the shards of {without_keys(job.output)} are merged: retry without the setting shard"
        )
    return f"the shards of {without_keys(job.output)} are merged: nothing is done"


def rows_text(plan: Plan, job: Job) -> str:
    """What a shard has to do, for the user."""
    ranges = plan.ranges_of(job)
    return f"shard {job.shard}: {row_count_of(ranges):,} rows of {len(ranges):,} files"
