"""A job that is divided into shards, which several machines may do, and then merged."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import CancelledError, InvalidArgumentError, UnavailableError
from jitney_jobs import merging, output_files, shard_planning
from jitney_jobs.journal import FileRows, Interval, JobJournal, OutputPart
from jitney_jobs.journal_entries import decode, encode
from jitney_jobs.merging import merge_shards
from jitney_jobs.metrics import Metrics
from jitney_jobs.outcome import ExitStatus, ShardsMissingError, TooManyBadRows
from jitney_jobs.output_files import LocalFiles
from jitney_jobs.run import read_record, run_job
from jitney_jobs.shard_plan import plan_of

from tests.jobs.bucket import Bucket
from tests.jobs.job_rows import bad, fail_at_part, ids, job_of, read, run, write_lines
from tests.jobs.job_status import run_command
from tests.jobs.test_lines_on_server import line
from tests.jobs.test_outcome import batch, run_twice

SHARDS = 3


class Place:
    """An output, local or in a bucket: its name, and the folder in which it can be looked at."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "out"), tmp_path / "out")
    bucket = request.getfixturevalue("bucket")
    return Place(bucket.place("out"), bucket.folder / "out")


def lines(folder: Path, first: int, end: int, files: int = 2) -> Path:
    """An input of so many files."""
    source = folder / "in"
    source.mkdir()
    count = (end - first) // files
    for number in range(files):
        begin = first + number * count
        write_lines(source / f"{number}.jsonl", ids(begin, begin + count))
    return source


def run_shards(source: Path, output: Path | str, *indices: int, **settings: Any) -> None:
    for index in indices or range(SHARDS):
        assert run(source, output, shard=f"{index}/{SHARDS}", **settings)


def ids_of(output: Path) -> list[int]:
    return sorted(row["id"] for row in read(output))


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


# ------------------------------------------------------------------ what is refused


def test_a_shard_of_another_job_is_refused_by_name(tmp_path: Path) -> None:
    source = lines(tmp_path, 20, 60)
    output = tmp_path / "out"
    run_shards(source, output, 0)
    with pytest.raises(InvalidArgumentError, match=r"divided into 3 shards, not 4"):
        run(source, output, shard="1/4")
    with pytest.raises(InvalidArgumentError, match=r"differs: keep was None, is \['id'\]"):
        run(source, output, shard="1/3", keep=["id"])
    with pytest.raises(InvalidArgumentError, match=r"differs: input was "):
        run(source / "0.jsonl", output, shard="1/3")
    run_shards(source, output, 1, 2, part_rows=5, max_errors="100%")


def test_a_changed_function_is_refused_by_a_shard_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lines(tmp_path, 20, 60)
    run_shards(source, tmp_path / "out", 0)
    monkeypatch.setattr(shard_planning, "fingerprints_of", lambda job: {"map job_rows.py": "x"})
    with pytest.raises(InvalidArgumentError, match=r"of another model or function .*job_rows.py"):
        run(source, tmp_path / "out", shard="1/3")
    run_shards(source, tmp_path / "out", 1, accept_changes=True)


def test_a_wrong_job_makes_no_plan(tmp_path: Path) -> None:
    source = lines(tmp_path, 20, 60)
    wrong = {"task": "generate", "map": None, "model": "m", "prompt": "{txet}"}
    with pytest.raises(InvalidArgumentError, match="txet"):
        run(source, tmp_path / "out", shard="0/3", **wrong)
    assert plan_of(str(tmp_path / "out")) is None
    run_shards(source, tmp_path / "out", 0)


def test_a_job_as_a_whole_and_its_shards_exclude_each_other(tmp_path: Path, place: Place) -> None:
    source = lines(tmp_path, 20, 60)
    run_shards(source, place.name, 0)
    with pytest.raises(InvalidArgumentError, match=r"3 shards that are not merged: go on with"):
        run(source, place.name)
    for command in ("resume", "report"):
        refused = run_command(["batch", command, place.name])
        assert refused.status == ExitStatus.JOB_ERROR
        assert "3 shards that are not merged" in refused.error
    run_shards(source, place.name, 1, 2)
    merge_shards(place.name)
    assert ids_of(place.folder) == list(range(20, 60))


def test_an_output_that_has_something_is_not_divided(tmp_path: Path, place: Place) -> None:
    source = lines(tmp_path, 20, 60)
    assert run(source, place.name)
    with pytest.raises(InvalidArgumentError, match="a job that is not divided into shards"):
        run(source, place.name, shard="0/3")
    with pytest.raises(InvalidArgumentError, match="has no job that is divided into shards"):
        merge_shards(place.name)
    shutil.rmtree(place.folder / "_job")
    with pytest.raises(InvalidArgumentError, match=r"has part-0.*, but no journal"):
        run(source, place.name, shard="0/3")


def test_a_storage_without_conditions_is_refused(tmp_path: Path, bucket: Bucket) -> None:
    bucket.heeds_conditions = False
    source = lines(tmp_path, 20, 60)
    with pytest.raises(InvalidArgumentError, match="does not heed If-None-Match: shards cannot"):
        run(source, bucket.place("out"), shard="0/3")
    with pytest.raises(InvalidArgumentError, match="output is 'gs://b/out', but must be local or"):
        run(source, "gs://b/out", shard="0/3")


def test_a_replaced_file_is_refused(tmp_path: Path) -> None:
    """None of its rows is done by this shard; but its numbers of rows are of the file as it was."""
    source = lines(tmp_path, 20, 60)
    run_shards(source, tmp_path / "out", 0)
    write_lines(source / "1.jsonl", ids(0, 3))
    with pytest.raises(InvalidArgumentError, match=r"1.jsonl was replaced .*, since the job was"):
        run(source, tmp_path / "out", shard="2/3")


def test_runs_that_exclude_each_other(tmp_path: Path, place: Place) -> None:
    source = lines(tmp_path, 20, 60)
    run_shards(source, place.name, 0, 1)
    journal = JobJournal(job_of(source, place.name, shard="2/3"))
    with contextlib.closing(journal):
        if "://" not in place.name:  # else the same process waits to see whether it lives
            with pytest.raises(UnavailableError, match="another run writes to shard 2/3 of"):
                run(source, place.name, shard="2/3")
            with pytest.raises(UnavailableError, match="another run writes to"):
                run(source, place.name)
        with pytest.raises(ShardsMissingError):
            merge_shards(place.name)
        run_shards(source, place.name, 0)  # another shard goes on beside it
    run_shards(source, place.name, 2)
    merge_shards(place.name)


@pytest.mark.parametrize("step", ["Dataset", "divided"])
def test_shards_that_plan_at_the_same_time_agree(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another one has made its plan, and has written its first part, before this one looks at the
    output, or while it counts."""
    source = lines(tmp_path, 20, 60)
    real = getattr(shard_planning, step)
    others = iter([2])

    def overtaken(*arguments: Any) -> Any:
        for index in others:
            run_shards(source, place.name, index)
        return real(*arguments)

    monkeypatch.setattr(shard_planning, step, overtaken)
    run_shards(source, place.name, 0, 1)
    merge_shards(place.name)
    assert ids_of(place.folder) == list(range(20, 60))


def test_a_file_is_created_by_one_of_many_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(tmp_path)
    assert [files.create("a/b", text) for text in (b"one", b"two", b"")] == [True, False, False]
    assert (tmp_path / "a/b").read_bytes() == b"one"
    assert os.listdir(tmp_path / "a") == ["b"]

    def no_links(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(output_files.os, "link", no_links)
    with pytest.raises(InvalidArgumentError, match="a file system without hard links"):
        files.create("a/c", b"")
    assert os.listdir(tmp_path / "a") == ["b"]


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


# ------------------------------------------------------------------ what is bad


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


def test_a_merge_waits_for_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lines(tmp_path, 20, 60)
    run_shards(source, tmp_path / "out", 0, 1)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            run_shards(source, tmp_path / "out", 2)

    monkeypatch.setattr(merging.time, "sleep", pause)
    said: list[str] = []
    merge_shards(str(tmp_path / "out"), wait_s=100, say=said.append)
    assert said == ["waits for 1 of 3 shards"]
    assert pauses[0] < pauses[1]
    assert ids_of(tmp_path / "out") == list(range(20, 60))


def test_bad_rows_of_all_shards_are_held_against_the_limit(tmp_path: Path) -> None:
    """Each shard was held against its own rows."""
    rows = [{"id": 13 if i % 10 == 0 else i} for i in range(20, 80)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run_shards(source, tmp_path / "out", max_errors=4)
    with pytest.raises(TooManyBadRows, match=r"6 of 60 rows of all shards .*max_errors \(4\)"):
        merge_shards(str(tmp_path / "out"))
    merge = ["batch", "merge", str(tmp_path / "out")]
    assert run_command(merge).status == ExitStatus.TOO_MANY_BAD
    merged = batch("merge", tmp_path / "out", "--max-errors", "10%")
    assert merged.exit_code == ExitStatus.BAD_ROWS


def retried(row: dict[str, Any]) -> dict[str, Any]:
    """Bad are the ids of which there is no file of that name."""
    if not Path(row["folder"], str(row["id"])).exists():
        raise ValueError("not yet")
    return {"twice": 2 * row["id"]}


@pytest.mark.parametrize("is_merged", [False, True])
def test_bad_rows_are_retried_in_a_shard_and_after_the_merge(
    tmp_path: Path, place: Place, is_merged: bool
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    source = write_lines(
        tmp_path / "in.jsonl", [{"id": i, "folder": str(folder)} for i in range(20, 50)]
    )
    for i in range(20, 50):
        if i not in (22, 33, 44):
            (folder / str(i)).touch()
    settings = {"map": f"{__name__}:retried", "part_rows": 4}
    middle = job_of(source, place.name, **settings, shard="1/3")
    for _ in range(3):  # on object storage its claims get numbers beyond that of the merged job
        with pytest.raises(CancelledError):
            run_job(middle, wanted=lambda: False)
    run_shards(source, place.name, **settings)
    if is_merged:
        merge_shards(place.name)
    (folder / "33").touch()
    shard = {} if is_merged else {"shard": "1/3"}
    assert run_job(job_of(source, place.name, **settings, **shard), retry_bad=True)
    if not is_merged:
        merge_shards(place.name)
    record = read_record(place.name, None)
    assert record.end is not None
    assert (record.written, record.failed) == (28, 2)
    assert record.done.intervals == [(0, 0, 30)]
    assert ids_of(place.folder) == [i for i in range(20, 50) if i not in (22, 44)]
    named = {name for part in record.parts for name in part.files}
    there = {path.relative_to(place.folder).as_posix() for path in place.folder.rglob("part-*")}
    assert named == there
    assert sorted(row["input"]["id"] for row in bad(place.folder)) == [22, 44]


def test_damaged_files_are_listed_once_and_can_be_put_right(tmp_path: Path, place: Place) -> None:
    """One cannot be read at all, the other not to its end: what is behind that belongs to one
    shard, which reads it once the file is whole."""
    source = tmp_path / "in"
    source.mkdir()
    good = write_lines(source / "a.jsonl", ids(20, 40))
    (source / "b.json").write_text("")
    whole = json.dumps(ids(40, 80))
    (source / "c.json").write_text(whole[:-200])
    run_shards(source, place.name)
    merged = batch("merge", place.name)
    assert merged.exit_code == ExitStatus.BAD_ROWS, merged.output
    listed = (place.folder / "_errors/files.jsonl").read_text().splitlines()
    assert [Path(json.loads(each)["file"]).name for each in listed] == ["c.json"]
    assert [path.name for path in (place.folder / "_errors").glob("files*")] == ["files.jsonl"]
    (source / "c.json").write_text(whole)
    retried = batch("resume", place.name, "--retry-bad")
    assert retried.exit_code == ExitStatus.COMPLETE, retried.output
    assert ids_of(place.folder) == list(range(20, 80))
    assert good.exists()
    assert not (place.folder / "_errors/files.jsonl").exists()


def test_a_damaged_file_is_put_right_before_the_merge(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", ids(20, 40))
    whole = json.dumps(ids(40, 80))
    (source / "c.json").write_text(whole[:-200])
    output = tmp_path / "out"
    run_shards(source, output)
    (source / "c.json").write_text(whole)
    for index in (1, 2):  # both have seen the damage
        retried = batch("resume", output, "--shard", f"{index}/3", "--retry-bad")
        assert retried.exit_code == ExitStatus.COMPLETE, retried.output
    merge_shards(str(output))
    assert ids_of(output) == list(range(20, 80))
    record = read_record(str(output), None)
    assert record.bad_files == {}
    assert record.total == 60


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_input_of_one_file_that_is_damaged(tmp_path: Path, is_lost: bool) -> None:
    """A shard that can read nothing of it is complete all the same. If no shard could, the job is
    not."""
    source = tmp_path / "in.parquet"
    pq.write_table(
        pa.Table.from_pylist(ids(20, 80)),
        source,
        row_group_size=20,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    whole = source.read_bytes()
    places = [whole.index(id.to_bytes(8, "little")) for id in (25, 45, 65)]
    damaged = bytearray(whole)
    for place in places if is_lost else places[1:]:
        damaged[place] ^= 1
    source.write_bytes(damaged)
    run_shards(source, tmp_path / "out")
    merge = ["batch", "merge", str(tmp_path / "out")]
    done = run_command(merge)
    assert done.status == (ExitStatus.JOB_ERROR if is_lost else ExitStatus.BAD_ROWS), done
    assert ("cannot be read" in done.error) == is_lost
    assert ids_of(tmp_path / "out") == ([] if is_lost else list(range(20, 40)))


# ------------------------------------------------------------------ what a merge checks


def test_a_merge_finds_what_is_lost_or_exchanged(tmp_path: Path) -> None:
    source = lines(tmp_path, 20, 80)
    output = tmp_path / "out"
    run_shards(source, output, part_rows=5)
    (part, *_) = sorted(output.glob("part-1-of-3-*"))
    data = part.read_bytes()
    part.unlink()
    with pytest.raises(InvalidArgumentError, match=rf"part {part.name} of .* has 0 bytes, but had"):
        merge_shards(str(output))
    part.write_bytes(data)
    journal = output / "_job/shard-1-of-3/journal.jsonl"
    kept = journal.read_text()
    journal.write_text((output / "_job/shard-0-of-3/journal.jsonl").read_text())
    with pytest.raises(InvalidArgumentError, match=r"shard 1/3 of .* belongs to another plan"):
        merge_shards(str(output))
    without_part = [each for each in kept.splitlines() if '"number":1,' not in each]
    journal.write_text("\n".join(without_part) + "\n")
    with pytest.raises(ShardsMissingError, match="shard 1/3: 15 of 20 rows, last"):
        merge_shards(str(output))
    journal.write_text(kept)
    plan = output / "_job/plan.json"
    plan.write_text(plan.read_text().replace("0.jsonl", "9.jsonl"))
    with pytest.raises(InvalidArgumentError, match=r"plan.json .* is damaged: its checksum"):
        merge_shards(str(output))


def test_a_shard_of_a_plan_that_was_removed_is_refused(tmp_path: Path) -> None:
    source = lines(tmp_path, 20, 80)
    output = tmp_path / "out"
    run_shards(source, output, 0)
    shutil.move(output / "part-0-of-3-00000.jsonl", tmp_path / "kept")
    (output / "_job/plan.json").unlink()
    run_shards(source, output, 1)
    shutil.move(tmp_path / "kept", output / "part-0-of-3-00000.jsonl")
    with pytest.raises(InvalidArgumentError, match="rows of shard 0/3 that belong to another plan"):
        run(source, output, shard="0/3")


def test_shards_have_metrics_of_their_own(tmp_path: Path) -> None:
    """Else each would replace what the others push."""
    from jitney.progress import State

    job = job_of(tmp_path / "in.jsonl", tmp_path / "out", shard="1/16", name="nightly")
    state = State({"moved_at": 0.0})
    with contextlib.closing(Metrics(job, state)) as metrics:
        labels = {sample.labels["name"] for each in metrics.collect() for sample in each.samples}
    assert labels == {"nightly-shard-01-of-16"}


def move_shard(output: Path, first: int) -> None:
    """Have the plan say that shard 1 begins at that row."""
    plan = plan_of(str(output))
    assert plan is not None
    (rows,) = plan.shards[1]
    shards = [plan.shards[0], [rows._replace(first=first)], plan.shards[2]]
    moved = msgspec.structs.replace(plan, shards=shards)
    (output / "_job/plan.json").write_bytes(encode(moved))


@pytest.mark.parametrize("first", [15, 25])
def test_ranges_that_overlap_or_leave_a_gap_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 80))
    output = tmp_path / "out"
    run_shards(source, output, 0)
    move_shard(output, first)
    run_shards(source, output, 1, 2)
    with pytest.raises(InvalidArgumentError, match=f"row {first} of file 0 does not follow"):
        merge_shards(str(output))
    if first < 20:  # the rows that are done are looked at, too
        monkeypatch.setattr(merging, "_check_plan", lambda plan: None)
        with pytest.raises(InvalidArgumentError, match=r"rows 15 to 19 of .* are in two shards"):
            merge_shards(str(output))


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (-3, r"shard 1/3 of .* lacks rows 37 to 39 of .*in.jsonl"),
        (3, r"shard 1/3 of .* lacks rows 20 to 22 of .*in.jsonl"),
    ],
)
def test_a_shard_that_did_other_rows_is_not_merged(tmp_path: Path, shift: int, said: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 80))
    output = tmp_path / "out"
    run_shards(source, output)
    journal = output / "_job/shard-1-of-3/journal.jsonl"
    moved = []
    for data in journal.read_bytes().splitlines(keepends=True):
        entry, _ = decode(data)
        if isinstance(entry, OutputPart):
            intervals = [Interval(f, a + shift, b + shift) for f, a, b in entry.intervals]
            entry = msgspec.structs.replace(entry, intervals=intervals)
        if not isinstance(entry, FileRows):  # it would tell that the file has no more rows
            moved.append(encode(entry))
    journal.write_bytes(b"".join(moved))
    with pytest.raises(InvalidArgumentError, match=said):
        merge_shards(str(output))
