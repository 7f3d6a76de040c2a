"""The first results of ``map`` set the columns of a table, whenever a job is stopped, and nothing
is done twice because of that."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney_jobs import prepare
from jitney_jobs.job_record import read_record
from jitney_jobs.pipeline import Pipeline
from jitney_jobs.status import status_of

from tests.jobs.job_rows import bad, job_of, read, run

SETTINGS: dict[str, Any] = {
    "map": "tests.jobs.job_rows:noted",
    "keep": ["id"],
    "output_format": "parquet",
    "ordered": True,
}
ROWS = 300


def write_input(folder: Path, stops: tuple[int, ...] = ()) -> Path:
    """Rows, at some of which the job is stopped."""
    path = folder / "in.jsonl"
    log = str(folder / "log")
    rows = [{"id": i, "log": log, "stops": i in stops} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def times_done(folder: Path) -> Counter[int]:
    return Counter(map(int, (folder / "log").read_text().split()))


def table_of(output: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(part) for part in sorted(output.glob("part-*"))])


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each row took seconds."""
    monkeypatch.setattr(prepare, "_MADE_S", 0.0)


def test_a_limit_does_not_set_the_columns(tmp_path: Path) -> None:
    """The rows of the first run are whole numbers; in the whole job they are texts."""
    source = write_input(tmp_path)
    output = tmp_path / "out"
    assert run(source, output, **SETTINGS, limit=5)
    assert read(output) == [{"id": i, "made": i} for i in range(5)]
    assert run(source, output, **SETTINGS, limit=5)
    assert len(read(output)) == 5, "nothing is left to do"
    record = read_record(str(output), None)
    assert "rows    5: 5 written, 0 bad" in status_of(record, job_of(source, output, **SETTINGS))
    assert run(source, output, **SETTINGS, limit=25)
    assert [row["made"] for row in read(output)][18:22] == ["18", "19", "text 20", "text 21"]
    assert run(source, output, **SETTINGS)
    assert bad(output) == []
    done = times_done(tmp_path)
    assert run(source, tmp_path / "whole", **SETTINGS)
    assert table_of(output).equals(table_of(tmp_path / "whole"))
    assert len(read(output)) == ROWS
    assert set(done.values()) == {1}, "results are kept from run to run"
    assert not (output / "_job/held_results").exists()


def test_a_limit_that_has_all_rows(tmp_path: Path) -> None:
    source = write_input(tmp_path)
    assert run(source, tmp_path / "out", **SETTINGS, limit=ROWS)
    assert run(source, tmp_path / "out", **SETTINGS)
    assert len(read(tmp_path / "out")) == ROWS
    assert read_record(str(tmp_path / "out"), None).end is not None
    assert set(times_done(tmp_path).values()) == {1}


@pytest.mark.usefixtures("row_by_row")
def test_a_job_that_is_stopped_early_gets_on(tmp_path: Path) -> None:
    source = write_input(tmp_path, stops=(3, 30, 60))
    output = tmp_path / "out"
    stops = 0
    while not run(source, output, **SETTINGS):
        assert read(output) == [], "so few results set no columns"
        stops += 1
    assert stops == 3
    assert len(read(output)) == ROWS
    assert bad(output) == []
    # Rows that were under way at a stop are done twice.
    done = times_done(tmp_path)
    assert [done[i] for i in (0, 1, 2)] == [1, 1, 1]
    assert sum(done.values()) < ROWS + 3 * 20


@pytest.mark.usefixtures("row_by_row")
def test_a_job_that_is_killed_early_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are kept as often as parts are committed."""
    source = write_input(tmp_path, stops=(60,))
    settings = {**SETTINGS, "part_seconds": 0.001}

    def killed(self: Pipeline) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "commit_rest", killed)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", **settings)
    assert run(source, tmp_path / "out", **settings)
    assert times_done(tmp_path)[0] == 1
    assert [row["id"] for row in read(tmp_path / "out")] == list(range(ROWS))


@pytest.mark.usefixtures("row_by_row")
def test_results_of_another_function_are_not_taken(tmp_path: Path) -> None:
    source = write_input(tmp_path, stops=(30,))
    output = tmp_path / "out"
    assert not run(source, output, **SETTINGS)
    assert (output / "_job/held_results").exists()
    other = {**SETTINGS, "map": "tests.jobs.job_rows:noted_otherwise"}
    assert run(source, output, **other)
    assert read(output) == [{"id": i, "made": -i} for i in range(ROWS)]


@pytest.mark.usefixtures("row_by_row")
def test_results_that_are_torn_are_done_again(tmp_path: Path) -> None:
    source = write_input(tmp_path, stops=(30,))
    output = tmp_path / "out"
    assert not run(source, output, **SETTINGS)
    held = output / "_job/held_results"
    held.write_bytes(held.read_bytes()[:-3])
    assert run(source, output, **SETTINGS)
    assert len(read(output)) == ROWS
