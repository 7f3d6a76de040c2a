"""What a journal's lines are: entries as JSON, each with a checksum.

A line is an object of JSON whose last member is ``crc``, the CRC-32 of the object without it. Lines
of version 2 had none.
"""

import zlib
from typing import NamedTuple

import msgspec

from jitney_jobs.job import Job

VERSION = 3
ERRORS = "_errors"
"""Folder of the bad rows: readers of data sets pass over names that begin so."""
READ_VERSIONS = (2, VERSION)
_CRC_OPENS = b',"crc":"'
_CRC_CLOSES = b'"}\n'
_CRC_BYTES = len(_CRC_OPENS) + 8 + len(_CRC_CLOSES)


class Interval(NamedTuple):
    """The rows [first, end) of a file, which is known by its index."""

    file: int
    first: int
    end: int


class ReadStart(NamedTuple):
    """Where a reader can begin in a file, so that it need not parse what comes before."""

    row: int
    """The row that begins there."""
    position: int
    """In bytes of the file; of Arrow's files the number of a record batch."""


class RowRange(NamedTuple):
    """The rows [first, end) of a file that a shard has."""

    file: int
    first: int
    end: int
    is_open: bool = False
    """Whether the shard also has what comes after ``end``: the file could not be read beyond it
    when the job was divided."""
    start: ReadStart | None = None
    """Where a reader begins: the last known start at ``first`` or before it. None: the beginning
    of the file."""


class InputFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of the input, as it was when the job began. ``changed`` is in ns since 1970."""

    path: str
    size: int
    changed: int
    ends: str = ""
    """Digest of its first and last bytes. Empty if it was not taken (``input_changes.py``)."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The job that the journal belongs to. Only claims of runs come before it."""

    version: int
    job: Job
    """Its addresses are without their keys."""
    files: list[InputFile]
    files_are_rows: bool = msgspec.field(name="whole")
    """Whether each file is a row. All files together then count as one file, whose index is 0."""
    at: float = 0.0
    """When the job began, in seconds since 1970."""
    prints: dict[str, str] = {}
    """Fingerprints of the model's files and of map's code (``fingerprints.py``), by name."""
    id: str = ""
    """Of this journal. If the output is on object storage and the journal is not, the output tells
    by it whether a journal is its own."""
    schema: bytes | None = None
    """The input's columns with the types that all of its files get, as Arrow serializes them. None
    if its lines are written as they came, and in journals of earlier versions."""
    passed_over: dict[str, int] = {}
    """Kinds of files below the input that are not read, with counts."""
    ranges: list[RowRange] | None = None
    """Only of a shard: its rows, by file. ``id`` and ``at`` are those of the plan then."""
    result_schema: bytes | None = None
    """The output's schema, as Arrow serializes it, if the plan of the shards has one."""


class Again(msgspec.Struct, frozen=True, tag="again"):
    """A later run has other settings, of those that may change; or a changed model was accepted
    for it."""

    job: Job
    prints: dict[str, str]
    at: float


class InputNow(msgspec.Struct, frozen=True, tag="input"):
    """A file of the input was replaced, either before any of its rows was committed, or after it
    was found to be damaged. ``index``: of the file."""

    index: int
    file: InputFile


class FileRows(msgspec.Struct, frozen=True, tag="file", omit_defaults=True):
    """A file of the input was read to its end, or as far as it can be. ``file`` is its index."""

    file: int
    row_count: int = msgspec.field(name="rows")
    why_bad: str | None = None
    """Why it cannot be read any further."""


class OutputPart(msgspec.Struct, frozen=True, tag="part"):
    """A committed part: names and bytes of its files, and its rows."""

    number: int
    files: dict[str, int]
    intervals: list[Interval] = msgspec.field(name="rows")
    written: int
    """Good rows."""
    failed: int
    """Bad rows."""
    figures: dict[str, float]
    """Of this run until this part: ``run_figures.py``."""
    schema: bytes | None = None
    """The output's schema, as Arrow serializes it. Only the first part of Parquet has it."""
    has_final_columns: bool = True
    """False if a limit left too few rows to set the columns: a run that goes beyond it does all
    rows again (:class:`Undone`)."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Every row is in a part. ``at``: in seconds since 1970."""

    at: float = 0.0
    rows: int | None = None
    """Rows of all parts then. None in journals of version 2."""
    input_changes: list[str] = []
    """How the input then differed from the list in :class:`Begin`."""


class Reopened(msgspec.Struct, frozen=True, tag="reopened"):
    """The bad rows of all parts so far, and the bad files, are done again. Error files of these
    parts count no more."""

    intervals: list[Interval] = msgspec.field(name="rows")
    """The bad rows."""


class Undone(msgspec.Struct, frozen=True, tag="undone"):
    """No part so far counts any more: their columns were set by too few rows. All rows are done
    again."""


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Only on object storage: a run takes the job over. No earlier run can commit from then on."""

    token: str
    """Random; the run's own."""
    machine: str
    """Where the run's process can be looked for."""
    pid: int
    process_began: str
    """Tells the process from a later one of the same number."""
    host: str
    """For people."""
    at: float
    """In seconds since 1970."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Only on object storage: the run with that token has ended, and has said so."""

    token: str


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """Only on object storage: the output's journal is a local one."""

    id: str
    """As in :class:`Begin`."""
    place: str
    """Its folder and machine, for people."""


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """Only on object storage, of a shard: it is merged. No run can commit from then on."""


Entry = (
    Begin
    | Again
    | InputNow
    | FileRows
    | OutputPart
    | End
    | Reopened
    | Undone
    | Claim
    | Released
    | Elsewhere
    | Sealed
)
"""A line of the journal."""
_DECODER = msgspec.json.Decoder(Entry)


_TAG_OF_REOPENED = b'"type":"reopened"'


def was_reopened(line: bytes) -> bool:
    """Whether a line, which may be damaged, seems to have been a :class:`Reopened`."""
    return _TAG_OF_REOPENED in line


def encode(entry: msgspec.Struct) -> bytes:
    """The line of an entry, or of another object."""
    data = msgspec.json.encode(entry)
    return data[:-1] + _CRC_OPENS + _checksum(data) + _CRC_CLOSES


class JournalLine(NamedTuple):
    """A line that was read."""

    entry: Entry
    has_checksum: bool
    """Whether the line has a checksum, which then was right."""


def decode(line: bytes) -> JournalLine:
    """A whole line. Raises ValueError if it is damaged: the text says how."""
    has_checksum = check(line)
    try:
        return JournalLine(_DECODER.decode(line), has_checksum)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def check(line: bytes) -> bool:
    """Whether a whole line has a checksum. Raises ValueError if that is wrong."""
    crc = line[-_CRC_BYTES:]
    has_checksum = crc.startswith(_CRC_OPENS) and crc.endswith(_CRC_CLOSES)
    if has_checksum:
        data = line[:-_CRC_BYTES] + b"}"
        if crc[len(_CRC_OPENS) : -len(_CRC_CLOSES)] != _checksum(data):
            raise ValueError("its checksum differs")
    return has_checksum


def _checksum(data: bytes) -> bytes:
    return b"%08x" % zlib.crc32(data)
