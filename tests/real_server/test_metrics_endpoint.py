"""Every metric stands at the server's own endpoint and moves when its cause does."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jitney_server.server import TritonServer

from tests.real_server.client import Reply, Stream, metric, settled, stream, wait_until
from tests.real_server.conftest import BLOCK_BYTES, BUSY_CONTEXT, MODELS

GROWING = [
    "jitney_prompt_tokens_total",
    "jitney_generated_tokens_total",
    "jitney_computed_prompt_tokens_total",
    "jitney_prefix_query_tokens_total",
    "jitney_prefix_hit_tokens_total",
    "jitney_preemptions_total",
    "jitney_requests_total",
    "jitney_responses_total",
    "jitney_step_seconds_count",
    "jitney_step_seconds_sum",
    "jitney_batch_sequences_count",
    "jitney_queue_seconds_count",
    "jitney_time_to_first_token_seconds_count",
    "jitney_inter_token_seconds_count",
    "jitney_request_seconds_count",
]


def sampling(seed: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 150, "seed": seed, "ignore_eos": True, **more}


def value(server: TritonServer, name: str, model: str = "narrow", **labels: str) -> float:
    return metric(server.metrics_url, name, model=model, **labels)


def test_counters_and_histograms_grow(server: TritonServer) -> None:
    """All of them: four requests are together too much for the cache. They must run at the same
    time for that: up to five times they are sent."""

    def one(seed: int) -> Reply:
        prompt = "the bus stops here and the passengers board while others leave"
        return stream(
            server.grpc_url, "narrow", text_input=prompt, sampling_parameters=sampling(seed)
        )

    def read() -> dict[str, float]:
        return {name: value(server, name) for name in GROWING}

    before = settled(read)
    for rounds in range(1, 6):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(4)))
        now = settled(read)
        grown = {name: now[name] - before[name] for name in GROWING}
        assert grown["jitney_generated_tokens_total"] == rounds * 4 * 150
        assert rounds * 4 <= grown["jitney_responses_total"] <= rounds * 4 * 150
        assert grown["jitney_inter_token_seconds_count"] == rounds * 4 * 149
        if all(grown.values()):
            return
    raise AssertionError(f"some have not grown: {grown}")


def test_gauges_rise_and_fall(server: TritonServer) -> None:
    def gauge(name: str, **labels: str) -> float:
        return value(server, name, "busy", **labels)

    tensors = {
        "text_input": "the bus stops here and the passengers board",
        "stream": True,
        "sampling_parameters": sampling(1, max_tokens=BUSY_CONTEXT - 64),
    }
    one = Stream(server.grpc_url, "busy", tensors)
    gauges = ("jitney_running_requests", "jitney_running_sequences", "jitney_kv_used_blocks")
    wait_until(lambda: all(gauge(name) > 0 for name in gauges))
    orca = "nv_trt_llm_kv_cache_block_metrics"
    wait_until(lambda: gauge(orca, kv_cache_block_type="used") > 0)
    blocks = MODELS["busy"]["kv_cache_bytes"] // BLOCK_BYTES  # type: ignore[operator]
    assert gauge(orca, kv_cache_block_type="max") == blocks
    assert gauge(orca, kv_cache_block_type="tokens_per") == 16
    one.cancel()
    wait_until(lambda: all(gauge(name) == 0 for name in gauges))
    kinds = ("used", "cached", "free")
    used, cached, free = settled(lambda: [gauge(f"jitney_kv_{kind}_blocks") for kind in kinds])
    assert used + cached + free == blocks
    assert cached > 0
    assert gauge(orca, kv_cache_block_type="used") == 0
