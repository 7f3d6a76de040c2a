"""The plan of a job that is divided into shards: ``_job/plan.json`` in its output.

Whichever shard comes first makes it (``shard_planning.py``); it is created once, and all shards
read it. It has what must be the same for all of them: the list of files, the rows of each shard,
the settings, the schema and the fingerprints.
"""

from typing import NamedTuple

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.fingerprints import print_differences
from jitney_jobs.job import Job, job_without_keys
from jitney_jobs.job_differences import differences, differences_text
from jitney_jobs.journal_entries import Begin, InputFile, RowRange, check, encode
from jitney_jobs.output_files import OutputFiles, output_files
from jitney_jobs.row_ranges import row_count_of
from jitney_jobs.shards import Shard

_NAME = "_job/plan.json"
VERSION = 1
"""Of the plan's format."""


class Plan(msgspec.Struct, frozen=True):
    """How a job is divided, and what all its shards have in common."""

    version: int
    id: str
    """Random. The journals of the shards, and that of the merged job, have it too."""
    at: float
    """When it was made, in seconds since 1970: the beginning of the job."""
    job: Job
    """Without ``shard``, and its addresses without their keys."""
    files: list[InputFile]
    files_are_rows: bool
    passed_over: dict[str, int]
    prints: dict[str, str]
    schema: bytes | None
    """As in :class:`Begin`."""
    result_schema: bytes | None
    """The output's schema if ``map`` makes it, as its first results have it."""
    repeated: list[tuple[int, int]]
    """Lines for OpenAI's API that repeat the ``custom_id`` of an earlier one: file and row."""
    shards: list[list[RowRange]]
    """The rows of each shard, by file."""

    def shard(self, index: int) -> Shard:
        return Shard(index, len(self.shards))

    def ranges_of(self, job: Job) -> list[RowRange]:
        """The rows of the shard that a job is."""
        shard = job.its_shard
        assert shard is not None, "the job is a shard"
        return self.shards[shard.index]

    @property
    def row_count(self) -> int:
        """Of all shards."""
        return sum(row_count_of(ranges) for ranges in self.shards)

    def with_model(self, job: Job) -> Job:
        """A shard's job with the model that the lines of the input name, unless it names one."""
        if job.model is not None:
            return job
        return msgspec.structs.replace(job, model=self.job.model)

    def begin_shard(self, entry: Begin) -> Begin:
        """The first line of a shard's journal. ``entry``: with the shard's own settings."""
        return msgspec.structs.replace(
            entry,
            at=self.at,
            id=self.id,
            schema=self.schema,
            result_schema=self.result_schema,
            passed_over=self.passed_over,
            ranges=self.ranges_of(entry.job),
        )

    def check(self, job: Job, shard: Shard, prints: dict[str, str]) -> None:
        """Raises InvalidArgumentError that names what differs if a shard is not of this plan.
        ``job``: with the model that the lines name."""
        changes = []
        if shard.count != len(self.shards):
            changes.append(f"it is divided into {len(self.shards):,} shards, not {shard.count:,}")
        changes += differences(self.job, job_without_keys(job))
        if not job.accept_changes:
            changes += print_differences(self.prints, prints)
        if changes:
            raise InvalidArgumentError(
                f"{self.job.output} holds a job of shards that differs: "
                f"{differences_text(changes)}. To divide it anew, choose another output"
            )


class Created(NamedTuple):
    """The plan that is there now."""

    plan: Plan
    is_ours: bool
    """Whether it is the one that was given, and not another run's."""


def read_plan(files: OutputFiles) -> Plan | None:
    """None if there is none. Raises InvalidArgumentError for one that is damaged, or of another
    version, and OSError."""
    try:
        data = files.read(_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not check(data):
            raise ValueError("it has no checksum")
        plan = msgspec.json.decode(data, type=Plan)
    except (ValueError, msgspec.DecodeError) as error:
        bad = "put back a copy of it, or do the job anew with another output"
        raise InvalidArgumentError(f"{_NAME} of the output is damaged: {error}; {bad}") from None
    if plan.version != VERSION:
        raise InvalidArgumentError(
            f"{_NAME} of the output is of version {plan.version}, not {VERSION}: go on with the "
            "version of Jitney that made it"
        )
    return plan


def plan_of(output: str) -> Plan | None:
    """That of an output. Raises as :func:`read_plan`."""
    if "://" in output and not output.startswith("s3://"):
        return None  # it can have no shards
    return read_plan(output_files(output))


def create_plan(files: OutputFiles, plan: Plan) -> Created:
    """Create the plan, unless another run has created one. Raises as :func:`read_plan`, and
    InvalidArgumentError for a storage on which two runs would both create one."""
    data = encode(plan)
    # A storage that lets this run create the file twice would let two runs do so, too.
    if files.create(_NAME, data) and files.create(_NAME, data):
        files.delete(_NAME)
        raise InvalidArgumentError(
            f"output {plan.job.output} is on a storage that does not heed If-None-Match: shards "
            "cannot agree on a plan there"
        )
    there = read_plan(files)
    assert there is not None, "one was created"
    return Created(there, there.id == plan.id)
