"""AIPerf's chat mode and LiteLLM, unmodified, against ``jitney gateway`` before the real server: by
the very commands of docs/clients.md, and by more calls of LiteLLM."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import stream
from tests.server_perf.test_clients import (
    MODEL,
    PROMPT_TOKENS,
    REQUESTS,
    TOKENS,
    block,
    folder,
    read,
    run,
    served,
)

__all__ = ["folder"]  # a fixture
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.clients]

ROOT = Path(__file__).resolve().parents[2]
POOLING = ("embed", "minilm", "minilm_tokenizer", "rank")
KEY = "a-key-of-more-than-24-characters"
NO_NETWORK = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """What `make models` builds, and the language model, which calls tools here."""
    subprocess.run([sys.executable, str(ROOT / "scripts/build_models.py")], check=True)
    repository = tmp_path_factory.mktemp("repository")
    for name in POOLING:
        (repository / name).symlink_to(ROOT / "model_repository" / name)
    shutil.copytree(ROOT / "model_repository" / MODEL, repository / MODEL)
    options = repository / MODEL / "1/model.json"
    options.write_text(json.dumps(read(options) | {"tool_format": "hermes"}), encoding="utf-8")
    with TritonServer(repository) as running:
        yield running


@pytest.fixture(scope="module")
def gateways(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """``http://HOST:PORT`` of one without keys, and of one with."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{KEY}\n", encoding="utf-8")
    jitney = str(Path(sys.executable).parent / "jitney")
    command = [jitney, "gateway", "--server", server.grpc_url, "--port", "0"]
    processes = [
        subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
        for more in ([], ["--api-key-file", str(keys)])
    ]
    lines = [process.stdout.readline() for process in processes if process.stdout is not None]
    yield [line.split()[-1].removesuffix("/v1") for line in lines]
    for process in processes:
        process.terminate()
        assert process.wait(30) == 0


def test_aiperf_chats(
    aiperf: Path, server: TritonServer, gateways: list[str], folder: Path
) -> None:
    _, failed = served(server)
    done = run(block("--endpoint-type chat"), server, folder, gateways[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert served(server)[1] == failed
    written = folder / "build/aiperf-chat"
    found = read(written / "profile_export_aiperf.json")
    assert found["is_complete"]
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["count"] == REQUESTS
    assert 0 < found["time_to_first_token"]["p50"] <= found["request_latency"]["p50"]
    assert found["inter_token_latency"]["count"] == REQUESTS
    assert (found["output_sequence_length"]["min"], found["output_sequence_length"]["max"]) == (
        TOKENS, TOKENS,
    )  # fmt: skip
    assert found["input_sequence_length"]["avg"] == pytest.approx(PROMPT_TOKENS, abs=5)
    assert (
        "jitney_gateway_generated_tokens" in read(written / "server_metrics_export.json")["metrics"]
    )


def test_the_page_shows_litellm(
    litellm: Path, server: TritonServer, gateways: list[str], folder: Path
) -> None:
    done = run(block("import litellm"), server, folder, gateways[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_litellm(litellm: Path, server: TritonServer, gateways: list[str]) -> None:
    calls = Path(__file__).with_name("litellm_calls.py")
    done = subprocess.run(
        [str(litellm), str(calls), gateways[1], KEY],
        env={**os.environ, **NO_NETWORK}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    def plain(**tensors: Any) -> str:
        params = {"max_tokens": TOKENS, "temperature": 0}
        return stream(server.grpc_url, MODEL, sampling_parameters=params, **tensors).text

    text = plain(messages=json.dumps([{"role": "user", "content": "Add two numbers."}]))
    whole = {"text": text, "tokens": TOKENS}
    assert found["chat"] == found["chat, streamed"] == found["Anthropic, streamed"] == whole
    assert found["response"] == found["message"] == text
    assert found["stop"] == text[: text.index("context") + len("context")]
    assert found["Anthropic"]["text"] == text
    assert found["completion"] == plain(text_input="def add(a, b):")
    for name in ("tools", "Anthropic, tools"):
        assert found[name]
        for called, arguments in found[name]:
            assert called == "stop"
            assert arguments in ({"at": "north"}, {"at": "south"})
    for name in ("JSON", "Anthropic, JSON"):
        assert found[name] in ({"at": "north"}, {"at": "south"})
    assert [len(vector) for vector in found["vectors"]] == [384, 384]
    assert [index for index, _ in found["ranks"]] == [1, 0]
    assert found["refused"][0] == 404
    assert "'nobody' does not exist" in found["refused"][1]
