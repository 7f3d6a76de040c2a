"""Model folders for these tests: a configuration, and nothing beside it."""

from pathlib import Path

CONFIG = """# what the user wrote
backend: "python"
max_batch_size: 16
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
dynamic_batching {
  preferred_batch_size: [4, 8]
  max_queue_delay_microseconds: 300
  default_queue_policy { max_queue_size: 99 }
}
instance_group [{ kind: KIND_CPU count: 1 }]
parameters [{ key: "note" value: { string_value: "kept" } }]
"""


def write_config(repository: Path, name: str, text: str) -> Path:
    """A model of which there is nothing but its configuration."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
    return repository / name
