"""ONNX Runtime called in a loop in a separate process: the reference for the server.

    python -m benchmarks.batching.direct model.onnx rows.npz --batch 32 --threads 2 --seconds 3

Default options but for the number of threads. Prints one JSON line: rows per second and the median
of a call in milliseconds.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.batching.subjects import ROOT

_WARM_CALLS = 5


@dataclass(frozen=True)
class Direct:
    """What the loop made."""

    rows_per_s: float
    p50_ms: float


def run_direct(model: Path, rows: Path, *, batch: int, threads: int, seconds: float) -> Direct:
    """One loop in a new process. ``rows`` is an .npz with the model's inputs."""
    command = [
        *(sys.executable, "-m", "benchmarks.batching.direct", str(model), str(rows)),
        *("--batch", str(batch), "--threads", str(threads), "--seconds", str(seconds)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the direct loop failed:\n{done.stderr[-2000:]}")
    return Direct(**json.loads(done.stdout))


def main() -> None:
    """Load, warm up, loop, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    print(json.dumps(asdict(_loop(arguments))))


def _loop(arguments: argparse.Namespace) -> Direct:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(arguments.model), options, providers=["CPUExecutionProvider"]
    )
    with np.load(arguments.rows) as file:
        rows = {name: file[name] for name in file.files}
    count = len(next(iter(rows.values())))
    # As many different batches as the rows give, in turn.
    starts = range(0, max(1, count - arguments.batch + 1), arguments.batch)
    batches = [
        {
            name: np.take(v, range(at, at + arguments.batch), 0, mode="wrap")
            for name, v in rows.items()
        }
        for at in starts
    ]
    for _ in range(_WARM_CALLS):
        session.run(None, batches[0])
    calls: list[float] = []
    began = last = time.perf_counter()
    while last - began < arguments.seconds:
        session.run(None, batches[len(calls) % len(batches)])
        now = time.perf_counter()
        calls.append(now - last)
        last = now
    return Direct(
        rows_per_s=len(calls) * arguments.batch / (last - began),
        p50_ms=1e3 * float(np.median(calls)),
    )


if __name__ == "__main__":
    main()
