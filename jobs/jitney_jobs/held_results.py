"""Results of ``map`` that are in no part yet, kept from one run of a job to the next.

The first results of ``map`` set the types of a table's columns, and no part is written before there
are enough. A job that is stopped before keeps the results that it has in ``_job/held_results`` of
its output, so that a slow function gets on nevertheless.

The results are pickled, as they came from the workers. Who can write to an output's ``_job`` can
also change the job that ``resume`` finds there, and with it the function that is called.
"""

import hashlib
import time
import zlib
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from jitney_jobs.ended_rows import Ended
from jitney_jobs.journal import Begin
from jitney_jobs.part_maker import PartMaker
from jitney_jobs.rows import Chunk, RowId
from jitney_jobs.tasks import MapResult

_NAME = "_job/held_results"
_CHECKSUM_BYTES = 4
"""At the beginning of the file."""


class _Held(msgspec.Struct):
    """What the file has after its checksum."""

    key: str
    """Of the settings, the function and the input that the results are of."""
    results: list[tuple[RowId, MapResult]]


class HeldResults:
    """Of one job, whose journal begins with ``begin``."""

    def __init__(self, maker: PartMaker, begin: Begin) -> None:
        """Raises OSError."""
        self._maker = maker
        self._key = _key_of(begin)
        self._saved_at = time.monotonic()
        may_hold = begin.job.task == "map" and maker.columns.is_table
        data = maker.read_file(_NAME) if may_hold else None
        self._is_there = data is not None
        self._results: dict[RowId, MapResult] = {} if data is None else self._read(data)

    def _read(self, data: bytes) -> dict[RowId, MapResult]:
        """The results in a file. Empty if it is torn, or if the settings, the function or the input
        have changed since: these rows are done again."""
        content = data[_CHECKSUM_BYTES:]
        if _checksum(content) != data[:_CHECKSUM_BYTES]:
            return {}
        held = msgspec.msgpack.decode(content, type=_Held)
        return dict(held.results) if held.key == self._key else {}

    def put_into(self, chunk: Chunk) -> Chunk:
        """The chunk with the results that are known of its rows."""
        if not self._results:
            return chunk
        known = {}
        for index in range(len(chunk)):
            result = self._results.get(chunk.id_of(index))
            if result is not None:
                known[index] = result
        return replace(chunk, results=known)

    def save(self, rows: Iterable[Ended]) -> None:
        """Keep the results of these rows. Raises OSError."""
        for ended in rows:
            for index, result in zip(ended.rows, ended.results, strict=False):
                assert isinstance(result, MapResult), "only map makes columns that are not known"
                self._results[ended.chunk.id_of(index)] = result
        held = _Held(self._key, list(self._results.items()))
        content = msgspec.msgpack.encode(held)
        self._maker.write_file(_NAME, _checksum(content) + content)
        self._is_there = True
        self._saved_at = time.monotonic()

    def save_each(self, seconds: float, rows: Iterable[Ended]) -> None:
        """As :meth:`save`, unless they were saved less than so long ago. Raises OSError."""
        if time.monotonic() - self._saved_at >= seconds:
            self.save(rows)

    def remove(self) -> None:
        """Remove the file: all results are in parts. If it cannot be removed, no run uses it."""
        if self._is_there:
            self._maker.remove([_NAME])
        self._is_there = False
        self._results = {}


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big")


def _key_of(begin: Begin) -> str:
    """A text that differs whenever the results may."""
    settings = begin.job.fields_that_shape_output
    data = msgspec.json.encode([begin.id, settings, begin.prints, begin.files, begin.schema])
    return hashlib.sha256(data).hexdigest()
