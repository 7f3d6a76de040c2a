"""Jobs within a time, worked off from a folder, and seen from outside."""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney.progress import Deadline
from jitney_jobs import executors, worker
from jitney_jobs import run as jobs_run
from jitney_jobs.job import make_job, read_job
from jitney_jobs.job_record import read_record
from jitney_jobs.status import status_of
from jitney_jobs.times import due_at
from typer.testing import CliRunner

from tests.jobs.job_rows import ids, job_of, read, run, write_lines

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------ within a time

NOON = datetime(2026, 11, 23, 12).timestamp()


@pytest.mark.parametrize(
    ("setting", "value", "hours"),
    [
        ("finish_by", "18:30", 6.5),
        ("finish_by", "06:00", 18),
        ("finish_by", "12:00", 24),
        ("finish_by", 16 * 60, 4),  # 16:00 in a journal of an earlier version
        ("finish_by", f"18:30 {datetime.fromtimestamp(NOON).astimezone():%z}", 6.5),
        ("within", "4h", 4),
        ("within", "1h30m", 1.5),
        ("within", "1.5d", 36),
    ],
)
def test_until_when(setting: str, value: str | int, hours: float) -> None:
    given: dict[str, Any] = {"finish_by": None, "within": None, setting: value}
    due = due_at(**given, now=NOON)
    assert due is not None
    assert due - NOON == hours * 3600


def test_a_clock_time_in_a_job_file(tmp_path: Path) -> None:
    for text in ("16:00", "06:00", "'16:00'"):
        (tmp_path / "job.yaml").write_text(
            f"input: a\noutput: b\ntask: map\nmap: c:d\nfinish_by: {text}"
        )
        job = make_job(read_job(tmp_path / "job.yaml"))
        due = due_at(job.finish_by, None, NOON)
        assert due is not None
        assert datetime.fromtimestamp(due).strftime("%H:%M") == text.strip("'")


@pytest.mark.parametrize(
    ("finish_by", "hours"),
    [
        ("06:00 Europe/Zurich", 17),  # it is 13:00 there
        ("06:00 UTC", 18),
        ("06:00+02:00", 16),
        ("06:00 -0500", 23),
        ("13:30 Europe/Zurich", 0.5),
    ],
)
def test_a_clock_time_of_another_zone(finish_by: str, hours: float) -> None:
    noon = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
    due = due_at(finish_by, None, noon)
    assert due is not None
    assert due - noon == hours * 3600


def test_a_clock_time_keeps_the_zone_of_the_machine_that_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    zone = "Asia/Shanghai"
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert run(source, tmp_path / "out", finish_by="06:00")
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()
        record = read_record(str(tmp_path / "out"), None)
        assert record.begin is not None
        due = record.due(record.begin.job)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert due is not None
    assert datetime.fromtimestamp(due, ZoneInfo(zone)).strftime("%H:%M") == "06:00"


def test_it_warns_when_its_mind_changes() -> None:
    deadline = Deadline(1000.0)
    states: list[tuple[float, float, float | None, str | None]] = [
        (0, 5, 9999, None),  # too early to tell
        (10, 15, None, None),
        (100, 100, 900, None),
        (101, 101, 900, "late: it will end about"),
        (110, 110, 2000, None),  # once
        (200, 200, 799, None),  # not sure enough
        (201, 201, 700, "in time again: it will end about"),
        (300, 300, 400, None),
        (400, 400, 601, "late: it will end about"),
        (1001, 900, None, None),
    ]
    for now, seconds, left, said in states:
        got = deadline.judge(now, seconds, left)
        assert (got is None) == (said is None), (now, got)
        assert got is None or got.startswith(str(said))
    assert deadline.late
    assert Deadline(1000.0).judge(1000.0, 1, None) is not None, "the time is over"
    assert Deadline(None).judge(1e12, 1e9, 1e9) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"finish_by": "6 am"}, "finish_by is '6 am', but must be a clock time of this machine"),
        ({"finish_by": "06:00 Europe/Zurick"}, "finish_by is '06:00 Europe/Zurick', but must be"),
        ({"patience": "4"}, "patience is '4', but must be a time such as 4h, 90m or 1h30m"),
        ({"watchdog": "0"}, "watchdog is '0', but must be a time"),
        ({"finish_by": "24:00"}, "finish_by is '24:00', but must be"),
        ({"finish_by": 930}, "finish_by is 930, but must be a clock time of this machine"),
        ({"within": "4"}, "within is '4', but must be a time such as 4h, 90m or 1h30m"),
        ({"within": "0h"}, "within is '0h', but must be"),
        ({"within": "1h", "finish_by": "06:00"}, "finish_by and within exclude each other"),
    ],
)
def test_times_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        job_of(tmp_path / "in", tmp_path / "out", **settings)


def test_a_late_job_ends_and_says_so_by_its_status(tmp_path: Path) -> None:
    """Also of a job that is complete already."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    command = ["batch", "run", str(source), str(tmp_path / "out"), *options]
    for _ in range(2):  # the second finds it complete
        late = CliRunner().invoke(cli.make_app(), [*command, "--within", "0.000001s"])
        assert late.exit_code == 4
        assert ": complete\n" in late.output
        assert ", late\n" in late.output
    command[3] = str(tmp_path / "out2")
    in_time = CliRunner().invoke(cli.make_app(), [*command, "--within", "1000d"])
    assert in_time.exit_code == 0
    assert "due     " in in_time.output
    assert ", late" not in in_time.output


def test_a_run_within_a_longer_time_is_not_late(tmp_path: Path) -> None:
    """Neither by its status nor by what it prints."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    command = ["batch", "run", str(source), str(tmp_path / "out"), *options, "--within"]
    CliRunner().invoke(cli.make_app(), [*command, "0.000001s"])
    longer = CliRunner().invoke(cli.make_app(), [*command, "1000d"])
    assert longer.exit_code == 0
    assert "due     " in longer.output
    assert ", late" not in longer.output


def test_the_time_counts_from_the_first_run(tmp_path: Path, monkeypatch: Any) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*ids(20, 40), {"id": 13}])
    output = tmp_path / "out"
    with pytest.raises(InvalidArgumentError, match="more than max_errors"):
        run(source, output, max_errors=0, within="1h")
    record = read_record(str(output), None)
    job = job_of(source, output, within="1h")
    due = record.due(job)
    assert due is not None
    assert due > time.time()
    monkeypatch.setattr(time, "time", lambda: due + 60)
    assert run(source, output, within="1h")
    record = read_record(str(output), None)
    assert record.due(job) == due
    assert record.is_late(job)
    assert status_of(record, job).endswith(", late")


# ------------------------------------------------------------------ a folder of jobs


def job_file(folder: Path, name: str, source: Path, **settings: Any) -> None:
    """Put there by hand, as another program would."""
    given = {"task": "map", "map": "tests.jobs.job_rows:twice", "workers": 0, **settings}
    given |= {"input": str(source), "output": str(folder.parent / f"out-{name}")}
    folder.mkdir(exist_ok=True)
    lines = [f"{key}: {value}" for key, value in given.items()]
    (folder / f"{name}.yaml").write_text("\n".join(lines))


def work(folder: Path, *options: str) -> int:
    command = ["batch", "worker", str(folder), "--until-empty", "--backoff", "0", *options]
    return CliRunner().invoke(cli.make_app(), command, catch_exceptions=False).exit_code


def states(folder: Path) -> list[str]:
    listed = CliRunner().invoke(cli.make_app(), ["batch", "list", str(folder)]).output
    return [" ".join(line.split()) for line in listed.splitlines()]


def test_a_worker_runs_what_is_there_and_sets_aside_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs"
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    loaded: list[dict[str, Any]] = []
    load = executors.load
    monkeypatch.setattr(executors, "load", lambda job: loaded.append(job.engine) or load(job))
    job_file(folder, "a", source)
    job_file(folder, "b", source)
    job_file(folder, "c", source, engine="{max_num_seqs: 3}")
    job_file(folder, "d", source, map="tests.jobs.job_rows:not_there")
    assert work(folder, "--tries", "2") == 1
    *done, failed = states(folder)
    assert done == ["done a", "done b", "done c"]
    assert failed.startswith("failed d: map 'tests.jobs.job_rows:not_there'")
    assert loaded == [{}, {"max_num_seqs": 3}, {}], "a and b share; d cannot end otherwise"
    for name in "abc":
        assert len(read(tmp_path / f"out-{name}")) == 20
    assert work(folder) == 0, "nothing is left"


def test_a_job_lies_where_it_failed_only_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who is killed between leaves one without."""
    folder = tmp_path / "jobs"
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    job_file(folder, "d", source, map="tests.jobs.job_rows:not_there")
    rename = Path.rename

    def checked(path: Path, target: Path) -> Path:
        if Path(target) == folder / "failed" / "d.yaml":
            assert (folder / "failed" / "d.txt").exists()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", checked)
    assert work(folder, "--tries", "1") == 1
    assert states(folder)[0].startswith("failed d: map")


def test_a_job_that_waits_for_its_next_try_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose error cannot pass has no next try."""
    folder = tmp_path / "jobs"
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    job_file(folder, "away", source)
    job_file(folder, "typo", source, mpa="x")
    job_file(folder, "good", source)
    real = jobs_run.run_job
    begun: list[str] = []

    def failing_twice(job: Any, *arguments: Any) -> bool:
        begun.append(Path(job.output).name)
        if begun.count("out-away") in (1, 2) and begun[-1] == "out-away":
            raise UnavailableError("it is away")
        return real(job, *arguments)

    monkeypatch.setattr(jobs_run, "run_job", failing_twice)
    command = ["batch", "worker", str(folder), "--until-empty", "--backoff", "0.5"]
    assert CliRunner().invoke(cli.make_app(), command).exit_code == 1
    assert begun == ["out-away", "out-good", "out-away", "out-away"]
    *done, failed = states(folder)
    assert sorted(done) == ["done away", "done good"]
    assert failed.startswith("failed typo: setting 'mpa' is unknown (did you mean 'map'?)")


def test_a_worker_says_what_is_bad_and_what_was_done_before(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    job_file(folder, "a", write_lines(tmp_path / "in.jsonl", ids(10, 40)))
    assert work(folder) == 3
    assert states(folder) == ["done a: 1 bad rows"]
    (folder / "done/a.yaml").rename(folder / "a.yaml")
    assert work(folder) == 3
    assert states(folder) == ["done a: it was complete before, and nothing was done; 1 bad rows"]


def test_a_job_that_is_done_has_no_reason_of_a_try_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs"
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    job_file(folder, "a", source)
    faults = iter([ValueError("a passing fault")])
    real = jobs_run.run_job

    def failing_once(*arguments: Any) -> bool:
        for fault in faults:
            raise fault
        return real(*arguments)

    monkeypatch.setattr(jobs_run, "run_job", failing_once)
    assert work(folder) == 0
    assert states(folder) == ["done a"]


def test_files_of_a_model_that_changed_are_loaded_again(tmp_path: Path, monkeypatch: Any) -> None:
    loaded: list[Any] = []

    def load(job: Any) -> Any:
        loaded.append(executors.PassThrough())
        loaded[-1].figures = {"steps": 7.0, "most_rows": 4.0}
        return loaded[-1], executors.Context(job)

    monkeypatch.setattr(executors, "load", load)
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model/weights"
    weights.write_text("a")
    jobs = [job_of(tmp_path / "in", tmp_path / f"{i}", model=str(weights.parent)) for i in range(3)]
    models = executors.Models()
    first, context = models.load(jobs[0])
    assert models.load(jobs[1])[0] is first
    assert first.figures == {"steps": 0.0, "most_rows": 4.0}
    os.utime(weights, (1, 1))
    other, context = models.load(jobs[2])
    assert other is not first
    assert context.job is jobs[2]


@pytest.mark.parametrize("options", [{"server": "127.0.0.1:1"}, {"model": None}])
def test_a_model_is_kept_whatever_folder_has_its_name_but_not_one_on_a_server(
    tmp_path: Path, monkeypatch: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        executors, "load", lambda job: (executors.PassThrough(), executors.Context(job))
    )
    monkeypatch.chdir(tmp_path)
    model = options.get("model", "tiny")
    models = executors.Models()
    job = job_of(tmp_path / "in", tmp_path / "out", **{"model": "tiny", **options})
    (tmp_path / str(model)).mkdir()
    first, _ = models.load(job)
    os.utime(tmp_path / str(model), (1, 1))
    is_kept = models.load(job)[0] is first
    # The executor of a server knows what has become of the job before: the next gets its own.
    assert is_kept == (job.server is None)


def test_no_two_workers_have_one_job_and_a_killed_ones_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    for name in "ab":
        job_file(folder, name, tmp_path)
    first = worker._claim(folder)
    second = worker._claim(folder)
    assert first is not None
    assert second is not None
    assert [first.path.name, second.path.name] == ["a.yaml", "b.yaml"]
    job_file(folder, "a", tmp_path)  # once more, while it runs
    assert worker._claim(folder) is None
    second.release()  # as its worker's end does
    again = worker._claim(folder)
    assert again is not None
    assert again.path == second.path
    first.release()
    again.release()


def test_a_killed_workers_job_is_resumed(tmp_path: Path) -> None:
    """Row 50 ends the worker. Then a part is committed: of the 30 rows before at most 8 are on
    their way, the next two parts begin, and the third waits for the first."""
    folder = tmp_path / "jobs"
    flag = str(tmp_path / "flag")
    rows = [{**row, "flag": flag} for row in ids(20, 60)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    job_file(folder, "a", source, map="tests.jobs.job_rows:killing", in_flight=8, part_rows=2)
    command = [sys.executable, "-m", "jitney.cli", "batch", "worker", str(folder)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert states(folder) == ["running a"]
    assert read(tmp_path / "out-a"), "what was committed counts"
    assert work(folder) == 0
    assert states(folder) == ["done a"]
    assert sorted(row["id"] for row in read(tmp_path / "out-a")) == list(range(20, 60))


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_a_running_job_is_stopped_or_cancelled(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "jobs"
    rows = [{**row, "folder": str(folder), "how": how} for row in ids(20, 2000)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    job_file(folder, "a", source, map="tests.jobs.job_rows:ending", in_flight=16)
    job_file(folder, "b", write_lines(tmp_path / "b.jsonl", ids(20, 40)))
    if how == "stop":
        assert work(folder) == 130
        assert states(folder) == ["waiting b", "waiting a"]
    else:
        assert work(folder) == 0
        assert states(folder) == ["done b", "cancelled a"]
    assert 0 < len(read(tmp_path / "out-a")) < 1980, "what was finished is committed"
    assert not list((folder / "running").iterdir())


def test_jobs_are_submitted_and_cancelled(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", ids(20, 30))
    Path("a.yaml").write_text("input: in.jsonl\noutput: out\ntask: map\nmap: builtins:dict")
    batch = ["batch", "submit", "jobs", "a.yaml"]
    assert CliRunner().invoke(cli.make_app(), batch).exit_code == 0
    submitted = make_job(read_job(tmp_path / "jobs/a.yaml"))
    assert [submitted.input, submitted.output] == [f"{tmp_path}/in.jsonl", f"{tmp_path}/out"]
    with pytest.raises(InvalidArgumentError, match="a job a waits or runs in jobs"):
        worker.submit(Path("jobs"), Path("a.yaml"))
    worker.cancel(Path("jobs"), "a")
    assert states(Path("jobs")) == ["cancelled a"]
    with pytest.raises(InvalidArgumentError, match="no job a waits or runs in jobs"):
        worker.cancel(Path("jobs"), "a")
    Path("a.yaml").write_text("input: in.jsonl\noutput: out\ntask: map")
    with pytest.raises(InvalidArgumentError, match="task map needs the setting map"):
        worker.submit(Path("jobs"), Path("a.yaml"))


def test_a_submitted_job_has_its_models_path_or_the_servers_name(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A folder that is called as the server's model is not meant."""
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    text = "input: in.jsonl\noutput: out\ntask: embed\nmodel: digits\n"
    Path("a.yaml").write_text(text)
    Path("b.yaml").write_text(f"{text}server: host:8001\n")
    for name in ("a", "b"):
        worker.submit(Path("jobs"), Path(f"{name}.yaml"))
    assert read_job(tmp_path / "jobs/a.yaml")["model"] == f"{tmp_path}/digits"
    assert read_job(tmp_path / "jobs/b.yaml")["model"] == "digits"


def test_a_submitted_job_knows_its_journal_from_everywhere(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The journal's folder is not there yet. And a file may be called None."""
    monkeypatch.chdir(tmp_path)
    Path("None").touch()
    text = "input: in.jsonl\noutput: out\ntask: map\nmap: builtins:dict\njournal: own"
    Path("a.yaml").write_text(text)
    worker.submit(Path("jobs"), Path("a.yaml"))
    submitted = read_job(tmp_path / "jobs/a.yaml")
    assert submitted.keys() == {"input", "output", "task", "map", "journal"}
    assert submitted["journal"] == f"{tmp_path}/own"
