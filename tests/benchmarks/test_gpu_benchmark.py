"""The GPU benchmark rehearsed on the CPU: every part runs once, through the kernels' interpreter.

So it cannot fail for a silly reason the first time a GPU is at hand. Its figures mean nothing here;
that its checks hold does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from jitney.execution.attention.reference import ReferenceAttention

from benchmarks.device.decode import gaps
from benchmarks.device.offline import w_gpu
from benchmarks.device.paged import Case, distance, expected, make_batch
from benchmarks.device.shapes import LLAMA_8B, TINY, make_module
from benchmarks.device.timing import time_calls

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


def test_a_part_can_be_chosen_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    done = rehearse(tmp_path / "run.json", "--only", "check-attention")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert [*found["parts"]] == ["environment", "check-attention"]
    refused = rehearse(tmp_path / "other.json", "--only", "checks")
    assert refused.returncode == 2
    assert "'checks' is unknown" in refused.stderr


# --------------------------------------------------------------------------- its own references


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", [(9, 1), (3, 20), (0, 4)], (4, 2, 16), torch.float32),
        Case("window, cap", [(30, 7)], (4, 1, 16), torch.float32, window=9, softcap=4.0),
        Case("sinks", [(30, 7), (2, 1)], (4, 4, 16), torch.float32, sinks=True, num_blocks=40),
    ],
    ids=lambda case: case.name,
)
def test_the_float64_reference_agrees_with_the_other_one(case: Case) -> None:
    """Two references, written apart."""
    batch = make_batch(case, torch.device("cpu"))
    assert distance(batch.run(ReferenceAttention()), expected(batch)) < 1e-6


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


def test_random_weights_are_drawn_where_and_as_asked() -> None:
    module = make_module(TINY, torch.device("cpu"), seed=3)
    same = make_module(TINY, torch.device("cpu"), seed=3)
    weights = dict(module.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in same.named_parameters())
    assert weights["lm_head.weight"].std() > 0.01
    assert torch.isfinite(module.model.rotary_emb.inv_freq).all()
    assert not module.training


def test_the_workload_has_the_shape_it_is_said_to_have() -> None:
    workload = w_gpu(1000)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == 512
    assert (min(lengths), max(lengths)) == (64, 1024) or (min(lengths) < 70 and max(lengths) > 1015)
    assert min(workload.output_lengths) >= 64
    assert max(workload.output_lengths) <= 512
    assert abs(np.mean(lengths) - 544) < 30
    assert w_gpu(1000).prompts == workload.prompts, "seeds are fixed"


def test_gaps_between_what_ran() -> None:
    """Overlapping spans are one; small gaps count as idle, but not as gaps between steps."""
    spans = [(0.0, 10.0), (5.0, 8.0), (12.0, 20.0), (30.0, 31.0)]
    assert gaps(spans) == (12.0, 10.0, 31.0)
    with pytest.raises(RuntimeError, match="recorded nothing"):
        gaps([])


def test_times_are_those_of_one_call() -> None:
    counted: list[int] = []
    timing = time_calls(
        [lambda: counted.append(1), lambda: counted.append(2)], torch.device("cpu"), 0.02
    )
    assert 0 < timing.seconds < 0.01
    assert counted.count(1) == counted.count(2) == 2 + timing.samples
    assert not timing.graphed
