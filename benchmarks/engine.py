"""W1, W2 and W3 on m100: Jitney in-process beside other engines, in one run.

    python -m benchmarks.engine                                 # what is installed here
    python -m benchmarks.engine --openvino-python PATH          # an environment with OpenVINO GenAI
    python -m benchmarks.engine --engines jitney --breakdown    # where the time goes
    python -m benchmarks.engine --engines jitney,jitney_int8,openvino,openvino_int8

Every run is a separate process; the engines take turns, and the table shows medians. OpenVINO GenAI
needs a converted model: a separate environment with ``openvino-genai``, ``optimum-intel`` and
torch's CPU build, without ``torchvision``, converts and runs it. Compare ratios within one run;
absolute figures differ between machines. `--instructions avx2` takes from all of them what is
above; from OpenVINO as far as oneDNN does it.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.measure import MARK
from benchmarks.instructions import INSTRUCTIONS, limited_to
from benchmarks.workloads import save_m100

ROOT = Path(__file__).parent.parent
ENGINES = {
    "jitney": "Jitney",
    "jitney_int8": "Jitney, int8 weights and activations",
    "openvino": "OpenVINO GenAI, continuous batching",
    "openvino_int8": "OpenVINO GenAI, int8 weights",
    "transformers_static": "transformers generate, static batches of 32",
    "transformers_continuous": "transformers continuous batching, paged sdpa",
}
DEFAULT = [name for name in ENGINES if not name.endswith("int8")]
UNITS = {"W1": "output tok/s", "W2": "decode tok/s", "W3": "prompt tok/s"}
# transformers' continuous batching is slow: a part of W1, once, and neither of the others.
CONTINUOUS_REQUESTS = 16
TIMEOUT_S = 900


@dataclass
class Command:
    """How one engine is run."""

    name: str
    python: str
    model: Path
    workloads: list[str]
    repeats: int
    options: list[str]
    instructions: str = "all"

    def run(self, threads: int) -> dict:
        """One process; returns what it reports. Raises RuntimeError with the end of its output."""
        module = self.name.removesuffix("_int8")
        command = [
            self.python, "-m", f"benchmarks.engines.{module}", "--model", str(self.model),
            "--threads", str(threads), "--workloads", ",".join(self.workloads), *self.options,
        ]  # fmt: skip
        environment = {**os.environ, **limited_to(self.instructions)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            if line.startswith(MARK):
                result: dict = json.loads(line.removeprefix(MARK))
                return result
        raise RuntimeError(f"{self.name} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    """Run the engines in turn and print the table."""
    arguments = _parse()
    folder = arguments.work_dir
    folder.mkdir(parents=True, exist_ok=True)
    model = save_m100(folder / "m100")
    threads = arguments.threads or len(os.sched_getaffinity(0))
    commands = [c for name in arguments.engines if (c := _command(name, model, arguments))]
    results: dict[str, list[dict]] = {command.name: [] for command in commands}
    for turn in range(arguments.repeats):
        for command in commands:
            if turn < command.repeats:
                results[command.name].append(command.run(threads))
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{_processor()}, {threads} threads, instructions: {arguments.instructions}\n")
    _print_table(commands, results)
    decode = _median(results.get("jitney", []), "W2") if "W2" in arguments.workloads else None
    if decode:
        _print_bandwidth(model, threads, decode)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines",
        type=lambda text: text.split(","),
        default=DEFAULT,
        help="comma-separated",
    )
    parser.add_argument(
        "--workloads", type=lambda text: text.split(","), default=list(UNITS), help="W1,W2,W3"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only the first so many of W1, for a look")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="all")
    parser.add_argument("--breakdown", action="store_true", help="Jitney: time the parts of a step")
    parser.add_argument("--openvino-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--work-dir", type=Path, default=ROOT / "build" / "benchmarks", help="models and logs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    arguments = parser.parse_args()
    for name in arguments.engines:
        if name not in ENGINES:
            parser.error(f"engine {name!r} is unknown; there are {', '.join(ENGINES)}")
    return arguments


def _command(name: str, model: Path, arguments: argparse.Namespace) -> Command | None:
    """The command for an engine, or None, with a line that says why, if it is not installed."""
    workloads, options, repeats = arguments.workloads, [], arguments.repeats
    python = sys.executable
    requests = arguments.requests
    if name == "jitney" and arguments.breakdown:
        options.append("--breakdown")
    if name == "jitney_int8":
        options += ["--quantization", "int8"]
    if name == "transformers_continuous":
        workloads, repeats = [w for w in workloads if w == "W1"], 1
        requests = min(requests or CONTINUOUS_REQUESTS, CONTINUOUS_REQUESTS)
    if name.startswith("openvino"):
        python = arguments.openvino_python
        if _missing(python, "openvino_genai"):
            print(f"without {ENGINES[name]}: openvino_genai is not installed in {python}")
            return None
        model = _convert(python, model, "int8" if name.endswith("int8") else "fp16")
        if arguments.instructions == "avx2":  # what it takes by itself on such a processor
            options += ["--precision", "f32"]
    if requests:
        options += ["--requests", str(requests)]
    if not workloads:
        return None
    return Command(name, python, model, workloads, repeats, options, arguments.instructions)


def _missing(python: str, module: str) -> bool:
    return bool(subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode)


def _convert(python: str, model: Path, weights: str) -> Path:
    """The model in OpenVINO's format with such ``weights``, beside the original; made once."""
    target = model.with_name(f"{model.name}-openvino-{weights}")
    if not (target / "openvino_model.bin").exists():
        tool = Path(python).parent / "optimum-cli"
        if not tool.exists():
            raise SystemExit(f"{tool} is missing: install optimum-intel there, or use --engines")
        subprocess.run(
            [str(tool), "export", "openvino", "--model", str(model), "--task",
             "text-generation-with-past", "--weight-format", weights, str(target)],
            check=True, capture_output=True,
        )  # fmt: skip
    return target


# --------------------------------------------------------------------------- the table


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


def _print_bandwidth(model: Path, threads: int, tokens_per_s: float) -> None:
    """What W2 reads of weights in a second, beside a plain loop that reads memory."""
    import torch

    torch.set_num_threads(threads)
    memory = torch.ones(1 << 28)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - began)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    loop, reads = memory.nbytes / min(seconds) / 1e9, weights * tokens_per_s / 1e9
    print(f"\nJitney's W2 reads {reads:.1f} GB/s of weights, a plain loop {loop:.1f} GB/s: "
          f"{reads / loop:.2f}")  # fmt: skip


def _median(runs: list[dict], workload: str) -> float | None:
    figures = [run["workloads"][workload]["figure"] for run in runs if workload in run["workloads"]]
    return statistics.median(figures) if figures else None


def _print_table(commands: list[Command], results: dict[str, list[dict]]) -> None:
    columns = [w for w in UNITS if any(w in c.workloads for c in commands)]
    head = " | ".join(f"{w}, {UNITS[w]} (Jitney ÷)" for w in columns)
    print(f"| engine | {head} | peak MB | load s |")
    print("|---|" + "---|" * (len(columns) + 2))
    ours = {w: _median(results.get("jitney", []), w) for w in columns}
    for command in commands:
        runs = results[command.name]
        cells = [_cell(_median(runs, w), ours[w]) for w in columns]
        peak = statistics.median(run["peak_mb"] for run in runs)
        load = statistics.median(run["load_s"] for run in runs)
        name = ENGINES[command.name]
        if command.name == "transformers_continuous":
            name += f" (the first {command.options[-1]} requests of W1)"
        print(f"| {name} | {' | '.join(cells)} | {peak:,.0f} | {load:.1f} |")
    for name, runs in results.items():
        for workload in columns:
            figures = [
                r["workloads"][workload]["figure"] for r in runs if workload in r["workloads"]
            ]
            if len(figures) > 1:
                spread = (max(figures) - min(figures)) / statistics.median(figures)
                print(f"{name} {workload}: {len(figures)} runs, spread {spread:.0%}")
    for workload in columns:
        _print_breakdown(workload, results.get("jitney", []))


def _cell(value: float | None, ours: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.1f}" + (f" ({ours / value:.2f})" if ours else "")


def _print_breakdown(workload: str, runs: list[dict]) -> None:
    """Parts of the median run's time, and the share of scheduling and other Python."""
    timed = [
        r["workloads"][workload] for r in runs if r["workloads"].get(workload, {}).get("breakdown")
    ]
    if not timed:
        return
    run = sorted(timed, key=lambda r: r["seconds"])[len(timed) // 2]
    python = ("schedule", "update", "metadata", "Python and small operations")
    print(f"\n{workload}: {run['seconds']:.2f} s in {run['steps']} steps")
    for part, seconds in sorted(run["breakdown"].items(), key=lambda item: -item[1]):
        share = seconds / run["seconds"]
        print(
            f"  {part:28} {seconds:8.3f} s {share:6.1%} {1e6 * seconds / run['steps']:8.0f} µs/step"
        )
    total = sum(run["breakdown"][part] for part in python)
    print(f"  scheduling and other Python: {total / run['seconds']:.1%}")


if __name__ == "__main__":
    main()
