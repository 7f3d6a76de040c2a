"""A job that is divided into shards, which several machines may do, and then merged."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import merging
from jitney_jobs.job_record import read_record
from jitney_jobs.merging import merge_shards
from jitney_jobs.metrics import Metrics
from jitney_jobs.outcome import ExitStatus
from jitney_jobs.run import run_job
from jitney_jobs.shard_plan import plan_of

from tests.jobs.bucket import Bucket
from tests.jobs.job_rows import bad, fail_at_part, ids, job_of, read, run, write_lines
from tests.jobs.job_status import batch, run_command, run_twice
from tests.jobs.shard_runs import SHARDS, Place, ids_of, lines, run_shards
from tests.jobs.test_lines_on_server import line

# ------------------------------------------------------------------ the whole of it


def test_merged_shards_are_the_job_without_shards(tmp_path: Path, place: Place) -> None:
    """The same lines in the same order, bad rows under the same numbers; the parts stay where they
    are; a second merge changes nothing; the next job of a chain reads it; a job without shards goes
    on with it."""
    source = lines(tmp_path, 0, 60)
    assert run(source, tmp_path / "whole", ordered=True)
    run_shards(source, place.name, ordered=True, part_rows=8)
    parts = {path.name: path.stat().st_ino for path in place.folder.glob("part-*")}
    assert all(re.match(r"part-\d-of-3-\d{5}", name) for name in parts)
    merge_shards(place.name)
    assert read(place.folder) == read(tmp_path / "whole")
    assert bad(place.folder) == bad(tmp_path / "whole")
    assert {path.name: path.stat().st_ino for path in place.folder.glob("part-*")} == parts
    record = read_record(place.name, None)
    whole = read_record(str(tmp_path / "whole"), None)
    assert (record.total, record.written, record.failed) == (60, 59, 1)
    assert record.done.intervals == whole.done.intervals
    assert record.row_counts == whole.row_counts
    numbers = [part.number for part in record.parts]
    assert numbers == list(range(len(parts)))
    assert len({part.figures["run"] for part in record.parts}) == SHARDS
    before = {path: path.read_bytes() for path in place.folder.rglob("*") if path.is_file()}
    said: list[str] = []
    merge_shards(place.name, say=said.append)
    assert (
        said == [f"{record.begin.job.output.partition('?')[0]} is merged already"]
        or "merged already" in said[0]
    )
    assert {path: path.read_bytes() for path in place.folder.rglob("*") if path.is_file()} == before
    assert run(source, place.name, ordered=True), "nothing is done"
    assert run(place.folder, tmp_path / "next", map="tests.jobs.job_rows:marked")
    assert ids_of(tmp_path / "next") == ids_of(place.folder)


def test_the_plan_is_made_once_and_input_that_comes_later_is_not_read(tmp_path: Path) -> None:
    source = lines(tmp_path, 20, 60)
    output = tmp_path / "out"
    run_shards(source, output, 1)
    plan = (output / "_job/plan.json").read_bytes()
    write_lines(source / "later.jsonl", ids(100, 200))
    with (source / "0.jsonl").open("a") as file:
        file.write('{"id": 300}\n')
    run_shards(source, output, 0, 2)
    assert (output / "_job/plan.json").read_bytes() == plan
    merge_shards(str(output))
    assert ids_of(output) == list(range(20, 60))
    end = read_record(str(output), None).end
    assert end is not None
    assert any("later.jsonl has come since" in text for text in end.input_changes)


@pytest.mark.parametrize("count", [1, 7])
def test_there_may_be_one_shard_or_more_than_rows(tmp_path: Path, count: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 24))
    output = tmp_path / "out"
    for index in range(count):
        assert run(source, output, shard=f"{index}/{count}")
    merge_shards(str(output))
    assert ids_of(output) == list(range(20, 24))


def test_map_gives_all_shards_the_columns_of_a_job_without(tmp_path: Path) -> None:
    """Those of the first rows of the whole: the last shard alone would have found numbers."""
    values = ["text", *range(40)]
    (tmp_path / "values").write_text(json.dumps(values))
    rows = [{"id": i, "values": str(tmp_path / "values")} for i in range(41)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    settings = {"map": "tests.jobs.job_rows:of_id", "output_format": "parquet", "ordered": True}
    assert run(source, tmp_path / "whole", **settings)
    for index in (2, 1, 0):
        run_shards(source, tmp_path / "out", index, **settings)
    merge_shards(str(tmp_path / "out"))
    assert read(tmp_path / "out") == read(tmp_path / "whole")
    schemas = {pq.read_schema(path).to_string() for path in (tmp_path / "out").glob("part-*")}
    assert schemas == {pq.read_schema(next((tmp_path / "whole").glob("part-*"))).to_string()}
    assert read_record(str(tmp_path / "out"), None).schema is not None


def test_files_that_are_rows_are_divided_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(20, 30):
        (tmp_path / f"in/{i}.txt").write_text(f"text {i}")
    settings = {"map": "tests.jobs.job_rows:marked"}
    run_shards(tmp_path / "in", tmp_path / "out", **settings)
    merge_shards(str(tmp_path / "out"))
    texts = sorted(row["text"] for row in read(tmp_path / "out"))
    assert texts == [f"text {i}" for i in range(20, 30)]


def test_lines_that_repeat_an_id_of_another_shard_are_bad(tmp_path: Path) -> None:
    from tests.jobs.scripted_api import scripted_api

    names = ["a", "b", "a", "c", "b", "d"]
    source = write_lines(tmp_path / "in.jsonl", [line(name, prompt=name) for name in names])
    with scripted_api() as api:
        run_shards(
            source, tmp_path / "out", task="generate", map=None, model="m", input_format="openai",
            server=api.url,
        )  # fmt: skip
    merge_shards(str(tmp_path / "out"))
    assert sorted(row["custom_id"] for row in read(tmp_path / "out")) == ["a", "b", "c", "d"]
    codes = [(row["row"], row["error"]["code"]) for row in bad(tmp_path / "out")]
    assert sorted(codes) == [(2, "duplicate_custom_id"), (4, "duplicate_custom_id")]


# ------------------------------------------------------------------ goes on


def test_a_shard_goes_on_and_touches_no_part_of_others(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was written and not noted is removed, of its own shard alone."""
    source = lines(tmp_path, 20, 110)
    with monkeypatch.context() as patched:
        fail_at_part(patched, 2)
        for index in (1, 2):
            with pytest.raises(UnavailableError, match="No space left"):
                run(source, place.name, shard=f"{index}/3", part_rows=10)
    assert len(list(place.folder.glob("part-2-of-3-00002*"))) == 1
    resumed = batch("resume", place.name, "--shard", "1/3")
    assert resumed.exit_code == 0, resumed.output
    assert len(list(place.folder.glob("part-2-of-3-00002*"))) == 1
    run_shards(source, place.name, 0, 2, part_rows=7)
    merge_shards(place.name)
    assert ids_of(place.folder) == list(range(20, 110))


@pytest.mark.parametrize("name", ["_put_journal", "_list_bad_files"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_merge_that_is_killed_is_done_again(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, name: str, is_done: bool
) -> None:
    """Before a step, or after it."""
    source = lines(tmp_path, 0, 60)
    run_shards(source, place.name)
    step = getattr(merging, name)

    def killed(*arguments: Any) -> None:
        if is_done:
            step(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(merging, name, killed)
        with pytest.raises(KeyboardInterrupt):
            merge_shards(place.name)
    run_shards(source, place.name)  # nothing is left to do
    merge_shards(place.name)
    again = job_of(source, place.name, shard="0/3")
    with pytest.raises(InvalidArgumentError, match="are merged: retry without the setting shard"):
        run_job(again, retry_bad=True)
    assert len(ids_of(place.folder)) == 59


def test_a_shard_that_runs_again_while_it_is_merged_loses(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On object storage, where no lock holds it back."""
    source = lines(tmp_path, 0, 60)
    output = bucket.place("out")
    run_shards(source, output)
    real = merging._check_bad_rows
    others = iter([0])

    def overtaken(*arguments: Any) -> None:
        for index in others:
            assert run_job(job_of(source, output, shard=f"{index}/3"), retry_bad=True)
        real(*arguments)

    monkeypatch.setattr(merging, "_check_bad_rows", overtaken)
    with pytest.raises(UnavailableError, match=r"shard 0/3 of .* runs again"):
        merge_shards(output)
    merge_shards(output)
    record = read_record(output, None)
    assert (record.written, record.failed) == (59, 1)


# ------------------------------------------------------------------ what is said


def test_statuses_of_shards_and_of_the_merged_job(tmp_path: Path) -> None:
    source = lines(tmp_path, 0, 60)
    output = tmp_path / "out"
    wrong = ["batch", "run", str(source), str(output), "--model", "m", "--shard", "3/3"]
    assert run_command(wrong).status == ExitStatus.COMMAND_LINE
    assert run_twice(source, output, "--shard", "0/3").exit_code == ExitStatus.BAD_ROWS
    assert run_twice(source, output, "--shard", "1/3").exit_code == ExitStatus.COMPLETE
    told = batch("status", output)
    assert told.exit_code == 0
    assert "not complete: 2 of 3 shards are" in told.stdout
    assert "rows    40 of 60: 39 written, 1 bad" in told.stdout
    assert "shard   0/3: 20 of 20 rows, 1 bad, complete" in told.stdout
    assert "shard   2/3: has not begun" in told.stdout
    merge = ["batch", "merge", str(output)]
    missing = run_command(merge)
    assert missing.status == ExitStatus.SHARDS_MISSING
    assert "are not complete: shard 2/3: has not begun" in missing.error
    assert run_command([*merge, "--wait", "soon"]).status == ExitStatus.COMMAND_LINE
    assert run_twice(source, output, "--shard", "2/3").exit_code == ExitStatus.COMPLETE
    assert "every shard is complete; they are not merged" in batch("status", output).stdout
    for _ in range(2):
        merged = batch("merge", output)
        assert merged.exit_code == ExitStatus.BAD_ROWS
        assert "rows    60 of 60: 59 written, 1 bad" in merged.stdout
    assert "complete\n" in batch("status", output).stdout
    assert batch("report", output).exit_code == 0


def test_shards_are_late_together(tmp_path: Path) -> None:
    """The time counts from the plan, which is when the first of them began."""
    source = lines(tmp_path, 20, 60)
    output = tmp_path / "out"
    for index in range(SHARDS):
        done = run_twice(source, output, "--shard", f"{index}/3", "--within", "0.000001s")
        assert done.exit_code == ExitStatus.LATE
    plan = plan_of(str(output))
    assert plan is not None
    begin = read_record(str(output), None, plan.shard(2)).begin
    assert begin is not None
    assert begin.at == plan.at
    assert batch("merge", output).exit_code == ExitStatus.LATE


def test_shards_have_metrics_of_their_own(tmp_path: Path) -> None:
    """Else each would replace what the others push."""
    from jitney.progress import State

    job = job_of(tmp_path / "in.jsonl", tmp_path / "out", shard="1/16", name="nightly")
    state = State({"moved_at": 0.0})
    with contextlib.closing(Metrics(job, state)) as metrics:
        labels = {sample.labels["name"] for each in metrics.collect() for sample in each.samples}
    assert labels == {"nightly-shard-01-of-16"}
