"""A folder of job files: workers that run them, and the commands that put them there."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import executors, worker
from jitney_jobs import run as jobs_run
from jitney_jobs.job_making import make_job, read_job
from typer.testing import CliRunner

from tests.jobs.job_rows import ids, job_of, read, write_lines

ROOT = Path(__file__).resolve().parents[2]


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
