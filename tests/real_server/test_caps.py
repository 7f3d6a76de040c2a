"""Tiers and what clients may ask for, through the real server: over HTTP and gRPC, and with limits
of an API key behind nginx, at the model and at a gateway."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc_client
from jitney_server.server import TritonServer

from tests.compose.engine.clients import Client
from tests.compose.free_ports import free_port
from tests.compose.proxy import Proxy, Server
from tests.real_server.client import make_inputs, wait_until
from tests.real_server.conftest import BLOCK_BYTES, write_model

pytestmark = pytest.mark.debian
BOUND = "bound-by-more-than-24-characters"
LIMITS = "tiers=slow,bulk min_priority=0"
PROMPT: dict[str, Any] = {"text_input": "the bus", "max_tokens": 3}


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[TritonServer]:
    options = {
        "model": str(checkpoint), "dtype": "float32", "threads": 1, "min_priority": -5,
        "kv_cache_bytes": 256 * BLOCK_BYTES,
        "tiers": [{"name": "fast", "gap_ms": 1000}, {"name": "slow"}, {"name": "bulk"}],
    }  # fmt: skip
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "tiered", options)
    with TritonServer(repository) as started:
        yield started


@pytest.fixture(scope="module")
def front(tiered: TritonServer) -> Iterator[Proxy]:
    """A proxy before the server and a gateway, with a key that has limits."""
    http, grpc = (int(url.rpartition(":")[2]) for url in (tiered.http_url, tiered.grpc_url))
    port = free_port()
    with Proxy(Server(http_port=http, grpc_port=grpc, gateway_port=port)) as proxy:
        keys = proxy.secrets / "api_keys"
        keys.write_text(f"{proxy.keys()}bound:{BOUND} {LIMITS}\n", encoding="utf-8")
        assert proxy.reload().returncode == 0
        command = [str(Path(sys.executable).parent / "jitney"), "gateway"]
        command += ["--server", tiered.grpc_url, "--port", str(port), "--api-key-file", str(keys)]
        gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        bound = proxy.client(BOUND)
        wait_until(lambda: bound.request("GET", "/v1/models")[0] == 200)
        wait_until(lambda: bound.request("GET", "/v2")[0] == 200)
        yield proxy
        gateway.terminate()
        assert gateway.wait(30) == 0


def over_http(client: Client, body: dict[str, Any]) -> str:
    """The error, or nothing."""
    data = json.dumps(PROMPT | body).encode()
    return json.loads(client.request("POST", "/v2/models/tiered/generate", data)[2]).get(
        "error", ""
    )


def over_grpc(client: Client, tensors: dict[str, Any], parameters: dict[str, Any]) -> str:
    """The error, or nothing. The limits must not come from a client."""
    found: list[str] = []
    with grpc_client.InferenceServerClient(
        f"localhost:{client.port}", ssl=True, root_certificates=str(client.certificate)
    ) as triton:
        headers = {**client.headers, "jitney-limits": "min_priority=-9"}
        triton.start_stream(
            lambda result, error: found.append("" if error is None else error.message()),
            headers=headers,
        )
        given = make_inputs(grpc_client, {"text_input": "the bus", **tensors})
        triton.async_stream_infer("tiered", given, parameters={"max_tokens": 3, **parameters})
        wait_until(lambda: found)
        triton.stop_stream()
    return found[0]


def test_no_way_around_the_limits_of_a_key(front: Proxy) -> None:
    bound, free = front.client(BOUND), front.client()
    tier, priority = "tier is 'fast', but must be one of 'slow', 'bulk'", "priority is -1, but must"
    for said, asked in ((tier, {"tier": "fast"}), (priority, {"priority": -1})):
        tensor = {"sampling_parameters": json.dumps({"max_tokens": 3, **asked})}
        assert said in over_http(bound, tensor)
        assert said in over_grpc(bound, tensor, {})
        assert over_http(free, tensor) == over_grpc(free, tensor, {}) == ""
    assert tier in over_http(bound, {"tier": "fast"})
    assert tier in over_grpc(bound, {}, {"tier": "fast"})
    assert tier in over_http(bound, {"parameters": {"tier": "fast"}})
    inner = {"parameters": {"jitney-limits": "tiers=fast", "tier": "fast"}}
    assert "jitney-limits is given twice" in over_http(bound, inner)
    for name in ("jitney-limits", "Jitney-Limits"):
        own = {name: "tiers=fast", "tier": "fast"}
        assert "jitney-limits is given twice" in over_http(bound, own)
        assert "jitney-limits is given twice" in over_grpc(bound, {}, own)
    for asked in ({}, {"tier": "bulk"}):
        assert over_http(bound, asked) == over_grpc(bound, {}, asked) == ""


def test_a_gateway_holds_them_too(front: Proxy) -> None:
    chat = {"model": "tiered", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}

    def ask(key: str | None, **asked: Any) -> tuple[int, Any]:
        body = json.dumps(chat | asked).encode()
        status, _, answer = front.client(key).request("POST", "/v1/chat/completions", body)
        return status, json.loads(answer).get("error", {}).get("param")

    assert ask(BOUND, service_tier="fast") == (400, "service_tier")
    assert ask(BOUND, service_tier="priority") == (400, "service_tier")
    assert ask(BOUND, tier="fast") == (400, "tier")
    assert ask(BOUND, priority=-1) == (400, "priority")
    assert ask(None, service_tier="rapid") == (200, None), "a tier that is not there is ignored"
    for key, asked in ((BOUND, {}), (BOUND, {"service_tier": "flex"}), (None, {"tier": "fast"})):
        assert ask(key, **asked) == (200, None)
