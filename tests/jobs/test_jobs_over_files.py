"""What jobs read and write: formats, whole files as rows, damage, and what is held of an input."""

import csv
import errno
import gzip
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import dataset, input_listing, outcome, storage
from jitney_jobs.journal import JobJournal, Record
from jitney_jobs.rows import Chunk

from tests.jobs.job_rows import bad, ids, job_of, read, run, write_lines

ROWS: list[dict[str, Any]] = [
    {"id": i, "name": f"Zürich, {i}" if i % 3 else None, "list": [i, i + 1]} for i in range(50)
]


def parquet(folder: Path) -> list[dict[str, Any]]:
    for year in ("2025", "2026"):
        (folder / f"year={year}").mkdir()
        half = ROWS[:25] if year == "2025" else ROWS[25:]
        pq.write_table(pa.Table.from_pylist(half), folder / f"year={year}/a.pq", row_group_size=7)
    return [{**row, "year": 2025 if row["id"] < 25 else 2026} for row in ROWS]


def arrow(folder: Path) -> list[dict[str, Any]]:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=20)
    return ROWS


def lines(folder: Path) -> list[dict[str, Any]]:
    text = "\n\n".join(json.dumps(row) for row in ROWS)  # an empty line is no row
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "_ignored.jsonl").write_text("[]")
    return ROWS


def table(folder: Path) -> list[dict[str, Any]]:
    rows = [{"id": str(row["id"]), "name": f'"{row["name"]}",\n'} for row in ROWS]
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "name"])
        writer.writeheader()
        writer.writerows(rows)
    return rows


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
@pytest.mark.parametrize("write", [parquet, arrow, lines, table])
def test_every_format_in_and_out(
    tmp_path: Path, write: Callable[[Path], list[dict[str, Any]]], output_format: Any
) -> None:
    (tmp_path / "in").mkdir()
    rows = write(tmp_path / "in")
    settings = {"output_format": output_format, "part_rows": 9, "ordered": True}
    assert run(tmp_path / "in", tmp_path / "out", **settings)
    expected = [{**row, "twice": 2 * int(row["id"])} for row in rows if int(row["id"]) != 13]
    if write is table:
        expected.insert(13, {**rows[13], "twice": 26})  # "13" is a text there
    assert read(tmp_path / "out") == expected
    assert len(list((tmp_path / "out").glob(f"part-*.{output_format}"))) >= 6


def test_files_are_rows(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    assert run(tmp_path / "*.txt", tmp_path / "out", map="builtins:dict", keep=[])
    assert {row["text"] for row in read(tmp_path / "out")} == {f"text {i}" for i in range(5)}
    assert bad(tmp_path / "out")[0]["file"] == str(tmp_path / "bad.txt")


def test_values_that_do_not_fit_the_columns_are_bad_rows(tmp_path: Path) -> None:
    """Types that the job names hold for all rows."""
    rows = [{"id": i, "v": i} for i in range(40)]
    rows[30]["v"] = "thirty"  # type: ignore[assignment]
    rows[31]["v"] = 31.5  # type: ignore[assignment]
    source = write_lines(tmp_path / "in.jsonl", rows)
    settings = {"output_format": "parquet", "part_rows": 10, "schema": '{"v": "int64"}'}
    assert run(source, tmp_path / "out", **settings)
    found = [(each["file"], each["row"]) for each in bad(tmp_path / "out")]
    assert sorted(found) == [(str(source), row) for row in (13, 30, 31)]
    assert len(read(tmp_path / "out")) == 37
    for _ in range(2):  # the bad rows of the first run count in the second
        # Of how many depends on what was read, and committed, before the third one was found.
        with pytest.raises(
            outcome.TooManyBadRows, match=r"3 of \d+ rows are bad, more than max_err"
        ):
            run(source, tmp_path / "few", **settings, max_errors=2)
    assert run(source, tmp_path / "few", **settings, max_errors="10%")


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_values_that_cannot_be_written_are_bad_rows(tmp_path: Path, output_format: Any) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 8))
    settings = {"map": "tests.jobs.job_rows:odd", "output_format": output_format}
    assert run(source, tmp_path / "out", **settings)
    written = {row["id"] for row in read(tmp_path / "out")}
    rows = {each["row"] for each in bad(tmp_path / "out")}
    assert rows == ({1, 2, 3, 4, 5} if output_format == "parquet" else {1})
    assert written == set(range(8)) - rows


def test_columns_that_must_not_be_empty_may_be(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    field = pa.field("w", pa.int64(), nullable=False)
    first = pa.table([[20], [1]], pa.schema([pa.field("id", pa.int64()), field]))
    pq.write_table(first, tmp_path / "in/a.parquet")
    pq.write_table(pa.table({"id": [21]}), tmp_path / "in/b.parquet")
    assert run(tmp_path / "in", tmp_path / "out", ordered=True)
    assert [row["w"] for row in read(tmp_path / "out")] == [1, None]


def test_a_glob_does_not_read_the_output(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", ids(20, 30))
    for glob in ("*.jsonl", "../*/*.jsonl", "**.jsonl"):
        for _ in range(2):  # once more with nothing left to do
            assert run(tmp_path / "in" / glob, tmp_path / "in/out", part_rows=5)
            assert len(read(tmp_path / "in/out")) == 10
        (tmp_path / "in/out").rename(tmp_path / "in" / f"_{len(glob)}")


class Storage:
    """The local file system, but for its first reads, so many, which fail."""

    def __init__(self, failing: int) -> None:
        self._fs = pafs.LocalFileSystem()
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def fail(self) -> None:
        self._failing -= 1
        if self._failing >= 0:
            raise OSError(errno.EIO, "the network is gone")

    def open_input_stream(self, path: str, **options: Any) -> Any:
        self.fail()
        return self._fs.open_input_stream(path, **options)

    def open_input_file(self, path: str) -> Any:
        """Fails at the end of a file."""
        source = io.BytesIO(Path(path).read_bytes())
        outer = self

        class File(io.RawIOBase):
            def read(self, size: int = -1) -> bytes:
                data = source.read(size)
                if len(data) < size:
                    outer.fail()
                return data

            def readable(self) -> bool:
                return True

            def seekable(self) -> bool:
                return True

            def seek(self, *where: int) -> int:
                return source.seek(*where)

            def tell(self) -> int:
                return source.tell()

        return pa.PythonFile(File(), "r")


@pytest.mark.parametrize("files", ["rows", "lines"])
def test_a_storage_that_fails_makes_no_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """It is tried again; then the job ends, and can be resumed."""
    (tmp_path / "in").mkdir()
    for i in range(4):
        if files == "rows":
            (tmp_path / f"in/{i}.txt").write_text(str(i))
        else:
            rows = ids(20 + 700 * i, 720 + 700 * i)
            write_lines(tmp_path / f"in/{i}.jsonl", [{**row, "text": "x" * 3000} for row in rows])
    monkeypatch.setattr(outcome, "pause", lambda tries: 0.001)
    settings = {"map": "builtins:dict", "keep": [], "patience": "1s", "part_rows": 100}
    always = 1_000_000
    for failing in (always, 3):
        failing_storage = Storage(failing)
        for module in (input_listing, storage):
            monkeypatch.setattr(
                module, "file_system", lambda place, fs=failing_storage: (fs, place)
            )
        if failing == always:
            with pytest.raises(UnavailableError, match=r"input .*in/0.* the network is gone"):
                run(tmp_path / "in", tmp_path / "out", **settings)
        else:
            assert run(tmp_path / "in", tmp_path / "out", **settings)
    assert bad(tmp_path / "out") == []
    made = sorted(row["id"] if files == "lines" else row["text"] for row in read(tmp_path / "out"))
    assert made == (list(range(20, 2820)) if files == "lines" else ["0", "1", "2", "3"])


@pytest.mark.parametrize("name", ["a.parquet", "b.parquet", "a.arrow", "a.csv.gz", "a.jsonl.zst"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"damaged " * 20)
    if name == "b.parquet":
        pq.write_table(pa.table({"id": [20]}), tmp_path / "in/a.parquet")
    with pytest.raises(InvalidArgumentError, match=f"input .*{name} cannot be read: "):
        run(tmp_path / "in", tmp_path / "out", skip_bad_files=False)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_share_that_is_read_is_that_of_the_rows_given(tmp_path: Path, suffix: str) -> None:
    """Also of an input that is smaller than what is read ahead."""
    source = tmp_path / f"in.jsonl{suffix}"
    rows = 20_000 if suffix else 400  # what a codec reads at once is not divided
    with (gzip.open if suffix else open)(source, "wt") as file:
        file.writelines(f'{{"id": {i}, "text": "{os.urandom(16).hex()}"}}\n' for i in range(rows))
    found = dataset.Dataset(job_of(source, tmp_path / "out"))
    chunks = [c for c in found.chunks(Record.empty(), rows // 8) if isinstance(c, Chunk)]
    assert [c.position for c in chunks] == pytest.approx([n / 8 for n in range(1, 9)], abs=0.15)


def test_memory_of_what_is_read_is_bounded(tmp_path: Path) -> None:
    """A chunk is sent without the rest of its batch; of a row group only pages are held."""
    table = pa.table({"id": range(600_000), "text": [os.urandom(50) for _ in range(600_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=len(table))
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    of_table = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    for name in ("a.parquet", "a.arrow"):
        found = dataset.Dataset(job_of(tmp_path / name, tmp_path / "out"))
        rows = 0
        most = 0
        for chunk in found.chunks(Record.empty(), 1000):
            if isinstance(chunk, Chunk):
                rows += len(chunk.indices)
                assert len(pickle.dumps(chunk)) < 150_000
                most = max(most, pa.total_allocated_bytes() - before)
        assert rows == 600_000
        if name == "a.parquet":
            assert most < of_table / 2
    job = job_of(tmp_path / "a.arrow", tmp_path / "out")
    journal = JobJournal(job)
    for files in (list(found.files), list(found.files)):  # the second as of a job that is resumed
        journal.begin_or_resume(job, files, False)
        assert journal.record.begin is not None
        assert journal.record.begin.files is files, "one list of them is held"
    journal.close()
