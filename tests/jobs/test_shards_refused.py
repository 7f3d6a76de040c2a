"""Shards that may not run: of another job, beside the job as a whole, or where two runs cannot be
told apart."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import shard_planning
from jitney_jobs.journal import JobJournal
from jitney_jobs.merging import merge_shards
from jitney_jobs.outcome import ExitStatus, ShardsMissingError
from jitney_jobs.planning_claim import PlanningClaim
from jitney_jobs.shard_plan import plan_of

from tests.jobs.bucket import Bucket
from tests.jobs.job_rows import ids, job_of, run, write_lines
from tests.jobs.job_status import run_command
from tests.jobs.shard_runs import Place, ids_of, lines, run_shards


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
    """Another one took this one for dead. It has made its plan, and has written its first part,
    before this one looks at the output, or while it counts."""
    source = lines(tmp_path, 20, 60)
    real = getattr(shard_planning, step)
    others = iter([2])

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(PlanningClaim, "take", lambda claim: True)
        for index in others:
            run_shards(source, place.name, index)
        return real(*arguments)

    monkeypatch.setattr(shard_planning, step, overtaken)
    run_shards(source, place.name, 0, 1)
    merge_shards(place.name)
    assert ids_of(place.folder) == list(range(20, 60))


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
