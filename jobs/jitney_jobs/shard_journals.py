"""The journals of all shards of an output: read for ``jitney batch status`` and ``merge``."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jitney.progress import clock_text

from jitney_jobs.addresses import without_keys
from jitney_jobs.journal_entries import Sealed, encode
from jitney_jobs.journal_record import Record, read_file
from jitney_jobs.output_files import objects_at
from jitney_jobs.shard_plan import Plan
from jitney_jobs.shards import Shard

_READERS = 16


class ShardJournal(NamedTuple):
    """What the journal of a shard says."""

    shard: Shard
    record: Record
    next_object: int
    """On object storage: the number of the next one."""

    @property
    def is_complete(self) -> bool:
        return self.record.end is not None

    @property
    def text(self) -> str:
        """How far it is."""
        record = self.record
        if record.begin is None:
            return "has not begun"
        total = "" if record.total is None else f" of {record.total:,}"
        text = f"{record.written + record.failed:,}{total} rows"
        if record.failed:
            text += f", {record.failed:,} bad"
        if record.bad_files:
            text += f", {len(record.bad_files):,} bad files"
        if self.is_complete:
            return f"{text}, complete"
        if record.parts:
            text += f", last {clock_text(record.parts[-1].figures['at'])}"
        return text


class ShardJournals:
    """Of one output. Everything raises OSError, and InvalidArgumentError for a journal that is
    damaged."""

    def __init__(self, output: str, plan: Plan) -> None:
        self.shards = [plan.shard(index) for index in range(len(plan.shards))]
        self._folder = Path(output, "_job")
        self._objects = None
        if output.startswith("s3://"):
            self._objects = objects_at(output)

    def read(self, shards: list[Shard]) -> list[ShardJournal]:
        with ThreadPoolExecutor(1 if self._objects is None else _READERS) as pool:
            return list(pool.map(self._read_one, shards))

    def _read_one(self, shard: Shard) -> ShardJournal:
        if self._objects is None:
            record, _ = read_file(self._path(shard))
            return ShardJournal(shard, record, 0)
        from jitney_jobs.journal_objects import read_objects

        record, next_object = read_objects(self._objects, shard)
        return ShardJournal(shard, record, next_object)

    def lines(self, journal: ShardJournal) -> Iterator[bytes]:
        """The journal's lines that were whole when it was read."""
        if self._objects is None:
            with self._path(journal.shard).open("rb") as lines:
                yield from (line for line in lines if line.endswith(b"\n"))
            return
        from jitney_jobs.journal_objects import folder_of

        folder = folder_of(journal.shard)
        names = [f"{folder}/{number}" for number in range(journal.next_object)]
        for data in self._objects.read_each(names):
            yield from data.splitlines(keepends=True)

    def seal(self, journal: ShardJournal) -> bool:
        """Put a last entry into the journal: no run of the shard can commit from now on. Returns
        False if a run has committed since the journal was read. A local journal needs no such
        entry: it has a lock."""
        if self._objects is None or journal.record.is_sealed:
            return True
        from jitney_jobs.journal_objects import folder_of

        name = f"{folder_of(journal.shard)}/{journal.next_object}"
        data = encode(Sealed())
        return self._objects.create(name, data) or self._objects.read(name) == data

    def _path(self, shard: Shard) -> Path:
        return self._folder / shard.folder / "journal.jsonl"


def status_of_shards(output: str, plan: Plan) -> str:
    """Some lines on where all shards of a job stand."""
    journals = ShardJournals(output, plan)
    shards = journals.read(journals.shards)
    records = [journal.record for journal in shards]
    complete = sum(journal.is_complete for journal in shards)
    written = sum(record.written for record in records)
    failed = sum(record.failed for record in records)
    size = sum(file.size for file in plan.files)
    if complete == len(shards):
        state = "every shard is complete; they are not merged"
    else:
        state = f"not complete: {complete:,} of {len(shards):,} shards are"
    lines = [
        f"{without_keys(output)}: {state}",
        f"input   {len(plan.files):,} files, {size:,} bytes",
        f"rows    {written + failed:,} of {plan.row_count:,}: {written:,} written, {failed:,} bad",
        f"parts   {sum(len(record.parts) for record in records):,}",
    ]
    lines += [f"shard   {journal.shard}: {journal.text}" for journal in shards]
    return "\n".join(lines)
