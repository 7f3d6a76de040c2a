"""What a job says of itself to Prometheus: while it runs, and to a push gateway."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import metrics
from jitney_jobs.run import run_job
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.http_server import Quiet, listening
from tests.jobs.job_rows import ids, job_of, run, write_lines

Values = dict[str, float]


def values_of(text: str, name: str) -> Values:
    """Sample -> value, of one job's ``jitney_job_`` metrics. Each has its help, type and label."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("jitney_job_"):
            assert family.documentation
            for sample in family.samples:
                counts = sample.name.endswith("_total")
                assert family.type == ("counter" if counts else "gauge")
                if sample.labels["name"] == name:
                    found[sample.name.removeprefix("jitney_job_")] = sample.value
    return found


def fetch(url: str) -> str:
    return str(urllib.request.urlopen(url, timeout=60).read().decode())


class Gateway:
    """Keeps what is pushed; refuses it if told so."""

    def __init__(self) -> None:
        self.refuses = False
        self.pushed: list[tuple[str, str, str]] = []
        """(method, path, body)"""


@contextmanager
def gateway() -> Iterator[tuple[str, Gateway]]:
    made = Gateway()

    class Handler(Quiet):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            made.pushed.append((self.command, self.path, body))
            self.send_response(500 if made.refuses else 200)
            self.end_headers()

    with listening(Handler) as address:
        yield f"http://{address}", made


def test_a_running_job_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its beginning, when nothing is done, to its end, with which the port closes."""
    pq.write_table(pa.Table.from_pylist(ids(0, 2000)), tmp_path / "in.parquet", row_group_size=20)
    source = tmp_path / "in.parquet"
    job = job_of(source, tmp_path / "out", within="1000d", metrics_port=0, in_flight=16)
    seen: list[Values] = []
    urls: list[str] = []

    def look() -> bool:
        if not urls:
            port = capsys.readouterr().err.removeprefix("metrics on port ").strip()
            urls.append(f"http://127.0.0.1:{port}/metrics")
        if len(seen) < 50:
            seen.append(values_of(fetch(urls[0]), "out"))
        return True

    assert run_job(job, wanted=look)
    first = seen[0]
    last = seen[-1]
    assert first["rows_total"] == first["bad_rows_total"] == first["complete"] == first["late"] == 0
    assert abs(first["progress_timestamp_seconds"] - time.time()) < 3600
    assert first["due_timestamp_seconds"] > time.time()
    assert "expected_rows" not in first, "nothing is read"
    assert "tokens_total" not in first, "it has no model"
    assert 0 < last["rows_total"] < 2000
    assert last["progress_timestamp_seconds"] > seen[1]["progress_timestamp_seconds"]
    assert last["bad_rows_total"] == 1, "row 13"
    assert 1500 < last["expected_rows"] < 2500
    assert last["expected_end_timestamp_seconds"] >= last["progress_timestamp_seconds"]
    for stage in ("read", "prepare", "waited", "run", "write"):
        assert last[f"{stage}_seconds_total"] >= seen[1][f"{stage}_seconds_total"]
    with pytest.raises(OSError, match="refused"):
        fetch(urls[0])


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"cannot be served on port {port}: .*in use"):
            run(source, tmp_path / "out", metrics_port=port)


def test_tokens_and_the_batch(tmp_path: Path) -> None:
    figures = {"tokens": 70.0, "steps": 10.0, "rows_in_steps": 20.0, "most_rows": 4.0, "at": 100.0}
    figures |= {"position": 0.5, "taken": 40.0, "done": 30.0, "seconds": 60.0, "moved_at": 99.0}
    state = metrics.State(figures, done_before=10, bad_before=2, due=120.0, late=True)
    values = {name: value_of(state) for name, (_, value_of) in metrics.FAMILIES.items()}
    assert values["tokens_total"] == 70
    assert values["batch_filled_ratio"] == 0.5
    assert values["expected_rows"] == 100, "half of it: 10 by an earlier run, 40 by this one"
    assert values["rows_total"] == 40
    assert values["bad_rows_total"] == 2
    assert values["expected_end_timestamp_seconds"] == 100 + 120
    assert values["due_timestamp_seconds"] == 120
    assert values["late"] == 1


def test_what_a_gateway_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning, on the way and at the end, of a job that fails and of the run after it."""
    monkeypatch.setattr(metrics, "_PUSH_S", 0.01)
    source = write_lines(tmp_path / "in.jsonl", ids(0, 400))
    settings: dict[str, Any] = {"name": "nightly", "part_rows": 5, "in_flight": 8}
    with gateway() as (url, got):
        settings["push_gateway"] = url
        with pytest.raises(InvalidArgumentError, match="max_errors"):
            run(source, tmp_path / "out", max_errors=0, **settings)
        stopped = values_of(got.pushed[-1][2], "nightly")
        assert stopped["complete"] == 0
        before = len(got.pushed)
        function = "tests.jobs.job_rows:slowly"
        with pytest.raises(InvalidArgumentError, match="map was"):
            run(source, tmp_path / "out", map=function, **settings)
        assert run(source, tmp_path / "out", **settings)
    assert {pushed[:2] for pushed in got.pushed} == {("PUT", "/metrics/job/nightly")}
    first, last = (values_of(got.pushed[at][2], "nightly") for at in (before, -1))
    assert first["complete"] == 0
    assert last["complete"] == 1
    assert last["rows_total"] == last["expected_rows"] == 400, "those of the first run too"
    assert last["bad_rows_total"] == 1
    assert len(got.pushed) > before + 2


def test_a_gateway_that_fails_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_PUSH_S", 0.001)
    source = write_lines(tmp_path / "in.jsonl", ids(20, 400))
    with gateway() as (url, got):
        got.refuses = True
        assert run(source, tmp_path / "out", push_gateway=url, in_flight=8, part_rows=2)
        assert len(got.pushed) > 2
    assert capsys.readouterr().err.count("metrics cannot be pushed: HTTP Error 500") == 1
    for number, nowhere in enumerate((url, "nonsense://[")):
        assert run(source, tmp_path / f"out{number}", push_gateway=nowhere)
        assert capsys.readouterr().err.count("metrics cannot be pushed") == 1


def test_a_worker_tells_of_its_jobs(tmp_path: Path) -> None:
    """Each under its own name, and where its file says so to another gateway."""
    queue = tmp_path / "queue"
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    queue.mkdir()
    with gateway() as (url, got), gateway() as (other, elsewhere):
        for name in "ab":
            text = f"input: {source}\noutput: {tmp_path}/{name}\ntask: map\nworkers: 0\n"
            text += "map: tests.jobs.job_rows:twice\n"
            text += f"push_gateway: {other}\n" if name == "b" else ""
            (queue / f"{name}.yaml").write_text(text, encoding="utf-8")
        words = ["batch", "worker", str(queue), "--until-empty", "--push-gateway", url]
        assert CliRunner().invoke(cli.make_app(), words, catch_exceptions=False).exit_code == 0
    assert {path for _, path, _ in got.pushed} == {"/metrics/job/a"}
    assert {path for _, path, _ in elsewhere.pushed} == {"/metrics/job/b"}


@pytest.mark.debian
def test_the_real_gateway(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 30))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["prometheus-pushgateway", f"--web.listen-address={address}"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            while not answers(address):
                assert process.poll() is None, "it ended"
                time.sleep(0.01)
            assert run(source, tmp_path / "out", push_gateway=address, within="0.001s")
            text = fetch(f"http://{address}/metrics")
        finally:
            process.terminate()
    values = values_of(text, "out")
    assert values["rows_total"] == 30
    assert values["bad_rows_total"] == 1
    assert values["complete"] == values["late"] == 1
    assert 'jitney_job_rows_total{instance="",job="out",name="out"} 30' in text


def answers(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0
