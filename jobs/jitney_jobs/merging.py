"""``jitney batch merge``: one journal of a job whose shards are complete.

The parts stay where they are: their names tell shards apart. What is written is one journal that
names all of them, as a whole or not at all. So a merge may be killed at any moment, and done again.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.addresses import errors_without_keys, without_keys
from jitney_jobs.journal import read_journal
from jitney_jobs.journal_entries import (
    VERSION,
    Begin,
    End,
    FileRows,
    InputFile,
    Interval,
    OutputPart,
    Reopened,
    decode,
    encode,
)
from jitney_jobs.journal_file import lock_folder
from jitney_jobs.journal_record import Record, without_errors
from jitney_jobs.outcome import ShardsMissingError, TooManyBadRows, check_files, error_limit
from jitney_jobs.output import (
    check_parts,
    files_of,
    lines_of_bad_files,
    name_of_bad_files,
    parts_in,
)
from jitney_jobs.output_files import OutputFiles, objects_at, output_files
from jitney_jobs.row_ranges import Ranges
from jitney_jobs.shard_checks import undivided_text
from jitney_jobs.shard_journals import ShardJournal, ShardJournals
from jitney_jobs.shard_plan import Plan, plan_of
from jitney_jobs.storage import file_system

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MOST_SHOWN = 10
_TRIES = 10
"""How often it is tried to put the journal behind the entries of other runs, which are refused."""


@errors_without_keys()
def merge_shards(
    output: str,
    wait_s: float = 0.0,
    max_errors: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Write the journal of a job whose shards are complete; nothing if it is there. ``wait_s``:
    seconds to wait for shards that are not. ``max_errors`` replaces what the job says; here it is
    held against the bad rows of all shards.

    Raises ShardsMissingError, TooManyBadRows, InvalidArgumentError if the output has no job of
    shards or something of it is damaged, and UnavailableError if the storage fails, or a shard
    runs."""
    if "://" not in output:
        output = os.path.abspath(output)
    try:
        _merge(output, wait_s, max_errors, say)
    except OSError as error:
        raise UnavailableError(f"{output} cannot be merged: {error}") from error


def _merge(output: str, wait_s: float, max_errors: str | None, say: Callable[[str], None]) -> None:
    plan = plan_of(output)
    if plan is None:
        raise InvalidArgumentError(f"{output} has no job that is divided into shards")
    files = output_files(output)
    journals = ShardJournals(output, plan)
    there = read_journal(output, None)
    if there.begin is None:
        _wait_for_all(output, journals, wait_s, say)
        with _alone(output):
            shards = journals.read(journals.shards)
            _check_complete(output, shards)
            _check_parts(output, plan, shards)
            _check_bad_rows(plan, shards, max_errors)
            for journal in shards:
                if not journals.seal(journal):
                    raise UnavailableError(f"shard {journal.shard} of {output} runs again")
            data = _journal_of_all(plan, journals, shards, max_errors)
            _put_journal(output, files, data)
        there = read_journal(output, None)
        assert there.begin is not None, "it was put there"
    elif there.begin.id == plan.id:
        say(f"{without_keys(output)} is merged already")
    if there.begin.id != plan.id:
        raise InvalidArgumentError(undivided_text(output))
    _list_bad_files(files, there, journals)


# ------------------------------------------------------------------ waiting


def _wait_for_all(
    output: str, journals: ShardJournals, wait_s: float, say: Callable[[str], None]
) -> None:
    """Raises ShardsMissingError if some are not complete after that time."""
    until = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    left = journals.shards
    said = 0
    while True:
        shards = [each for each in journals.read(left) if not each.is_complete]
        if not shards:
            return
        left_s = until - time.monotonic()
        if left_s <= 0:
            _check_complete(output, shards)  # raises: none of these is complete
        if len(shards) != said:
            say(f"waits for {len(shards):,} of {len(journals.shards):,} shards")
        said = len(shards)
        left = [each.shard for each in shards]
        time.sleep(min(pause_s, left_s))
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _check_complete(output: str, shards: list[ShardJournal]) -> None:
    missing = [each for each in shards if not each.is_complete]
    if not missing:
        return
    shown = "; ".join(f"shard {each.shard}: {each.text}" for each in missing[:_MOST_SHOWN])
    if len(missing) > _MOST_SHOWN:
        shown += f"; and {len(missing) - _MOST_SHOWN:,} more"
    raise ShardsMissingError(f"{len(missing):,} shards of {output} are not complete: {shown}")


@contextlib.contextmanager
def _alone(output: str) -> Iterator[None]:
    """While no run writes to a local output. On object storage shards are sealed instead."""
    if "://" in output:
        yield
        return
    lock = lock_folder(Path(output, "_job"), output)
    try:
        yield
    finally:
        os.close(lock)


# ------------------------------------------------------------------ checks


def _check_parts(output: str, plan: Plan, shards: list[ShardJournal]) -> None:
    """Raises InvalidArgumentError unless each row is in one part, and each part is there."""
    _check_plan(plan)
    there = parts_in(*file_system(output))
    all_rows: list[Interval] = []
    schemas: set[bytes] = set()
    for journal in shards:
        record = journal.record
        begin = record.begin
        assert begin is not None, "it is complete"
        name = f"shard {journal.shard} of {output}"
        if begin.id != plan.id or begin.ranges != plan.shards[journal.shard.index]:
            raise InvalidArgumentError(f"{name} belongs to another plan: do it anew")
        _check_rows(name, record)
        all_rows += record.done.intervals
        if record.schema is not None:
            schemas.add(record.schema)
        check_parts(files_of(record), there, output)
    _check_files(plan, shards)
    twice = Ranges(all_rows).twice
    if twice is not None:
        raise InvalidArgumentError(f"{_rows_text(twice, plan.files)} are in two shards of {output}")
    if len(schemas) > 1:
        raise InvalidArgumentError(
            f"the shards of {output} have columns of different types: they were done by different "
            "versions of Jitney or of its packages"
        )


def _check_files(plan: Plan, shards: list[ShardJournal]) -> None:
    """Raises InvalidArgumentError if no file could be read, as a job without shards does."""
    reasons: dict[int, str] = {}
    for journal in shards:
        reasons |= journal.record.bad_files
    written = sum(journal.record.written for journal in shards)
    check_files(reasons, len(plan.files), written)


def _check_plan(plan: Plan) -> None:
    """Raises InvalidArgumentError unless the ranges of the shards follow one another without a
    gap."""
    ends: dict[int, int] = {}
    for ranges in plan.shards:
        for each in ranges:
            if each.first != ends.get(each.file, 0):
                raise InvalidArgumentError(
                    f"the plan of the shards is damaged: row {each.first:,} of file {each.file} "
                    "does not follow the shard before"
                )
            ends[each.file] = each.end


def _check_rows(name: str, record: Record) -> None:
    """Raises InvalidArgumentError unless a shard has done its rows, and no others. Rows of a file
    that could not be read to its end may be missing."""
    assert record.begin is not None, "it is complete"
    assert record.shard_rows is not None, "it is a shard"
    expected = record.shard_rows.within(record.row_counts)
    assert expected is not None, "it is complete"
    files = record.begin.files
    missing = [
        interval
        for interval in Ranges(expected).without(record.done.intervals).intervals
        if interval.file not in record.bad_files
    ]
    if missing:
        raise InvalidArgumentError(f"{name} lacks {_rows_text(missing[0], files)}")
    others = record.done.without(expected).intervals
    if others:
        raise InvalidArgumentError(f"{name} has {_rows_text(others[0], files)}, which it may not")


def _rows_text(rows: Interval, files: list[InputFile]) -> str:
    return f"rows {rows.first:,} to {rows.end - 1:,} of {files[rows.file].path}"


def _check_bad_rows(plan: Plan, shards: list[ShardJournal], max_errors: str | None) -> None:
    """Raises TooManyBadRows if all shards together have too many. (Each was checked alone when it
    ran.)"""
    given = plan.job.max_errors if max_errors is None else max_errors
    bad = sum(journal.record.failed for journal in shards)
    total = bad + sum(journal.record.written for journal in shards)
    if error_limit(given).is_exceeded(bad, total, all_known=True):
        raise TooManyBadRows(
            f"{bad:,} of {total:,} rows of all shards are bad, more than max_errors ({given}) "
            "allows: retry them (--retry-bad with each shard), or merge with a larger --max-errors"
        )


# ------------------------------------------------------------------ the journal


def _journal_of_all(
    plan: Plan, journals: ShardJournals, shards: list[ShardJournal], max_errors: str | None
) -> bytes:
    """The lines of the journal of the merged job. They are the same whenever they are made of the
    same journals."""
    job = plan.job
    if max_errors is not None:
        job = msgspec.structs.replace(job, max_errors=max_errors)
    begin = Begin(
        version=VERSION,
        job=job,
        files=_files_of(plan, shards),
        files_are_rows=plan.files_are_rows,
        at=plan.at,
        prints=plan.prints,
        id=plan.id,
        schema=plan.schema,
        passed_over=plan.passed_over,
        result_schema=plan.result_schema,
    )
    lines = [encode(begin)]
    file_count = 1 if plan.files_are_rows else len(plan.files)
    lines += [encode(_rows_of_file(file, shards)) for file in range(file_count)]
    first_number = 0
    for journal in shards:
        for part in _parts_of(journals.lines(journal)):
            lines.append(encode(_renumbered(part, first_number)))
        first_number += journal.record.next_number
    lines.append(encode(_end_of(shards)))
    return b"".join(lines)


def _files_of(plan: Plan, shards: list[ShardJournal]) -> list[InputFile]:
    """The files of the plan. A damaged file that was put right since is as it is now."""
    files = list(plan.files)
    for journal in shards:
        assert journal.record.begin is not None, "it is complete"
        for index, file in enumerate(journal.record.begin.files):
            if file != plan.files[index]:
                files[index] = file
    return files


def _rows_of_file(file: int, shards: list[ShardJournal]) -> FileRows:
    """A file that is in no shard has no rows."""
    row_count = 0
    why_bad = None
    for journal in shards:
        row_count = max(row_count, journal.record.row_counts.get(file, 0))
        why_bad = why_bad or journal.record.bad_files.get(file)
    return FileRows(file, row_count, why_bad)


def _parts_of(lines: Iterator[bytes]) -> list[OutputPart]:
    """Those of a shard, with the rows that count: without those that were done again."""
    parts: list[OutputPart] = []
    for line in lines:
        entry, _ = decode(line)
        match entry:
            case Begin():
                parts = []
            case OutputPart():
                parts.append(entry)
            case Reopened():
                parts = [_without_rows(part, entry.intervals) for part in parts]
    return [part for part in parts if part.written or part.failed]


def _without_rows(part: OutputPart, rows: list[Interval]) -> OutputPart:
    """A part without its bad rows, which are among ``rows``."""
    left = Ranges(part.intervals).without(rows).intervals
    return msgspec.structs.replace(without_errors(part), intervals=left)


def _renumbered(part: OutputPart, first_number: int) -> OutputPart:
    """A part of a shard, numbered behind those of the shards before. Its figure ``run`` is the
    number of its run's first part, and moves with it."""
    figures = {**part.figures, "run": part.figures["run"] + first_number}
    return msgspec.structs.replace(part, number=part.number + first_number, figures=figures)


def _end_of(shards: list[ShardJournal]) -> End:
    at = 0.0
    rows = 0
    changes: dict[str, None] = {}
    for journal in shards:
        end = journal.record.end
        assert end is not None, "it is complete"
        at = max(at, end.at)
        rows += journal.record.written + journal.record.failed
        changes |= dict.fromkeys(end.input_changes)
    return End(at=at, rows=rows, input_changes=list(changes))


def _put_journal(output: str, files: OutputFiles, data: bytes) -> None:
    """As a whole."""
    if "://" not in output:
        files.put("_job/journal.jsonl", data)
        return
    from jitney_jobs.journal_objects import FOLDER, read_objects

    objects = objects_at(output)
    for _ in range(_TRIES):
        record, number = read_objects(objects)
        if record.begin is not None:
            return  # another merge was faster
        if objects.create(f"{FOLDER}/{number}", data):
            return
    raise UnavailableError(f"other runs write to {output}")


def _list_bad_files(files: OutputFiles, record: Record, journals: ShardJournals) -> None:
    """In one list, in place of those of the shards."""
    assert record.begin is not None, "the job is merged"
    name = name_of_bad_files(None)
    if record.bad_files:
        files.put(name, lines_of_bad_files(record.begin.files, record.bad_files))
    else:
        files.delete(name)
    for shard in journals.shards:
        files.delete(name_of_bad_files(shard))
