"""What becomes of rows and jobs when something is wrong: statuses and limits, what is done again,
and what a job that was complete before says."""

import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs.job_making import make_job
from jitney_jobs.job_record import read_record
from jitney_jobs.journal import Record
from jitney_jobs.outcome import ExitStatus, error_limit
from jitney_jobs.run import run_job

from tests.jobs.job_rows import bad, ids, job_of, read, run, write_lines
from tests.jobs.job_status import batch, run_twice

ROOT = Path(__file__).resolve().parents[2]
MARKED = "tests.jobs.job_rows:marked"


# ------------------------------------------------------------------ statuses and limits


def test_a_jobs_exit_status_says_how_complete_it_is(tmp_path: Path) -> None:
    clean = write_lines(tmp_path / "clean.jsonl", ids(20, 40))
    soiled = write_lines(tmp_path / "soiled.jsonl", ids(10, 40))
    late = ["--within", "0.000001s"]
    assert run_twice(clean, tmp_path / "a").exit_code == ExitStatus.COMPLETE
    for _ in range(2):  # the second finds it complete
        assert run_twice(soiled, tmp_path / "b").exit_code == ExitStatus.BAD_ROWS
    assert run_twice(clean, tmp_path / "c", *late).exit_code == ExitStatus.LATE
    assert run_twice(soiled, tmp_path / "d", *late).exit_code == ExitStatus.BAD_ROWS
    too_many = run_twice(soiled, tmp_path / "e", "--max-errors", "0")
    assert too_many.exit_code == ExitStatus.TOO_MANY_BAD
    assert "error: 1 of" in too_many.stderr
    assert "1 bad" in too_many.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["run", "in.jsonl", "out", "--task", "map"], ExitStatus.COMMAND_LINE),
        (["run", "job.yaml"], ExitStatus.COMMAND_LINE),
        (["run", "nowhere.jsonl", "out", "--task", "map", "--map", "a:b"], ExitStatus.JOB_ERROR),
    ],
)
def test_a_wrong_command_line_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: ExitStatus
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("input: a\noutput: b\nmodle: c\n")
    monkeypatch.setattr(sys, "argv", ["jitney", "batch", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == status


@pytest.mark.parametrize(
    ("bad_count", "known", "all_known", "exceeded"),
    [
        (1, 1, False, False),  # nothing is known yet
        (10, 20, False, False),
        (11, 20, False, True),
        (60, 60, True, True),
        (1, 9, True, True),
        (1, 10, True, False),
        (11, 100_000, False, False),
        (10_001, 100_000, False, True),
    ],
)
def test_a_share_of_bad_rows_is_one_of_all_that_are_known(
    bad_count: int, known: int, all_known: bool, exceeded: bool
) -> None:
    assert error_limit("10%").is_exceeded(bad_count, known, all_known) is exceeded


def test_a_small_job_of_bad_rows_alone_is_not_complete(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": 13}] * 60)
    with pytest.raises(InvalidArgumentError, match="60 of 60 rows are bad"):
        run(source, tmp_path / "out", max_errors="10%")
    assert read_record(str(tmp_path / "out"), None).end is None


def test_bad_rows_at_the_beginning_end_no_long_job(tmp_path: Path) -> None:
    """11 of the first 12, and none of those that follow."""
    source = write_lines(tmp_path / "in.jsonl", [*[{"id": 13}] * 110, *ids(20, 2000)])
    assert run(source, tmp_path / "out", max_errors="10%", in_flight=64)
    assert len(bad(tmp_path / "out")) == 110


# ------------------------------------------------------------------ what is done again


def test_what_failed_alone_is_done_again(tmp_path: Path) -> None:
    """Bad rows and bad files; killed after it has begun, it goes on. What was good stays."""
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    for number in range(3):
        table = pa.table({"id": list(range(10 * number, 10 * number + 10))})
        pq.write_table(table, folder / f"{number}.parquet")
    whole = (folder / "2.parquet").read_bytes()
    (folder / "2.parquet").write_bytes(b"damaged " * (len(whole) // 8) + b"x" * (len(whole) % 8))
    assert run_twice(folder, output, "--part-rows", "5").exit_code == ExitStatus.BAD_ROWS
    before = {path.name: path.read_bytes() for path in output.glob("part-*")}
    journal = (output / "_job/journal.jsonl").read_text()
    assert len(bad(output)) == 1
    again = batch("resume", output, "--retry-bad")
    assert again.exit_code == ExitStatus.BAD_ROWS, "neither is put right"
    assert "1 of 3 cannot be read" in again.stdout
    assert [each["row"] for each in bad(output)] == [3]
    for name, data in before.items():
        assert (output / name).read_bytes() == data
    assert sorted(row["id"] for row in read(output)) == [*range(13), *range(14, 20)]
    assert (output / "_job/journal.jsonl").read_text().startswith(journal), "it only grows"
    nothing = batch("resume", output)
    assert nothing.exit_code == ExitStatus.BAD_ROWS
    assert "nothing is done" in nothing.stderr


def test_a_bad_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """Not as it was listed when the job began."""
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"id": [20, 21]}), folder / "0.parquet")
    (folder / "1.parquet").write_bytes(b"damaged")
    assert run(folder, tmp_path / "out")
    pq.write_table(pa.table({"id": list(range(30, 60))}), folder / "1.parquet")
    assert run_job(job_of(folder, tmp_path / "out"), retry_bad=True)
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [20, 21, *range(30, 60)]
    record = Record.read(tmp_path / "out/_job/journal.jsonl")
    assert not record.bad_files
    assert record.total == 32


def test_bad_rows_are_good_when_their_cause_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(10, 20))
    run_twice(source, tmp_path / "out")
    monkeypatch.setattr("tests.jobs.job_rows.twice", lambda row: {"twice": 0})
    assert batch("resume", tmp_path / "out", "--retry-bad").exit_code == ExitStatus.COMPLETE
    assert bad(tmp_path / "out") == []
    assert {row["id"]: row["twice"] for row in read(tmp_path / "out")}[13] == 0
    assert len(read(tmp_path / "out")) == 10


def test_a_job_whose_rows_were_all_bad_can_be_changed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": 13}] * 60)
    with pytest.raises(InvalidArgumentError, match="60 of 60 rows"):
        run(source, tmp_path / "out", max_errors="10%")
    assert run(source, tmp_path / "out", map=MARKED)
    assert bad(tmp_path / "out") == []
    assert len(read(tmp_path / "out")) == 60


def test_the_first_rows_alone(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 2000))
    some = run_twice(source, tmp_path / "out", "--limit", "300")
    assert some.exit_code == ExitStatus.COMPLETE
    assert "limit   300 rows; without it the job goes on" in some.stdout
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [*range(20, 320)]
    assert run_twice(source, tmp_path / "out", "--limit", "300").exit_code == 0
    assert len(read(tmp_path / "out")) == 300
    assert run_twice(source, tmp_path / "out").exit_code == ExitStatus.COMPLETE
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [*range(20, 2000)]


@pytest.mark.parametrize("first", [300, 512], ids=["in a chunk", "between two chunks"])
def test_first_rows_that_are_all_rows_are_the_whole_job(tmp_path: Path, first: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 1044))
    for limit, is_complete in ((first, False), (1024, True)):
        assert run(source, tmp_path / "out", limit=limit)
        assert len(read(tmp_path / "out")) == limit
        record = read_record(str(tmp_path / "out"), None)
        assert (record.end is not None) == is_complete


# ------------------------------------------------------------------ what does not end


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_never_ends_is_bad(tmp_path: Path, workers: int) -> None:
    """Without the setting the watchdog ends the job, which goes on with the setting."""
    source = write_lines(tmp_path / "in.jsonl", ids(0, 100))
    settings = {"map": "tests.jobs.job_rows:stuck", "workers": workers, "part_rows": 10}
    with pytest.raises(UnavailableError, match="nothing has moved for 2 s"):
        run(source, tmp_path / "out", watchdog="2s", **settings)
    assert run(source, tmp_path / "out", row_timeout=1, **settings)
    assert [each["row"] for each in bad(tmp_path / "out")] == [50]
    assert "row_timeout (1 s)" in bad(tmp_path / "out")[0]["error"]
    assert len(read(tmp_path / "out")) == 99


def test_a_call_that_does_not_return_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import time; from jitney_jobs import watchdog; watchdog._GRACE_S = 0.5; "
        "watchdog.Watchdog(1.0); time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert ended.returncode == ExitStatus.JOB_ERROR
    assert "nothing has moved for 1 s" in ended.stderr


# ------------------------------------------------------------------ the next night


def test_paths_have_the_run_and_the_date(tmp_path: Path) -> None:
    settings = {"task": "map", "map": "a:b", "run": "nightly-7"}
    paths = {"input": "/in/{date}/*", "output": "/out/{run}", "journal": "/jobs/{run}-{date}"}
    job = make_job({**settings, **paths})
    today = time.strftime("%Y-%m-%d")
    assert job.input == f"/in/{today}/*"
    assert job.output == "/out/nightly-7"
    assert job.journal == f"/jobs/nightly-7-{today}"
    with pytest.raises(InvalidArgumentError, match=r"output has \{run\}: name this run"):
        make_job({**settings, **paths, "run": None})
    with pytest.raises(InvalidArgumentError, match=r"run is 'a/b', but must be a name"):
        make_job({**settings, **paths, "run": "a/b"})


def test_a_job_that_was_complete_before_says_so(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    assert "nothing is done" not in run_twice(source, tmp_path / "out").stderr
    again = run_twice(source, tmp_path / "out")
    assert again.exit_code == ExitStatus.COMPLETE
    assert "is complete since" in again.stderr
    assert "nothing is done" in again.stderr


def test_a_run_says_at_once_what_it_does_and_loads_nothing_for_a_report(tmp_path: Path) -> None:
    """The first line comes before the imports that take long."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    words = ["jitney", "batch", "run", str(source), str(tmp_path / "out"), *options]
    code = (
        "import builtins, sys\n"
        "from jitney import cli, cli as _\n"
        "from jitney_jobs import command\n"
        "say = command._say\n"
        "def checked(text):\n"
        "    print('pyarrow' in sys.modules, text)\n"
        "command._say = checked\n"
        f"sys.argv = {words!r}\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        "    print('plots', 'matplotlib' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"False {source} to {tmp_path}/out", done
    assert lines[-1] == "plots False"
    assert not (tmp_path / "out/_job/report.html").exists()
