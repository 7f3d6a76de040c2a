"""AIPerf and GenAI-Perf against the real server, by the very commands of docs/clients.md.

Each runs in the environment that scripts/fetch_clients.py has made, as `.ci/docs` has it do.
Nothing here depends on how long anything takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jitney_server.server import TritonServer

from tests.docs.blocks import read_page

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.clients]

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/clients.md")
MODEL = "pylm"
REQUESTS = 24
TOKENS = 16
PROMPT_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def run(
    text: str, server: TritonServer, folder: Path, gateway: str = ""
) -> subprocess.CompletedProcess[str]:
    """A block, at the addresses of this server and of a gateway."""
    for documented, here in (
        ("http://127.0.0.1:8000", f"http://{server.http_url}"),
        ("127.0.0.1:8001", server.grpc_url),
        ("http://127.0.0.1:9000", gateway),
    ):
        text = text.replace(documented, here)
    own = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**own, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=900,
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
def streamed(aiperf: Path, server: TritonServer, folder: Path) -> Path:
    """What AIPerf wrote, streaming."""
    before = served(server)
    text = block("cat >request.jinja") + block("aiperf profile", "generate_stream")
    done = run(text, server, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    after = served(server)
    assert (after[0] - before[0], after[1] - before[1]) == (REQUESTS, 0)
    return folder / "build/aiperf"


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


def test_aiperf_whole_answers(streamed: Path, server: TritonServer, folder: Path) -> None:
    """``streamed`` left the template there, as on the page."""
    done = run(block("aiperf profile", "pylm/generate "), server, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(folder / "build/aiperf-whole/profile_export_aiperf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert found["error_summary"] == []
    assert "time_to_first_token" not in found
    check_lengths(found["output_sequence_length"])


# ------------------------------------------------------------------ GenAI-Perf


@pytest.fixture(scope="module")
def profiled(genai_perf: Path, server: TritonServer, folder: Path) -> Path:
    """What GenAI-Perf wrote."""
    before = served(server)
    done = run(block("genai-perf profile"), server, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    after = served(server)
    assert (after[0] - before[0], after[1] - before[1]) == (REQUESTS, 0)
    (found,) = (folder / "build/genai-perf").rglob("profile_export_genai_perf.json")
    return found.parent


def test_genai_perf(profiled: Path) -> None:
    found = read(profiled / "profile_export_genai_perf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert 0 < found["time_to_first_token"]["p50"] <= found["request_latency"]["p50"]
    assert found["inter_token_latency"]["avg"] > 0
    assert found["input_sequence_length"]["avg"] == pytest.approx(PROMPT_TOKENS, abs=1)
    assert found["output_sequence_length"]["avg"] == pytest.approx(TOKENS, abs=1)
