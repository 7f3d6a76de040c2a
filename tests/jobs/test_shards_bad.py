"""Bad rows and damaged files of a job of shards, retried before the merge and after it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import CancelledError
from jitney_jobs.job_record import read_record
from jitney_jobs.merging import merge_shards
from jitney_jobs.outcome import ExitStatus
from jitney_jobs.run import run_job

from tests.jobs.job_rows import bad, ids, job_of, write_lines
from tests.jobs.job_status import batch, run_command
from tests.jobs.shard_runs import Place, ids_of, run_shards


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
