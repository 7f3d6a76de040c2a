"""Jobs without a model: bad rows and transient errors, bounds, settings and commands."""

import multiprocessing.spawn
import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney import cli
from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.progress import Progress, State
from jitney_jobs import executors, outcome
from jitney_jobs.dataset import Dataset
from jitney_jobs.generate import GenerateOnServer
from jitney_jobs.job_differences import differences
from jitney_jobs.job_making import make_job
from jitney_jobs.job_record import read_record
from jitney_jobs.outcome import error_limit
from jitney_jobs.prepare_workers import Workers
from jitney_jobs.row_runner import worker_count
from jitney_jobs.rows import Chunk
from jitney_jobs.run import run_job
from jitney_jobs.tasks import Context, Map
from typer.testing import CliRunner

from tests.jobs.job_rows import bad, fail_at_part, ids, job_of, read, run, write_lines


def test_bad_rows_and_how_many_are_too_many(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*ids(0, 300), "no object", {"other": 1}])
    with source.open("a") as file:
        file.write("{broken\n" + 100_000 * "[" + "\n")
    assert run(source, tmp_path / "out", max_errors="5")
    found = {each["row"]: each for each in bad(tmp_path / "out")}
    assert found.keys() == {13, 300, 301, 302, 303}
    assert found[13]["error"] == "ValueError: unlucky"
    assert found[13]["input"] == {"id": 13}
    assert "malformed" in found[302]["error"]
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [*range(13), *range(14, 300)]
    for most in ("3", "1%"):
        with pytest.raises(InvalidArgumentError, match=r"rows are bad, more than max_errors"):
            run(source, tmp_path / f"out{most}", max_errors=most)
    clean = write_lines(tmp_path / "clean.jsonl", ids(0, 300))
    with pytest.raises(InvalidArgumentError, match="column 'id' is both of the input and of the"):
        run(clean, tmp_path / "both", map="builtins:dict", max_errors=0.05)


@pytest.mark.parametrize("share", [0.00001, "1e-05", "0.00001", "0.001%"])
def test_a_share_of_bad_rows_may_be_small(tmp_path: Path, share: Any) -> None:
    job = job_of(tmp_path / "in.jsonl", tmp_path / "out", max_errors=share)
    assert error_limit(job.max_errors).share == pytest.approx(0.00001)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_raised_outside_of_one_row(tmp_path: Path, workers: int) -> None:
    """What cannot be sent, an exit, and a value that Python does not have."""
    days = pa.array([0, 0, 10**8, 0], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"id": list(range(4)), "day": days}), tmp_path / "in.parquet")
    settings = {"map": "tests.jobs.job_rows:unruly", "keep": ["id"], "workers": workers}
    assert run(tmp_path / "in.parquet", tmp_path / "out", **settings)
    assert {each["row"] for each in bad(tmp_path / "out")} == {0, 1, 2}
    assert [row["id"] for row in read(tmp_path / "out")] == [3]


class Flaky(executors.PassThrough):
    """Fails each row once in a way that may pass, and row 5 always so."""

    error: JitneyError

    def __init__(self) -> None:
        super().__init__()
        self.failed: set[int] = set()

    def step(self) -> list[executors.Outcome]:
        outcomes = super().step()
        fresh = {key for key, _ in outcomes} - self.failed | {5}
        self.failed |= fresh
        return [(key, self.error if key in fresh else result) for key, result in outcomes]


@pytest.mark.parametrize("error", [InternalError("a fault"), UnavailableError("it is away")])
def test_transient_errors_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: JitneyError
) -> None:
    """A row that fails to the end, while others do not, is bad."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    monkeypatch.setattr(executors, "PassThrough", Flaky)
    monkeypatch.setattr(Flaky, "error", error, raising=False)
    monkeypatch.setattr(outcome, "pause", lambda tries: 0.001)
    assert run(source, tmp_path / "out", retries=2, patience="1s")
    assert [each["error"] for each in bad(tmp_path / "out")] == [str(error)]
    assert len(read(tmp_path / "out")) == 19
    figures = read_record(str(tmp_path / "out"), None).parts[-1].figures
    if isinstance(error, InternalError):
        assert figures["tries"] == 21
    else:
        assert figures["tries"] > 21


def test_rows_on_their_way_are_bounded(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 2000))
    for ordered in (False, True):
        output = tmp_path / f"out{ordered}"
        assert run(source, output, in_flight=50, workers=1, part_rows=100, ordered=ordered)
        figures = read_record(str(output), None).parts[-1].figures
        assert 10 < figures["most_in_flight"] <= 50
        rows = [row["id"] for row in read(output)]
        assert (rows if ordered else sorted(rows)) == list(range(20, 2000))


def test_what_is_measured_of_prepared_rows(tmp_path: Path) -> None:
    """The bytes that were made of each row. A row that waits costs no CPU time."""
    lines = [b'{"id": %d}' % i for i in range(10, 60)]
    data = pa.record_batch({"line": pa.array(lines, pa.large_binary())})
    chunk = Chunk(0, range(50), "jsonl", data)
    job = job_of(tmp_path / "in.jsonl", tmp_path / "out", map="tests.jobs.job_rows:slowly")
    workers = Workers(Context(job), 0)
    prepared = workers.submit(chunk).result(60)
    workers.close()
    assert {item.nbytes for item in prepared.items} <= {len('{"twice":20}'), len('{"twice":100}')}
    assert prepared.seconds > 50 * 0.002
    assert prepared.cpu_s < prepared.seconds / 2


def test_workers_that_die_as_they_start(tmp_path: Path, monkeypatch: Any) -> None:
    """However much they were to be told: a job that waited for them would never end."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    source = write_lines(tmp_path / "in.jsonl", ids(0, 3))
    assert run(source, tmp_path / "out", workers=1, prompt="x" * 200_000)
    died = "the process that prepared it died"
    assert [each["error"] for each in bad(tmp_path / "out")] == [died] * 3


def test_a_line_of_progress() -> None:
    """A quarter of the input is read: 100 rows by an earlier run, 300 by this one."""
    figures = {"seconds": 50.0, "done": 200.0, "bad": 3.0, "position": 0.25, "taken": 300.0}
    figures |= {"tokens": 5000.0, "steps": 10.0, "rows_in_steps": 40.0, "most_rows": 8.0}
    line = "300 rows, 4.0 rows/s, 100 tokens/s, batch 50% full, 0:05:25 left, 3 bad"
    assert Progress().line(State(figures, 100)) == line
    figures |= {"recent_s": 20.0, "recent_done": 20.0, "rows_in_steps": 81.0}
    line = "300 rows, 1.0 rows/s, 100 tokens/s, batch 100% full, 0:21:40 left, 3 bad"
    assert Progress().line(State(figures, 100)) == line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colunm": "x"}, r"setting 'colunm' is unknown \(did you mean 'column'\?\)"),
        ({"part_rows": 0}, r"part_rows is 0: expected `int` >= 1"),
        ({"part_seconds": "inf"}, r"part_seconds is 'inf': expected `float` <= 1000000000.0"),
        ({"labels": "lables.txt"}, "labels is 'lables.txt', but must be a file that is there"),
        ({"template": "tmpl.j2"}, "template is 'tmpl.j2', but must be a file that is there"),
        ({"patience": "long"}, "patience is 'long', but must be a time such as 4h"),
        ({"in_flight": "many"}, r"in_flight is 'many': expected `int`"),
        ({"max_errors": "200%"}, r"max_errors is '200%', but must be a number, or a share"),
        ({"map": None}, "task map needs the setting map"),
        ({"map": "tests.nothing:f"}, "map 'tests.nothing:f' cannot be imported"),
        ({"task": "generate"}, "task generate needs the setting model"),
        (
            {"server": "h:1", "model": "m", "input_format": "openai"},
            "server is 'h:1', but",
        ),
        (
            {"task": "score", "server": "http://h:1", "model": "m", "input_format": "openai"},
            "task is 'score', but must be generate or embed, for openai lines",
        ),
        (
            {"input": "/a/b", "output": "/a/b/c"},
            "must be outside of the input",
        ),
        (
            {"output": "gs://anonymous@bucket/out"},
            "not local, and only s3:// can have the journal",
        ),
        ({"input": "/nowhere/*.jsonl"}, r"input /nowhere/\*.jsonl is not there"),
        ({"input": str(Path(__file__))}, "has files of no known kind: name input_format"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 22))
    output = settings.pop("output", str(tmp_path / "out"))
    given = {"input": str(source), "task": "map", "map": "builtins:dict", "workers": 0}
    with pytest.raises(InvalidArgumentError, match=message):
        run_job(make_job({**given, "output": output, **settings}))


def test_paths_are_known_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"input": "in", "output": "out", "journal": "own", "tokenizer": "tokenizer.json"}
    job = make_job({"task": "embed", "model": "m", **names})
    assert {name: getattr(job, name) for name in names} == {
        name: f"{tmp_path}/{path}" for name, path in names.items()
    }
    earlier = msgspec.structs.replace(job, tokenizer="tokenizer.json")  # as journals had it
    assert differences(earlier, job) == []


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 22))
    settings = {"task": "generate", "map": None, "model": "m", "patience": "1s"}
    with pytest.raises(UnavailableError, match="model m on localhost:9: "):
        run(source, tmp_path / "out", server="localhost:9", **settings)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    job = f"input: {source}\noutput: {tmp_path}/out\ntask: map\nworkers: 0\npart_rows: 10\n"
    (tmp_path / "job.yaml").write_text(job + "map: tests.jobs.job_rows:twice\n")
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        stopped = CliRunner().invoke(cli.make_app(), ["batch", "run", str(tmp_path / "job.yaml")])
        assert isinstance(stopped.exception, UnavailableError)
    status = CliRunner().invoke(cli.make_app(), ["batch", "status", str(tmp_path / "out")]).output
    assert "not complete" in status
    assert "rows    10 of 20: 10 written, 0 bad" in status
    cost = (
        r"^cost    [\d.]+ s without loading: [\d.,]+ rows/s; [\d.,]+ core-seconds a thousand rows$"
    )
    assert re.search(cost, status, re.M)
    assert (
        CliRunner().invoke(cli.make_app(), ["batch", "resume", str(tmp_path / "out")]).exit_code
        == 0
    )
    assert len(read(tmp_path / "out")) == 20
    assert not (tmp_path / "out/_job/report.html").exists(), "nobody has asked for it"
    again = CliRunner().invoke(cli.make_app(), ["batch", "report", str(tmp_path / "out")])
    assert again.output.strip() == str(tmp_path / "out/_job/report.html")
    page = (tmp_path / "out/_job/report.html").read_text()
    assert "Complete: 20 rows written, 0 bad" in page
    assert "Runs: 2." in page
    assert '<th scope="row">run: the model at work</th>' in page
    assert 'id="throughput"' in page
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    same = ["batch", "run", str(source), str(tmp_path / "out"), *options]
    assert ": complete\n" in CliRunner().invoke(cli.make_app(), same).output
    assert job_of(source, tmp_path / "out") != make_job(
        {"input": "a", "output": "b", "model": "m", "sampling": {"seed": 1}}
    )


@pytest.mark.parametrize(
    ("rows", "settings", "has_workers"),
    [
        (10, {"task": "generate", "map": None, "model": "m"}, False),
        (10_000, {"task": "generate", "map": None, "model": "m"}, True),
        (10, {}, True),
    ],
)
def test_a_few_texts_need_no_process(
    tmp_path: Path, rows: int, settings: dict[str, Any], has_workers: bool
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}] * rows)
    job = job_of(source, tmp_path / "out", **settings)
    task = Map(Context(job)) if job.task == "map" else GenerateOnServer(job)
    assert (worker_count(task, Dataset(job)) > 0) == has_workers
