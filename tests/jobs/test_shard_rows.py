"""How the rows of an input are divided into shards, and that a shard reads its own alone."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jitney.errors import InvalidArgumentError
from jitney_jobs import table_batches, text_batches
from jitney_jobs.dataset import Dataset
from jitney_jobs.file_reader import FileReader
from jitney_jobs.journal import Begin, FileRows, InputFile, InputNow, Record
from jitney_jobs.journal_entries import VERSION, ReadStart, RowRange
from jitney_jobs.rows import Chunk
from jitney_jobs.shard_planning import CountedFile, divided
from jitney_jobs.shards import Shard

from tests.jobs.job_rows import ids, job_of, note_row_groups, write_lines

ROWS = 90
MakeFile = Callable[[Path], Path]


# ------------------------------------------------------------------ I/N


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("8/8", "0/8 to 7/8: shards count from 0"),
        ("1/0", "of 1 to 100,000 shards"),
        ("0/100001", "of 1 to 100,000 shards"),
        ("-1/8", "I/N: shard I of N, counted from 0, such as 0/8 to 7/8"),
        ("3", "I/N: shard I of N"),
        ("/8", "I/N: shard I of N"),
    ],
)
def test_a_shard_that_there_is_not_is_refused_by_name(text: str, bound: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"shard is '{text}', but must be {bound}"):
        job_of("in", "out", shard=text)


def test_names_of_shards_sort_as_the_shards_do() -> None:
    names = [Shard(index, 101).name for index in range(101)]
    assert names == sorted(names)
    assert Shard.of("07/8") == Shard(7, 8), "a scheduler may write zeros"


@pytest.mark.parametrize(
    "other", [{"limit": 5}, {"ray": "local"}, {"journal": "/somewhere"}], ids=lambda each: min(each)
)
def test_settings_that_shards_cannot_have_are_refused_by_name(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"settings {min(other)} and shard exclude"):
        job_of("in", "out", shard="0/2", **other)


# ------------------------------------------------------------------ dividing


@given(
    files=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8),
    shard_count=st.integers(1, 12),
)
def test_shards_have_equally_many_rows_without_gap_or_overlap(
    files: list[tuple[int, bool]], shard_count: int
) -> None:
    counted = [CountedFile(rows, is_open=is_open) for rows, is_open in files]
    shards = divided(counted, shard_count)
    sizes = [sum(each.end - each.first for each in ranges) for ranges in shards]
    assert max(sizes) - min(sizes) <= 1
    ends: dict[int, int] = {}
    opened = set()
    for ranges in shards:
        assert [each.file for each in ranges] == sorted({each.file for each in ranges})
        for each in ranges:
            assert each.file not in opened, "the rest of a file is the last of it"
            assert each.first == ends.get(each.file, 0)
            ends[each.file] = each.end
            if each.is_open:
                opened.add(each.file)
    assert opened == {file for file, (_, is_open) in enumerate(files) if is_open}
    assert [ends.get(file, 0) for file in range(len(files))] == [rows for rows, _ in files]


# ------------------------------------------------------------------ reading


def jsonl(folder: Path) -> Path:
    lines = [json.dumps({"id": i, "text": "x" * (i % 7)}) for i in range(ROWS)]
    lines[5] += "\n\n  \n"  # rows do not count these
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def compressed(folder: Path) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(folder).read_bytes()))
    (folder / "a.jsonl").unlink()
    return folder / "a.jsonl.gz"


def utf16(folder: Path) -> Path:
    path = jsonl(folder)
    path.write_text(path.read_text(), encoding="utf-16")
    return path


def array(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps(ids(0, ROWS), indent=1))
    return folder / "a.json"


def csv(folder: Path) -> Path:
    """With records over several lines, and one that is none."""
    lines = [f'{i},"a ""{i}""\nb"' for i in range(ROWS)]
    lines[30] = '30,"not closed'
    (folder / "a.csv").write_text("id,text\n" + "\n".join(lines) + "\n")
    return folder / "a.csv"


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ids(0, ROWS)), folder / "a.parquet", row_group_size=20)
    return folder / "a.parquet"


def arrow(folder: Path, make: Any = pa.ipc.new_file) -> Path:
    table = pa.Table.from_pylist(ids(0, ROWS))
    with make(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return folder / "a.arrow"


def arrow_stream(folder: Path) -> Path:
    return arrow(folder, pa.ipc.new_stream)


def texts(folder: Path) -> Path:
    for i in range(ROWS):
        (folder / f"{i:03}.txt").write_text(str(i))
    return folder


KINDS = [jsonl, compressed, utf16, array, csv, parquet, arrow, arrow_stream, texts]


def opened(source: Path) -> Dataset:
    dataset = Dataset(job_of(source, "/nowhere"))
    dataset.set_schema(dataset.look_ahead(is_typed=False))
    return dataset


def record_of(dataset: Dataset, ranges: list[RowRange] | None) -> Record:
    record = Record.empty()
    record.apply(
        Begin(
            version=VERSION,
            job=dataset.job,
            files=dataset.files,
            files_are_rows=dataset.files_are_rows,
            ranges=ranges,
        )
    )
    return record


def read_rows(dataset: Dataset, record: Record) -> tuple[list[Any], list[FileRows]]:
    """Of each row its place and its values; and what is said of files."""
    rows: list[Any] = []
    notes = []
    for entry in dataset.chunks(record, 7):
        if isinstance(entry, Chunk):
            given = [entry.given(index) for index in range(len(entry))]
            places = [
                (entry.id_of(i), entry.offset_of(i), i in entry.unreadable)
                for i in range(len(entry))
            ]
            rows += zip(places, given, strict=True)
        else:
            notes.append(entry)
    return rows, notes


def plan_rows(dataset: Dataset, count: int) -> list[list[RowRange]]:
    counted = [dataset.count_rows(index) for index in range(len(dataset.sizes))]
    return divided([CountedFile(c.rows, c.starts, is_open) for c, is_open in counted], count)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_shards_together_read_what_a_job_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: MakeFile
) -> None:
    """The same rows under the same numbers, with the same offsets."""
    monkeypatch.setattr(text_batches, "_START_BYTES", 100)
    dataset = opened(make(tmp_path))
    whole, _ = read_rows(dataset, record_of(dataset, None))
    assert len(whole) >= ROWS
    together = []
    for ranges in plan_rows(dataset, 4):
        record = record_of(dataset, ranges)
        rows, notes = read_rows(dataset, record)
        assert len(rows) == record.total
        assert [(note.file, note.row_count) for note in notes] == [
            (each.file, each.end) for each in ranges
        ]
        assert all(note.why_bad is None for note in notes)
        together += rows
    assert together == whole


@pytest.mark.parametrize("make", [jsonl, csv], ids=lambda make: make.__name__)
def test_a_shard_does_not_parse_lines_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: MakeFile
) -> None:
    monkeypatch.setattr(text_batches, "_START_BYTES", 100)
    source = make(tmp_path)
    dataset = opened(source)
    last = plan_rows(dataset, 4)[-1]
    expected, _ = read_rows(dataset, record_of(dataset, last))
    assert len(expected) >= ROWS // 4
    data = bytearray(source.read_bytes())
    half = len(data) // 2
    data[20:half] = b"x" * (half - 20)  # were it parsed, rows would have other numbers
    source.write_bytes(data)
    assert read_rows(dataset, record_of(dataset, last))[0] == expected


def test_a_shard_reads_no_row_groups_and_no_batches_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = note_row_groups(monkeypatch)
    (tmp_path / "parquet").mkdir()
    dataset = opened(parquet(tmp_path / "parquet"))
    read_rows(dataset, record_of(dataset, plan_rows(dataset, 4)[-2]))
    assert groups == [2, 3], "rows 45 to 67"

    batches: list[int] = []
    given_batches = table_batches._record_batches

    def noted_batches(reader: Any, first: int) -> Any:
        for number, batch in enumerate(given_batches(reader, first), first):
            batches.append(number)
            yield batch

    (tmp_path / "arrow").mkdir()
    dataset = opened(arrow(tmp_path / "arrow"))
    ranges = plan_rows(dataset, 4)[-2]
    monkeypatch.setattr(table_batches, "_record_batches", noted_batches)
    read_rows(dataset, record_of(dataset, ranges))
    assert batches == [2, 3]


def test_files_that_a_shard_has_no_rows_of_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for i in range(4):
        write_lines(tmp_path / f"in/{i}.jsonl", ids(10 * i, 10 * i + 10))
    dataset = opened(tmp_path / "in")
    ranges = plan_rows(dataset, 4)[2]
    opened_files: list[int] = []
    real = FileReader._batches

    def noted(self: FileReader, file: InputFile, index: int, *rest: Any) -> Any:
        opened_files.append(index)
        return real(self, file, index, *rest)

    monkeypatch.setattr(FileReader, "_batches", noted)
    rows, _ = read_rows(dataset, record_of(dataset, ranges))
    assert [row["id"] for _, row in rows] == list(range(20, 30))
    assert opened_files == [2]


def test_a_file_that_has_lost_rows_since_is_a_bad_one(tmp_path: Path) -> None:
    """Rows that another shard does not have either may not go missing without a word."""
    source = write_lines(tmp_path / "a.jsonl", ids(0, 40))
    dataset = opened(source)
    ranges = plan_rows(dataset, 2)[1]
    write_lines(source, ids(0, 35))
    rows, notes = read_rows(dataset, record_of(dataset, ranges))
    assert len(rows) == 15
    assert notes[0].row_count == 35
    assert "ends behind 35 rows: it had 40" in str(notes[0].why_bad)


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Where its rows began is of the file as it was."""
    longer = [{"id": i, "text": "longer"} for i in range(40)]
    dataset = opened(write_lines(tmp_path / "a.jsonl", longer))
    record = record_of(dataset, [RowRange(0, 30, 40, start=ReadStart(20, 180))])
    record.apply(InputNow(0, dataset.files[0]))
    rows, _ = read_rows(dataset, record)
    assert [row["id"] for _, row in rows] == list(range(30, 40))
