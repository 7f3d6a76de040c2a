"""The server's load: what is read of its metrics, and what is told."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator

import pytest
from jitney.errors import ConfigError
from jitney_gateway.server_load import ModelLoad, ServerLoad, parse
from prometheus_client.parser import text_string_to_metric_families

PAGE = "".join(
    f'{name},model="{model}",model_instance="{model}_{i}",version="1"}} {value}\n'.replace(
        "{,", "{"
    )
    for model, i, values in (("one", 0, (1, 4, 8, 32, 16)), ("one", 1, (2, 3, 8, 32, 16)))
    for name, value in zip(
        (
            "jitney_waiting_requests{",
            "jitney_running_requests{",
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"',
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"',
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"',
        ),
        values,
        strict=True,
    )
)
FIGURES = {
    "kv_cache_utilization": 0.25,
    "max_token_capacity": 1024,
    "num_requests_waiting": 3,
    "num_requests_running": 7,
}


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            other = b'# not UTF-8: \xff\nnv_inference_count{model="one"} 9\n'
            self.wfile.write(other + PAGE.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def test_instances_count_together() -> None:
    assert parse(PAGE + 'jitney_waiting_requests_x{model="two"} 1\n') == {
        "one": ModelLoad(**FIGURES)
    }


def test_the_header_in_both_forms(url: str) -> None:
    async def ask() -> None:
        load = ServerLoad(url)
        ((name, value),) = (await load.header("json", "one")).items()
        assert name == "endpoint-load-metrics"
        assert json.loads(value.removeprefix("JSON ")) == {"named_metrics": FIGURES}
        (text,) = (await load.header("text", "one")).values()
        parts = dict(each.split("=") for each in text.removeprefix("TEXT ").split(", "))
        assert {name: float(parts[f"named_metrics.{name}"]) for name in FIGURES} == FIGURES
        assert await load.header("BIN", "one") == {}
        assert await load.header("json", "two") == {}

    asyncio.run(ask())


def test_the_names_of_the_inference_gateway(url: str) -> None:
    page = asyncio.run(ServerLoad(url).exposition()).decode()
    found = {family.name: family.samples for family in text_string_to_metric_families(page)}
    assert {name: sample.value for name, (sample,) in found.items()} == {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 7,
        "vllm:kv_cache_usage_perc": 0.25,
    }
    assert all(sample.labels == {"model_name": "one"} for (sample,) in found.values())


def test_nothing_is_told_while_the_server_does_not_answer(url: str) -> None:
    async def ask() -> None:
        load = ServerLoad("http://127.0.0.1:9/metrics")
        assert await load.header("json", "one") == {}
        assert await load.exposition() == b""

    asyncio.run(ask())
    with pytest.raises(ConfigError, match="is 'server:8002', not http"):
        ServerLoad("server:8002")
