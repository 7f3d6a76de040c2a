"""Rows that travel as blocks of Arrow arrive as they were; without a cluster."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney_jobs.dataset import Dataset
from jitney_jobs.journal import Interval, Record
from jitney_jobs.ray_blocks import block_of, intervals_of, portions_of, without_rows
from jitney_jobs.rows import Chunk

from tests.jobs.job_rows import job_of, write_lines


def write_zoo(folder: Path) -> dict[str, list[Path]]:
    """Two files of each kind, with rows that cannot be read among them."""
    folders = {name: folder / name for name in ("lines", "csv", "parquet", "texts", "bare")}
    for each in folders.values():
        each.mkdir(parents=True)
    for file in range(2):
        rows: list[Any] = [{"id": 10 * file + i, "text": "ä" * i} for i in range(7)]
        hive = folders["lines"] / f"year={2025 + file}"
        hive.mkdir()
        write_lines(hive / "rows.jsonl", rows)
        text = "a,b\n" + "".join(f"{i},ü\n" for i in range(5)) + "6\n"
        (folders["csv"] / f"{file}.csv").write_bytes(text.encode())
        times = pa.array(range(6), pa.timestamp("ns"))
        table = pa.table(
            {"id": range(6), "at": times, "deep": [{"x": [i, None]} for i in range(6)]}
        )
        pq.write_table(table, folders["parquet"] / f"{file}.parquet")
        (folders["texts"] / f"{file}.txt").write_text(f"text {file}")
        pq.write_table(pa.table({"id": range(4)}), folders["bare"] / f"{file}.parquet")
    return {name: sorted(each.rglob("*.*")) for name, each in folders.items()}


def facts_of(chunk: Chunk) -> list[Any]:
    """What is known of each row."""
    rows = chunk.data.to_pylist()
    return [
        (
            chunk.id_of(index),
            rows[index],
            chunk.unreadable.get(index),
            chunk.offset_of(index),
            chunk.further,
            chunk.replaced.get(index),
        )
        for index in range(len(chunk))
    ]


@pytest.mark.parametrize("kind", ["lines", "csv", "parquet", "texts", "bare"])
def test_rows_arrive_as_they_were(tmp_path: Path, kind: str) -> None:
    """Also when Ray joins blocks and cuts them."""
    write_zoo(tmp_path)
    more = {"decode_errors": "replace", "encoding": "ascii"} if kind in ("lines", "csv") else {}
    dataset = Dataset(job_of(tmp_path / kind, tmp_path / "out", **more))
    schema = dataset.look_ahead(is_typed=False)
    dataset.set_schema(schema, [] if kind == "bare" else None)
    chunks = [c for c in dataset.chunks(Record.empty(), 3) if isinstance(c, Chunk)]
    sent = pa.concat_tables([block_of(chunk, 0.25) for chunk in chunks])
    portions = [
        portion
        for block in (sent.slice(0, 5), sent.slice(5))
        for portion in portions_of(block, dataset, 4)
    ]
    assert all(len(portion.chunk) <= 4 for portion in portions)
    assert all(portion.chunk.format == dataset.format for portion in portions)
    assert sum(portion.share for portion in portions) == pytest.approx(0.25 * len(chunks))
    (second_row,) = portions_of(sent.slice(1, 1), dataset, 4)
    assert second_row.share == pytest.approx(0.25 / len(chunks[0]))
    before = [fact for chunk in chunks for fact in facts_of(chunk)]
    after = [fact for portion in portions for fact in facts_of(portion.chunk)]
    assert after == before
    for portion in portions:
        assert portion.chunk.data.schema.equals(chunks[0].data.schema)
    read_bytes = sum(chunk.read_bytes for chunk in chunks)
    assert sum(portion.chunk.read_bytes for portion in portions) == pytest.approx(read_bytes, abs=9)


@pytest.mark.parametrize("kind", ["lines", "bare"])
def test_rows_of_a_block_can_be_left_out(tmp_path: Path, kind: str) -> None:
    write_zoo(tmp_path)
    dataset = Dataset(job_of(tmp_path / kind, tmp_path / "out"))
    dataset.set_schema(dataset.look_ahead(is_typed=False), [] if kind == "bare" else None)
    chunks = [c for c in dataset.chunks(Record.empty(), 2) if isinstance(c, Chunk)]
    block = pa.concat_tables([block_of(chunk, 0.25) for chunk in chunks])
    rows = block.num_rows // 2
    assert intervals_of(block.slice(1)) == [Interval(0, 1, rows), Interval(1, 0, rows)]
    assert without_rows(block, []) is block
    left = without_rows(block, [Interval(0, 0, 3), Interval(1, 1, rows)])
    portions = list(portions_of(left, dataset, 9))
    ids = [portion.chunk.id_of(i) for portion in portions for i in range(len(portion.chunk))]
    assert ids == [*((0, row) for row in range(3, rows)), (1, 0)]
    assert list(portions_of(without_rows(left, intervals_of(left)), dataset, 9)) == []
