"""A small sweep of the real server, by the command that users give; needs perf_analyzer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jitney_measure import record
from jitney_server.server import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("binary")]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pylm"
JITNEY = Path(sys.executable).parent / "jitney"


def bench(server: TritonServer, *words: str) -> subprocess.CompletedProcess[str]:
    where = ("--url", server.grpc_url, "--http-url", server.http_url)
    return subprocess.run(
        [JITNEY, "bench", *where, "--metrics-url", server.metrics_url, *words],
        env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow  # test_a_model_of_one_call is its faster sister
def test_a_language_model(server: TritonServer, tmp_path: Path) -> None:
    done = bench(
        server, MODEL, "--concurrency", "4", "--rate", "20", "--requests", "24",
        "--input-tokens", "40", "--output-tokens", "8:16", "--slo", "ttft-p95=30s,itl-p95=30s",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Best with ttft-p95=30s,itl-p95=30s: ", done.stdout)
    result = record.read(tmp_path / "result.json")
    assert [str(point.load) for point in result.points] == ["4 at once", "20/s"]
    for point in result.points:
        found, work = point.measured, point.engine
        assert found is not None, point.remarks
        assert (found.requests, found.failed) == (24, 0)
        # What the client counted is what the engine says it made.
        assert found.tokens_from == "counts"
        assert work is not None
        assert found.output_tokens == work.generated_tokens
        assert work.hit_tokens == 0, "the warm-up had prompts of its own"
        assert 24 * 8 <= work.generated_tokens <= 24 * 16
        assert found.input_tokens_mean == pytest.approx(40, rel=0.25), "as long as was asked for"
        assert work.prompt_tokens == pytest.approx(24 * found.input_tokens_mean, rel=0.01)
        assert 0 < found.ttft.at(50) < found.latency.at(50)
        assert work.steps > 0
        assert point.stages[0].inferences == 24
    assert result.points[0].engine.mean_batch > 1.5, "four at once share steps"
    assert (tmp_path / "report.html").exists()


def test_a_model_of_one_call(server: TritonServer, tmp_path: Path) -> None:
    if "digits" not in (server.models or ()):
        pytest.skip("the model is not built: make models")
    done = bench(
        server, "digits", "--concurrency", "8", "--requests", "400",
        "--protocol", "http", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    points = record.read(tmp_path / "result.json").points
    assert [str(point.load) for point in points] == ["8 at once"]
    for point in points:
        assert point.measured is not None, point.remarks
        assert point.measured.requests == 400
        (stage,) = point.stages
        assert stage.inferences == 400
    assert points[0].stages[0].mean_batch > 1


def test_what_goes_wrong_is_said(server: TritonServer, tmp_path: Path) -> None:
    """An unknown model is an error of one line; a refused request is a failed load."""
    unknown = bench(server, "pilm")
    assert unknown.returncode == 1
    assert "did you mean 'pylm'" in unknown.stderr
    refused = bench(
        server, "--concurrency", "2", "--requests", "8", "--out", str(tmp_path),
        "--sampling", json.dumps({"temprature": 1}),
    )  # fmt: skip
    assert refused.returncode == 1
    assert "'temprature' is unknown" in refused.stdout
    (point,) = record.read(tmp_path / "result.json").points
    assert point.state == "failed"
    assert (tmp_path / "report.html").exists()
