"""Makes the plan of a job that is divided into shards: which rows each of them does.

All of the input is looked at once for that: Parquet states its rows, in other files they are
counted. Of several shards that begin at the same time one does so, and the others wait.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.addresses import without_keys
from jitney_jobs.dataset import Dataset
from jitney_jobs.executors import Models
from jitney_jobs.fingerprints import fingerprints_of
from jitney_jobs.first_results import columns_of_map
from jitney_jobs.job import Job, job_without_keys
from jitney_jobs.journal import Record, read_journal
from jitney_jobs.journal_entries import OutputPart, ReadStart, RowRange
from jitney_jobs.line_survey import survey_job
from jitney_jobs.output import Output, write_errors
from jitney_jobs.output_files import OutputFiles, output_files
from jitney_jobs.planning_claim import PlanningClaim
from jitney_jobs.preview import Preview
from jitney_jobs.shard_checks import undivided_text
from jitney_jobs.shard_plan import VERSION, Plan, create_plan, read_plan
from jitney_jobs.shards import Shard

_POLL_S = 0.5
"""Between two looks for a plan that another shard makes."""


class CountedFile(msgspec.Struct, frozen=True):
    """A file of the input, or all files that are rows together."""

    rows: int
    starts: list[ReadStart] = []
    is_open: bool = False
    """Whether it could not be read to its end. Then it may have more rows."""


def plan_for(job: Job, shard: Shard, say: Callable[[str], None]) -> Plan:
    """The plan of a shard's job, which is made if there is none. Raises InvalidArgumentError for a
    job that is wrong, or that differs from the plan's; UnavailableError as reading and writing
    do."""
    with write_errors(job):
        files = output_files(job.output, job.retries)
        plan = read_plan(files)
    if plan is None:
        plan = _make_or_wait(job, shard, files, say)
    job = plan.with_model(job)
    plan.check(job, shard, fingerprints_of(job))
    return plan


def _make_or_wait(job: Job, shard: Shard, files: OutputFiles, say: Callable[[str], None]) -> Plan:
    """The plan, made by this shard or, while this one waits, by another."""
    claim = PlanningClaim(files)
    has_said = False
    while True:
        with write_errors(job):
            may_make = claim.take()
            plan = read_plan(files)
        if may_make:
            break
        if plan is not None:
            return plan
        if not has_said:
            say("another shard divides the input: this one waits for it")
        has_said = True
        time.sleep(_POLL_S)
    with claim:
        return plan or _make_or_read(job, shard, files, say)


def _make_or_read(job: Job, shard: Shard, files: OutputFiles, say: Callable[[str], None]) -> Plan:
    try:
        made = _make_plan(job, shard, say)
    except InvalidArgumentError:
        with write_errors(job):
            there = read_plan(files)
        if there is None:
            raise
        return there  # another shard made one, and its parts may be why this one failed
    with write_errors(job):
        created = create_plan(files, made)
    if created.is_ours:
        say(f"{made.row_count:,} rows are divided into {shard.count:,} shards")
    return created.plan


def _make_plan(job: Job, shard: Shard, say: Callable[[str], None]) -> Plan:
    """Raises as :func:`~jitney_jobs.run.run_job` does before rows are run."""
    whole = msgspec.structs.replace(job, shard=None)
    with write_errors(job):
        if read_journal(job.output, None).begin is not None:
            raise InvalidArgumentError(f"{undivided_text(job.output)}: choose another output")
    dataset = Dataset(whole)
    say(f"{without_keys(job.input)}: {dataset.summary}")
    surveyed = survey_job(whole, dataset)
    whole = surveyed.job
    with write_errors(job):
        output = Output(whole, dataset, _NoJournal())
    schema = dataset.look_ahead(output.maker.columns.is_table)
    dataset.set_schema(schema)
    Preview(whole, dataset).check_named()
    result_schema = None
    if job.task == "map" and output.maker.columns.is_table:
        result_schema = _result_schema(whole, dataset, output)
    say("the input's rows are counted, to divide them")
    counted = [_counted(dataset, index) for index in range(len(dataset.sizes))]
    return Plan(
        version=VERSION,
        id=secrets.token_hex(8),
        at=time.time(),
        job=msgspec.structs.replace(job_without_keys(whole), accept_changes=False),
        files=dataset.files,
        files_are_rows=dataset.files_are_rows,
        passed_over=dataset.passed_over,
        prints=fingerprints_of(whole),
        schema=None if schema is None else schema.serialize().to_pybytes(),
        result_schema=result_schema,
        repeated=sorted(surveyed.repeated),
        shards=divided(counted, shard.count),
    )


class _NoJournal:
    """The journal of an output that is only asked what its columns will be."""

    def __init__(self) -> None:
        self.record = Record.empty()

    def append(self, entry: OutputPart) -> None:
        raise AssertionError("no part is written")

    def next_part(self) -> tuple[int, str]:
        raise AssertionError("no part is written")

    def may_remove(self, part: str) -> bool:
        return False


def _counted(dataset: Dataset, index: int) -> CountedFile:
    counted, is_open = dataset.count_rows(index)
    return CountedFile(counted.rows, counted.starts, is_open)


def _result_schema(job: Job, dataset: Dataset, output: Output) -> bytes | None:
    """The output's schema of a job with ``map``: with the same columns as without shards."""
    with ExitStack() as closing:
        models = Models()
        closing.callback(models.close)
        _, context = models.load(job)
        columns = output.maker.columns
        return columns_of_map(columns.completed(context), dataset, columns)


def divided(counted: list[CountedFile], shard_count: int) -> list[list[RowRange]]:
    """The rows of each shard, in the order of the input. The numbers of rows differ by one at most.

    What may follow in a file that could not be read to its end belongs to the shard with the last
    row that could. If none could, it belongs to the shard whose turn it is then.
    """
    total = sum(each.rows for each in counted)
    ends = [total * (index + 1) // shard_count for index in range(shard_count)]
    shards: list[list[RowRange]] = [[] for _ in range(shard_count)]
    index = 0  # of the shard that gets the next row
    rows_before = 0  # of the files before this one
    for file, of_file in enumerate(counted):
        first = 0
        while first < of_file.rows:
            end = min(of_file.rows, ends[index] - rows_before)
            if end > first:
                is_open = of_file.is_open and end == of_file.rows
                start = _last_start(of_file.starts, first)
                shards[index].append(RowRange(file, first, end, is_open, start))
                first = end
            if rows_before + first == ends[index] and index < shard_count - 1:
                index += 1
        if of_file.is_open and not of_file.rows:
            shards[index].append(RowRange(file, 0, 0, is_open=True))
        rows_before += of_file.rows
    return shards


def _last_start(starts: list[ReadStart], row: int) -> ReadStart | None:
    """The last start that is at a row, or before it. None: the beginning of the file."""
    before = [start for start in starts if start.row <= row]
    return before[-1] if before else None
