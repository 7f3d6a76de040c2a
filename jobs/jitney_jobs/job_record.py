"""The journal of an output as a user names it: read for ``jitney batch status``, ``resume``,
``report`` and ``merge``, and after a run."""

import os

import msgspec
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.addresses import errors_without_keys
from jitney_jobs.job import job_without_keys
from jitney_jobs.journal import Record, read_journal
from jitney_jobs.shard_checks import unmerged_text
from jitney_jobs.shard_journals import status_of_shards
from jitney_jobs.shard_plan import plan_of
from jitney_jobs.shards import Shard


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
        raise _unreadable(output, error) from None
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
    """Where the shards of an output stand. None if it has no shards, or if they are merged. Raises
    as :func:`read_record`."""
    try:
        plan = plan_of(output)
        if plan is None or read_journal(output, None).begin is not None:
            return None
        return status_of_shards(output, plan)
    except OSError as error:
        raise _unreadable(output, error) from None


def _unreadable(output: str, error: OSError) -> UnavailableError:
    return UnavailableError(f"the journal of {output} cannot be read: {error}")
