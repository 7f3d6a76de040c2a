"""The README's samples run as they stand: only the addresses are replaced by the test server's."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from jitney_server.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.fixture
def run_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], str]]:
    """Runs a program in this process, which has imported most of it; returns what it prints."""
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()

    def run(code: str) -> str:
        exec(code, {"__name__": "__main__"})
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.mark.server
def test_the_client_sample(server: TritonServer, run_python: Callable[[str], str]) -> None:
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


def test_the_offline_sample(run_python: Callable[[str], str]) -> None:
    (code,) = (block for block in blocks("python") if "LLM(" in block)
    assert len(run_python(code)) > 20


def test_every_block_is_run() -> None:
    assert len(blocks("python")) == 2
