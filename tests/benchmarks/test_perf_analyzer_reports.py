"""Reading what perf_analyzer exports, and the variants that benchmarks give the server."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.batching.perf_analyzer import read_profile
from benchmarks.batching.repository import Variant, write_variant

MILLISECOND = 1_000_000


def profile(*requests: tuple[int, list[int]]) -> dict:
    """Requests as (sent, responses), in milliseconds."""
    return {
        "experiments": [
            {
                "requests": [
                    {
                        "timestamp": sent * MILLISECOND,
                        "response_timestamps": [at * MILLISECOND for at in responses],
                    }
                    for sent, responses in requests
                ]
            }
        ]
    }


def test_throughput_is_from_the_first_request_to_the_last_response() -> None:
    report = read_profile(profile((1000, [1100]), (1000, [1300]), (1300, [1500])), batch=8)
    assert report.rows_per_s == pytest.approx(3 * 8 / 0.5)
    assert (report.p50_ms, report.p95_ms, report.p99_ms) == pytest.approx((200, 300, 300))


@pytest.mark.parametrize("requests", [[], [(0, [5]), (1, [])]])
def test_missing_answers_are_an_error(requests: list[tuple[int, list[int]]]) -> None:
    with pytest.raises(RuntimeError, match="failed"):
        read_profile(profile(*requests), batch=1)


def write(folder: Path, variant: Variant) -> model_config_pb2.ModelConfig:
    """The configuration of a variant of a shipped model."""
    built = folder / "built"
    (built / "1").mkdir(parents=True)
    config = text_format.Parse(
        'backend: "onnxruntime" max_batch_size: 64 '
        "dynamic_batching { max_queue_delay_microseconds: 7 preferred_batch_size: [4] } "
        "instance_group [{ count: 2 kind: KIND_AUTO }] "
        'model_warmup [{ name: "w" batch_size: 64 }]',
        model_config_pb2.ModelConfig(),
    )
    write_variant(folder / "repository", built, config, variant)
    written = (folder / "repository" / variant.name / "config.pbtxt").read_text(encoding="utf-8")
    assert (folder / "repository" / variant.name / "1").resolve() == built / "1"
    return text_format.Parse(written, model_config_pb2.ModelConfig())


def test_a_variant_without_a_batcher(tmp_path: Path) -> None:
    config = write(tmp_path, Variant("plain", 32, None, threads=1))
    assert (config.name, config.max_batch_size) == ("plain", 32)
    assert not config.HasField("dynamic_batching")
    assert [(group.count, group.kind) for group in config.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    ]
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    assert config.model_warmup[0].batch_size == 32, "no more than the batcher may make"


def test_a_variant_with_a_window_and_priorities(tmp_path: Path) -> None:
    config = write(tmp_path, Variant("urgent", 8, 500, threads=2, priorities=2))
    assert config.max_batch_size == 8
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert not config.dynamic_batching.preferred_batch_size, "the window and nothing else"
    assert config.dynamic_batching.priority_levels == 2
    assert config.dynamic_batching.default_priority_level == 2


def test_a_window_of_nothing_is_still_a_batcher(tmp_path: Path) -> None:
    assert write(tmp_path, Variant("d", 8, 0, threads=2)).HasField("dynamic_batching")
