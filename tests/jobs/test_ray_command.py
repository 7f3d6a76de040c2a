"""`jitney batch run --ray` as a user sees it: what it prints, and its end without a cluster."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jitney_jobs.job_record import read_record
from jitney_jobs.outcome import ExitStatus

from tests.http_server import Quiet, listening
from tests.jobs.job_rows import bad, ids, read, write_lines

pytest.importorskip("ray")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; sys.path.insert(0, ''); from jitney import cli; cli.main()"
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 2,
    "object_store_memory": 200 << 20,
    "include_dashboard": False,
    "_system_config": {"worker_niceness": 0},
})
processes = cluster.head_node.all_processes.items()
found = {kind: [each.process.pid for each in some] for kind, some in processes}
print(cluster.address, found["gcs_server"][0], found["raylet"][0], flush=True)
sys.stdin.read()
"""
IN_20_MS = "tests.jobs.job_rows:in_20_ms"


class OwnCluster:
    """A cluster of one node, in a process of its own."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        words = [sys.executable, "-c", CLUSTER]
        self._process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.address, *pids = self._process.stdout.readline().split()
        self.pids = dict(zip(("head", "raylet"), map(int, pids), strict=True))

    def close(self) -> None:
        self._process.communicate("", timeout=60)


@pytest.fixture
def cluster() -> Iterator[OwnCluster]:
    made = OwnCluster()
    yield made
    made.close()


def begin(source: Path, output: Path, address: str, function: str) -> subprocess.Popen[str]:
    words = ["run", str(source), str(output), "--task", "map", "--map", function]
    words += ["--ray", address, "--part-rows", "20", "--workers", "1", "--max-errors", "1"]
    return begin_batch(*words)


def begin_batch(*words: str) -> subprocess.Popen[str]:
    """In a session of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "batch", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("lost", "options"), [("head", ["--ray", "local"]), ("raylet", [])])
def test_the_cluster_is_gone(
    tmp_path: Path, cluster: OwnCluster, lost: str, options: list[str]
) -> None:
    """The job ends and says so; `resume` goes on, with Ray or without."""
    source = write_lines(tmp_path / "in.jsonl", ids(0, 400))
    output = tmp_path / "out"
    job = begin(source, output, cluster.address, IN_20_MS)
    while not list(output.glob("part-*")):
        assert job.poll() is None
        time.sleep(0.05)
    os.kill(cluster.pids[lost], signal.SIGKILL)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "`jitney batch resume` goes on, with --ray or without" in errors
    assert read_record(str(output), None).written < 399
    resumed = begin_batch("resume", str(output), *options)
    said, errors = resumed.communicate(timeout=240)
    assert resumed.returncode == ExitStatus.BAD_ROWS, errors
    assert ": complete\n" in said
    assert sorted(row["id"] for row in read(output)) == [i for i in range(400) if i != 13]
    assert [each["row"] for each in bad(output)] == [13]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
@pytest.mark.parametrize("when", ["Ray starts", "rows run"])
def test_a_signal_ends_the_job_and_all_of_ray(
    tmp_path: Path, when: str, number: signal.Signals
) -> None:
    """Ctrl-C comes to all processes of the terminal, SIGTERM to the job's alone."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 2000))
    output = tmp_path / "out"
    job = begin(source, output, "local", IN_20_MS)
    process = psutil.Process(job.pid)
    children: list[psutil.Process] = []
    while len(children) < 2 if when == "Ray starts" else not list(output.glob("part-*")):
        assert job.poll() is None
        time.sleep(0.02)
        children = process.children(recursive=True)
    if number is signal.SIGINT:
        os.killpg(job.pid, number)
    else:
        os.kill(job.pid, number)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == ExitStatus.STOPPED, errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert processes_of(job.pid) == []


def processes_of(session: int) -> list[psutil.Process]:
    """Those that run in a session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_an_address_that_is_not_ray_s(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    with listening(Quiet) as address:
        job = begin(source, tmp_path / "out", address, IN_20_MS)
        _, errors = job.communicate(timeout=100)
    assert job.returncode == ExitStatus.JOB_ERROR
    assert f"error: Ray is not at {address}: what answers there is no Ray" in errors
    assert "Traceback" not in errors


def test_nothing_of_ray_s_is_printed(tmp_path: Path) -> None:
    """Neither its warnings nor its log."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 120))
    job = begin(source, tmp_path / "out", "local", "tests.jobs.job_rows:twice")
    _, errors = job.communicate(timeout=240)
    assert job.returncode == 0
    assert len(read(tmp_path / "out")) == 100
    for word in ("Warning", "WARNING", "ERROR", "ray", "Ray", "["):
        assert word not in errors.replace(str(tmp_path), "")
