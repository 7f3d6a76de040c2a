"""The repository that the tests serve: the project's models, and two that are soon at their limits,
so that what alerts warn of can be brought about.

`tight` is the language model with places for a few sequences and a small cache; `slow` is a Python
model that takes a quarter of a second for each request.
"""

import json
import shutil
from pathlib import Path

TIGHT_OPTIONS = {
    "max_num_seqs": 8,
    # 341 tokens, on every processor: in a cache of twice the width, which `auto` means where there
    # is no bfloat16, half as many would be fewer than one request of the crowd may need.
    "kv_cache_dtype": "float32",
    "kv_cache_bytes": 2 << 20,
    "max_model_len": 256,
    "max_queued": 60,
}
# What each of too many clients asks of it.
CROWD_PROMPT, CROWD_TOKENS = "import os\n", 200
# A stop gives requests as long as DRAIN_SECONDS does.
PATIENT_OPTIONS = {"drain_s": 20}

_SLOW_CONFIG = """backend: "python"
max_batch_size: 1
input [{ name: "x" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
_SLOW_MODEL = '''"""Answers what it is sent, slowly."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.25)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy())]
            )
            for each in requests
        ]
'''


def make_repository(source: Path, target: Path) -> None:
    """Copy the project's repository and add the two; readable for the containers' user."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    shutil.copytree(target / "pylm", target / "tight")
    for name, options in (("pylm", PATIENT_OPTIONS), ("tight", TIGHT_OPTIONS)):
        file = target / name / "1" / "model.json"
        written = json.loads(file.read_text(encoding="utf-8")) | options
        file.write_text(json.dumps(written), encoding="utf-8")
    write_slow_model(target / "slow")
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def write_slow_model(folder: Path) -> None:
    """Make `slow` in a folder, or over what is in it."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(_SLOW_CONFIG, encoding="utf-8")
    (folder / "1" / "model.py").write_text(_SLOW_MODEL, encoding="utf-8")
