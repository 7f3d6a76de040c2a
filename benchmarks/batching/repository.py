"""Model repositories for the benchmarks: one model under several names, each batched its own way.

Owns the folders that are written for one server start. A variant shares the built model's version
folder through a link and has the model's own configuration, changed in its scheduler, its batch
size, its threads and its instances only.
"""

from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

KIND_CPU = model_config_pb2.ModelInstanceGroup.KIND_CPU


@dataclass(frozen=True)
class Variant:
    """How one copy of a model is batched. ``window_us`` None: no dynamic batcher at all."""

    name: str
    max_batch_size: int
    window_us: int | None
    threads: int
    priorities: int = 0
    """Priority levels of the batcher; requests that name none have the last one."""


def write_variant(
    repository: Path, folder: Path, config: model_config_pb2.ModelConfig, variant: Variant
) -> None:
    """Add the model in ``folder`` to ``repository`` as ``variant`` says."""
    target = repository / variant.name
    target.mkdir(parents=True)
    (target / "1").symlink_to((folder / "1").resolve())
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    changed.name = variant.name
    changed.max_batch_size = variant.max_batch_size
    # Warm-up stays, but for one row; the benchmark itself warms up every size.
    for warmup in changed.model_warmup:
        warmup.batch_size = min(warmup.batch_size, variant.max_batch_size)
    set_window(changed, variant.window_us)
    if variant.priorities:
        changed.dynamic_batching.priority_levels = variant.priorities
        changed.dynamic_batching.default_priority_level = variant.priorities
    set_threads(changed, variant.threads)
    write_config(target, changed)


def set_window(config: model_config_pb2.ModelConfig, window_us: int | None) -> None:
    """A dynamic batcher with this window and nothing else, or none."""
    config.ClearField("dynamic_batching")
    if window_us is not None:
        config.dynamic_batching.max_queue_delay_microseconds = window_us


def set_threads(config: model_config_pb2.ModelConfig, threads: int) -> None:
    """One instance on the CPU, whose graph runs on so many threads."""
    config.ClearField("instance_group")
    config.instance_group.add(kind=KIND_CPU, count=1)
    config.parameters["intra_op_thread_count"].string_value = str(threads)
    config.parameters["inter_op_thread_count"].string_value = "1"


def write_config(folder: Path, config: model_config_pb2.ModelConfig) -> None:
    """``config.pbtxt`` of a model folder."""
    text = text_format.MessageToString(config)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
