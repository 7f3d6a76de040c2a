"""The README's samples run as they stand: only the addresses are replaced by the test server's."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jitney.server.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(ROOT / "model_repository", models=["pylm"]) as running:
        yield running


@pytest.mark.server
def test_the_client_sample(server: TritonServer) -> None:
    (code,) = (block for block in blocks("python") if "tritonclient" in block)
    assert "127.0.0.1:8001" in code
    assert len(run_python(code.replace("127.0.0.1:8001", server.grpc_url))) > 10


@pytest.mark.server
def test_the_curl_line(server: TritonServer) -> None:
    (line,) = (block for block in blocks("bash") if block.startswith("curl"))
    assert "127.0.0.1:8000" in line
    result = subprocess.run(
        ["bash", "-c", line.replace("127.0.0.1:8000", server.http_url).replace("curl", "curl -sS")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    events = [
        json.loads(line[5:]) for line in result.stdout.splitlines() if line.startswith("data")
    ]
    assert events
    assert "error" not in events[-1]
    assert "".join(event["text_output"] for event in events).strip()


@pytest.mark.server  # not the server itself, but a whole model in a process of its own
def test_the_offline_sample() -> None:
    (code,) = (block for block in blocks("python") if "LLM(" in block)
    assert len(run_python(code)) > 20


def test_every_block_is_run() -> None:
    assert len(blocks("python")) == 2
