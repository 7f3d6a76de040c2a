"""How much longer than transformers does a load take?

    python -m benchmarks.loading [MODEL …] [--quantization none int8 int4] [--threads N]

A load ends with a runner that is warmed up, and a tokenizer; transformers' ends with its module and
tokenizer. Each runs in a process of its own that has imported everything before. Neither reads from
the disk: the run before the first that counts has filled the page cache, and the cache of compiled
code. MODEL is a folder or a GGUF file; without one it is m100 (``benchmarks.workloads``).

CPU seconds are those of all threads. Where other work shares the processor, take those of one
thread (``--threads 1``): two wait for each other then, and waiting counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine import ROOT
from benchmarks.workloads import save_m100

QUANTIZATIONS = ("none", "int8", "int4")


class Figures(NamedTuple):
    """What a load took, in seconds."""

    wall: float
    cpu: float


def main() -> None:
    """Run the loads in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument(
        "--quantization", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS)
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")
    parser.add_argument("--child", choices=("jitney", "transformers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        load = {"jitney": load_here, "transformers": load_by_transformers}[arguments.child]
        model = arguments.models[0]
        print(json.dumps(load(model, arguments.quantization[0], arguments.threads)))
        return

    models = arguments.models
    if not models:
        arguments.work_dir.mkdir(parents=True, exist_ok=True)
        models = [save_m100(arguments.work_dir / "m100")]
    print("| checkpoint | `quantization` | Jitney, s | CPU s | transformers, s | CPU s |")
    print("|---|---|---|---|---|---|")
    for model in models:
        is_quantized = model.suffix == ".gguf"
        theirs = median_of("transformers", model, "none", arguments)
        for quantization in ["none"] if is_quantized else arguments.quantization:
            ours = median_of("jitney", model, quantization, arguments)
            print(
                f"| {model.stem} | `{quantization}` | {ours.wall:.1f} | {ours.cpu:.1f} "
                f"| {theirs.wall:.1f} | {theirs.cpu:.1f} |",
                flush=True,
            )


def median_of(child: str, model: Path, quantization: str, arguments: argparse.Namespace) -> Figures:
    """The medians of some loads in processes of their own, after one that does not count."""
    command = [sys.executable, "-m", "benchmarks.loading", str(model), "--child", child]
    command += ["--quantization", quantization, "--threads", str(arguments.threads)]
    runs = []
    for _ in range(1 + arguments.repeats):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        runs.append(Figures(*json.loads(done.stdout.splitlines()[-1])))
    counted = runs[1:]
    return Figures(
        wall=statistics.median(run.wall for run in counted),
        cpu=statistics.median(run.cpu for run in counted),
    )


def load_here(model: Path, quantization: str, threads: int) -> Figures:
    """What the engine's process does, once the fork server has prepared it."""
    from jitney.engine.assemble import prepare
    from jitney.read_config import make_config

    load = prepare()
    options = {"model": str(model), "device": "cpu", "dtype": "bfloat16"}
    more = {"quantization": quantization, "threads": threads, "kv_cache_bytes": 64 << 20}
    config = make_config({**options, **more})
    return measured(lambda: load(config, b""))


def load_by_transformers(model: Path, quantization: str, threads: int) -> Figures:
    """``from_pretrained``, in bfloat16."""
    import torch
    from jitney.execution.read_model import import_models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert quantization == "none"
    import_models()
    torch.set_num_threads(threads)
    folder = model
    of_file: dict[str, str] = {}
    if model.is_file():
        folder = model.parent
        of_file["gguf_file"] = model.name
    has_tokenizer = model.is_file() or (folder / "tokenizer.json").exists()

    def load() -> None:
        if has_tokenizer:
            AutoTokenizer.from_pretrained(str(folder), **of_file)
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **of_file)

    return measured(load)


def measured(load: Callable[[], object]) -> Figures:
    """What ``load`` takes."""
    wall = time.monotonic()
    cpu = cpu_seconds()
    load()
    return Figures(wall=time.monotonic() - wall, cpu=cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Of this process, all threads."""
    times = os.times()
    return times.user + times.system


if __name__ == "__main__":
    main()
