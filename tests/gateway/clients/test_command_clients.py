"""Commands and agents, unmodified, against the gateway."""

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.clients.conftest import KEY, Asked, Gateway, Run, environment, find, needs

ALONE = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "ANTHROPIC_MODEL": "lm",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "lm",
}
"""Claude Code asks nobody but the gateway, and for its model only."""
CODEX = """
model = "lm"
model_provider = "jitney"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.jitney]
name = "Jitney"
base_url = "{root}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
PROXY_START_S = 180.0


@needs("llm")
def test_llm(run: Run, asked: Asked, gateway: Gateway) -> None:
    """By its README's ``llm openai endpoint``, in its ways."""
    endpoint = ["openai", "endpoint", f"{gateway.root}/v1", "-m", "lm", "--key", KEY]
    capital = "What is the capital of France?"
    assert run("llm", *endpoint, capital).strip()
    assert run("llm", *endpoint, "--no-stream", "-s", "Be brief", capital).strip()
    assert run("llm", *endpoint, "--responses", capital).strip()
    dog = json.loads(run("llm", *endpoint, "--schema", "name, age int, bio", "A cool dog"))
    assert set(dog) >= {"name", "age", "bio"}
    called = run("llm", *endpoint, "-T", "llm_version", "What version of LLM is this?", "--td")
    assert called.strip()
    assert "lm" in run("llm", "openai", "endpoint", f"{gateway.root}/v1", "--key", KEY, "--models")


@needs("claude-code")
def test_claude_code(run: Run, asked: Asked) -> None:
    """It calls its tool Bash, and answers."""
    printed = run(
        "claude-code", "-p", "say hello", "--output-format", "json", "--allowedTools", "Bash",
        **ALONE,
    )  # fmt: skip
    result = json.loads(printed)
    assert result["is_error"] is False, printed
    assert result["num_turns"] == 2
    assert result["result"]
    assert asked() <= {"/v1/messages", "/v1/messages/count_tokens"}


@needs("codex")
def test_codex(run: Run, asked: Asked, gateway: Gateway, tmp_path: Path) -> None:
    """It runs the command that the model calls, and answers."""
    home = tmp_path / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(root=gateway.root), encoding="utf-8")
    printed = run(
        "codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json",
        "explain this folder to me",
    )  # fmt: skip
    events = [json.loads(line) for line in printed.splitlines()]
    assert events[-1]["type"] == "turn.completed", printed
    kinds = {event["item"]["type"] for event in events if event["type"] == "item.completed"}
    assert kinds >= {"command_execution", "agent_message"}, printed
    assert asked() == {"/v1/responses"}


# ------------------------------------------------------------------ LiteLLM's proxy


@pytest.fixture
def proxy(gateway: Gateway, tmp_path: Path) -> Iterator[str]:
    """LiteLLM's proxy before the gateway."""
    server = {"api_base": f"{gateway.root}/v1", "api_key": KEY}
    models = {"lm": "openai/lm", "embed": "openai/embed", "rank": "hosted_vllm/rank"}
    config = {
        "model_list": [
            {"model_name": name, "litellm_params": {"model": model, **server}}
            for name, model in models.items()
        ],
        "general_settings": {"master_key": KEY},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [find("litellm"), "--config", path, "--host", "127.0.0.1", "--port", port],
        env=environment(gateway.root, tmp_path) | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cwd=tmp_path,
    )
    root = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{root}/health/liveliness", process)
        yield root
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PROXY_START_S
    while time.monotonic() < end:
        assert process.poll() is None, "the proxy has ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the proxy does not start")


def post(url: str, **body: Any) -> str:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


@needs("litellm")
def test_litellm_proxy(proxy: str, asked: Asked) -> None:
    chat: Any = {"model": "lm", "messages": [{"role": "user", "content": "Hello!"}]}
    weather = {"type": "object", "properties": {"location": {"enum": ["SF", "NY"]}}}
    tools: Any = {"tools": [{"name": "get_weather", "input_schema": weather}]}
    answer = json.loads(post(f"{proxy}/v1/chat/completions", **chat))
    assert answer["choices"][0]["message"]["content"]
    message = json.loads(post(f"{proxy}/v1/messages", **chat, max_tokens=1024))
    assert message["content"][0]["text"]
    called = json.loads(post(f"{proxy}/v1/messages", **chat, **tools, max_tokens=1024))
    assert called["content"][0]["input"] == {"location": "San Francisco"}
    assert called["stop_reason"] == "tool_use"
    streamed = post(f"{proxy}/v1/messages", **chat, **tools, max_tokens=1024, stream=True)
    assert '"stop_reason": "tool_use"' in streamed
    assert "event: message_stop" in streamed
    embedded = json.loads(post(f"{proxy}/v1/embeddings", model="embed", input=["a", "b"]))
    assert [len(each["embedding"]) for each in embedded["data"]] == [384, 384]
    ranked = json.loads(
        post(f"{proxy}/rerank", model="rank", query="a cat", documents=["the bus", "cats"])
    )
    assert [each["index"] for each in ranked["results"]] == [1, 0]
