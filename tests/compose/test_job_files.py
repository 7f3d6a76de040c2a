"""The files of deploy/jobs, as far as a machine without systemd's first process and without a
cluster can show."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jitney_jobs.job import make_job
from jitney_jobs.outcome import ExitStatus

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "deploy" / "jobs"
UNITS = ("jitney-job@.service", "jitney-job@.timer")
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((JOBS / "cronjob.yaml").read_text()))
SERVICE = (JOBS / UNITS[0]).read_text(encoding="utf-8")
NOT_AGAIN = [
    ExitStatus.COMMAND_LINE,
    ExitStatus.BAD_ROWS,
    ExitStatus.LATE,
    ExitStatus.TOO_MANY_BAD,
]
A_DAY_S = 24 * 3600


def setting(name: str) -> str:
    """Of the service."""
    (value,) = [line for line in SERVICE.splitlines() if line.startswith(f"{name}=")]
    return value.partition("=")[2]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """But for the program, which is not installed there."""
    program = shlex.split(setting("ExecStart"))[0]
    for name in UNITS:
        text = (JOBS / name).read_text(encoding="utf-8").replace(program, "/bin/true")
        (tmp_path / name.replace("@", "@nightly")).write_text(text, encoding="utf-8")
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_retry_has_the_run_of_the_first_try(tmp_path: Path) -> None:
    """What the service does before `jitney`, with a date of the test's own; and what of that
    `jitney` gets."""
    made = tmp_path / "run"
    command = setting("ExecStartPre").replace("$$", "$").replace("%%", "%")
    command = command.replace("%t/jitney-job-%i/run", str(made))
    (tmp_path / "date").write_text("#!/bin/sh\necho 2026-11-23 $1\n", encoding="utf-8")
    (tmp_path / "date").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run(shlex.split(command), env=path, check=True)
        assert made.read_text(encoding="utf-8") == "RUN=2026-11-23 +%F\n"
        (tmp_path / "date").write_text("#!/bin/sh\necho the next day\n", encoding="utf-8")
    assert setting("EnvironmentFile") == "-%t/jitney-job-%i/run"
    assert shlex.split(setting("ExecStart"))[-2:] == ["--run", "${RUN}"]
    assert container()["command"][-2:] == ["--run", "$(RUN)"]
    assert [each["name"] for each in container()["env"]] == ["RUN"]


def test_a_job_that_hangs_holds_back_no_other_night() -> None:
    assert setting("TimeoutStartSec") == "20h"
    of_job = MANIFESTS[1]["spec"]["jobTemplate"]["spec"]
    assert of_job["activeDeadlineSeconds"] < A_DAY_S


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def pod() -> dict[str, Any]:
    return dict(MANIFESTS[1]["spec"]["jobTemplate"]["spec"]["template"]["spec"])


@pytest.mark.debian
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifests_are_of_kubernetes_schema(manifest: dict[str, Any]) -> None:
    """`make test-compose` installs what checks it."""
    import kubernetes_validate

    kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_failures_are_tried_again_as_often_everywhere_and_only_if_that_may_help() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    retries = int(compose["services"]["job"]["restart"].removeprefix("on-failure:"))
    of_job = MANIFESTS[1]["spec"]["jobTemplate"]["spec"]
    assert of_job["backoffLimit"] == retries
    assert int(setting("StartLimitBurst")) == 1 + retries
    rule = of_job["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == NOT_AGAIN
    assert rule["onExitCodes"]["containerName"] == container()["name"]
    assert setting("RestartPreventExitStatus") == " ".join(str(int(each)) for each in NOT_AGAIN)
    assert setting("Restart") == compose["services"]["job"]["restart"].partition(":")[0]


def test_the_manifests_job_is_one_and_its_pod_is_shut_in() -> None:
    job = make_job({**yaml.safe_load(MANIFESTS[0]["data"]["job.yaml"]), "run": "nightly-7"})
    assert job.output.endswith("/nightly-7")
    places = {each["mountPath"]: each for each in container()["volumeMounts"]}
    for path in (job.input, job.output, str(job.model)):
        assert f"/{Path(path).parts[1]}" in places
    assert {each["name"] for each in places.values()} == {v["name"] for v in pod()["volumes"]}
    own = container()["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod()["securityContext"]["runAsUser"] == 10001


def test_the_images_have_what_jobs_need() -> None:
    for name in ("Dockerfile", "triton.Dockerfile"):
        text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
        assert " jobs otel >requirements.txt" in text
