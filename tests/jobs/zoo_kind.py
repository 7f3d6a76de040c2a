"""What a kind of file is, and how its files are made. ``zoo`` has all kinds."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

COMPLETE = 0
JOB_ERROR = 1
WITH_BAD_ROWS = 3


@dataclass(frozen=True)
class Kind:
    """Some files, and what a job over them is to give."""

    write: Callable[[Path], None]
    """Writes the files into a folder."""
    good: pa.Table | None = None
    """The good rows, in their order, with the types that a part of Parquet is to have."""
    bad: dict[int, str] = field(default_factory=dict)
    """Index in its file -> what the error says, as a pattern."""
    raw: dict[int, Any] = field(default_factory=dict)
    """Index of a bad row -> what was read of it."""
    error: str | None = None
    """Of the job, if it cannot run at all, as a pattern."""
    settings: dict[str, Any] = field(default_factory=dict)
    has_bad_file: bool = False
    """Whether one of the files cannot be read, which does not keep the job from the others."""
    file: str = ""
    """The input below the folder, if it is not the folder itself."""

    @property
    def status(self) -> int:
        """The exit status of the command."""
        if self.error is not None:
            return JOB_ERROR
        return WITH_BAD_ROWS if self.bad or self.has_bad_file else COMPLETE


def of_bytes(name: str, data: bytes, **expected: Any) -> Kind:
    """One file."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return Kind(write, **expected)


def text_table(**columns: list[str | None]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


NUMBERS = pa.table({"n": [1, 2, 3]})
LINES = b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


def bytes_of(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def parquet_of(name: str, table: pa.Table, **options: Any) -> Callable[[Path], None]:
    return lambda folder: pq.write_table(table, folder / name, **options)


def arrow_of(name: str, table: pa.Table, is_stream: bool = False) -> Callable[[Path], None]:
    open_writer = pa.ipc.new_stream if is_stream else pa.ipc.new_file

    def write(folder: Path) -> None:
        with open_writer(str(folder / name), table.schema) as sink:
            sink.write_table(table, max_chunksize=2)

    return write
