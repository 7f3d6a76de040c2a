"""Jobs on a Ray cluster of two nodes, both on this machine."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import LoadError, UnavailableError
from jitney_jobs.job import Job
from jitney_jobs.job_record import read_record
from jitney_jobs.outcome import TooManyBadRows
from jitney_jobs.run import run_job

from tests.jobs.bucket import bucket_in
from tests.jobs.job_rows import bad, ids, job_of, read, run, write_lines
from tests.jobs.test_generate_job import ENGINE
from tests.tiny_models import make_checkpoint

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

MEMORY = 200 << 20
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "worker_niceness": 0,
}
"""So that a dead node is noticed in seconds, and that workers start on a busy machine."""


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


def when_there_is(output: Path, pattern: str, act: Callable[[], None]) -> threading.Thread:
    """Do something once a file is in the output, in a thread."""

    def watch() -> None:
        while not list(output.glob(pattern)):
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def slow_job(inputs: Path, output: Path, cluster: Cluster, **settings: Any) -> Job:
    """20 ms a row; each file is a block, whose parts have 20 rows."""
    function = "tests.jobs.job_rows:in_20_ms"
    given = {"map": function, "part_rows": 20, "workers": 2, "ray": cluster.address, **settings}
    return job_of(inputs, output, **given)


def check_all_rows(output: Path) -> None:
    rows = sorted(read(output), key=lambda row: row["id"])
    assert [(row["id"], row["twice"]) for row in rows] == [
        (i, 2 * i) for i in range(400) if i != 13
    ]
    assert [each["error"] for each in bad(output)] == ["ValueError: unlucky"]


def test_a_node_is_killed(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    """In mid-job, with actors on it: every row is there once, the bad one among the bad. Neither a
    file of a part that does not count is left, nor an actor."""
    import ray

    output = tmp_path / "out"
    node = cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    lost: list[int] = []

    def kill() -> None:
        for actor in ray._private.state.actors().values():
            if actor["Address"]["NodeID"] == node.node_id:
                lost.append(actor["Pid"])
        cluster.remove_node(node, allow_graceful=False)

    killer = when_there_is(output, "part-*", kill)
    job = slow_job(inputs, output, cluster)
    assert run_job(job)
    killer.join(60)
    assert lost
    for pid in lost:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(60)
    check_all_rows(output)
    named = {name for part in read_record(str(output), None).parts for name in part.files}
    assert {str(path.relative_to(output)) for path in output.rglob("part-*")} == named
    assert run_job(job), "a complete job has nothing left to do"


def test_a_stopped_run_keeps_what_has_ended(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    """The actors write it, and a run without Ray goes on."""
    output = tmp_path / "out"
    stopper = when_there_is(output, "part-*", partial(os.kill, os.getpid(), signal.SIGTERM))
    job = slow_job(inputs, output, cluster)
    assert not run_job(job)
    stopper.join(60)
    record = read_record(str(output), None)
    done = record.written + record.failed
    assert 20 <= done < 400
    assert run_job(job_of(inputs, output, map="tests.jobs.job_rows:in_20_ms"))
    check_all_rows(output)


def test_tables_as_without_ray(cluster: Cluster, tmp_path: Path) -> None:
    """Of every type, divided into folders, with columns that the function makes, and bad rows."""
    source = tmp_path / "in"
    source.mkdir()
    for file in range(3):
        ids = list(range(100 * file, 100 * file + 100))
        columns = {
            "id": ids,
            "at": pa.array(ids, pa.timestamp("ns", "UTC")),
            "kind": [f"k{i % 3}" for i in ids],
            "parts": [[{"x": i, "y": None}] for i in ids],
        }
        fields = [pa.field("id", pa.int32(), metadata={"unit": "1"})]
        fields += list(pa.table(columns).schema)[1:]
        table = pa.table(columns, pa.schema(fields, {"made": "here"}))
        pq.write_table(table, source / f"{file}.parquet")
    settings: dict[str, Any] = {"partition_by": ["kind"], "map": "tests.jobs.job_rows:odd"}
    for output, more in (("here", {}), ("there", {"ray": cluster.address})):
        assert run(source, tmp_path / output, **settings, **more)
    here, there = (
        pq.read_table(tmp_path / output, filters=None).sort_by("id") for output in ("here", "there")
    )
    assert there.equals(here)
    for path in (tmp_path / "there").rglob("part-*.parquet"):
        schema = pq.read_schema(path)
        assert schema.metadata[b"made"] == b"here"
        assert schema.field("id").metadata[b"unit"] == b"1"
    assert len(bad(tmp_path / "there")) == 5
    assert bad(tmp_path / "there") == bad(tmp_path / "here")


def test_prompts_with_a_model_of_ones_own(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    """As without Ray; in order, from the part that an earlier run has committed."""
    model = make_checkpoint(tmp_path / "llama", "llama", tokenizer=True)
    settings: dict[str, Any] = {"task": "generate", "map": None, "model": str(model)}
    settings |= {"engine": ENGINE, "prompt": "{text}:", "max_tokens": 5, "ordered": True}
    settings["sampling"] = {"temperature": 0}
    assert run_job(job_of(inputs, tmp_path / "here", **settings))
    first = job_of(inputs, tmp_path / "there", limit=30, **settings)
    assert run_job(first)
    there = job_of(inputs, tmp_path / "there", ray=cluster.address, **settings)
    assert run_job(there)
    assert read(tmp_path / "there") == read(tmp_path / "here")


def test_the_first_rows_only(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run_job(job_of(inputs, output, ray=cluster.address, limit=150))
    assert sorted(row["id"] for row in read(output)) == [i for i in range(150) if i != 13]
    assert read_record(str(output), None).end is None


def test_bad_rows_and_files_end_as_without_ray(
    cluster: Cluster, inputs: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for file in inputs.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "4.jsonl.gz").write_bytes(b"no gzip")
    output = tmp_path / "out"
    assert run(source, output, ray=cluster.address)
    check_all_rows(output)
    record = read_record(str(output), None)
    assert list(record.bad_files) == [4]
    assert "4.jsonl.gz" in (output / "_errors" / "files.jsonl").read_text()
    with pytest.raises(TooManyBadRows, match=r"1 of .* rows are bad.*row 13 of .*unlucky"):
        run(source, tmp_path / "few", ray=cluster.address, max_errors="0")


def test_a_file_disappears_in_mid_job(cluster: Cluster, tmp_path: Path) -> None:
    """After it was listed: it is a bad file, and the job is complete."""
    source = tmp_path / "in"
    source.mkdir()
    for file in range(4):
        write_lines(source / f"{file}.jsonl", ids(100 * file, 100 * file + 100))
    output = tmp_path / "out"
    remover = when_there_is(output, "_job/journal.jsonl", (source / "3.jsonl").unlink)
    assert run(source, output, ray=cluster.address)
    remover.join(60)
    assert sorted(row["id"] for row in read(output)) == [i for i in range(300) if i != 13]
    assert list(read_record(str(output), None).bad_files) == [3]


def test_output_on_object_storage(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the journal there. What an actor of an earlier run has left is removed."""
    (tmp_path / "storage").mkdir()
    with bucket_in(tmp_path / "storage", monkeypatch) as bucket:
        (bucket.folder / "in").mkdir()
        write_lines(bucket.folder / "in/a.jsonl", ids(20, 80))
        source = bucket.place("in", "key:word@")
        output = bucket.place("out", "key:word@")
        assert run(source, output, ray=cluster.address, limit=20)
        left = bucket.folder / "out/part-00000-000000-000000000020-0-12345678.jsonl"
        left.write_text("{}")
        assert run(source, output, ray=cluster.address)
        assert sorted(row["id"] for row in read(bucket.folder / "out")) == list(range(20, 80))
        assert bucket.uploads == 0, "a part is one PUT"


def test_a_model_that_is_not_there(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    job = job_of(
        inputs, tmp_path / "out", task="generate", map=None, model="nowhere", ray=cluster.address
    )
    with pytest.raises(LoadError, match="nowhere"):
        run_job(job)


def test_no_cluster(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"Ray is not at 127\.0\.0\.1:1"):
        run_job(job_of(inputs, tmp_path / "out", ray="127.0.0.1:1"))
