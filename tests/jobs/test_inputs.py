"""Several inputs of a job: in its settings, or in a list."""

from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs.job import Job
from jitney_jobs.job_making import make_job, read_job
from jitney_jobs.storage import open_inputs
from jitney_jobs.worker import submit

from tests.jobs.job_rows import ids, read, run, write_lines


def job_of(inputs: str | list[str]) -> Job:
    return make_job({"input": inputs, "output": "/out", "model": "m"})


def paths_of(inputs: str | list[str]) -> list[str]:
    _, paths = open_inputs(job_of(inputs))
    return paths


def test_inputs_of_a_job_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths_of(["a", "/b/*.csv", "a"]) == [f"{tmp_path}/a", "/b/*.csv"]


def test_a_list_of_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its relative paths start at its folder, wherever the job is started."""
    (tmp_path / "lists").mkdir()
    listed = "\ufeffa.csv\r\n\n  with space/ü.csv \n/far/b.csv\n../c"
    (tmp_path / "lists" / "l.txt").write_text(listed, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    job = job_of("@lists/l.txt")
    monkeypatch.chdir("/")
    below = f"{tmp_path}/lists"
    expected = [f"{below}/a.csv", f"{below}/with space/ü.csv", "/far/b.csv", f"{tmp_path}/c"]
    assert open_inputs(job)[1] == expected


def test_lists_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nothing\.txt cannot be read"):
        paths_of(f"@{tmp_path}/nothing.txt")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidArgumentError, match="names no file"):
        paths_of(f"@{tmp_path}/empty")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    with pytest.raises(InvalidArgumentError, match="is no UTF-8"):
        paths_of(f"@{tmp_path}/bytes")


def test_inputs_on_several_storages() -> None:
    with pytest.raises(InvalidArgumentError, match="must be on the same storage as /a"):
        paths_of(["/a", "mock:///b"])


def test_an_output_inside_of_one_of_the_inputs() -> None:
    with pytest.raises(InvalidArgumentError, match="must be outside of the input"):
        make_job({"input": ["/a", "/b"], "output": "/b/c", "model": "m"})


def test_a_job_file_of_several_inputs_is_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("input: [a, '@l']\nmore_inputs: [c]\noutput: o\nmodel: m\n")
    submit(tmp_path / "queue", tmp_path / "job.yaml")
    job = make_job(read_job(tmp_path / "queue" / "job.yaml"))
    assert [job.input, *job.more_inputs] == [f"{tmp_path}/a", f"@{tmp_path}/l", f"{tmp_path}/c"]


@pytest.mark.parametrize("form", ["list", "setting", "file"])
def test_rows_of_several_inputs(tmp_path: Path, form: str) -> None:
    """A file that two of them name is read once; folders are columns, each below its own input."""
    for name, first in (("a", 20), ("b/x=1", 30), ("c", 40)):
        (tmp_path / name).mkdir(parents=True)
        write_lines(tmp_path / name / "in.jsonl", ids(first, first + 3))
    inputs = [f"{tmp_path}/a/in.jsonl", f"{tmp_path}/b", f"{tmp_path}/a"]
    if form == "file":
        (tmp_path / "list").write_text("\n".join(inputs))
        run(Path(f"@{tmp_path}/list"), tmp_path / "out")
    elif form == "list":
        run(tmp_path, tmp_path / "out", input=inputs)
    else:
        run(Path(inputs[0]), tmp_path / "out", more_inputs=inputs[1:])
    rows = sorted(read(tmp_path / "out"), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == [20, 21, 22, 30, 31, 32]
    assert [row.get("x") for row in rows[3:]] == [1, 1, 1]
