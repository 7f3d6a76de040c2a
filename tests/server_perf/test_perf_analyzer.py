"""NVIDIA's own load generator drives our backend in streaming mode and finds nothing wrong.

perf_analyzer is what GenAI-Perf runs underneath. scripts/fetch_perf_analyzer.py puts it into the
environment; the test is skipped only where that is impossible.
"""

import csv
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from jitney.server import TritonServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pylm"
CONCURRENCY = 4
REQUESTS = 24
PROMPTS = [("import os\n", 8), ("def add(a, b):\n", 16), ("class Stack:\n", 24)]


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(ROOT / "model_repository", models=[MODEL]) as running:
        yield running


@pytest.fixture(scope="module")
def folder(binary: Path, server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run left behind: report.csv, profile.json and output."""
    folder = tmp_path_factory.mktemp("perf_analyzer")
    requests = [
        {
            "text_input": [prompt],
            "stream": [True],
            "sampling_parameters": [json.dumps({"max_tokens": count, "ignore_eos": True})],
        }
        for prompt, count in PROMPTS
    ]
    (folder / "input.json").write_text(json.dumps({"data": requests}), encoding="utf-8")
    command = [
        *(str(binary), "-m", MODEL, "-u", server.grpc_url, "-i", "grpc"),
        *("--streaming", "--async", "--input-data", str(folder / "input.json")),
        *("--concurrency-range", str(CONCURRENCY), "--request-count", str(REQUESTS)),
        *("-s", "900", "-f", str(folder / "report.csv")),
        *("--profile-export-file", str(folder / "profile.json")),
    ]
    result = subprocess.run(
        command,
        env={**os.environ, "LD_LIBRARY_PATH": str(binary.parent)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    output = result.stdout + result.stderr
    (folder / "output").write_text(output, encoding="utf-8")
    assert result.returncode == 0, output
    return folder


def test_it_finishes_and_reports(folder: Path) -> None:
    output = (folder / "output").read_text(encoding="utf-8")
    assert f"Request concurrency: {CONCURRENCY}" in output
    assert "Throughput:" in output
    for word in ("Failed to obtain stable measurement", "Failed Request", "error"):
        assert word.lower() not in output.lower(), output
    (row,) = csv.DictReader((folder / "report.csv").read_text(encoding="utf-8").splitlines())
    assert row["Concurrency"] == str(CONCURRENCY)
    assert float(row["Inferences/Second"]) > 0
    assert float(row["p99 latency"]) >= float(row["p50 latency"]) > 0


def test_each_request_streamed_what_it_asked_for(folder: Path) -> None:
    """Coalescing may put two tokens in one response, so responses are at most tokens; each request
    has at least a first response, and they come after it was sent and in order."""
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    (experiment,) = profile["experiments"]
    assert experiment["experiment"]["value"] == CONCURRENCY
    requests = experiment["requests"]
    assert len(requests) >= REQUESTS
    most = max(count for _, count in PROMPTS)
    for request in requests:
        times = request["response_timestamps"]
        assert 1 <= len(times) <= most + 1, "and the empty final response"
        assert request["timestamp"] < times[0]
        assert times == sorted(times)
    overlapping = sum(
        later["timestamp"] < earlier["response_timestamps"][-1]
        for earlier, later in itertools.pairwise(requests)
    )
    assert overlapping > 0, "the concurrency was real"


def test_the_server_counted_them_without_failure(folder: Path, server: TritonServer) -> None:
    import tritonclient.http as triton

    with triton.InferenceServerClient(server.http_url) as client:
        (stats,) = client.get_inference_statistics(MODEL)["model_stats"]
    assert stats["inference_stats"]["success"]["count"] >= REQUESTS
    assert stats["inference_stats"]["fail"]["count"] == 0
