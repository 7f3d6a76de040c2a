"""What a run does if the input has changed since the journal listed its files. It tells the user
what differs, and refuses a file that was replaced after some of its rows were done."""

import sys

from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.dataset import Dataset
from jitney_jobs.input_changes import ChangeKind, InputChange, texts_of
from jitney_jobs.journal import InputNow, JobJournal, Record
from jitney_jobs.output import write_errors


def go_on_with_list(dataset: Dataset, journal: JobJournal, were_bad: frozenset[int]) -> None:
    """Say how the input differs from the journal's list of files, which are the files that are
    read. ``were_bad``: files that were damaged when the run began; they may be put right. Raises
    InvalidArgumentError if any other file was replaced and has committed rows.

    A file that is gone is read like any other: then it is a bad file.
    """
    to_say = []
    for change in dataset.changes():
        was_bad = change.index in were_bad
        if not _is_read_as_it_is_now(change, dataset, journal.record, was_bad):
            to_say.append(change)
            continue
        assert change.index is not None, "it is in the list"
        assert change.now is not None, "it is there"
        if not was_bad:
            _check_untouched(change, change.index, journal.record)
        with write_errors(dataset.job):
            journal.append(InputNow(change.index, change.now))
        dataset.files[change.index] = change.now
        if change.kind is not ChangeKind.GROWN:  # else what it has grown by is read
            to_say.append(change)
    _say(texts_of(to_say))


def differences_at_end(dataset: Dataset) -> list[str]:
    """How the input differs, after the last row, from the list of files that were read. The user
    is told, too."""
    try:
        texts = texts_of(dataset.changes_meanwhile())
    except JitneyError as error:  # every row is done: that counts
        texts = [f"it cannot be compared with the list of its files: {error}"]
    _say(texts)
    return texts


def _is_read_as_it_is_now(
    change: InputChange, dataset: Dataset, record: Record, was_bad: bool
) -> bool:
    """Whether this run has rows to read in a file that was replaced."""
    # A file that was cut off, and is whole now, counts as grown.
    is_other = change.kind is ChangeKind.REPLACED or (change.kind is ChangeKind.GROWN and was_bad)
    if not is_other or dataset.files_are_rows:
        return False
    assert change.index is not None, "it is in the list"
    if record.shard_rows is not None and change.index not in record.shard_rows.ranges:
        return False
    return not record.is_done(change.index)


def _check_untouched(change: InputChange, file: int, record: Record) -> None:
    """Raises InvalidArgumentError if a file that was replaced is divided, or has committed
    rows."""
    if record.shard_rows is not None:
        raise InvalidArgumentError(
            f"input {change.text}, since the job was divided into shards; put it back, or begin a "
            "job with another output"
        )
    if record.done.touches(file):
        raise InvalidArgumentError(
            f"input {change.text}, and some of its rows are done; put it back, or begin a job with "
            "another output"
        )


def _say(texts: list[str]) -> None:
    for text in texts:
        print(f"input: {text}", file=sys.stderr)
