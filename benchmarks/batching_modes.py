"""The ways to batch, under the same arrivals: tables, and the plots of docs/batching.md.

    python -m benchmarks.batching_modes                       # about ten minutes on two cores
    python -m benchmarks.batching_modes --quick               # a look, in a minute or two
    python -m benchmarks.batching_modes --parts minilm        # of digits, minilm, language
    python -m benchmarks.batching_modes --again               # print and plot the last results

Models of one call: no batching, static, dynamic (batch size by window) and a naive server. The
language model m100: static, dynamic and in-flight. Latency counts from the scheduled arrival. The
generator, the server and the model share the machine's cores, as in a small deployment; what the
generator took of them is printed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.batching.language import measure_language
from benchmarks.batching.one_call import Results, measure, read_results
from benchmarks.batching.plan import FULL, QUICK, Plan
from benchmarks.batching.subjects import ROOT, SUBJECTS
from benchmarks.batching.tables import tables
from benchmarks.served import save_tokenizer
from benchmarks.workloads import VOCAB_SIZE, save_m100

LANGUAGE = "language"
PARTS = (*SUBJECTS, LANGUAGE)


def main() -> None:
    """Measure or read, print, plot."""
    arguments = _parse()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    plan = QUICK if arguments.quick else FULL
    threads = arguments.threads or len(os.sched_getaffinity(0))
    measured = []
    for name in arguments.parts:
        file = arguments.work_dir / f"batching-{name}.json"
        if not arguments.again:
            began = time.perf_counter()
            results = _part(name, plan, threads, arguments.work_dir)
            print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr)
            file.write_text(json.dumps(results.as_json(), indent=1), encoding="utf-8")
        measured.append(read_results(json.loads(file.read_text(encoding="utf-8"))))
        print(f"\n### {name}\n\n{tables(measured[-1])}", flush=True)
    if arguments.pictures:
        from benchmarks.batching.plots import plot

        for results in measured:
            for path in plot(results, arguments.pictures):
                print(f"plotted {path}", file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few loads and short ones")
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS)
    )
    parser.add_argument("--threads", type=int, help="of each model; default: all cores")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="plot into it; the documents' own: "
        "docs/pictures",
    )  # fmt: skip
    parser.add_argument(
        "--again", action="store_true", help="measure nothing: read what the last run left"
    )
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"part {part!r} is unknown; there are {', '.join(PARTS)}")
    return arguments


def _part(name: str, plan: Plan, threads: int, work_dir: Path) -> Results:
    print(f"{name} ", end="", file=sys.stderr, flush=True)
    if name == LANGUAGE:
        checkpoint = save_m100(work_dir / "m100")
        save_tokenizer(checkpoint)
        return measure_language(checkpoint, VOCAB_SIZE, plan, threads)
    return measure(SUBJECTS[name](), plan, threads)


if __name__ == "__main__":
    main()
