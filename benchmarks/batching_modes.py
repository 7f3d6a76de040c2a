"""The ways to batch, under the same arrivals: tables, and the plots of docs/batching.md.

    python -m benchmarks.batching_modes                       # about ten minutes on two cores
    python -m benchmarks.batching_modes --quick               # a look, in a minute or two
    python -m benchmarks.batching_modes --parts minilm        # of digits, minilm, language
    python -m benchmarks.batching_modes --again               # print and plot the last results

Models of one call: no batching, static, dynamic (batch size by window) and a naive server. The
language model m100: static, dynamic and in-flight. perf_analyzer, the server and the model share
the machine's cores, as in a small deployment. Every result is left as a record of ``jitney bench``,
which sets any two of them side by side.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

from jitney_measure import record
from jitney_measure.slo import Statistic
from msgspec.structs import replace

from benchmarks.batching.language import measure_language
from benchmarks.batching.one_call import Groups, measure, tables
from benchmarks.batching.plan import FULL, QUICK, Plan
from benchmarks.batching.subjects import ROOT, SUBJECTS
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
    for name in arguments.parts:
        folder = arguments.work_dir / f"batching-{name}"
        if not arguments.again:
            began = time.perf_counter()
            _write(_measured(name, plan, threads, arguments.work_dir), folder)
            print(f" {time.perf_counter() - began:.0f} s", file=sys.stderr)
        groups = _read(folder)
        print(f"\n### {name}\n\n{tables(groups)}", flush=True)
        if arguments.pictures:
            print(f"plotted {_plot(name, groups, arguments.pictures)}", file=sys.stderr)


def _write(groups: Groups, folder: Path) -> None:
    """A record for each mode, in their order."""
    for group, results in groups.items():
        for old in folder.glob(f"{group}/*.json"):
            old.unlink()
        for number, (name, result) in enumerate(results.items()):
            file = re.sub(r"[^a-z0-9]+", "-", name)
            record.write(result, folder / group / f"{number:02}-{file}.json")


def _read(folder: Path) -> Groups:
    """What :func:`_write` wrote."""
    groups: Groups = {}
    for path in sorted(folder.glob("*/*.json")):
        result = record.read(path)
        groups.setdefault(path.parent.name, {})[result.title] = result
    return groups


def _plot(name: str, groups: Groups, folder: Path) -> Path:
    """The latencies of the modes against their throughput."""
    from jitney_measure.plots import curves  # matplotlib may be missing

    shown = [Statistic("latency", percent) for percent in (50.0, 95.0)]
    modes = {mode: _in_requests(result) for mode, result in groups["modes"].items()}
    path = folder / f"batching-{name}-load.svg"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(curves(modes, shown).svg)
    return path


def _in_requests(result: record.Result) -> record.Result:
    """With requests as its throughput: of a language model only one of the modes counts tokens."""
    points = []
    for point in result.points:
        assert point.measured is not None
        rate = point.measured.requests_per_s
        points.append(replace(point, measured=replace(point.measured, throughput=rate)))
    return replace(result, language=False, points=tuple(points))


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


def _measured(name: str, plan: Plan, threads: int, work_dir: Path) -> Groups:
    print(f"{name} ", end="", file=sys.stderr, flush=True)
    if name == LANGUAGE:
        checkpoint = save_m100(work_dir / "m100")
        save_tokenizer(checkpoint)
        return measure_language(checkpoint, VOCAB_SIZE, plan, threads)
    return measure(SUBJECTS[name](), plan, threads)


if __name__ == "__main__":
    main()
