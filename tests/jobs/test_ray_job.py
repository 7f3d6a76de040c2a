"""Jobs on a Ray cluster of two nodes, both on this machine."""

import contextlib
import gzip
import os
import signal
import subprocess
import sys
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
from jitney.errors import JitneyError, LoadError, UnavailableError
from jitney_jobs.job import Job
from jitney_jobs.job_record import read_record
from jitney_jobs.outcome import ExitStatus, TooManyBadRows
from jitney_jobs.run import run_job

from tests.jobs.bucket import bucket_in
from tests.jobs.job_rows import bad, ids, job_of, read, run, write_lines
from tests.jobs.job_status import run_command
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
    job = slow_job(inputs, output, cluster, max_errors="1")
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


def test_a_node_with_a_gpu_is_killed(inputs: Path, tmp_path: Path) -> None:
    """Its actor cannot be started on another node, whose GPU is taken: the rows that it had are
    done there nevertheless."""
    head = {
        "num_cpus": 2,
        "num_gpus": 1,
        "object_store_memory": MEMORY,
        "include_dashboard": False,
        "_system_config": QUICK,
    }
    output = tmp_path / "out"
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=MEMORY)
        kill = partial(cluster.remove_node, node, allow_graceful=False)
        killer = when_there_is(output, "part-*", kill)
        assert run_job(slow_job(inputs, output, cluster, watchdog="100s", max_errors="1"))
        killer.join(60)
    finally:
        cluster.shutdown()
    check_all_rows(output)


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


def test_an_actor_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """After a part of its block is committed: the rows of this part are not run again, so that no
    bad row counts twice."""
    import ray

    source = write_lines(tmp_path / "in.jsonl", ids(0, 200))
    output = tmp_path / "out"
    killed: list[int] = []

    def kill() -> None:
        while not read_record(str(output), None).failed:
            time.sleep(0.05)
        for actor in ray._private.state.actors().values():
            if actor["State"] == "ALIVE" and "MapWorker" in actor["ActorClassName"]:
                killed.append(actor["Pid"])
                os.kill(actor["Pid"], signal.SIGKILL)

    killer = when_there_is(output, "_errors/part-*", kill)
    assert run_job(slow_job(source, output, cluster, workers=1, max_errors="1"))
    killer.join(60)
    assert len(killed) == 1
    assert sorted(row["id"] for row in read(output)) == [i for i in range(200) if i != 13]
    assert [each["row"] for each in bad(output)] == [13]
    parts = read_record(str(output), None).parts
    assert sum(part.written + part.failed for part in parts) == 200


def test_a_module_that_only_actors_cannot_import(cluster: Cluster, tmp_path: Path) -> None:
    """The reason alone is shown, with the node, and no text of Ray's."""
    source = write_lines(tmp_path / "in.jsonl", ids(0, 10))
    with pytest.raises(JitneyError) as caught:
        run(source, tmp_path / "out", ray=cluster.address, map="tests.jobs.fails_on_cluster:same")
    text = str(caught.value)
    assert "libexample.so.1: cannot open shared object file" in text
    assert "on the node 1" in text
    assert "\n" not in text
    assert "ray::" not in text


def test_a_process_that_dies_at_a_row_again_and_again(cluster: Cluster, tmp_path: Path) -> None:
    """In the actor itself, which Ray starts again: not for ever."""
    source = write_lines(tmp_path / "in.jsonl", [{"id": i, "flag": "/nowhere"} for i in range(90)])
    with pytest.raises(UnavailableError, match="has died 4 times since a part was last committed"):
        run(source, tmp_path / "out", ray=cluster.address, map="tests.jobs.job_rows:deadly_at_50")


@pytest.mark.parametrize("settings", [{}, {"ordered": True}], ids=["as it comes", "ordered"])
def test_the_first_rows_only(
    cluster: Cluster, inputs: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Not complete, but if these are all rows."""
    output = tmp_path / "out"
    assert run_job(job_of(inputs, output, ray=cluster.address, limit=150, **settings))
    assert sorted(row["id"] for row in read(output)) == [i for i in range(150) if i != 13]
    assert read_record(str(output), None).end is None
    assert run_job(job_of(inputs, output, ray=cluster.address, limit=400, **settings))
    assert read_record(str(output), None).end is not None
    check_all_rows(output)


def test_what_failed_alone_is_done_again(cluster: Cluster, tmp_path: Path) -> None:
    """A bad row, and a bad file that was put right."""
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "0.jsonl", [{"id": i, "flag": str(tmp_path / "fixed")} for i in range(50)])
    (source / "1.jsonl.gz").write_bytes(b"no gzip")
    output = tmp_path / "out"
    job = job_of(source, output, map="tests.jobs.job_rows:until_fixed", ray=cluster.address)
    assert run_job(job)
    record = read_record(str(output), None)
    assert [each["row"] for each in bad(output)] == [13]
    assert list(record.bad_files) == [1]
    before = {path.name: path.read_bytes() for path in output.glob("part-*")}
    assert run_job(job, retry_bad=True)
    assert [each["row"] for each in bad(output)] == [13], "it is not put right"
    (tmp_path / "fixed").touch()
    lines = "".join(f'{{"id": {i}, "flag": "/"}}\n' for i in range(50, 70))
    (source / "1.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert run_job(job, retry_bad=True)
    assert bad(output) == []
    assert sorted(row["id"] for row in read(output)) == list(range(70))
    assert (
        before.items() <= {path.name: path.read_bytes() for path in output.glob("part-*")}.items()
    )
    assert not read_record(str(output), None).bad_files


def test_a_late_job_says_so_by_its_status(cluster: Cluster, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    words = ["batch", "run", source, tmp_path / "out", "--task", "map", "--ray", cluster.address]
    words += ["--map", "tests.jobs.job_rows:twice", "--workers", "0", "--within", "0.000001s"]
    late = run_command(list(map(str, words)))
    assert late.status == ExitStatus.LATE
    assert ", late\n" in late.output


def test_lines_of_openai(cluster: Cluster, tmp_path: Path) -> None:
    """As without Ray, those that are refused among them."""
    model = make_checkpoint(tmp_path / "llama", "llama", tokenizer=True)
    body = {"model": str(model), "prompt": "the bus", "max_tokens": 4, "temperature": 0}
    lines: list[dict[str, Any]] = [
        {"custom_id": str(i % 19), "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(20)
    ]
    lines[5] = {**lines[5], "url": "/v1/nowhere"}
    source = write_lines(tmp_path / "in.jsonl", lines)
    settings: dict[str, Any] = {"task": "generate", "map": None, "input_format": "openai"}
    settings |= {"engine": ENGINE}
    assert run(source, tmp_path / "here", **settings)
    assert run(source, tmp_path / "there", ray=cluster.address, **settings)
    here, there = (
        {row["custom_id"]: row["response"]["body"]["choices"] for row in read(tmp_path / name)}
        for name in ("here", "there")
    )
    assert len(there) == 18
    assert there == here
    refused = [
        sorted((row["custom_id"], row["error"]["code"]) for row in bad(tmp_path / name))
        for name in ("here", "there")
    ]
    assert len(refused[1]) == 2
    assert refused[1] == refused[0]


def test_rows_that_are_larger_than_a_block(cluster: Cluster, tmp_path: Path) -> None:
    """A block has about 8 MB at most."""
    rows = [{"id": i, "text": chr(97 + i) * (12 << 20)} for i in range(4)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert run(source, tmp_path / "out", ray=cluster.address, map_column=["id"])
    found = {row["id"]: row["text"] for row in read(tmp_path / "out")}
    assert found == {row["id"]: row["text"] for row in rows}


def test_two_jobs_at_once(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    """Of two processes on one cluster: each has its own rows, all of them."""
    outputs = [tmp_path / "a", tmp_path / "b"]
    command = "import sys; from jitney import cli; cli.main()"
    words = ["--task", "map", "--map", "tests.jobs.job_rows:in_20_ms", "--ray", cluster.address]
    words += ["--part-rows", "20", "--workers", "1"]
    root = Path(__file__).resolve().parents[2]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", command, "batch", "run", str(inputs), str(output), *words],
            cwd=root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for output in outputs
    ]
    errors = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [ExitStatus.BAD_ROWS] * 2, errors
    for output in outputs:
        check_all_rows(output)
