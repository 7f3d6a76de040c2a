"""The GPU path, checked, measured and put into one table, on one GPU in under nine minutes.

    PYTHONPATH=backend/jitney python3 benchmarks/gpu.py --json FILE   # from the repository's root
    … --only attention,decode                                         # some parts
    … --tiny      # everything once, on the CPU in the kernels' interpreter: figures mean nothing

Weights are random and made on the device; there is no checkpoint, network or server. Parts run in
turn in a process that is replaced if one of them takes the device down. The table comes last; the
exit status is 0 if all parts ran and all checks hold, whether or not bars of speed are met.
docs/gpu.md has the command with what must be installed, docs/benchmarks.md the bars.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script, the path begins with its folder
    sys.path.insert(0, str(ROOT))

from benchmarks.device.report import Report, table  # noqa: E402
from benchmarks.device.supervise import Part, supervise  # noqa: E402

# In this order: what the most depends on comes first, what a short run can do without, last.
PARTS = [
    Part("environment", "benchmarks.device.environment:run", 90, always=True),
    Part("check-attention", "benchmarks.device.check_attention:run", 110),
    Part("check-sampling", "benchmarks.device.check_sampling:run", 70),
    Part("check-runner", "benchmarks.device.check_runner:run", 110),
    Part("attention", "benchmarks.device.attention:run", 50),
    Part("decode", "benchmarks.device.decode:run", 90, least=20),
    Part("offline", "benchmarks.device.offline:run", 140, least=30),
    Part("load", "benchmarks.device.load:run", 140, least=40),
    Part("tiles", "benchmarks.device.tiles:run", 80, least=15),
    Part("options", "benchmarks.device.options:run", 120, least=20),
]


def main() -> int:
    """Run what is selected and print the table. Returns the exit status."""
    arguments = _parse()
    if arguments.tiny:  # before any process imports the kernels' language
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parts = [part for part in PARTS if part.always or part.name in arguments.only]
    if arguments.tiny:  # limits are for a GPU
        parts = [replace(part, seconds=10 * part.seconds) for part in parts]
    report = Report([part.name for part in parts], arguments.json)
    seconds = arguments.seconds or (1800 if arguments.tiny else 540)
    with tempfile.TemporaryDirectory(prefix="jitney-gpu-benchmark-") as folder:
        os.environ["TMPDIR"] = folder  # a part that is killed leaves no checkpoint behind
        supervise(parts, report, seconds, arguments.tiny)
    print("\n" + table(report))
    if arguments.tiny:
        print("--tiny: the kernels ran in an interpreter; none of these figures means anything")
    return 0 if report.ok else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=names, metavar="PART,PART",
        help=f"of {', '.join(names)}; the first is always run",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, help="the deadline of the whole run; 540, or 1,800 with --tiny"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every result, as it comes")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    arguments = parser.parse_args()
    for name in arguments.only:
        if name not in names:
            parser.error(f"part {name!r} is unknown; there are {', '.join(names)}")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
