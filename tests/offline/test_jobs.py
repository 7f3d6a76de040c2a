"""Jobs without a model: what is read, what is written, and that each row is written once."""

import csv
import errno
import gzip
import io
import json
import multiprocessing.spawn
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jitney import cli
from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.offline import dataset, executors, feeding
from jitney.offline.job import make_job
from jitney.offline.journal import JobJournal, Part, Ranges, Record
from jitney.offline.progress import Progress, State
from jitney.offline.run import read_record
from typer.testing import CliRunner

from tests.offline.job_rows import bad, ids, job_of, read, run, write_lines

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
from tests.offline.job_rows import run
print(run(Path(sys.argv[1]), Path(sys.argv[2]), map="tests.offline.job_rows:slowly",
          part_rows=25, part_seconds=0.03, workers=1, in_flight=64))
"""


def start(source: Path, output: Path, script: str = SCRIPT, **options: Any) -> Any:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(output)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# ------------------------------------------------------------------ formats

ROWS: list[dict[str, Any]] = [
    {"id": i, "name": f"Zürich, {i}" if i % 3 else None, "list": [i, i + 1]} for i in range(50)
]


def parquet(folder: Path) -> list[dict[str, Any]]:
    for year in ("2025", "2026"):
        (folder / f"year={year}").mkdir()
        half = ROWS[:25] if year == "2025" else ROWS[25:]
        pq.write_table(pa.Table.from_pylist(half), folder / f"year={year}/a.pq", row_group_size=7)
    return [{**row, "year": "2025" if row["id"] < 25 else "2026"} for row in ROWS]


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
    rows = [{"id": i, "v": i} for i in range(40)]
    rows[30]["v"] = "thirty"  # type: ignore[assignment]
    rows[31]["w"] = 1
    rows[32]["twice"] = 1  # a column of the result
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert run(source, tmp_path / "out", output_format="parquet", part_rows=10)
    found = [(each["file"], each["row"]) for each in bad(tmp_path / "out")]
    assert sorted(found) == [(str(source), row) for row in (13, 30, 31, 32)]
    assert len(read(tmp_path / "out")) == 36
    for _ in range(2):  # the bad rows of the first run count in the second
        with pytest.raises(InvalidArgumentError, match="4 of 40 rows are bad, more than max_err"):
            run(source, tmp_path / "few", output_format="parquet", part_rows=10, max_errors=3)
    assert run(source, tmp_path / "few", output_format="parquet", max_errors="10%")


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_values_that_cannot_be_written_are_bad_rows(tmp_path: Path, output_format: Any) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 8))
    settings = {"map": "tests.offline.job_rows:odd", "output_format": output_format}
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


# ------------------------------------------------------------------ each row once


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_kill_at_random_moments(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for i in range(3):
        write_lines(source / f"{i}.jsonl", ids(200 * i, 200 * (i + 1)))
    output, moment = tmp_path / "out", random.Random(5)
    journal = output / "_job" / "journal.jsonl"
    codes = []
    for kill in (True, True, True, True, False):
        before = size_of(journal)
        process = start(source, output)
        if kill:
            while process.poll() is None and size_of(journal) <= before:
                time.sleep(0.005)
            time.sleep(moment.uniform(0, 0.3))
            process.kill()
        _, said = process.communicate(timeout=300)  # ends when its workers have ended too
        codes.append(process.returncode)
        assert process.returncode == 0 or (kill and process.returncode == -9), said
    assert -9 in codes
    rows = read(output)
    assert sorted(row["id"] for row in rows) == list(range(600))
    assert all(row["twice"] == 2 * row["id"] for row in rows)


def test_sigterm_and_a_row_that_kills_its_worker(tmp_path: Path) -> None:
    rows = [{**row, "flag": str(tmp_path / "flag")} for row in ids(0, 4000)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    said, error = start(source, tmp_path / "out", SCRIPT.replace("slowly", "deadly")).communicate()
    assert said == "False\n", error
    committed = len(read(tmp_path / "out"))
    assert 0 < committed < 3998, "what was finished is committed"
    settings = {"map": "tests.offline.job_rows:deadly", "workers": 1, "in_flight": 64}
    assert run(source, tmp_path / "out", **settings)
    found = [(each["row"], each["error"]) for each in bad(tmp_path / "out")]
    assert found == [(row, "the process that prepared it died") for row in (150, 3500)]
    expected = [i for i in range(4000) if i not in (150, 3500)]
    assert sorted(row["id"] for row in read(tmp_path / "out")) == expected


SLOW_READ = """
import time
from jitney.offline.dataset import Dataset
batches = Dataset._batches
def stuck(self, *arguments):
    yield from batches(self, *arguments)
    time.sleep(3600)
Dataset._batches = stuck
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stuck", ["read", "prepare"])
def test_a_stop_does_not_wait_for_what_is_slow(tmp_path: Path, stuck: str, workers: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 100 if stuck == "prepare" else 50))
    script = SCRIPT.replace("slowly", "stuck").replace("workers=1", f"workers={workers}")
    process = start(source, tmp_path / "out", (SLOW_READ if stuck == "read" else "") + script)
    while not list((tmp_path / "out").glob("part-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    said, error = process.communicate(timeout=600)
    assert (process.returncode, said) == (0, "False\n"), error
    assert {row["id"] for row in read(tmp_path / "out")} <= set(range(50))


def test_a_full_disk_and_then_more_space(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": i, "x": "x" * 4000} for i in range(60)])
    script = SCRIPT.replace("part_rows=25, part_seconds=0.03, workers=1", "workers=0")
    limit = (150_000, 150_000)  # bytes of a file; a part of all rows has more

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    failed = start(source, tmp_path / "out", script, preexec_fn=fill)
    said = failed.communicate(timeout=300)[1]
    assert re.search(r"output .* cannot be written: \[Errno 27\] .*File too large; when it", said)
    assert failed.returncode == 1
    assert list((tmp_path / "out").glob("*part*")) == [], "nothing half-written is left"
    assert run(source, tmp_path / "out", map="tests.offline.job_rows:slowly")
    assert sorted(row["id"] for row in read(tmp_path / "out")) == list(range(60))


def fail_at_part(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk is full when that part is noted: its files are there, but do not count."""
    append = JobJournal.append

    def failing(self: JobJournal, line: Any) -> None:
        if isinstance(line, Part) and line.number == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, line)

    monkeypatch.setattr(JobJournal, "append", failing)


def test_a_part_that_the_journal_does_not_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", ids(20, 60)), tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_at_part(patched, 2)
        with pytest.raises(UnavailableError, match="No space left"):
            run(source, output, part_rows=10)
    assert (output / "part-00002.jsonl").exists()
    journal = output / "_job" / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"type":"part","number":2,"fil')  # torn
    (output / ".part-00003.jsonl").write_text("{}")
    assert run(source, output, part_rows=7)
    assert sorted(row["id"] for row in read(output)) == list(range(20, 60))
    assert not (output / ".part-00003.jsonl").exists()
    assert [part.number for part in Record(journal).parts] == [0, 1, 2, 3, 4]


def test_committed_row_groups_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist(ids(20, 80)), tmp_path / "in.parquet", row_group_size=20)
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        with pytest.raises(UnavailableError):
            run(tmp_path / "in.parquet", tmp_path / "out", part_rows=20)
    groups: list[int] = []
    real = pq.ParquetFile.iter_batches

    def noted(self: Any, size: int, row_groups: list[int]) -> Any:
        groups.extend(row_groups)
        return real(self, size, row_groups=row_groups)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    assert run(tmp_path / "in.parquet", tmp_path / "out", part_rows=20)
    assert groups == [1, 2]
    assert [row["id"] for row in read(tmp_path / "out")] == list(range(20, 80))


def test_what_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", ids(20, 60)), tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10)
    with pytest.raises(InvalidArgumentError, match=r"another job: keep was None, is \['id'\]"):
        run(source, output, keep=["id"])
    before = source.read_text()
    source.write_text(before + '{"id": 60}\n')
    with pytest.raises(InvalidArgumentError, match=r"in.jsonl was 440 bytes, is 451; changed at"):
        run(source, output)
    with pytest.raises(InvalidArgumentError, match=r"in2\.jsonl is new"):
        run(source.rename(tmp_path / "in2.jsonl"), output)
    part = output / "part-00000.jsonl"
    part.write_text("less")
    record = read_record(str(output), None)
    os.utime(write_lines(source, ids(20, 60)), ns=(0, record.begin.files[0].changed))  # type: ignore
    with pytest.raises(InvalidArgumentError, match=r"part-00000.jsonl .* has 4 bytes, but had"):
        run(source, output)
    (output / "_job" / "journal.jsonl").unlink()
    with pytest.raises(InvalidArgumentError, match=r"has part-0.*, but no journal"):
        run(source, output)


def test_two_runs_exclude_each_other(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", ids(20, 30)), tmp_path / "out"
    first = JobJournal(job_of(source, output))
    with pytest.raises(UnavailableError, match="another run writes to"):
        run(source, output)
    first.close()
    assert run(source, output)
    assert run(source, output), "nothing is left to do"
    assert len(read(output)) == 10


def test_two_journals_of_one_output_exclude_each_other(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", ids(20, 30)), tmp_path / "out"
    first = JobJournal(job_of(source, output, journal=str(tmp_path / "a")))
    with pytest.raises(UnavailableError, match="another run writes to"):
        run(source, output, journal=str(tmp_path / "b"))
    first.close()
    assert run(source, output, journal=str(tmp_path / "b"))


def test_a_glob_does_not_read_the_output(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", ids(20, 30))
    for glob in ("*.jsonl", "../*/*.jsonl", "**.jsonl"):
        for _ in range(2):  # once more with nothing left to do
            assert run(tmp_path / "in" / glob, tmp_path / "in/out", part_rows=5)
            assert len(read(tmp_path / "in/out")) == 10
        (tmp_path / "in/out").rename(tmp_path / "in" / f"_{len(glob)}")


@given(st.lists(st.integers(0, 40), unique=True), st.randoms())
def test_ranges_are_a_set_of_rows(rows: list[int], order: random.Random) -> None:
    pieces = Ranges((file, row, row + 1) for file in (0, 1) for row in rows).pieces
    order.shuffle(pieces)
    ranges = Ranges(pieces)
    assert sum(end - first for _, first, end in ranges.pieces) == 2 * len(rows)
    for first in range(40):
        end = first + order.randint(0, 4)
        assert ranges.covers(1, first, end) == (set(range(first, end)) <= set(rows))


# ------------------------------------------------------------------ errors and bounds


def test_bad_rows_and_how_many_are_too_many(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*ids(0, 300), "no object", {"other": 1}])
    with source.open("a") as file:
        file.write("{broken\n" + 100_000 * "[" + "\n")
    assert run(source, tmp_path / "out", max_errors="5")
    found = {each["row"]: each for each in bad(tmp_path / "out")}
    assert found.keys() == {13, 300, 301, 302, 303}
    assert found[13]["error"] == "ValueError: unlucky"
    assert found[13]["input"] == {"id": 13}
    assert "malformed" in found[302]["error"]
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [*range(13), *range(14, 300)]
    for most in ("3", "1%"):
        with pytest.raises(InvalidArgumentError, match=r"rows are bad, more than max_errors"):
            run(source, tmp_path / f"out{most}", max_errors=most)
    clean = write_lines(tmp_path / "clean.jsonl", ids(0, 300))
    with pytest.raises(InvalidArgumentError, match="column 'id' is both of the input and of the"):
        run(clean, tmp_path / "both", map="builtins:dict", max_errors=0.05)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_raised_outside_of_one_row(tmp_path: Path, workers: int) -> None:
    """What cannot be sent, an exit, and a value that Python does not have."""
    days = pa.array([0, 0, 10**8, 0], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"id": list(range(4)), "day": days}), tmp_path / "in.parquet")
    settings = {"map": "tests.offline.job_rows:unruly", "keep": ["id"], "workers": workers}
    assert run(tmp_path / "in.parquet", tmp_path / "out", **settings)
    assert {each["row"] for each in bad(tmp_path / "out")} == {0, 1, 2}
    assert [row["id"] for row in read(tmp_path / "out")] == [3]


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
        source, outer = io.BytesIO(Path(path).read_bytes()), self

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
    monkeypatch.setattr(dataset, "pause", lambda tries: 0.001)
    settings = {"map": "builtins:dict", "keep": [], "retries": 3, "part_rows": 100}
    for failing in (4, 3):
        storage = Storage(failing)
        monkeypatch.setattr(dataset, "file_system", lambda place, fs=storage: (fs, place))
        if failing == 4:
            with pytest.raises(UnavailableError, match=r"input .*in/0.* the network is gone"):
                run(tmp_path / "in", tmp_path / "out", **settings)
        else:
            assert run(tmp_path / "in", tmp_path / "out", **settings)
    assert bad(tmp_path / "out") == []
    made = sorted(row["id"] if files == "lines" else row["text"] for row in read(tmp_path / "out"))
    assert made == (list(range(20, 2820)) if files == "lines" else ["0", "1", "2", "3"])


@pytest.mark.parametrize("name", ["a.parquet", "b.parquet", "a.arrow", "a.csv.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    """Compressed bytes that are none cannot be told from a storage that fails."""
    monkeypatch.setattr(dataset, "pause", lambda tries: 0.001)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"damaged " * 20)
    if name == "b.parquet":
        pq.write_table(pa.table({"id": [20]}), tmp_path / "in/a.parquet")
    error = UnavailableError if name == "a.csv.gz" else InvalidArgumentError
    with pytest.raises(error, match=f"input .*{name} cannot be read: "):
        run(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_share_that_is_read_is_that_of_the_rows_given(tmp_path: Path, suffix: str) -> None:
    """Also of an input that is smaller than what is read ahead."""
    source = tmp_path / f"in.jsonl{suffix}"
    rows = 20_000 if suffix else 400  # what a codec reads at once is not divided
    with (gzip.open if suffix else open)(source, "wt") as file:
        file.writelines(f'{{"id": {i}, "text": "{os.urandom(16).hex()}"}}\n' for i in range(rows))
    found = dataset.Dataset(job_of(source, tmp_path / "out"))
    chunks = [c for c in found.chunks(Record(tmp_path), rows // 8) if isinstance(c, dataset.Chunk)]
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
        rows, most = 0, 0
        for chunk in found.chunks(Record(tmp_path / "none"), 1000):
            if isinstance(chunk, dataset.Chunk):
                rows += len(chunk.rows)
                assert len(pickle.dumps(chunk)) < 150_000
                most = max(most, pa.total_allocated_bytes() - before)
        assert rows == 600_000
        if name == "a.parquet":
            assert most < of_table / 2
    job = job_of(tmp_path / "a.arrow", tmp_path / "out")
    journal = JobJournal(job)
    for files in (list(found.files), list(found.files)):  # the second as of a job that is resumed
        journal.begin(job, files, False)
        assert journal.record.begin is not None
        assert journal.record.begin.files is files, "one list of them is held"
    journal.close()


class Flaky(executors.Passing):
    """Fails each row once in a way that may pass, and row 5 always so."""

    error: JitneyError

    def __init__(self) -> None:
        super().__init__()
        self.failed: set[int] = set()

    def step(self) -> list[executors.Outcome]:
        outcomes = super().step()
        fresh = {key for key, _ in outcomes} - self.failed | {5}
        self.failed |= fresh
        return [(key, self.error if key in fresh else result) for key, result in outcomes]


@pytest.mark.parametrize("error", [InternalError("a fault"), UnavailableError("it is away")])
def test_transient_errors_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: JitneyError
) -> None:
    """A row that fails to the end is bad; but if a server is away, that ends the job."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    with monkeypatch.context() as patched:
        patched.setattr(executors, "Passing", Flaky)
        patched.setattr(Flaky, "error", error, raising=False)
        patched.setattr(feeding, "pause", lambda tries: 0.001)
        if isinstance(error, UnavailableError):
            with pytest.raises(UnavailableError, match="it is away"):
                run(source, tmp_path / "out", retries=2)
            assert bad(tmp_path / "out") == []
        else:
            assert run(source, tmp_path / "out", retries=2)
            assert [each["error"] for each in bad(tmp_path / "out")] == ["a fault"]
            figures = read_record(str(tmp_path / "out"), None).parts[-1].figures
            assert figures["tries"] == 21
    assert run(source, tmp_path / "out")
    assert len(read(tmp_path / "out")) == 20 - len(bad(tmp_path / "out"))


def test_rows_on_their_way_are_bounded(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 2000))
    for ordered in (False, True):
        output = tmp_path / f"out{ordered}"
        assert run(source, output, in_flight=50, workers=1, part_rows=100, ordered=ordered)
        figures = read_record(str(output), None).parts[-1].figures
        assert 10 < figures["most_in_flight"] <= 50
        rows = [row["id"] for row in read(output)]
        assert (rows if ordered else sorted(rows)) == list(range(20, 2000))


def test_workers_that_die_as_they_start(tmp_path: Path, monkeypatch: Any) -> None:
    """However much they were to be told: a job that waited for them would never end."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    source = write_lines(tmp_path / "in.jsonl", ids(0, 3))
    assert run(source, tmp_path / "out", workers=1, prompt="x" * 200_000)
    died = "the process that prepared it died"
    assert [each["error"] for each in bad(tmp_path / "out")] == [died] * 3


def test_a_line_of_progress() -> None:
    """A quarter of the input is read: 100 rows by an earlier run, 300 by this one."""
    figures = {"seconds": 50.0, "done": 200.0, "bad": 3.0, "position": 0.25, "taken": 300.0}
    figures |= {"tokens": 5000.0, "steps": 10.0, "rows_in_steps": 40.0, "most_rows": 8.0}
    line = "300 rows, 4.0 rows/s, 100 tokens/s, batch 50% full, 0:05:25 left, 3 bad"
    assert Progress().line(State(figures, 100)) == line


# ------------------------------------------------------------------ settings and commands


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colunm": "x"}, r"setting 'colunm' is unknown \(did you mean 'column'\?\)"),
        ({"part_rows": 0}, r"part_rows is 0: expected `int` >= 1"),
        ({"part_seconds": "inf"}, r"part_seconds is 'inf': expected `float` <= 1000000000.0"),
        ({"labels": "lables.txt"}, "labels is 'lables.txt', but must be a file that is there"),
        ({"template": "tmpl.j2"}, "template is 'tmpl.j2', but must be a file that is there"),
        ({"in_flight": "many"}, r"in_flight is 'many': expected `int`"),
        ({"max_errors": "200%"}, r"max_errors is '200%', but must be a number, or a share"),
        ({"map": None}, "task map needs the setting map"),
        ({"map": "tests.nothing:f"}, "map 'tests.nothing:f' cannot be imported"),
        ({"task": "generate"}, "task generate needs the setting model"),
        (
            {"server": "h:1", "model": "m", "input_format": "openai"},
            "server is 'h:1', but",
        ),
        (
            {"input": "/a/b", "output": "/a/b/c"},
            "must be outside of the input",
        ),
        ({"output": "s3://bucket/out"}, "output is not local: name a local folder for the journal"),
        ({"input": "/nowhere/*.jsonl"}, r"input /nowhere/\*.jsonl is not there"),
        ({"input": str(Path(__file__))}, "has files of no known kind: name input_format"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 22))
    output = settings.pop("output", str(tmp_path / "out"))
    given = {"input": str(source), "task": "map", "map": "builtins:dict", "workers": 0}
    with pytest.raises(InvalidArgumentError, match=message):
        executors_run({**given, "output": output, **settings})


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 22))
    with pytest.raises(UnavailableError, match="model m on localhost:9: "):
        run(source, tmp_path / "out", task="generate", map=None, model="m", server="localhost:9")


def executors_run(settings: dict[str, Any]) -> None:
    from jitney.offline.run import run_job

    run_job(make_job(settings))


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    job = f"input: {source}\noutput: {tmp_path}/out\ntask: map\nworkers: 0\npart_rows: 10\n"
    (tmp_path / "job.yaml").write_text(job + "map: tests.offline.job_rows:twice\n")
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        stopped = CliRunner().invoke(cli.app, ["batch", "run", str(tmp_path / "job.yaml")])
        assert isinstance(stopped.exception, UnavailableError)
    status = CliRunner().invoke(cli.app, ["batch", "status", str(tmp_path / "out")]).output
    assert "not complete" in status
    assert "rows    10 of 20: 10 written, 0 bad" in status
    cost = (
        r"^cost    [\d.]+ s without loading: [\d.,]+ rows/s; [\d.,]+ core-seconds a thousand rows$"
    )
    assert re.search(cost, status, re.M)
    assert CliRunner().invoke(cli.app, ["batch", "resume", str(tmp_path / "out")]).exit_code == 0
    assert len(read(tmp_path / "out")) == 20
    page = (tmp_path / "out/_job/report.html").read_text()
    assert "Complete: 20 rows written, 0 bad" in page
    assert "Runs: 2." in page
    assert '<th scope="row">run: the model at work</th>' in page
    assert 'id="throughput"' in page
    again = CliRunner().invoke(cli.app, ["batch", "report", str(tmp_path / "out")])
    assert again.output.strip() == str(tmp_path / "out/_job/report.html")
    options = ["--task", "map", "--map", "tests.offline.job_rows:twice", "--workers", "0"]
    same = ["batch", "run", str(source), str(tmp_path / "out"), *options]
    assert ": complete\n" in CliRunner().invoke(cli.app, same).output
    assert job_of(source, tmp_path / "out") != make_job(
        {"input": "a", "output": "b", "model": "m", "sampling": {"seed": 1}}
    )
