"""Each row is written once, whatever ends a job: kills, stops, a full disk, a second run."""

import contextlib
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import executors
from jitney_jobs.dataset import Dataset
from jitney_jobs.ended_rows import Ended
from jitney_jobs.job_record import read_record
from jitney_jobs.journal import InputFile, Interval, JobJournal, OutputPart, Record
from jitney_jobs.output import Output
from jitney_jobs.rows import Chunk
from jitney_jobs.tasks import MapResult

from tests.jobs.job_rows import (
    bad,
    fail_at_part,
    ids,
    job_of,
    note_row_groups,
    read,
    run,
    write_lines,
)

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from pathlib import Path
from tests.jobs.job_rows import run
print(run(Path(sys.argv[1]), Path(sys.argv[2]), map="tests.jobs.job_rows:slowly",
          part_rows=25, part_seconds=0.03, workers=1, in_flight=64))
"""


def start(source: Path, output: Path | str, script: str = SCRIPT, **options: Any) -> Any:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(output)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_kill_at_random_moments(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for i in range(3):
        write_lines(source / f"{i}.jsonl", ids(200 * i, 200 * (i + 1)))
    output = tmp_path / "out"
    moment = random.Random(5)
    journal = output / "_job" / "journal.jsonl"
    codes = []
    for kill in (True, True, False):
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
    settings = {"map": "tests.jobs.job_rows:deadly", "workers": 1, "in_flight": 64}
    assert run(source, tmp_path / "out", **settings)
    found = [(each["row"], each["error"]) for each in bad(tmp_path / "out")]
    assert found == [(row, "the process that prepared it died") for row in (150, 3500)]
    expected = [i for i in range(4000) if i not in (150, 3500)]
    assert sorted(row["id"] for row in read(tmp_path / "out")) == expected


SLOW_READ = """
import time
from jitney_jobs.file_reader import FileReader
batches = FileReader.batches
def stuck(self, *arguments, **options):
    yield from batches(self, *arguments, **options)
    time.sleep(3600)
FileReader.batches = stuck
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
    assert run(source, tmp_path / "out", map="tests.jobs.job_rows:slowly")
    assert sorted(row["id"] for row in read(tmp_path / "out")) == list(range(60))


def test_a_part_that_the_journal_does_not_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    output = tmp_path / "out"
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
    assert [part.number for part in Record.read(journal).parts] == [0, 1, 2, 3, 4]


def test_a_part_that_was_not_noted_is_no_part_of_a_job_that_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run, of other settings, ends before the journal has its first line."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_at_part(patched, 0)
        with pytest.raises(UnavailableError, match="No space left"):
            run(source, output, part_rows=10)
    assert (output / "part-00000.jsonl").exists()

    def killed(self: JobJournal, entry: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(JobJournal, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            run(source, output, keep=["id"])
    assert size_of(output / "_job" / "journal.jsonl") == 0
    assert run(source, output, keep=["id"])
    assert sorted(row["id"] for row in read(output)) == list(range(20, 60))


def test_committed_row_groups_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist(ids(20, 80)), tmp_path / "in.parquet", row_group_size=20)
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        with pytest.raises(UnavailableError):
            run(tmp_path / "in.parquet", tmp_path / "out", part_rows=20)
    groups = note_row_groups(monkeypatch)
    assert run(tmp_path / "in.parquet", tmp_path / "out", part_rows=20)
    assert groups == [1, 2]
    assert [row["id"] for row in read(tmp_path / "out")] == list(range(20, 80))


def test_what_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10)
    with pytest.raises(InvalidArgumentError, match=r"another job: keep was None, is \['id'\]"):
        run(source, output, keep=["id"])
    with pytest.raises(InvalidArgumentError, match=r"another job: input was '"):
        run(source.rename(tmp_path / "in2.jsonl"), output)
    (tmp_path / "in2.jsonl").rename(source)
    part = output / "part-00000.jsonl"
    part.write_text("less")
    with pytest.raises(InvalidArgumentError, match=r"part-00000.jsonl .* has 4 bytes, but had"):
        run(source, output)
    (output / "_job" / "journal.jsonl").unlink()
    with pytest.raises(InvalidArgumentError, match=r"has part-0.*, but no journal"):
        run(source, output)


def test_what_is_known_of_parts_does_not_grow_with_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second row of a file is in one part, the others in another, as rows that end in any
    order may be."""
    monkeypatch.setattr("jitney_jobs.journal_record.MANY", 1000)
    figures = {"run": 0.0}
    job = job_of(tmp_path / "in.jsonl", tmp_path / "out")
    journal = JobJournal(job)
    journal.begin_or_resume(job, [InputFile(job.input, 9, 0)], files_are_rows=False)
    tracemalloc.start()
    for number in range(100):
        first = number % 2 + number // 2 * 1000
        rows = [Interval(0, i, i + 1) for i in range(first, 50_000, 2)[:500]]
        journal.append(OutputPart(number, {}, rows, 500, 0, figures))
    grown, _ = tracemalloc.get_traced_memory()
    record = Record.read(tmp_path / "out" / "_job" / "journal.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    journal.close()
    assert record.done.intervals == [(0, 0, 50_000)]
    assert record.written == 50_000
    assert grown < 500_000, "50,000 intervals would have 5 MB"
    assert peak - grown < 1_500_000


def test_two_runs_exclude_each_other(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 30))
    output = tmp_path / "out"
    first = JobJournal(job_of(source, output))
    with pytest.raises(UnavailableError, match="another run writes to"):
        run(source, output)
    first.close()
    assert run(source, output)
    assert run(source, output), "nothing is left to do"
    assert len(read(output)) == 10


def test_two_journals_of_one_output_exclude_each_other(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 30))
    output = tmp_path / "out"
    first = JobJournal(job_of(source, output, journal=str(tmp_path / "a")))
    with pytest.raises(UnavailableError, match="another run writes to"):
        run(source, output, journal=str(tmp_path / "b"))
    first.close()
    assert run(source, output, journal=str(tmp_path / "b"))


def test_a_journal_that_cannot_be_read_leaves_no_lock(tmp_path: Path) -> None:
    """The next try in the same process has the true reason, too."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 30))
    output = tmp_path / "out"
    journal = output / "_job" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("damaged\n")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"line 1 of .* is damaged"):
            run(source, output)
    journal.unlink()
    assert run(source, output)


def test_a_journal_of_its_own_folder_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 30))
    output = tmp_path / "out"
    own = str(tmp_path / "own")
    first = JobJournal(job_of(source, output, journal=own))
    with pytest.raises(UnavailableError, match=f"another run writes to {own}$"):
        run(source, tmp_path / "out2", journal=own)
    first.close()
    assert run(source, output, journal=own)
    with pytest.raises(InvalidArgumentError, match=f"^{own} holds another job: input"):
        run(write_lines(tmp_path / "in2.jsonl", ids(20, 40)), tmp_path / "out2", journal=own)


class FirstRowLast(executors.PassThrough):
    """Ends row 0 after 39 others."""

    def __init__(self) -> None:
        super().__init__()
        self._given = 0

    def step(self) -> list[executors.Outcome]:
        ready = super().step()
        now = [outcome for outcome in ready if outcome[0] != 0 or self._given == 39]
        self._ready += [outcome for outcome in ready if outcome not in now]
        self._given += len(now)
        return now


def test_a_part_of_ordered_rows_is_not_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows wait for the first one, which ends last."""
    monkeypatch.setattr(executors, "PassThrough", FirstRowLast)
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    output = tmp_path / "out"
    assert run(source, output, ordered=True, part_rows=10, in_flight=64)
    assert [part.written for part in read_record(str(output), None).parts] == [10] * 4
    assert [row["id"] for row in read(output)] == list(range(20, 60))


def test_the_order_is_kept_although_a_part_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows after the lost ones are not committed: these would come later."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    output = tmp_path / "out"
    append = JobJournal.append
    faults = iter([OSError(28, "No space left on device")])

    def failing_once(self: JobJournal, entry: Any) -> None:
        if isinstance(entry, OutputPart) and entry.number == 1:
            for fault in faults:
                raise fault
        append(self, entry)

    monkeypatch.setattr(JobJournal, "append", failing_once)
    monkeypatch.setattr(executors, "PassThrough", FirstRowLast)
    with pytest.raises(UnavailableError, match="No space left"):
        run(source, output, ordered=True, part_rows=10, in_flight=64)
    monkeypatch.undo()
    assert run(source, output, ordered=True, part_rows=10)
    assert [row["id"] for row in read(output)] == list(range(20, 60))


def test_the_journal_has_the_columns_although_the_first_part_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next part of the run, the first one of Parquet, brings them."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 22))
    job = job_of(source, tmp_path / "out", output_format="parquet")
    with contextlib.closing(JobJournal(job)) as journal:
        dataset = Dataset(job)
        output = Output(job, dataset, journal)
        journal.begin_or_resume(job, dataset.files, dataset.files_are_rows)
        dataset.set_schema(dataset.look_ahead(is_typed=True))
        output.set_columns(None)
        (chunk, _) = dataset.chunks(journal.record, 2)
        assert isinstance(chunk, Chunk)
        columns = pa.record_batch({"id": [20, 21]})
        rows = replace(chunk, columns=columns)
        lost = Ended(rows, [0], results=[MapResult(pickle.dumps({"a": 1}), 0)])
        committed = Ended(rows, [1], results=[MapResult(pickle.dumps({"a": 1}), 0)])
        with monkeypatch.context() as patched:
            fail_at_part(patched, 0)
            with pytest.raises(OSError, match="No space left"):
                output.write([lost], {"run": 0.0})
        output.write([committed], {"run": 0.0})
    schema = read_record(job.output, None).schema
    assert schema is not None
    assert pa.ipc.read_schema(pa.py_buffer(schema)).names == ["id", "a"]


def test_an_error_of_the_system_that_is_not_of_the_output_is_not_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(job: Any) -> Any:
        raise OSError("the model's disk is gone")

    monkeypatch.setattr(executors, "load", load)
    with pytest.raises(OSError, match=r"^the model's disk is gone"):
        run(write_lines(tmp_path / "in.jsonl", ids(20, 30)), tmp_path / "out")
