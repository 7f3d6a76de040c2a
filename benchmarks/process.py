"""The engine in a process of its own against the engine in the caller's: what do its supervisor,
the journal and the frames between the two cost?

    python -m benchmarks.process

W1 by each in turn; which one is first changes from pair to pair. CPU seconds are of both processes.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks.engine import ROOT, Command
from benchmarks.workloads import save_m100


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--requests", type=int, help="only the first so many of W1, for a look")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")
    arguments = parser.parse_args()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    model = save_m100(arguments.work_dir / "m100")
    head = ["--requests", str(arguments.requests)] if arguments.requests else []
    ways = {
        "own": Command("jitney", sys.executable, model, ["W1"], 1, [*head, "--process"]),
        "caller's": Command("jitney", sys.executable, model, ["W1"], 1, head),
    }
    runs: dict[str, list[dict]] = {way: [] for way in ways}
    for pair in range(arguments.pairs):
        for way in sorted(ways, reverse=bool(pair % 2)):
            runs[way].append(ways[way].run(arguments.threads)["workloads"]["W1"])
        print(f"pair {pair + 1} of {arguments.pairs} is done", flush=True)
    print("| W1 | own process | the caller's | median of the ratios | least and greatest |")
    print("|---|---|---|---|---|")
    for name, figures in {
        "output tok/s": {way: [run["figure"] for run in runs[way]] for way in ways},
        "CPU s for 1,000 tokens": {
            way: [1e3 * run["cpu_s"] / run["output_tokens"] for run in runs[way]] for way in ways
        },
    }.items():
        own = figures["own"]
        callers = figures["caller's"]
        ratios = [one / other for one, other in zip(own, callers, strict=True)]
        print(
            f"| {name} | {statistics.median(own):,.2f} | {statistics.median(callers):,.2f} | "
            f"{statistics.median(ratios):.3f} | {min(ratios):.3f}–{max(ratios):.3f} |"
        )


if __name__ == "__main__":
    main()
