"""The files of an input: which are read and how, which are passed over, and what becomes of damaged
ones."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs.job_record import read_record
from jitney_jobs.outcome import ExitStatus
from jitney_jobs.preview import preview_of

from tests.jobs.job_rows import bad, ids, job_of, read, run, write_lines
from tests.jobs.job_status import run_twice

MARKED = "tests.jobs.job_rows:marked"


def parquet_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        pq.write_table(pa.table({"id": [100 + number]}), folder / f"{number:02}.parquet")


@pytest.mark.parametrize("damaged", ["00", "07", "19"])
def test_a_damaged_file_of_twenty_is_listed_and_the_others_are_done(
    tmp_path: Path, damaged: str
) -> None:
    parquet_files(tmp_path / "in", 20)
    (tmp_path / f"in/{damaged}.parquet").write_bytes(b"PAR1 no more")
    ended = run_twice(tmp_path / "in", tmp_path / "out")
    assert ended.exit_code == ExitStatus.BAD_ROWS
    assert "files   1 of 20 cannot be read to their end:\n" in ended.stdout
    assert f"in/{damaged}.parquet cannot be read: " in ended.stdout
    assert len(read(tmp_path / "out")) == 19
    with pytest.raises(InvalidArgumentError, match=rf"in/{damaged}.parquet cannot be read"):
        run(tmp_path / "in", tmp_path / "strict", skip_bad_files=False)


def test_what_can_be_read_of_a_damaged_file_is_done(tmp_path: Path) -> None:
    """Compressed lines that break off, and a CSV file that does not exist any more when it is its
    turn."""
    (tmp_path / "in").mkdir()
    lines = b"".join(b'{"id": %d, "x": "%d"}\n' % (i, hash(str(i))) for i in range(20, 20_000))
    whole = gzip.compress(lines)
    (tmp_path / "in/a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    (tmp_path / "in/b.jsonl.gz").write_bytes(flipped)
    write_lines(tmp_path / "in/c.jsonl", ids(20, 30))
    began = time.monotonic()
    assert run(tmp_path / "in", tmp_path / "out")
    assert time.monotonic() - began < 60, "damage is no storage that is away"
    record = read_record(str(tmp_path / "out"), None)
    assert record.bad_files.keys() >= {0, 1}
    assert len(read(tmp_path / "out")) > 10


def test_an_input_of_which_nothing_can_be_read_is_the_jobs_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / f"in/{name}.parquet").write_bytes(b"no parquet")
    with pytest.raises(InvalidArgumentError, match=r"in/a.parquet cannot be read"):
        run(tmp_path / "in", tmp_path / "out")


ROWS: list[dict[str, Any]] = [{"id": "20", "t": 'a"},{\\ ü'}, {"id": "21", "t": "b"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("array.json", json.dumps(ROWS).encode()),
        ("lines.json", "\n".join(map(json.dumps, ROWS)).encode()),
        ("pretty.json", json.dumps(ROWS, indent=2).encode()),
        ("objects.json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("bom.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode()),
        ("array.jsonl", json.dumps(ROWS).encode()),
        ("array.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("semicolons.csv", 'id;t\n20;"a""},{\\ ü"\n21;b\n'.encode()),
        ("tabs.csv", 'id\tt\n20\t"a""},{\\ ü"\n21\tb\n'.encode()),
        ("bars.csv", '"id"|"t"\n20|"a""},{\\ ü"\n21|b\n'.encode()),
        ("commas.csv", 'id,t\n20,"a""},{\\ ü"\n21,b\n'.encode()),
    ],
)
def test_arrays_and_other_delimiters_are_read(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert run(tmp_path / name, tmp_path / "out", map=MARKED, ordered=True)
    assert bad(tmp_path / "out") == []
    assert read(tmp_path / "out") == [{**row, "mark": True} for row in ROWS]


def test_an_array_that_breaks_off_is_a_bad_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_bytes(json.dumps(ROWS).encode()[:-20])
    write_lines(tmp_path / "in/b.json", ids(30, 31))
    assert run_twice(tmp_path / "in", tmp_path / "out").exit_code == ExitStatus.BAD_ROWS
    assert read_record(str(tmp_path / "out"), None).bad_files.keys() == {0}
    assert [row["id"] for row in read(tmp_path / "out")][-1] == 30


def test_compressed_texts_are_rows(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt.gz").write_bytes(gzip.compress("Zürich".encode()))
    (tmp_path / "in/b.txt").write_text("Bern")
    assert run(tmp_path / "in", tmp_path / "out", map="builtins:dict", keep=[], ordered=True)
    assert [row["text"] for row in read(tmp_path / "out")] == ["Zürich", "Bern"]


def test_what_was_found_and_passed_over_is_said(tmp_path: Path) -> None:
    """Before anything runs, with `--dry-run` alone, and in the summary."""
    parquet_files(tmp_path / "in", 3)
    for name in ("a.log", "b.log", "c", ".hidden.parquet"):
        (tmp_path / "in" / name).touch()
    dry = run_twice(tmp_path / "in", tmp_path / "out", "--dry-run")
    assert dry.exit_code == 0
    found = "3 .parquet as parquet"
    passed = "passed over: 2 .log, 1 without a suffix, 1 hidden (_ or .)"
    assert found in dry.stdout
    assert passed in dry.stdout
    assert "columns id int64" in dry.stdout
    assert "id: 100" in dry.stdout
    assert not (tmp_path / "out").exists()
    ran = run_twice(tmp_path / "in", tmp_path / "out")
    assert f"{found}, " in ran.stderr
    assert passed in ran.stdout
    mixed = write_lines(tmp_path / "in/d.jsonl", ids(0, 1))
    with pytest.raises(InvalidArgumentError, match=r"there are 3 .parquet, 2 .log, 1 w"):
        preview_of(job_of(tmp_path / "in", tmp_path / "out"))
    assert mixed.exists()
