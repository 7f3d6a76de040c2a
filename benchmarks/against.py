"""This checkout against another one of this project, in pairs: is it as fast as it was?

    git worktree add ../before COMMIT       # and an environment of its own there: make env
    python -m benchmarks.against ../before                      # W1, W2 and W3, in-process
    python -m benchmarks.against ../before --what served scheduler
    python -m benchmarks.against ../before --side-by-side       # where the machine is noisy

Both run the same benchmark of their own checkout, in turn, each in a process of its own; which one
goes first changes from pair to pair. A ratio is of one pair, and above 1 where this checkout is
better.

Where a machine is noisy, even the CPU seconds of two turns differ by a tenth and more. With
``--side-by-side`` both run at once, with a thread each, on one core. The kernel gives each of them
the core for a few milliseconds at a time, so what disturbs one disturbs the other as much. Only the
tokens a CPU second mean anything then.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.engines.measure import MARK
from benchmarks.instructions import INSTRUCTIONS, limited_to
from benchmarks.workloads import save_m100

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800

Figures = dict[str, float]
"""Name of a figure -> value. Every figure is better when it is greater."""


def run(tree: Path, module: str, *options: str) -> str:
    """The output of a benchmark of ``tree``. Raises RuntimeError with the end of its errors."""
    command = [str(tree / ".venv" / "bin" / "python"), "-m", f"benchmarks.{module}", *options]
    done = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{tree.name}: {module} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def in_process(tree: Path, arguments: argparse.Namespace) -> Figures:
    """The workloads by the engine alone."""
    model = save_m100(arguments.work_dir / "m100")
    output = run(
        tree, "engines.jitney", "--model", str(model.resolve()), "--dtype", arguments.dtype,
        "--threads", str(arguments.threads), "--workloads", ",".join(arguments.workloads),
    )  # fmt: skip
    (line,) = (line for line in output.splitlines() if line.startswith(MARK))
    figures = {}
    for name, result in json.loads(line.removeprefix(MARK))["workloads"].items():
        figures[f"{name}, tokens a second"] = result["figure"]
        figures[f"{name}, tokens a CPU second"] = result["output_tokens"] / result["cpu_s"]
    return figures


def served(tree: Path, arguments: argparse.Namespace) -> Figures:
    """W1 through the server."""
    output = run(tree, "served", "--repeats", "1", "--threads", str(arguments.threads))
    (rate,) = re.findall(r"^\| served \| ([\d,.]+) ", output, re.M)
    return {"W1 served, tokens a second": float(rate.replace(",", ""))}


def scheduler(tree: Path, arguments: argparse.Namespace) -> Figures:
    """Steps a second that ``schedule`` and ``update`` alone would allow."""
    figures = {}
    rows = re.findall(
        r"^ *([\d,]+) +([\d,]+) +(\w+)(?: +[\d.]+){2} +([\d.]+)", run(tree, "scheduler"), re.M
    )
    for running, waiting, planned, milliseconds in rows:
        name = f"scheduler, {running} running, {waiting} waiting, {planned}: steps a second"
        figures[name] = 1e3 / float(milliseconds)
    return figures


WHAT = {"in-process": in_process, "served": served, "scheduler": scheduler}


def in_turn(trees: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Figures]:
    """All figures of each checkout, one checkout after the other."""
    figures: dict[str, Figures] = {}
    for which, tree in trees.items():
        figures[which] = {}
        for what in arguments.what:
            figures[which].update(WHAT[what](tree, arguments))
    return figures


def side_by_side(trees: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Figures]:
    """The tokens a CPU second of both checkouts, which run at once."""
    with ThreadPoolExecutor() as pool:
        runs = {which: pool.submit(in_process, tree, arguments) for which, tree in trees.items()}
    figures: dict[str, Figures] = {}
    for which, run_of_one in runs.items():
        found = run_of_one.result()
        figures[which] = {name: value for name, value in found.items() if "CPU second" in name}
    return figures


def main() -> None:
    """Run the pairs and print a table: this checkout's median over the other's, and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout, with a .venv of its own")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["in-process"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3"])
    parser.add_argument("--dtype", default="auto", help="in-process only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="all")
    parser.add_argument(
        "--side-by-side", action="store_true", help="both at once, on one core; in-process only"
    )
    arguments = parser.parse_args()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    os.environ.update(limited_to(arguments.instructions))
    measure_pair = side_by_side if arguments.side_by_side else in_turn
    if arguments.side_by_side:
        if arguments.what != ["in-process"]:
            parser.error("--side-by-side measures in-process alone")
        arguments.threads = 1
        save_m100(arguments.work_dir / "m100")  # both would make it
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trees = {"new": ROOT, "old": arguments.other.resolve()}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"new": [], "old": []})
    for pair in range(arguments.pairs):
        order = ("new", "old") if pair % 2 else ("old", "new")
        figures = measure_pair({which: trees[which] for which in order}, arguments)
        for which, figures_of_one in figures.items():
            for name, value in figures_of_one.items():
                found[name][which].append(value)
        print(f"pair {pair + 1} of {arguments.pairs} is done", flush=True)
    print("| figure | this checkout | the other | median of the ratios | least and greatest |")
    print("|---|---|---|---|---|")
    for name, values in found.items():
        new, old = (statistics.median(values[which]) for which in ("new", "old"))
        ratios = [a / b for a, b in zip(values["new"], values["old"], strict=True)]
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        print(f"| {name} | {new:,.1f} | {old:,.1f} | {statistics.median(ratios):.2f} | {spread} |")


if __name__ == "__main__":
    main()
