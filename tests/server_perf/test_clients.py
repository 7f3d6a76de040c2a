"""AIPerf and GenAI-Perf against the real server, by the very commands of docs/clients.md.

Each runs in the environment that scripts/fetch_clients.py makes; the tests are skipped only where
that cannot be had. Nothing here depends on how long anything takes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney.server import TritonServer

from tests.docs.blocks import read_page
from tests.server_perf.conftest import fetch_client

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/clients.md")
MODEL = "pylm"
REQUESTS = 24
TOKENS = 16
PROMPT_TOKENS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(ROOT / "model_repository", models=[MODEL]) as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's commands find what they name."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "model_repository").symlink_to(ROOT / "model_repository")
    return folder


def block(*words: str) -> str:
    """The block of the page that has all words."""
    (found,) = [
        block.text for block in read_page(PAGE, ROOT)
        if block.language == "bash" and all(word in block.text for word in words)
    ]  # fmt: skip
    return found


def run(text: str, server: TritonServer, place: Path) -> subprocess.CompletedProcess[str]:
    """A block, at this server's addresses."""
    for documented, here in (
        ("http://127.0.0.1:8000", f"http://{server.http_url}"),
        ("127.0.0.1:8001", server.grpc_url),
    ):
        text = text.replace(documented, here)
    own = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=place,
        env={**own, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def served(server: TritonServer) -> tuple[int, int]:
    """Requests of the model that succeeded and failed, by the server's statistics."""
    import tritonclient.http as triton

    with triton.InferenceServerClient(server.http_url) as client:
        (stats,) = client.get_inference_statistics(MODEL)["model_stats"]
    spent = stats["inference_stats"]
    return int(spent["success"]["count"]), int(spent["fail"]["count"])


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def check_lengths(found: dict[str, Any]) -> None:
    """Of outputs, which are cut into tokens anew: a few have one more or less."""
    assert found["count"] == REQUESTS
    assert found["avg"] == pytest.approx(TOKENS, abs=1)
    assert found["p50"] == pytest.approx(TOKENS, abs=1)


# ------------------------------------------------------------------ AIPerf


@pytest.fixture(scope="module")
def streamed(aiperf: Path, server: TritonServer, place: Path) -> Path:
    """What AIPerf wrote, streaming."""
    before = served(server)
    text = block("cat >request.jinja") + block("aiperf profile", "generate_stream")
    done = run(text, server, place)
    assert done.returncode == 0, done.stdout + done.stderr
    after = served(server)
    assert (after[0] - before[0], after[1] - before[1]) == (REQUESTS, 0)
    return place / "build/aiperf"


def test_aiperf_streaming(streamed: Path) -> None:
    found = read(streamed / "profile_export_aiperf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert found["error_summary"] == []
    assert found["request_error_rate"]["avg"] == 0
    assert found["is_complete"]
    assert found["time_to_first_token"]["count"] == REQUESTS
    assert 0 < found["time_to_first_token"]["p50"] <= found["request_latency"]["p50"]
    check_lengths(found["output_sequence_length"])
    assert found["output_token_throughput"]["avg"] > 0
    assert "input_sequence_length" not in found, "it is there now: docs/clients.md says otherwise"


def test_aiperf_sends_the_tensors_of_the_table(streamed: Path) -> None:
    sessions = read(streamed / "inputs.json")["data"]
    assert len(sessions) == REQUESTS
    for session in sessions:
        (payload,) = session["payloads"]
        assert payload.pop("text_input").strip()
        assert payload == {
            "stream": True, "exclude_input_in_output": True,
            "max_tokens": TOKENS, "ignore_eos": True,
        }  # fmt: skip


def test_each_aiperf_answer_came_in_several_responses(streamed: Path) -> None:
    """Coalescing may put two tokens in one response, and not all sixteen in one every time."""
    lines = (streamed / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    assert len(metrics) == REQUESTS
    gaps = [len(found.get("inter_chunk_latency", {"value": []})["value"]) for found in metrics]
    assert all(count < TOKENS for count in gaps)
    assert sum(gaps) > REQUESTS


def test_aiperf_whole_answers(streamed: Path, server: TritonServer, place: Path) -> None:
    """``streamed`` left the template there, as on the page."""
    done = run(block("aiperf profile", "pylm/generate "), server, place)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(place / "build/aiperf-whole/profile_export_aiperf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert found["error_summary"] == []
    assert "time_to_first_token" not in found
    check_lengths(found["output_sequence_length"])


def test_aiperf_counts_what_is_refused(streamed: Path, server: TritonServer, place: Path) -> None:
    text = block("aiperf profile", "generate_stream").replace("ignore_eos:true", "temprature:1")
    done = run(text.replace("build/aiperf", "build/aiperf-refused"), server, place)
    assert done.returncode != 0
    log = place / "build/aiperf-refused/logs/aiperf.log"
    assert f"0 valid requests and {REQUESTS} errors" in log.read_text(encoding="utf-8")
    assert not (place / "build/aiperf-refused/profile_export_aiperf.json").exists()


# ------------------------------------------------------------------ GenAI-Perf


@pytest.fixture(scope="module")
def profiled(genai_perf: Path, server: TritonServer, place: Path) -> Path:
    """What GenAI-Perf wrote."""
    before = served(server)
    done = run(block("genai-perf profile"), server, place)
    assert done.returncode == 0, done.stdout + done.stderr
    after = served(server)
    assert (after[0] - before[0], after[1] - before[1]) == (REQUESTS, 0)
    (found,) = (place / "build/genai-perf").rglob("profile_export_genai_perf.json")
    return found.parent


def test_genai_perf(profiled: Path) -> None:
    found = read(profiled / "profile_export_genai_perf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert 0 < found["time_to_first_token"]["p50"] <= found["request_latency"]["p50"]
    assert found["inter_token_latency"]["avg"] > 0
    assert found["input_sequence_length"]["avg"] == pytest.approx(PROMPT_TOKENS, abs=1)
    assert found["output_sequence_length"]["avg"] == pytest.approx(TOKENS, abs=1)


def test_genai_perf_sends_the_tensors_of_the_table(profiled: Path) -> None:
    for entry in read(profiled / "inputs.json")["data"]:
        assert len(entry.pop("text_input")) == 1
        (parameters,) = entry.pop("sampling_parameters")
        assert json.loads(parameters) == {"max_tokens": f"{TOKENS}", "min_tokens": f"{TOKENS}"}
        assert entry == {"model": MODEL, "stream": [True], "exclude_input_in_output": [True]}


# ------------------------------------------------------------------ the environments


@pytest.mark.parametrize("client", ["aiperf", "genai-perf"])
def test_what_is_there_is_not_fetched_again(client: str) -> None:
    """By the page's command: `python scripts/fetch_clients.py`."""
    command = fetch_client(client)
    made = command.stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, "scripts/fetch_clients.py", client],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == command.parent
    assert command.stat().st_mtime_ns == made
