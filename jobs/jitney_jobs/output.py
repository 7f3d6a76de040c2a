"""A job's output: which parts count, which are left over, and the bad rows in files of their own.

A part is written first (``part_maker``), then noted in the journal; until then it does not count.
"""

import contextlib
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import msgspec
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.addresses import without_keys
from jitney_jobs.arrow import pa, pafs
from jitney_jobs.dataset import Dataset
from jitney_jobs.ended_rows import Ended
from jitney_jobs.job import Job
from jitney_jobs.journal import ERRORS, InputFile, Interval, OutputPart, Record
from jitney_jobs.json_lines import encoded
from jitney_jobs.part_maker import PartMaker, WrittenPart
from jitney_jobs.shards import Shard
from jitney_jobs.storage import file_system


class _BadRowId(msgspec.Struct):
    """What every line of an error file has: the row's file, and its index there."""

    file: str
    row: int


@dataclass
class PartCounts:
    """What is counted of committed rows alone, so that it is right after a crash, too."""

    non_finite: int = 0
    """NaN and infinities that were written as something else."""
    replaced: int = 0
    """U+FFFD that were put in place of what is no text."""
    long_texts: int = 0
    """Texts with more tokens than the encoder takes at once."""

    def to_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


@contextlib.contextmanager
def write_errors(job: Job) -> Iterator[None]:
    """Around what writes to the output or the journal: an OSError becomes an UnavailableError that
    names the output."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"output {without_keys(job.output)} cannot be written: {error}; when it can be, "
            "`jitney batch resume` goes on"
        ) from error


class PartJournal(Protocol):
    """What an output needs of its job's journal."""

    @property
    def record(self) -> Record: ...

    def append(self, entry: OutputPart) -> None: ...

    def next_part(self) -> tuple[int, str]: ...

    def may_remove(self, part: str) -> bool: ...


class Output:
    """The folder of the parts."""

    def __init__(self, job: Job, dataset: Dataset, journal: PartJournal) -> None:
        """Raises InvalidArgumentError if there are parts, but no journal."""
        self.maker = PartMaker(job, dataset)
        self._job = job
        self._dataset = dataset
        self._journal = journal
        self.counts = PartCounts()
        """Of this run's parts."""
        self.misfits = 0
        """Rows of this run whose results could not be written."""
        self.misfit: str | None = None
        """The last one of these, for an error that gives an example."""
        self._fs, self._folder = file_system(job.output)
        shard = job.its_shard
        self._mark = "" if shard is None else shard.part_mark
        """What stands before the number in the names of this run's parts."""
        self._fs.create_dir(f"{self._folder}/{ERRORS}", recursive=True)
        there = [name for name in self._parts() if not name.startswith(ERRORS)]
        if there and journal.record.begin is None:
            bad = f"output {self._folder} has {min(there)}, but no journal: choose another"
            raise InvalidArgumentError(bad)

    def recover(self) -> None:
        """Remove what the journal does not name, and check that what it names is there. Raises
        InvalidArgumentError."""
        there = self.remove_strays()
        check_parts(self._committed(), there, self._folder)

    def remove_strays(self) -> dict[str, int]:
        """Remove parts that the journal does not name, of runs that can commit no more. Returns
        names and bytes of all that were there."""
        there = self._parts()
        for name in there.keys() - self._committed().keys():
            if self._journal.may_remove(name):
                self._fs.delete_file(f"{self._folder}/{name}")
        return there

    def _committed(self) -> dict[str, int]:
        """Names and bytes of all parts that the journal names."""
        return files_of(self._journal.record)

    def _parts(self) -> dict[str, int]:
        """Names and bytes of all parts of the job, finished or not; of a shard only its own."""
        return parts_in(self._fs, self._folder, self._mark)

    def bad_rows(self) -> Iterator[Interval]:
        """The bad rows in the error files of all parts. Raises InvalidArgumentError for one that is
        damaged."""
        files = {file.path: index for index, file in enumerate(self._dataset.files)}
        decoder = msgspec.json.Decoder(_BadRowId)
        for part in self._journal.record.parts:
            for name in part.files:
                if not name.startswith(ERRORS):
                    continue
                with self._fs.open_input_stream(f"{self._folder}/{name}") as source:
                    lines = source.read().splitlines()
                for line in lines:
                    try:
                        bad = decoder.decode(line)
                        file = 0 if self._dataset.files_are_rows else files[bad.file]
                    except (msgspec.DecodeError, KeyError) as error:
                        raise InvalidArgumentError(f"{name} is damaged: {error}") from None
                    yield Interval(file, bad.row, bad.row + 1)

    def list_bad_files(self) -> None:
        """Write the list of bad files beside the bad rows; if no file is bad, remove an earlier
        list. Raises OSError."""
        files = self._dataset.files
        reasons = self._journal.record.bad_files
        name = name_of_bad_files(self._job.its_shard)
        path = f"{self._folder}/{name}"
        if reasons:
            self.maker.write_file(name, lines_of_bad_files(files, reasons))
        elif self._fs.get_file_info(path).type == pafs.FileType.File:
            self._fs.delete_file(path)

    # ------------------------------------------------------------------ the parts

    def set_columns(self, of_result: pa.Schema | None) -> None:
        """As :meth:`PartMaker.set_columns`; the parts that are there keep theirs."""
        self.maker.columns.set_result(of_result, self._journal.record.schema)

    def write(self, part: Sequence[Ended], figures: dict[str, float]) -> None:
        """Write a part and commit it. Raises as :meth:`PartMaker.write` and :meth:`commit`."""
        number, mark = self._journal.next_part()
        self.commit(self.maker.write(part, f"{self._mark}{number:05}{mark}"), figures)

    def commit(self, part: WrittenPart, figures: dict[str, float]) -> None:
        """Have the journal name a part. Raises OSError, and UnavailableError if another run has
        taken the job over: then the part is removed."""
        self.misfits += part.misfits
        self.misfit = part.misfit or self.misfit
        self.counts.non_finite += part.non_finite
        self.counts.replaced += part.replaced
        self.counts.long_texts += part.long_texts
        # Each part brings the columns until one has been committed: the part that set them may have
        # been lost.
        schema = None if self._journal.record.schema is not None else self.maker.columns.schema
        committed = OutputPart(
            number=self._journal.record.next_number,
            files=part.files,
            intervals=part.intervals,
            written=part.written,
            failed=part.failed,
            figures={**figures, **self.counts.to_dict()},
            schema=schema,
            has_final_columns=self.maker.columns.are_final,
        )
        try:
            self._journal.append(committed)
        except UnavailableError:  # another run has taken over: it does these rows
            self.maker.remove(part.files)
            raise


def files_of(record: Record) -> dict[str, int]:
    """Names and bytes of the files of all parts that a journal names."""
    return {name: size for part in record.parts for name, size in part.files.items()}


def check_parts(committed: Mapping[str, int], there: Mapping[str, int], output: str) -> None:
    """Raises InvalidArgumentError unless each committed file is there as a whole. Both mappings:
    names and bytes."""
    for name, size in committed.items():
        if there.get(name) != size:
            raise InvalidArgumentError(
                f"the committed part {name} of {output} has {there.get(name, 0):,} bytes, but had "
                f"{size:,}"
            )


def parts_in(fs: pafs.FileSystem, folder: str, mark: str = "") -> dict[str, int]:
    """Names and bytes of the parts in an output, finished or not: those that have ``mark`` before
    their number."""
    there = {}
    for info in fs.get_file_info(pafs.FileSelector(folder, recursive=True)):
        name = posixpath.basename(info.path)
        if info.type == pafs.FileType.File and name.removeprefix(".").startswith(f"part-{mark}"):
            there[posixpath.relpath(info.path, folder)] = info.size
    return there


def name_of_bad_files(shard: Shard | None) -> str:
    """Of the list of files that could not be read to their end, in an output."""
    mark = "" if shard is None else f"-{shard.name}"
    return f"{ERRORS}/files{mark}.jsonl"


def lines_of_bad_files(files: Sequence[InputFile], reasons: Mapping[int, str]) -> bytes:
    """``reasons``: by the file's index."""
    rows = [{"file": files[index].path, "error": why} for index, why in reasons.items()]
    return b"".join(encoded(row) + b"\n" for row in rows)
