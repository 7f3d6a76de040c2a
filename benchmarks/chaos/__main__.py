"""Every process of a served model is killed again and again, under load.

    python -m benchmarks.chaos                              # ten kills of each
    python -m benchmarks.chaos --kills 100 --processes engine

32 clients of the demo model at a time, by four ways: gRPC, /generate, /generate_stream and the
gateway. When some of them have their first tokens, a process of `jitney serve` is killed, or the
proxy in front of it. Then

- every answer must go on after the end of an engine or a fork server, and be the same, bit for bit,
  as the one to the same request alone (the model is in float32 with `batch_invariant`);
- after any other kill its clients must have an error within 5 s, and no answer that was cut short
  may have a finish reason;
- no process, shared memory, folder or socket in CLOSE_WAIT may stay on the machine. What a killed
  launcher leaves in files goes with the next start;
- later answers must be the same, again.

The exit status is 1 if anything is otherwise; standard error says what.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.chaos.launcher import Launcher
from benchmarks.chaos.verdict import MAY_END, Row, table
from benchmarks.chaos.waves import Chaos, why_no_proxy
from benchmarks.chaos.workload import copy_model

OPTIONS = {
    "dtype": "float32",
    "batch_invariant": True,
    "threads": 1,  # so that a busy machine does not slow the engine down more than it must
    "kv_cache_bytes": 256 << 20,
}


def main() -> int:
    """Kill each process, print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of each process")
    parser.add_argument("--processes", nargs="+", choices=list(MAY_END), default=list(MAY_END))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    processes = list(arguments.processes)
    if "proxy" in processes and (reason := why_no_proxy()):
        processes.remove("proxy")
        print(f"the proxy is left out: {reason} (make test-compose installs it)", file=sys.stderr)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as repository,
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
    ):
        copy_model(Path(repository), **OPTIONS)
        launcher = Launcher(Path(repository), Path(folder))
        try:
            chaos = Chaos(launcher, arguments.seed)
            chaos.learn_answers()
            for process in processes:
                rows.append(chaos.run(process, arguments.kills))
        finally:
            launcher.end()
    print(table(rows))
    _print_pauses(rows)
    defects = [defect for row in rows for defect in row.defects]
    print("\n".join(defects) or "Nothing is broken.", file=sys.stderr)
    return 1 if defects else 0


def _print_pauses(rows: list[Row]) -> None:
    for row in rows:
        if not MAY_END[row.process] and row.pauses_s:
            p50, p95 = np.quantile(row.pauses_s, [0.5, 0.95])
            print(f"\nLongest pause of a stream, {row.process}: p50 {p50:.2f} s, p95 {p95:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
