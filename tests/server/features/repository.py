"""The two model repositories of these tests: each model stands for one feature.

``write_features`` is served with the server's defaults, ``write_limited`` with a response cache and
the rate limiter, which are flags of the whole server.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.standins import onnx_models
from tests.standins.onnx_models import ONE, io

HOUR_US = 3_600_000_000
TIMEOUT_S = 2.0
"""How long a request may wait in ``reject``."""
WARM_BATCH = 3

_TWO = "instance_group [ { kind: KIND_CPU count: 2 } ]"
_TENSORS = """
input [
  { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "GATE" data_type: TYPE_INT32 dims: [ 1 ] }
]
output [
  { name: "VALUE_OUT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "VERSION" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""
# A window longer than any test: only a full or a preferred batch leaves before.
_WINDOW = f"max_queue_delay_microseconds: {HOUR_US}"
# Name -> the rows of a batch and the lines of the feature.
_FEATURES = {
    "full": (4, f"dynamic_batching {{ {_WINDOW} }}"),
    "preferred": (8, f"dynamic_batching {{ preferred_batch_size: [ 4 ] {_WINDOW} }}"),
    "ordered": (1, f"dynamic_batching {{ preserve_ordering: true }} {_TWO}"),
    "priorities": (1, "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"),
    "limited": (1, "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"),
    "reject": (
        1,
        "dynamic_batching { default_queue_policy { timeout_action: REJECT "
        f"default_timeout_microseconds: {round(TIMEOUT_S * 1e6)} }} }}",
    ),
    "pair": (1, _TWO),
    "swap": (1, ""),
}
# Name -> the versions in the folder, and which of them are served.
_VERSIONS = {
    "latest": ((1, 2, 3), "latest { num_versions: 2 }"),
    "specific": ((1, 2, 3), "specific { versions: [ 1 ] }"),
    "all": ((1, 2), "all { }"),
}
_WARM_UP = f"""
model_warmup [ {{
  name: "first" batch_size: {WARM_BATCH} count: 2
  inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [ 5 ] random_data: true }} }}
}} ]
"""
# It needs all the tokens that the server's flag gives.
_ALL_TOKENS = """
instance_group [ {
  kind: KIND_CPU count: 1
  rate_limiter { resources [ { name: "TOKENS" global: true count: 4 } ] }
} ]
"""


def write_features(repository: Path) -> None:
    """The models for the server without special flags."""
    for name, (max_batch_size, lines) in _FEATURES.items():
        _write_recorder(repository, name, lines, max_batch_size)
    for name, (versions, policy) in _VERSIONS.items():
        _write_recorder(repository, name, f"version_policy: {{ {policy} }}", versions=versions)
    tensors = io("input", "x", "TYPE_FP32", "[ -1 ]") + io("output", "y", "TYPE_FP32", "[ -1 ]")
    config = f'backend: "onnxruntime"\nmax_batch_size: 8\n{tensors}{ONE}{_WARM_UP}'
    onnx_models.write_model(repository, "doubled", onnx_models.doubled(), config)


def write_limited(repository: Path) -> None:
    """The models for the server with a response cache and the rate limiter."""
    _write_recorder(repository, "cached", "response_cache { enable: true }")
    _write_recorder(repository, "free")
    for name in ("one", "other"):
        _write_recorder(repository, name, _ALL_TOKENS)


def log_folder(repository: Path, name: str) -> Path:
    """Where the recorder ``name`` keeps its log and looks for its gates."""
    return repository.with_name(repository.name + ".logs") / name


def _write_recorder(
    repository: Path,
    name: str,
    lines: str = "",
    max_batch_size: int = 1,
    versions: Iterable[int] = (1,),
) -> None:
    """A model of :mod:`recorder`, in one instance unless ``lines`` has an ``instance_group``."""
    for version in versions:
        folder = repository / name / str(version)
        folder.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("recorder.py"), folder / "model.py")
    log = log_folder(repository, name)
    log.mkdir(parents=True)
    instances = "" if "instance_group" in lines else ONE
    text = f"""
backend: "python"
max_batch_size: {max_batch_size}
parameters {{ key: "folder" value {{ string_value: "{log}" }} }}
{_TENSORS}{instances}{lines}
"""
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
