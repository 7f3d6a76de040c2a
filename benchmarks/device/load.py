"""Part ``load``: from a checkpoint on disk to the first token, in processes of their own.

The checkpoint is random weights that this part writes as safetensors and reads once, so that what
is timed is the load and not the disk. Twice: with an empty cache of compiled kernels, and with one
that is filled, which the bar is for: first, if parts before this one have filled it, else last.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.device.environment import device_of
from benchmarks.device.load_once import MARK
from benchmarks.device.serving import engine_options
from benchmarks.device.shapes import LLAMA_8B, TINY, Shape, make_module
from benchmarks.device.supervise import Bench

LOAD_BAR_S = 25.0
COMPILED = "kernels compiled"
CACHED = "kernels cached"
_ROOT = Path(__file__).parents[2]


def run(bench: Bench) -> None:
    """Write, read, load twice, remove."""
    device = device_of(bench)
    shape = TINY if bench.tiny else LLAMA_8B
    needed = int(1.2 * shape.itemsize * (shape.step_values + shape.vocab * shape.hidden))
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        raise RuntimeError(f"{tempfile.gettempdir()} has {free:,} bytes left of {needed:,} needed")
    with tempfile.TemporaryDirectory(prefix="jitney-gpu-benchmark-") as folder:
        checkpoint = Path(folder) / "model"
        _write(bench, shape, device, checkpoint)
        empty = Path(folder) / "kernels"
        # name, folder of compiled kernels (None: the usual one)
        runs: list[tuple[str, Path | None]] = [(COMPILED, empty), (CACHED, empty)]
        if "step_ms" in bench.facts:  # the usual one has this shape's kernels, from part decode
            runs = [(CACHED, None), (COMPILED, empty)]
        for name, kernels in runs:
            bench.case(
                f"load to first token, {name}",
                partial(_load, bench, shape, checkpoint, kernels, name),
                seconds=15,
            )


def _write(bench: Bench, shape: Shape, device: torch.device, folder: Path) -> None:
    began = time.perf_counter()
    module = make_module(shape, device)
    logging.disable_progress_bar()
    module.save_pretrained(folder, max_shard_size="5GB")
    del module
    if device.type == "cuda":
        torch.cuda.empty_cache()
    written = time.perf_counter() - began
    size = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while piece := file.read(1 << 26):
                size += len(piece)
    bench.add(
        "write and read a checkpoint", value=time.perf_counter() - began, unit="s",
        note=f"{size / 1e9:.1f} GB", details={"written_s": written},
    )  # fmt: skip


def _load(bench: Bench, shape: Shape, checkpoint: Path, kernels: Path | None, name: str) -> None:
    options = engine_options(bench, shape, model=str(checkpoint), max_num_seqs=256)
    if bench.tiny:
        options["max_num_seqs"] = 2
    else:
        options["max_model_len"] = 8192
    command = [
        sys.executable, "-m", "benchmarks.device.load_once",
        "--options", json.dumps(options), "--began", repr(time.time()),
        "--prompt", "8" if bench.tiny else "128",
    ]  # fmt: skip
    cache = {} if kernels is None else {"TRITON_CACHE_DIR": str(kernels)}
    done = subprocess.run(
        command, cwd=_ROOT, env={**os.environ, **cache},
        capture_output=True, text=True, timeout=max(1.0, bench.left - 2), check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, float] = json.loads(lines[-1].removeprefix(MARK))
    seconds = found["load_s"] + found["first_token_s"]
    judged = name == CACHED
    bench.add(
        f"load to first token, {name}", value=seconds, unit="s",
        ratio=seconds if judged else None, bar=LOAD_BAR_S if judged else None, at_most=True,
        note=f"and {found['imports_s']:.1f} s of imports before", details=found,
    )  # fmt: skip
