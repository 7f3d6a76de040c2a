"""Makes parts of finished rows: their files, and what the journal is to say of them.

A part is written under a temporary name, synced and renamed; on object storage it appears when it
is closed. It counts once ``output`` has had the journal name it. ``part_files`` makes the content
of its files, and ``output_columns`` knows their columns. A run on this machine has one maker of
parts, a run on a cluster one in each actor.
"""

import contextlib
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from jitney_jobs.arrow import pa, pafs
from jitney_jobs.bad_rows import BadRow, error_line
from jitney_jobs.dataset import Dataset
from jitney_jobs.ended_rows import Ended, in_order
from jitney_jobs.job import Job
from jitney_jobs.journal import ERRORS, Interval, Ranges
from jitney_jobs.non_finite import NonFinite
from jitney_jobs.output_columns import OutputColumns
from jitney_jobs.part_files import (
    CsvPart,
    LinesWriter,
    ParquetPart,
    PartWriter,
    RowBlock,
    TableWriter,
    runs_of,
)
from jitney_jobs.rows import LINES, Chunk, RowValues
from jitney_jobs.storage import file_system, objects_of
from jitney_jobs.whole_files import sync

_BLOCK_ROWS = 512
"""Most rows that are encoded together."""
_BLOCK_BYTES = 4 << 20
"""Most bytes of their results."""


class WrittenPart(msgspec.Struct, frozen=True):
    """The files of a part, which do not count until the journal names them."""

    files: dict[str, int]
    """Their names and bytes."""
    intervals: list[Interval]
    """Its rows, good and bad."""
    written: int
    """Good rows."""
    failed: int
    """Bad rows."""
    misfits: int
    """Those of the bad rows whose results could not be written."""
    misfit: str | None
    """An example of these: its place, and why."""
    non_finite: int
    """NaN and infinities that were written as something else."""
    replaced: int
    """U+FFFD that were put in place of what is no text."""
    long_texts: int
    """Texts with more tokens than the encoder takes at once."""


class PartMaker:
    """Makes the parts of one run, or those of one actor. For one thread at a time."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        """Raises InvalidArgumentError for settings that exclude each other."""
        self.columns = OutputColumns(job, dataset)
        self._job = job
        self._dataset = dataset
        self._fs, self._folder = file_system(job.output)
        self._objects = objects_of(job)
        """Parts go there, each in one request. None: they go to the file system."""

    def written_bytes(self, ended: Ended) -> int:
        """About how many bytes of memory those columns of these rows' input have that are
        written."""
        chunk = ended.chunk
        if not ended.rows or self._job.keep == []:
            return 0
        nbytes = chunk.read_bytes
        if self._job.keep is not None and chunk.format not in LINES:
            data = chunk.data if chunk.columns is None else chunk.columns
            nbytes = data.select([n for n in data.schema.names if n in self._job.keep]).nbytes
        return nbytes * len(ended.rows) // len(chunk)

    def bad_row(
        self, chunk: Chunk, index: int, why: str, answer: RowValues | None = None
    ) -> BadRow:
        """Its line in an error file."""
        row = chunk.id_of(index)
        path = self._dataset.path_of(row)
        return BadRow(path, row.row, why, chunk.offset_of(index), chunk.given(index), answer)

    def write(self, part: Iterable[Ended], number: str) -> WrittenPart:
        """Write the files of a part. Rows whose results do not fit become bad ones. ``number`` is
        in the files' names. Raises OSError, and InvalidArgumentError if the part would have too
        many files."""
        part = in_order(part)
        total = sum(len(ended.rows) for ended in part)
        self.columns.learn(part)
        bad: list[BadRow] = []
        for ended in part:
            if ended.error is not None:
                for index in ended.rows:
                    bad.append(self.bad_row(ended.chunk, index, ended.error, ended.answer))
        misfits: list[BadRow] = []
        non_finite = NonFinite(self._job.non_finite)
        writer = self._writer(non_finite)
        for block in _blocks(part):
            for index, why in writer.add(block).items():
                misfits.append(self.bad_row(block.chunk, block.rows[index], why))
        files = {name.format(number): data for name, data in writer.files().items()}
        bad += misfits
        if bad:
            files[f"{ERRORS}/part-{number}.jsonl"] = b"".join(map(error_line, bad))
        for name, data in files.items():
            self.write_file(name, data)
        # On this machine each part has a new thread: give back what Arrow's pool keeps of its
        # memory.
        pa.default_memory_pool().release_unused()
        return WrittenPart(
            files={name: len(data) for name, data in files.items()},
            intervals=_intervals(part),
            written=total - len(bad),
            failed=len(bad),
            misfits=len(misfits),
            misfit=misfits[-1].text if misfits else None,
            non_finite=non_finite.count,
            replaced=sum(ended.replaced for ended in part),
            long_texts=sum(1 for ended in part if ended.is_long_text),
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of a part that does not count. What cannot be removed is left to the next
        run."""
        for name in names:
            with contextlib.suppress(OSError):
                self._fs.delete_file(f"{self._folder}/{name}")

    def _writer(self, non_finite: NonFinite) -> PartWriter:
        if not self.columns.is_table:
            return LinesWriter(self._job.keep, non_finite)
        schema = pa.schema([]) if self.columns.known is None else self.columns.known
        file_type = ParquetPart if self.columns.format == "parquet" else CsvPart
        return TableWriter(schema, file_type, self._job.partition_by)

    def read_file(self, name: str) -> bytes | None:
        """A file of the output. None if it is not there. Raises OSError."""
        try:
            with self._fs.open_input_stream(f"{self._folder}/{name}", compression=None) as source:
                return bytes(source.read())
        except FileNotFoundError:
            return None

    def write_file(self, name: str, data: bytes | pa.Buffer) -> None:
        """A file of the output. Raises OSError."""
        if self._objects is not None:
            self._objects.put(name, data)
            return
        path = f"{self._folder}/{name}"
        folder, name = posixpath.split(path)
        local = isinstance(self._fs, pafs.LocalFileSystem)
        temporary = f"{folder}/.{name}" if local else path
        try:
            if local and not os.path.isdir(folder):
                os.makedirs(folder)
                sync(Path(folder).parent)
            with self._fs.open_output_stream(temporary) as sink:
                sink.write(data)
            if local:
                sync(Path(temporary))
                os.rename(temporary, path)
                sync(Path(folder))
        except OSError:
            with contextlib.suppress(OSError):
                self._fs.delete_file(temporary)
            raise


def _blocks(part: Sequence[Ended]) -> Iterator[RowBlock]:
    """The good rows of a part in blocks. A block has rows of one chunk, and is bounded."""
    together: list[Ended] = []
    rows = 0
    nbytes = 0
    for ended in part:
        if ended.error is not None:
            continue
        is_other = bool(together) and together[0].chunk.first != ended.chunk.first
        is_full = rows + len(ended.rows) > _BLOCK_ROWS or nbytes >= _BLOCK_BYTES
        if together and (is_other or is_full):
            yield _joined(together)
            together = []
            rows = 0
            nbytes = 0
        together.append(ended)
        rows += len(ended.rows)
        nbytes += ended.result_bytes
    if together:
        yield _joined(together)


def _joined(together: list[Ended]) -> RowBlock:
    chunk = together[0].chunk
    rows = [row for ended in together for row in ended.rows]
    columns = [ended.columns for ended in together if ended.columns is not None]
    results = [result for ended in together for result in ended.results]
    return RowBlock(chunk, rows, pa.concat_batches(columns) if columns else None, results)


def _intervals(part: Sequence[Ended]) -> list[Interval]:
    """The rows of a part, good and bad."""
    found = []
    for ended in part:
        indices = [ended.chunk.indices[row] for row in ended.rows]
        found += [Interval(ended.chunk.file, *run) for run in runs_of(indices)]
    return Ranges(found).intervals
