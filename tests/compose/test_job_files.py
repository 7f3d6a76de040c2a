"""The files of deploy/jobs, as far as a machine without systemd's first process and without a
cluster can show."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jitney_jobs.job_making import make_job
from jitney_jobs.outcome import ExitStatus
from jitney_jobs.shards import Shard
from jitney_jobs.times import seconds_of

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "deploy" / "jobs"
UNITS = ("jitney-job@.service", "jitney-job@.timer")
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((JOBS / "cronjob.yaml").read_text()))
OF_SHARDS: list[dict[str, Any]] = list(yaml.safe_load_all((JOBS / "shards.yaml").read_text()))
SCRIPT = (JOBS / "shards.sbatch").read_text(encoding="utf-8")
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
    return container_of(pod())


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


def pod() -> dict[str, Any]:
    return dict(MANIFESTS[1]["spec"]["jobTemplate"]["spec"]["template"]["spec"])


@pytest.mark.debian
@pytest.mark.parametrize(
    "manifest",
    [*MANIFESTS, *OF_SHARDS],
    ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}",
)
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
    check_pod(pod(), [job.input, job.output, str(job.model)])


def check_pod(pod: dict[str, Any], paths: list[str]) -> None:
    """It has these files, and may do no more than it must."""
    of_job = container_of(pod)
    places = {each["mountPath"]: each for each in of_job["volumeMounts"]}
    for path in paths:
        assert f"/{Path(path).parts[1]}" in places
    assert {each["name"] for each in places.values()} == {v["name"] for v in pod["volumes"]}
    own = of_job["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsUser"] == 10001


# ------------------------------------------------------------------ shards


def filled(words: list[str], **values: str) -> list[str]:
    """A container's command, as Kubernetes starts it."""
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def test_the_manifests_shards_are_of_one_job_which_is_merged() -> None:
    settings, shards, merge = OF_SHARDS
    spec = shards["spec"]
    pod_of_shard = spec["template"]["spec"]
    count = spec["completions"]
    run = settings["data"]["run"]
    outputs = set()
    for index in range(count):
        command = container_of(pod_of_shard)["command"]
        words = filled(command, RUN=run, JOB_COMPLETION_INDEX=str(index))
        assert words[:4] == ["jitney", "batch", "run", "/etc/jitney/job.yaml"]
        given = dict(zip(words[4::2], words[5::2], strict=True))
        options = {name.removeprefix("--"): value for name, value in given.items()}
        job = make_job({**yaml.safe_load(settings["data"]["job.yaml"]), **options})
        assert job.its_shard == Shard(index, count)
        outputs.add(job.output)
        check_pod(pod_of_shard, [job.input, job.output, str(job.model)])
    words = filled(container_of(merge["spec"]["template"]["spec"])["command"], RUN=run)
    assert words[:3] == ["jitney", "batch", "merge"]
    assert {words[3]} == outputs
    check_pod(merge["spec"]["template"]["spec"], [words[3]])
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == count
    index = {each["name"]: each for each in container_of(pod_of_shard)["env"]}
    place = index["JOB_COMPLETION_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert place == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    longest_s = spec["activeDeadlineSeconds"]
    assert seconds_of("wait", words[5]) == longest_s < merge["spec"]["activeDeadlineSeconds"]


def test_a_shard_that_has_bad_rows_ends_no_other_one() -> None:
    _, shards, merge = OF_SHARDS
    fail_job, fail_index, _ = shards["spec"]["podFailurePolicy"]["rules"]
    assert (fail_job["action"], fail_index["action"]) == ("FailJob", "FailIndex")
    assert fail_job["onExitCodes"]["values"] == [ExitStatus.COMMAND_LINE]
    assert [ExitStatus.COMMAND_LINE, *fail_index["onExitCodes"]["values"]] == NOT_AGAIN
    assert shards["spec"]["backoffLimitPerIndex"] == merge["spec"]["backoffLimit"] == 3
    rule = merge["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [*NOT_AGAIN, ExitStatus.SHARDS_MISSING]
    assert rule["onExitCodes"]["containerName"] == "merge"


def slurm(tmp_path: Path, script: str, statuses: str = "0", **variables: str) -> tuple[int, str]:
    """The exit status of a script as Slurm would run it, with commands of the test's own: they note
    their words, and `jitney` ends with one status after the other."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (tmp_path / "statuses").write_text(statuses)
    (tmp_path / "said").write_text("")
    for name, text in {
        "srun": 'shift; exec "$@"',
        "sleep": f'echo "sleep $1" >>{tmp_path}/said',
        "jitney": f"""echo "jitney $*" >>{tmp_path}/said
            read -r status rest <{tmp_path}/statuses
            echo "$rest" >{tmp_path}/statuses
            exit $status""",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", JOBS / script],
        env={"PATH": f"{programs}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (tmp_path / "said").read_text() + done.stderr


def test_slurms_tasks_are_the_shards_of_one_job(tmp_path: Path) -> None:
    (array,) = re.findall(r"^#SBATCH --array=0-(\d+)$", SCRIPT, re.MULTILINE)
    count = int(array) + 1
    for index in range(count):
        status, said = slurm(
            tmp_path, "shards.sbatch", RUN="r1", SLURM_ARRAY_TASK_ID=str(index),
            SLURM_ARRAY_TASK_COUNT="1",
        )  # fmt: skip
        words = f"jitney batch run /shared/jobs/job.yaml --run r1 --shard {index}/{count}\n"
        assert (status, said) == (0, words)
    assert slurm(tmp_path, "merge.sbatch", "6", RUN="r1") == (
        6,
        "jitney batch merge /shared/answers/r1\n",
    )
    assert "output is\n# /shared/answers/{run}" in SCRIPT
    for script in ("shards.sbatch", "merge.sbatch"):
        status, said = slurm(tmp_path, script, SLURM_ARRAY_TASK_ID="0")
        assert status != 0
        assert "RUN: is not set" in said, "and nothing was begun"
        assert "jitney batch" not in said


@pytest.mark.parametrize(
    ("statuses", "tries"),
    [("1 1 1 1 0", 4), ("1 0", 2), ("130", 1), *[(str(int(each)), 1) for each in NOT_AGAIN]],
)
def test_slurm_tries_again_only_if_that_may_help(tmp_path: Path, statuses: str, tries: int) -> None:
    status, said = slurm(tmp_path, "shards.sbatch", statuses, RUN="r1", SLURM_ARRAY_TASK_ID="0")
    assert said.count("jitney batch run") == tries
    assert status == int(statuses.split()[tries - 1])


def test_the_images_have_what_jobs_need() -> None:
    for name in ("Dockerfile", "triton.Dockerfile"):
        text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
        assert " jobs otel >requirements.txt" in text
