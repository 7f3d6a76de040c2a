"""The GPU benchmark rehearsed on the CPU: every part runs once, through the kernels' interpreter.

So it cannot fail for a silly reason the first time a GPU is at hand. Its figures mean nothing here;
that its checks hold does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


from benchmarks.device.paged import Case
from benchmarks.device.shapes import LLAMA_8B

ROOT = Path(__file__).parents[2]
PARTS = ("environment", "check-attention", "check-sampling", "check-runner", "attention", "decode",
         "offline", "load", "tiles", "options")  # fmt: skip


def rehearse(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as its users do: by its path, with the package's folder on the path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "backend" / "jitney")}
    environment.pop("TRITON_INTERPRET", None)  # --tiny sets it itself
    return subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--tiny", "--json", str(path), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip


@pytest.mark.slow
def test_every_part_runs_and_every_check_holds(tmp_path: Path) -> None:
    done = rehearse(tmp_path / "run.json")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert [*found["parts"]] == [*PARTS]
    assert {state["status"] for state in found["parts"].values()} == {"done"}
    rows = {part: [row for row in found["rows"] if row["part"] == part] for part in PARTS}
    assert all(rows.values()), "every part reports something"
    assert not [row for row in found["rows"] if row["error"]]
    assert not [row for row in found["rows"] if "skipped" in row["note"]]
    for part in ("check-attention", "check-sampling", "check-runner"):
        assert all(row["met"] for row in rows[part])
    judged = [row["bar"] for row in found["rows"] if row["bar"] and "check" not in row["part"]]
    assert set(judged) == {0.85, 0.5, 0.8, 1.5, 5.0, 25.0}, "bars that a rehearsal can meet"
    assert "all parts ran and all checks hold" in done.stdout
    assert "none of these figures means anything" in done.stdout.splitlines()[-1]


# --------------------------------------------------------------------------- its own references


def test_counts_of_bytes_and_operations() -> None:
    """Of Llama-3.1-8B: 8.03 G values, 128 KiB of cache a token, by hand."""
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        module = LlamaForCausalLM(LLAMA_8B.config())
    total = sum(parameter.numel() for parameter in module.parameters())
    assert total == 8_030_261_248
    assert LLAMA_8B.step_values == total - 128_256 * 4096, "all but the embedding"
    assert LLAMA_8B.kv_bytes == 131_072
    assert LLAMA_8B.step_bytes(64, 1024) == 2 * LLAMA_8B.step_values + 64 * 1024 * 131_072
    case = Case("", [(6, 3)], (4, 2, 8))
    assert case.operations() == 4 * 8 * 4 * (7 + 8 + 9)
    assert case.kv_bytes() == 2 * 2 * 8 * 9 * 2
