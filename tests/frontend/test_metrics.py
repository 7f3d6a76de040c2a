"""Sums and flushes of the metrics, against a stand-in for the server's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jitney import __version__
from jitney.config import SpeculationConfig, TierConfig
from jitney.engine.handle import Health
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney.frontend import metrics as module
from jitney.messages import ModelInfo, StepStats, TierStats, Timing
from jitney_gateway.gateway_metrics import GatewayMetrics

from tests.frontend.house import House, ended, sampling, wait_until

LABELS = {"model": "m", "version": "1", "model_instance": "m_0_0"}
INFO = ModelInfo(
    vocab_size=10,
    max_model_len=64,
    num_blocks=8,
    block_size=4,
    eos_ids=frozenset(),
    dtype="float32",
    device="cpu",
    attention="reference",
    num_parameters=1,
)


def value(pb: Any, name: str, **labels: str) -> float:
    return pb.MetricFamily.values[(name, frozenset({**LABELS, **labels}.items()))]


def test_every_family_stands_at_the_server_from_the_start(pb: Any) -> None:
    module.ModelMetrics(LABELS, INFO)
    names = {name for name, _ in pb.MetricFamily.values}
    assert {*module.GAUGES, *module.COUNTERS, module.REQUESTS, module.BUILD} <= names
    assert module.ORCA in names
    for name in module.HISTOGRAMS:
        assert {f"{name}_bucket", f"{name}_sum", f"{name}_count"} <= names


def test_the_page_about_them_is_current(pb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import metrics_table
    from jitney_jobs import metrics as of_jobs

    written = metrics_table.TARGET.read_text(encoding="utf-8")
    assert written == metrics_table.make_page(
        module, of_jobs, GatewayMetrics().exposition().decode()
    ), "run: python scripts/metrics_table.py"
    module.ModelMetrics(LABELS, INFO)
    kinds = {
        dict(labels)["kv_cache_block_type"]
        for name, labels in pb.MetricFamily.values
        if name == module.ORCA
    }
    assert kinds == metrics_table.KINDS.keys()


def test_a_flush_sends_sums_and_the_next_one_nothing(pb: Any) -> None:
    metrics = module.ModelMetrics(LABELS, INFO)
    stats = StepStats(
        waiting=2, running=3, blocks_total=8, blocks_used=5, blocks_cached=1, generated_tokens=3,
        batch_sequences=3, step_seconds=0.01, prefix_hit_tokens=4, preemptions=1, out_of_memory=1,
    )  # fmt: skip
    metrics.add_step(stats)
    metrics.add_step(stats)
    counts = module.OpenCounts(encoding=3, submitted=4, reports=7)
    metrics.set_gauges(Health(up=False, replayed_tokens=9), counts)
    metrics.flush()
    assert value(pb, "jitney_generated_tokens_total") == 6
    assert value(pb, "jitney_prefix_hit_tokens_total") == 8
    assert value(pb, "jitney_preemptions_total") == 2
    assert value(pb, "jitney_out_of_memory_total") == 2
    assert value(pb, "jitney_waiting_requests") == 5
    assert value(pb, "jitney_running_requests") == 2
    assert value(pb, "jitney_running_sequences") == 3
    assert value(pb, "jitney_waiting_reports") == 7
    assert value(pb, "jitney_replayed_tokens_total") == 9
    assert value(pb, "jitney_kv_used_blocks") == 5
    assert value(pb, "jitney_kv_free_blocks") == 2
    assert value(pb, module.ORCA, kv_cache_block_type="used") == 5
    assert value(pb, module.ORCA, kv_cache_block_type="max") == 8
    assert value(pb, module.ORCA, kv_cache_block_type="tokens_per") == 4
    calls = pb.MetricFamily.calls
    metrics.flush()
    assert pb.MetricFamily.calls == calls


def test_histogram_buckets_are_cumulative_and_bounds_belong_to_their_bucket(pb: Any) -> None:
    metrics = module.ModelMetrics(LABELS, INFO)
    metrics.observe("jitney_inter_token_seconds", 0.01, times=3)
    metrics.flush()
    metrics.observe("jitney_inter_token_seconds", 0.03)
    metrics.observe("jitney_inter_token_seconds", 1e9)
    metrics.flush()
    bucket = "jitney_inter_token_seconds_bucket"
    assert value(pb, bucket, le="0.005") == 0
    assert value(pb, bucket, le="0.01") == 3
    assert value(pb, bucket, le="0.05") == 4
    assert value(pb, bucket, le="120") == 4
    assert value(pb, bucket, le="+Inf") == 5
    assert value(pb, "jitney_inter_token_seconds_count") == 5
    assert value(pb, "jitney_inter_token_seconds_sum") == pytest.approx(0.06 + 1e9)


def test_a_flush_that_fails_loses_nothing(pb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = module.ModelMetrics(LABELS, INFO)
    metrics.count("jitney_responses_total", 5)
    with monkeypatch.context() as broken:
        broken.setattr(pb.MetricFamily, "fails", True)
        with pytest.raises(pb.TritonModelException):
            metrics.flush()
    metrics.count("jitney_responses_total", 2)
    metrics.flush()
    assert value(pb, "jitney_responses_total") == 7


def test_a_finished_request_counts_by_its_reason(pb: Any) -> None:
    metrics = module.ModelMetrics(LABELS, INFO)
    timing = Timing(
        queue_s=0.5, first_token_s=None, total_s=2.0, cached_prompt_tokens=0,
        computed_prompt_tokens=3, preemptions=0,
    )  # fmt: skip
    metrics.count_finished(timing, "deadline", prompt_tokens=12, generated_tokens=700)
    metrics.count_failed(InvalidArgumentError("no"))
    metrics.close()
    assert value(pb, module.REQUESTS, outcome="deadline") == 1
    assert value(pb, module.REQUESTS, outcome="refused") == 1
    assert value(pb, module.REQUESTS, outcome="stop") == 0
    assert value(pb, "jitney_queue_seconds_count") == 1
    assert value(pb, "jitney_request_seconds_sum") == 2.0
    for name, below, above, count in (
        ("jitney_request_prompt_tokens", "10", "20", 12),
        ("jitney_request_generated_tokens", "500", "1000", 700),
    ):
        assert value(pb, f"{name}_bucket", le=below) == 0
        assert value(pb, f"{name}_bucket", le=above) == 1
        assert value(pb, f"{name}_sum") == count


def test_what_was_built_and_how_many_may_wait_is_told(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(max_queued=7)
    house.service.close()
    assert value(pb, module.BUILD, release=__version__) == 1
    assert value(pb, "jitney_queue_limit_requests") == 7


def test_a_request_counts_by_its_lengths(pb: Any, make_house: Callable[..., House]) -> None:
    """Those of all its sequences. One that failed has none."""
    house = make_house()
    requests = [
        pb.Request(text_input="abcd", sampling_parameters=sampling(max_tokens=3, n=2)),
        pb.Request(text_input="abcd", sampling_parameters=sampling(max_tokens=-3)),
    ]
    for request in requests:
        house.service.accept(request)
    wait_until(lambda: ended(*requests))
    house.service.close()
    assert value(pb, "jitney_request_prompt_tokens_count") == 1
    assert value(pb, "jitney_request_prompt_tokens_sum") == value(pb, "jitney_prompt_tokens_total")
    assert value(pb, "jitney_request_generated_tokens_sum") == 6


def test_drafts_count_by_their_drafter(pb: Any) -> None:
    metrics = module.ModelMetrics(LABELS, INFO, drafter="eagle")
    step = StepStats(blocks_total=8, draft_rows=2, draft_tokens=7, accepted_tokens=3)
    metrics.add_step(step)
    metrics.add_step(step)
    metrics.close()
    for name, count in zip(module.DRAFT_COUNTERS, (4, 14, 6), strict=True):
        assert value(pb, name, drafter="eagle") == count


def test_a_service_names_the_drafter_of_its_model(
    pb: Any, make_house: Callable[..., House]
) -> None:
    make_house(speculation=SpeculationConfig(drafter="ngram"))
    for name in module.DRAFT_COUNTERS:
        assert value(pb, name, drafter="ngram") == 0


def test_requests_count_by_tier_where_there_are_any(pb: Any) -> None:
    metrics = module.ModelMetrics(LABELS, INFO, ["fast", "bulk"])
    for tier, seconds in (("fast", 0.01), ("bulk", 3.0), ("bulk", 4.0)):
        metrics.observe("jitney_time_to_first_token_seconds", seconds, tier=tier)
        metrics.count_finished(
            Timing(queue_s=seconds, first_token_s=None, total_s=9.0),
            "stop",
            prompt_tokens=1,
            generated_tokens=1,
            tier=tier,
        )
    metrics.count_failed(InvalidArgumentError("no"))
    metrics.count_failed(UnavailableError("no"), "fast")
    tiers = [TierStats(running=1), TierStats(waiting=5, held_back=2, overdue=1, oldest_s=7.5)]
    metrics.add_step(StepStats(blocks_total=8, tiers=tiers))
    metrics.add_step(StepStats(blocks_total=8, tiers=tiers))
    metrics.set_gauges(Health(), module.OpenCounts(0, 0, 0))
    metrics.close()
    first = "jitney_time_to_first_token_seconds"
    assert [value(pb, f"{first}_count", tier=tier) for tier in ("fast", "bulk")] == [1, 2]
    assert value(pb, f"{first}_bucket", tier="bulk", le="2") == 0
    assert value(pb, f"{first}_bucket", tier="bulk", le="5") == 2
    assert value(pb, "jitney_queue_seconds_sum", tier="bulk") == 7.0
    assert value(pb, "jitney_step_seconds_count") == 0
    assert value(pb, module.REQUESTS, tier="bulk", outcome="stop") == 2
    assert value(pb, module.REQUESTS, tier="fast", outcome="unavailable") == 1
    assert value(pb, module.REQUESTS, outcome="refused") == 1
    assert value(pb, "jitney_tier_running_sequences", tier="fast") == 1
    assert value(pb, "jitney_tier_waiting_sequences", tier="bulk") == 5
    assert value(pb, "jitney_tier_oldest_wait_seconds", tier="bulk") == 7.5
    assert value(pb, "jitney_tier_held_back_total", tier="bulk") == 4
    assert value(pb, "jitney_tier_overdue_requests_total", tier="bulk") == 2
    families = {name for name, labels in pb.MetricFamily.values if "tier" in dict(labels)}
    assert {*module.TIER_GAUGES, *module.TIER_COUNTERS} <= families
    assert not any(name.startswith(module.HISTOGRAMS_WITHOUT_TIER) for name in families)


def test_a_request_counts_in_its_tier(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house(tiers=(TierConfig(name="fast"), TierConfig(name="bulk")))
    requests = [
        pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=3, **more))
        for more in ({"tier": "fast"}, {}, {}, {"tier": "fast", "cache_salt": ""}, {"tier": "x"})
    ]
    for request in requests:
        house.service.accept(request)
    wait_until(lambda: ended(*requests))
    house.service.close()
    first, gap = "jitney_time_to_first_token_seconds_count", "jitney_inter_token_seconds_count"
    assert [value(pb, first, tier=tier) for tier in ("fast", "bulk")] == [1, 2]
    assert [value(pb, gap, tier=tier) for tier in ("fast", "bulk")] == [2, 4]
    assert value(pb, module.REQUESTS, tier="bulk", outcome="length") == 2
    assert value(pb, module.REQUESTS, outcome="refused") == 2


def test_gauges_can_be_sent_alone(pb: Any) -> None:
    metrics = module.ModelMetrics(LABELS, INFO)
    metrics.add_step(StepStats(blocks_total=8, blocks_used=3, generated_tokens=5))
    metrics.set_gauges(Health(), module.OpenCounts(encoding=1, submitted=0, reports=0))
    metrics.flush(only_gauges=True)
    assert value(pb, "jitney_kv_used_blocks") == 3
    assert value(pb, "jitney_generated_tokens_total") == 0
    metrics.flush()
    assert value(pb, "jitney_generated_tokens_total") == 5
