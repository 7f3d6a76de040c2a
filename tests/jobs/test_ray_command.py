"""`jitney batch run --ray` as a user sees it: what it prints, and its end without a cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jitney_jobs.job_record import read_record
from jitney_jobs.run import run_job

from tests.jobs.job_rows import ids, job_of, read, write_lines

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
    words = ["batch", "run", str(source), str(output), "--task", "map", "--map", function]
    words += ["--ray", address, "--part-rows", "20", "--workers", "1", "--max-errors", "1"]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("lost", ["head", "raylet"])
def test_the_cluster_is_gone(tmp_path: Path, cluster: OwnCluster, lost: str) -> None:
    """The job ends and says so; a run without Ray goes on."""
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
    assert run_job(job_of(source, output, map=IN_20_MS, part_rows=20, max_errors=1))
    assert sorted(row["id"] for row in read(output)) == [i for i in range(400) if i != 13]


def test_nothing_of_ray_s_is_printed(tmp_path: Path) -> None:
    """Neither its warnings nor its log."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 120))
    job = begin(source, tmp_path / "out", "local", "tests.jobs.job_rows:twice")
    _, errors = job.communicate(timeout=240)
    assert job.returncode == 0
    assert len(read(tmp_path / "out")) == 100
    for word in ("Warning", "WARNING", "ERROR", "ray", "Ray", "["):
        assert word not in errors.replace(str(tmp_path), "")
