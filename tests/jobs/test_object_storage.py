"""A job from a bucket into a bucket: pyarrow's S3 client and boto3 against a small S3 server."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError
from jitney_jobs import command, journal_objects
from jitney_jobs.job_record import read_record
from jitney_jobs.journal import InputFile, JobJournal, OutputPart
from jitney_jobs.journal_objects import TakenOverError
from jitney_jobs.report import write_report
from jitney_jobs.run import run_job
from jitney_jobs.status import status_of

from tests.jobs.bucket import Bucket
from tests.jobs.job_rows import bad, fail_at_part, ids, job_of, read, run, write_lines
from tests.jobs.test_job_once import ROOT

ROWS = 300


@pytest.fixture
def bucket(bucket: Bucket) -> Bucket:
    """With a folder for an input."""
    (bucket.folder / "in").mkdir()
    return bucket


def lines_in(bucket: Bucket, count: int) -> str:
    """The address of an input of so many rows."""
    write_lines(bucket.folder / "in/a.jsonl", ids(20, 20 + count))
    return bucket.place("in")


def ids_of(folder: Path) -> list[int]:
    return sorted(row["id"] for row in read(folder))


@pytest.mark.parametrize("is_journal_local", [False, True])
def test_a_job_on_object_storage_goes_on(
    tmp_path: Path, bucket: Bucket, is_journal_local: bool
) -> None:
    """Partitioned Parquet in and out; a part that is not in the journal is removed."""
    for year in (2025, 2026):
        folder = bucket.folder / f"in/year={year}"
        folder.mkdir()
        rows = [{"id": i, "noise": b""} for i in range(ROWS) if i % 2 == year % 2]
        rows[-1]["noise"] = os.urandom(12 << 20)
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=40)
    settings: dict[str, Any] = {"part_rows": 50, "in_flight": 100}
    if is_journal_local:
        settings["journal"] = str(tmp_path / "journal")
    source = bucket.place("in")
    output = bucket.place("out")
    with pytest.raises(JitneyError, match="bad"):
        run(source, output, max_errors=0, **settings)
    (bucket.folder / "out/part-77777.parquet").write_bytes(b"of a run that was killed")
    assert run(source, output, **settings)
    assert not (bucket.folder / "out/part-77777.parquet").exists()
    assert [row["input"]["id"] for row in bad(bucket.folder / "out")] == [13]
    done = sorted((row["id"], row["year"], row["twice"]) for row in read(bucket.folder / "out"))
    assert done == [(i, 2026 - i % 2, 2 * i) for i in range(ROWS) if i != 13]


def test_bad_rows_on_object_storage_are_done_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(bucket.folder / "in/a.jsonl", ids(0, 30))
    source = bucket.place("in")
    output = bucket.place("out")
    assert run(source, output, part_rows=10)
    assert len(bad(bucket.folder / "out")) == 1
    monkeypatch.setattr("tests.jobs.job_rows.twice", lambda row: {"twice": 0})
    assert run_job(job_of(source, output), retry_bad=True)
    assert bad(bucket.folder / "out") == []
    made = {row["id"]: row["twice"] for row in read(bucket.folder / "out")}
    assert made.keys() == set(range(30))
    assert made[13] == 0
    assert run_job(job_of(source, output), retry_bad=True), "there is nothing left to do"
    assert len(read(bucket.folder / "out")) == 30


SCRIPT = """
import sys
from tests.jobs.job_rows import run
print(run(sys.argv[1], sys.argv[2], map="tests.jobs.job_rows:slowly",
          part_rows=25, part_seconds=0.05, workers=1, in_flight=64))
"""


def start(source: str, output: str) -> Any:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, source, output],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_at_random_moments(bucket: Bucket, rows: int, kills: int) -> None:
    source = lines_in(bucket, rows)
    output = bucket.place("out")
    moment = random.Random(5)
    codes = []
    for _ in range(kills):
        before = len(bucket.names("out/_job/journal"))
        process = start(source, output)
        # The claim and the job are noted before any part.
        while process.poll() is None and len(bucket.names("out/_job/journal")) <= before + 2:
            time.sleep(0.005)
        time.sleep(moment.uniform(0, 0.3))
        process.kill()
        process.communicate(timeout=300)
        codes.append(process.returncode)
    assert -9 in codes
    last = start(source, output)
    said, error = last.communicate(timeout=300)
    assert (last.returncode, said) == (0, "True\n"), error
    assert "has not said its end" not in error, "the process is dead, which is known at once"
    assert ids_of(bucket.folder / "out") == list(range(20, 20 + rows))
    assert bucket.left_uploads() == []


def test_kills_at_random_moments(bucket: Bucket) -> None:
    kill_at_random_moments(bucket, rows=500, kills=2)


@pytest.mark.slow
def test_fourteen_kills_leave_nothing(bucket: Bucket) -> None:
    kill_at_random_moments(bucket, rows=4000, kills=14)


def test_of_two_runs_that_begin_together_one_does_the_job(bucket: Bucket) -> None:
    source = lines_in(bucket, 500)
    output = bucket.place("out")
    runs = [start(source, output) for _ in range(3)]
    ends = [run.communicate(timeout=300) for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 1, 1], ends
    for run_, (_, error) in zip(runs, ends, strict=True):
        if run_.returncode == 1:
            assert re.search(
                r"another run (writes|has just begun to write) to s3://bucket/out", error
            )
    assert ids_of(bucket.folder / "out") == list(range(20, 520))


def test_a_run_that_lives_keeps_the_job(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run on another machine, the object that it writes anew tells that it lives."""
    source = lines_in(bucket, 50)
    output = bucket.place("out")
    monkeypatch.setattr(journal_objects, "_BEAT_S", 0.05)
    monkeypatch.setattr(journal_objects, "_POLL_S", 0.1)
    first = JobJournal(job_of(source, output))
    monkeypatch.setattr(journal_objects, "_machine", lambda: "another")
    with pytest.raises(UnavailableError, match=r"another run writes to .*: process \d+ on "):
        run(source, output)
    first.close()
    assert run(source, output)


def killed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs from now on take earlier ones for dead ones on another machine."""
    monkeypatch.setattr(journal_objects, "_machine", lambda: "another")
    monkeypatch.setattr(journal_objects, "_WATCH_S", 0.1)
    monkeypatch.setattr(journal_objects, "_POLL_S", 0.05)


def test_a_run_that_was_taken_over_can_commit_nothing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stood still for longer than the next run waits, and goes on in the midst of a part. It
    removes nothing of the run that took over, and takes its own part back."""
    source = lines_in(bucket, 60)
    output = bucket.place("out")
    killed_elsewhere(monkeypatch)
    append = JobJournal.append
    others = iter([0])

    def overtaken(self: JobJournal, entry: Any) -> None:
        if isinstance(entry, OutputPart) and entry.number == 2:
            for _ in others:
                assert run(source, output, part_rows=7)
        append(self, entry)

    monkeypatch.setattr(JobJournal, "append", overtaken)
    with pytest.raises(TakenOverError, match=r"another run has taken over s3://bucket/out.*: it "):
        run(source, output, part_rows=10)
    assert "waits" in capsys.readouterr().err
    assert ids_of(bucket.folder / "out") == list(range(20, 80))
    named = {name for part in read_record(output, None).parts for name in part.files}
    assert named == set(bucket.names("out")) - {".folder"}


def test_a_run_removes_no_part_of_a_later_one(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not know yet that it was taken over. What it has left itself may be removed."""
    job = job_of(lines_in(bucket, 60), bucket.place("out"))
    killed_elsewhere(monkeypatch)
    with contextlib.closing(JobJournal(job)) as first:
        of_first = f"part-00000{first.next_part()[1]}.jsonl"
        with contextlib.closing(JobJournal(job)) as later:
            of_later = f"_errors/part-00000{later.next_part()[1]}.jsonl"
            of_actor = f"part-00000-000002-000000000040{later.mark_of_run}-12345678.jsonl"
            for part in (of_first, of_later, of_actor):
                assert first.may_remove(part) == (part == of_first)
                assert later.may_remove(part)


def test_a_lost_answer_is_no_collision(bucket: Bucket) -> None:
    """The client asks again, and finds its own object there."""
    bucket.loses_answer_to = "journal/3"
    assert run(lines_in(bucket, 60), bucket.place("out"), part_rows=10)
    assert bucket.loses_answer_to == "", "the fault has come"
    assert ids_of(bucket.folder / "out") == list(range(20, 80))


def test_a_commit_whose_answer_never_came_counts_if_it_is_there(bucket: Bucket) -> None:
    """The job ends, but first it commits the rows that it has: the journal has found out by then
    that the part before is committed, and names the next one otherwise."""
    bucket.loses_answer_to = "journal/3"
    source = lines_in(bucket, 60)
    output = bucket.place("out")
    with pytest.raises(UnavailableError, match="cannot be written"):
        run(source, output, part_rows=10, retries=0)
    assert len(ids_of(bucket.folder / "out")) < 60
    assert run(source, output, part_rows=10)
    assert ids_of(bucket.folder / "out") == list(range(20, 80))


def test_a_journal_without_one_of_its_objects_is_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lines_in(bucket, 60)
    output = bucket.place("out")
    killed_elsewhere(monkeypatch)
    with monkeypatch.context() as patched:
        fail_at_part(patched, 4)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10)
    journal = bucket.folder / "out/_job/journal"
    (journal / "3").rename(bucket.folder / "copy")
    with pytest.raises(InvalidArgumentError, match=r"object 3 is missing, but 4 is there; put it"):
        run(source, output, part_rows=10)
    damaged = (bucket.folder / "copy").read_text().replace('"written":10', '"written":90')
    (journal / "3").write_text(damaged)
    with pytest.raises(InvalidArgumentError, match=r"object 3 of .* is damaged: its checksum"):
        run(source, output, part_rows=10)
    # What the errors say: all from there on is deleted, and done again.
    for number in range(3, len(bucket.names("out/_job/journal"))):
        (journal / str(number)).unlink()
    assert run(source, output, part_rows=10)
    assert ids_of(bucket.folder / "out") == list(range(20, 80))


@pytest.mark.slow
def test_many_commits_are_read_in_their_order(bucket: Bucket) -> None:
    """A bucket lists 10 before 2, and a thousand names at a time."""
    source = lines_in(bucket, 1100)
    output = bucket.place("out")
    assert run(source, output, part_rows=1)
    record = read_record(output, None)
    assert [part.number for part in record.parts] == list(range(1100))
    assert record.done.intervals == [(0, 0, 1100)]


@pytest.mark.parametrize("fault", ["heeds_conditions", "knows_conditions"])
def test_a_storage_without_conditions_needs_a_local_journal(
    tmp_path: Path, bucket: Bucket, fault: str
) -> None:
    setattr(bucket, fault, False)
    source = lines_in(bucket, 30)
    output = bucket.place("out")
    for _ in range(2):
        with pytest.raises(
            InvalidArgumentError, match=r"does not heed If-None-Match: .* local folder"
        ):
            run(source, output)
    assert run(source, output, journal=str(tmp_path / "journal"))
    assert ids_of(bucket.folder / "out") == list(range(20, 50))


def test_a_bucket_that_cannot_be_written_is_named(bucket: Bucket) -> None:
    bucket.is_read_only = True
    text = r"output s3://bucket/out.* cannot be written: .*AccessDenied"
    with pytest.raises(UnavailableError, match=text):
        run(lines_in(bucket, 30), bucket.place("out"), retries=0)


def test_an_output_has_one_journal(tmp_path: Path, bucket: Bucket) -> None:
    source = lines_in(bucket, 30)
    output = bucket.place("out")
    assert run(source, output, journal=str(tmp_path / "a"))
    with pytest.raises(
        InvalidArgumentError, match=r"the journal of s3://bucket/out.* is in .*/a on"
    ):
        run(source, output)
    assert run(source, bucket.place("out-2"))
    with pytest.raises(InvalidArgumentError, match=r"out-2 has part-.*, but no journal"):
        run(source, bucket.place("out-2"), journal=str(tmp_path / "c"))
    assert ids_of(bucket.folder / "out") == ids_of(bucket.folder / "out-2")


def test_of_two_runs_with_local_journals_one_does_the_job(tmp_path: Path, bucket: Bucket) -> None:
    source = lines_in(bucket, 30)
    output = bucket.place("out")
    one = job_of(source, output, journal=str(tmp_path / "a"))
    files = [InputFile("bucket/in/a.jsonl", 9, 0)]
    with contextlib.closing(JobJournal(one)) as journal:
        journal.begin_or_resume(one, files, files_are_rows=False)
        other = job_of(source, output, journal=str(tmp_path / "b"))
        with contextlib.closing(JobJournal(other)) as second:
            text = r"out.* has another journal, in .*/a on .*: name that one; if it is lost"
            with pytest.raises(InvalidArgumentError, match=text):
                second.begin_or_resume(other, files, files_are_rows=False)
    assert run(source, output, journal=str(tmp_path / "a"))


def test_a_job_that_has_written_nothing_can_be_changed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lines_in(bucket, 30)
    output = bucket.place("out")
    with monkeypatch.context() as patched:
        fail_at_part(patched, 0)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10, keep=[])
    assert run(source, output)
    assert ids_of(bucket.folder / "out") == list(range(20, 50))


def test_keys_in_addresses_are_neither_stored_nor_shown(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But they are used: there are none elsewhere."""
    lines_in(bucket, 30)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = "AKIAKEY:se%2Fcret@"
    source = bucket.place("in", keys)
    output = bucket.place("out", keys)
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        with pytest.raises(UnavailableError) as failed:
            run(source, output, part_rows=10)
    assert run(source, output, part_rows=10)
    record = read_record(output, None)
    assert record.begin is not None
    shown = [str(failed.value), status_of(record, record.begin.job), str(write_report(record))]
    with pytest.raises(InvalidArgumentError) as refused:
        run(source, output, keep=[])
    shown.append(str(refused.value))
    stored = [path.read_text() for path in (bucket.folder / "out").rglob("*") if path.is_file()]
    for text in (*shown, *stored):
        assert "AKIAKEY" not in text
        assert "cret" not in text.replace("secret_", "")
    (begin,) = [json.loads(text) for text in stored if text.startswith('{"type":"begin"')]
    assert begin["job"]["input"] == bucket.place("in")


def test_the_commands_find_the_journal_beside_the_output(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a lost node leaves is all in the bucket."""
    source = lines_in(bucket, 60)
    output = bucket.place("out")
    with monkeypatch.context() as patched:
        fail_at_part(patched, 2)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10)
    command.status(output)
    assert re.search(r"^s3://bucket/out.*: not complete", capsys.readouterr().out)
    command.resume(output)
    assert ids_of(bucket.folder / "out") == list(range(20, 80))
    command.report(output)
    assert (bucket.folder / "out/_job/report.html").stat().st_size > 1000
    with pytest.raises(InvalidArgumentError, match=r"s3://bucket/none.* has no journal of a job"):
        command.status(bucket.place("none"))
