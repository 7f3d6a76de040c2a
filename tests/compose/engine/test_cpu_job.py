"""Profile `jobs`, run by a real engine: a job that is killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.compose.engine.deployment import Deployment, wait_for
from tests.compose.engine.machine import Engine

ROWS = 400


@pytest.fixture
def jobs(
    engine: Engine, images: None, project: Path, settings: dict[str, str], tmp_path: Path
) -> Deployment:
    """With a folder of jobs that the containers' user may write to."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    folder.chmod(0o777)
    given = {"JOB_FOLDER": str(folder), "COMPOSE_PROJECT_NAME": "nightly"}
    return Deployment(engine, project, {**settings, **given})


def write_job(jobs: Deployment) -> None:
    folder = Path(jobs.settings["JOB_FOLDER"])
    lines = [json.dumps({"id": n, "text": f"def f{n}(x):"}) for n in range(ROWS)]
    (folder / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    job = {
        "input": "/jobs/in.jsonl", "output": "/jobs/out", "prompt": "{text}",
        "model": "/models/pylm/1/checkpoint", "max_tokens": 256, "part_rows": 20,
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")  # JSON is YAML too


def ids(jobs: Deployment) -> list[int]:
    parts = Path(jobs.settings["JOB_FOLDER"], "out").glob("part-*.jsonl")
    return sorted(json.loads(line)["id"] for part in parts for line in part.open())


def state(jobs: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = jobs.inspect("job")
    return {**found["State"], "restarts": found["RestartCount"]}


def test_a_job_that_is_killed_goes_on(jobs: Deployment) -> None:
    write_job(jobs)
    try:
        jobs.compose("--profile", "jobs", "up", "--detach", "job", timeout_s=600)
        wait_for(lambda: ids(jobs), "the first part", 300, lambda: jobs.logs("job"))
        assert len(ids(jobs)) < ROWS
        os.kill(state(jobs)["Pid"], signal.SIGKILL)
        wait_for(
            lambda: state(jobs)["restarts"] == 1 and state(jobs)["Status"] == "exited",
            "its second try to end", 300, lambda: jobs.logs("job"),
        )  # fmt: skip
        assert state(jobs)["ExitCode"] == 0, jobs.logs("job")
        assert ids(jobs) == list(range(ROWS))
    finally:
        jobs.down()
