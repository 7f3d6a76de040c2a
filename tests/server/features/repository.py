"""The two model repositories of these tests: each model stands for one feature.

``write_features`` is served with the server's defaults, ``write_limited`` with a response cache and
the rate limiter, which are flags of the whole server.
"""

from pathlib import Path

from tests.server.features.models import (
    laborious,
    times,
    times_rows,
    write_accumulator,
    write_onnx,
    write_recorder,
)

HOUR_US = 3_600_000_000
DELAY_S = 1.0
"""The window of the models called ``delay``."""
TIMEOUT_S = 2.0
"""How long a request may wait in ``reject``."""
IDLE_S = 2.0
"""How long a sequence of ``idle`` may be silent."""

BATCHERS = {
    # Longer than any test: only a full or a preferred batch leaves before.
    "full": (4, f"dynamic_batching {{ max_queue_delay_microseconds: {HOUR_US} }}"),
    "delay": (8, f"dynamic_batching {{ max_queue_delay_microseconds: {round(DELAY_S * 1e6)} }}"),
    "preferred": (
        8,
        "dynamic_batching { preferred_batch_size: [ 4 ] "
        f"max_queue_delay_microseconds: {HOUR_US} }}",
    ),
    "ordered": (
        1,
        "dynamic_batching { preserve_ordering: true } "
        "instance_group [ { kind: KIND_CPU count: 2 } ]",
    ),
}

QUEUES = {
    "priorities": """
      priority_levels: 2 default_priority_level: 2
      priority_queue_policy { key: 2 value { max_queue_size: 3 } }""",
    "limited": "default_queue_policy { max_queue_size: 2 }",
    "reject": f"""
      default_queue_policy {{
        timeout_action: REJECT
        default_timeout_microseconds: {round(TIMEOUT_S * 1e6)}
      }}""",
    "late": f"""
      default_queue_policy {{
        timeout_action: DELAY
        default_timeout_microseconds: {HOUR_US}
        allow_timeout_override: true
      }}""",
    "override": f"""
      default_queue_policy {{
        timeout_action: REJECT
        default_timeout_microseconds: {HOUR_US}
        allow_timeout_override: true
      }}""",
    "no_override": f"""
      default_queue_policy {{
        timeout_action: REJECT
        default_timeout_microseconds: {HOUR_US}
      }}""",
    "no_default": """
      default_queue_policy {
        timeout_action: REJECT
        allow_timeout_override: true
      }""",
}
"""Inside ``dynamic_batching`` of models that execute one row at a time."""

VERSION_POLICIES = {
    "latest": ((1, 2, 3), "latest { num_versions: 2 }"),
    "specific": ((1, 2, 3), "specific { versions: [ 1 ] }"),
    "all": ((1, 2), "all { }"),
}
"""The versions in the folder, and which of them are served."""

WARM_VALUE = 41
WARM_BATCH = 3
_WARM_RECORDER = f"""
model_warmup [ {{
  name: "first" batch_size: {WARM_BATCH} count: 2
  inputs {{ key: "VALUE" value {{ data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "value" }} }}
  inputs {{ key: "GATE" value {{ data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }} }}
}} ]
"""
_WARM_ONNX = f"""
model_warmup [ {{
  name: "first" batch_size: {WARM_BATCH} count: 2
  inputs {{ key: "X" value {{ data_type: TYPE_FP32 dims: [ 5 ] random_data: true }} }}
}} ]
"""


def write_features(repository: Path) -> None:
    """The models for the server without special flags."""
    for name, (max_batch_size, extra) in BATCHERS.items():
        write_recorder(repository, name, extra, max_batch_size=max_batch_size)
    for name, policy in QUEUES.items():
        write_recorder(repository, name, f"dynamic_batching {{ {policy} }}")
    for name, (versions, policy) in VERSION_POLICIES.items():
        write_recorder(repository, name, f"version_policy: {{ {policy} }}", versions=versions)
    write_recorder(repository, "pair", "instance_group [ { kind: KIND_CPU count: 2 } ]")
    write_recorder(repository, "swap")
    warm = write_recorder(repository, "warm", _WARM_RECORDER, max_batch_size=WARM_BATCH)
    (warm / "warmup").mkdir()
    (warm / "warmup" / "value").write_bytes(
        WARM_BATCH * WARM_VALUE.to_bytes(4, "little", signed=True)
    )
    _write_sequences(repository)
    _write_onnx(repository)
    _write_ensemble(repository)


def _write_sequences(repository: Path) -> None:
    write_accumulator(repository, "direct", "direct { }", max_batch_size=2)
    write_accumulator(
        repository,
        "oldest",
        f"oldest {{ max_candidate_sequences: 4 max_queue_delay_microseconds: {HOUR_US} "
        "preferred_batch_size: [ 2 ] }",
        max_batch_size=4,
    )
    write_accumulator(repository, "idle", "direct { }", max_batch_size=1, idle_s=IDLE_S)


def _write_onnx(repository: Path) -> None:
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {HOUR_US} }}"
    write_onnx(repository, "onnx_by_rows", times_rows(), batching, max_batch_size=4)
    two = "instance_group [ { kind: KIND_CPU count: 2 } ]"
    write_onnx(repository, "onnx_pair", laborious(), two)
    write_onnx(repository, "onnx_by_six", times(6), _WARM_ONNX)


def _write_ensemble(repository: Path) -> None:
    """``two_steps``: X -> onnx_by_six, each alone -> onnx_by_rows, in batches of 4 -> Y."""
    ensemble = repository / "two_steps"
    (ensemble / "1").mkdir(parents=True)
    text = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "onnx_by_six" model_version: -1
      input_map { key: "X" value: "X" }
      output_map { key: "Y" value: "sixfold" }
    },
    {
      model_name: "onnx_by_rows" model_version: -1
      input_map { key: "X" value: "sixfold" }
      output_map { key: "Y" value: "Y" }
    }
  ]
}
"""
    (ensemble / "config.pbtxt").write_text(text, encoding="utf-8")


CACHE = "response_cache { enable: true }"

RESOURCES = {
    "whole": (4, 1),
    "seldom": (4, 3),
    "half": (2, 1),
    "other_half": (2, 1),
}
"""How many of the 4 tokens that the server's flag gives to all models, and the priority."""


def write_limited(repository: Path) -> None:
    """The models for the server with a response cache and the rate limiter."""
    write_recorder(repository, "cached", CACHE)
    write_onnx(repository, "onnx_cached", times(7), CACHE)
    write_recorder(repository, "free")
    for name, (count, priority) in RESOURCES.items():
        write_recorder(repository, name, limited_instance(count, priority))


def limited_instance(count: int, priority: int) -> str:
    """One instance that needs ``count`` of the resource TOKENS to execute."""
    return f"""
instance_group [ {{
  kind: KIND_CPU count: 1
  rate_limiter {{
    resources [ {{ name: "TOKENS" global: true count: {count} }} ]
    priority: {priority}
  }}
}} ]
"""
