"""Jobs on a Ray cluster of two nodes, both on this machine."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import LoadError, UnavailableError
from jitney_jobs.run import run_job

from tests.jobs.job_rows import bad, job_of, read, write_lines
from tests.jobs.test_generate_job import ENGINE
from tests.tiny_models import make_checkpoint

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

MEMORY = 200 << 20
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
"""So that a dead node is noticed in seconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {
        "num_cpus": 2,
        "object_store_memory": MEMORY,
        "include_dashboard": False,
        "_system_config": QUICK,
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of 100 rows; that of the id 13 is bad for `twice`."""
    folder = tmp_path_factory.mktemp("rows")
    for file in range(4):
        rows = [{"id": 100 * file + i, "text": f"the bus {i}"} for i in range(100)]
        write_lines(folder / f"{file}.jsonl", rows)
    return folder


def test_a_node_is_killed(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    """In mid-job, with actors on it: every row is there once, the bad one among the bad."""
    import ray

    output = tmp_path / "out"
    node = cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    lost: list[int] = []

    def kill() -> None:
        while not (output / "part-00000.jsonl").exists():
            time.sleep(0.05)
        actors = ray._private.state.actors().values()
        lost.append(sum(actor["Address"]["NodeID"] == node.node_id for actor in actors))
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    function = "tests.jobs.job_rows:in_20_ms"
    job = job_of(inputs, output, map=function, ray=cluster.address, part_rows=20, workers=2)
    assert run_job(job)
    killer.join(60)
    assert lost
    assert lost[0] > 0
    rows = sorted(read(output), key=lambda row: row["id"])
    assert [(row["id"], row["twice"]) for row in rows] == [
        (i, 2 * i) for i in range(400) if i != 13
    ]
    assert [each["error"] for each in bad(output)] == ["ValueError: unlucky"]
    assert run_job(job), "a complete job has nothing left to do"


def test_prompts_with_a_model_of_ones_own(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    """As without Ray; in order, from the part that an earlier run has committed."""
    model = make_checkpoint(tmp_path / "llama", "llama", tokenizer=True)
    settings: dict[str, Any] = {"task": "generate", "map": None, "model": str(model)}
    settings |= {"engine": ENGINE, "prompt": "{text}:", "max_tokens": 5, "ordered": True}
    settings["sampling"] = {"temperature": 0}
    assert run_job(job_of(inputs, tmp_path / "here", **settings))
    there = job_of(inputs, tmp_path / "there", ray=cluster.address, **settings)
    assert run_job(there)
    assert read(tmp_path / "there") == read(tmp_path / "here")


def test_a_model_that_is_not_there(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    job = job_of(
        inputs, tmp_path / "out", task="generate", map=None, model="nowhere", ray=cluster.address
    )
    with pytest.raises(LoadError, match="nowhere"):
        run_job(job)


def test_no_cluster(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"Ray is not at 127\.0\.0\.1:1"):
        run_job(job_of(inputs, tmp_path / "out", ray="127.0.0.1:1"))
