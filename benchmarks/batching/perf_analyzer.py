"""One run of NVIDIA's ``perf_analyzer`` against a model, and what it reported.

Owns the command line, the input file and the reading of what it exports. Runs are by number of
requests: windows of time that must agree with each other ("stable") fail on a noisy machine and
leave no report. With a number of requests the throughput that it prints is a count over whole
seconds, though: so throughput and percentiles are computed here from the moments that it recorded,
of every request and every response. How many requests fill the wanted seconds is found out by a
first, short run, which also warms the server up.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batching.outcomes import percentiles_ms
from benchmarks.batching.subjects import ROOT, Subject

_WARM_REQUESTS = 100
_TIMEOUT_S = 60
_ATTEMPTS = 3
"""perf_analyzer now and then waits for ever near the end of a run by number of requests; the server
is idle then. Such a run is ended and made again, with a line that says so."""


@dataclass(frozen=True)
class Report:
    """Rows per second and latencies in milliseconds, as perf_analyzer measured them."""

    rows_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass
class Load:
    """A closed loop of ``concurrency`` requests of ``batch`` rows each on one model."""

    url: str
    model: str
    inputs: Path
    """In perf_analyzer's own JSON format."""
    concurrency: int
    batch: int = 1
    requests: int | None = None
    """Set by the first run."""

    def run(self, binary: Path, seconds: float) -> Report:
        """One run of about so many seconds. Raises RuntimeError with its output if it fails."""
        if self.requests is None:
            warm = max(_WARM_REQUESTS // self.batch, 2 * self.concurrency)
            rate = self._run(binary, warm).rows_per_s / self.batch
            self.requests = max(warm, round(rate * seconds))
        return self._run(binary, self.requests)

    def _run(self, binary: Path, requests: int) -> Report:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._try(binary, requests)
            except subprocess.TimeoutExpired:
                print(
                    f"perf_analyzer hung on {self.model} at {self.concurrency}, attempt {attempt}",
                    file=sys.stderr,
                )
        raise RuntimeError(f"perf_analyzer hung {_ATTEMPTS} times on {self.model}")

    def _try(self, binary: Path, requests: int) -> Report:
        with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as folder:
            profile = Path(folder, "profile.json")
            command = [
                *(str(binary), "-m", self.model, "-u", self.url, "-i", "grpc", "--async"),
                *("--input-data", str(self.inputs), "-b", str(self.batch)),
                *("--concurrency-range", str(self.concurrency)),
                *("--request-count", str(requests), "-s", "900"),
                *("--profile-export-file", str(profile)),
            ]
            environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S,
                check=False,
            )  # fmt: skip
            if done.returncode != 0 or not profile.exists():
                raise RuntimeError(f"perf_analyzer failed:\n{(done.stdout + done.stderr)[-2000:]}")
            # It holds the tensors as raw bytes in its strings: no UTF-8, but ours are the numbers.
            text = profile.read_text(encoding="latin-1")
            return read_profile(json.loads(text, strict=False), self.batch)


def read_profile(profile: dict[str, Any], batch: int) -> Report:
    """Throughput and latencies of an exported profile with one load; its times are nanoseconds.

    Requests that failed have no response and raise RuntimeError.
    """
    (experiment,) = profile["experiments"]
    requests = experiment["requests"]
    failed = sum(not request["response_timestamps"] for request in requests)
    if failed or not requests:
        raise RuntimeError(f"{failed} of {len(requests)} requests failed")
    sent = np.array([request["timestamp"] for request in requests], np.int64)
    answered = np.array([request["response_timestamps"][-1] for request in requests], np.int64)
    p50, p95, p99 = percentiles_ms((answered - sent) * 1e-9, (50, 95, 99))
    seconds = float(answered.max() - sent.min()) * 1e-9
    return Report(len(requests) * batch / seconds, p50, p95, p99)


def find_binary() -> Path:
    """The program in this environment, fetched if need be."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from fetch_perf_analyzer import fetch
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return fetch()


def write_rows(path: Path, subject: Subject) -> Path:
    """The subject's rows as perf_analyzer reads them; it sends them in turn."""
    rows = [
        {name: _tensor(values[row]) for name, values in subject.rows.items()}
        for row in range(len(subject.expected))
    ]
    return _write(path, rows)


def write_texts(path: Path, name: str, texts: Sequence[str]) -> Path:
    """Texts for a model whose input ``name`` is STRING [1]."""
    return _write(path, [{name: [text]} for text in texts])


def _tensor(row: np.ndarray) -> dict[str, Any]:
    return {"content": row.ravel().tolist(), "shape": list(row.shape)}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"data": rows}), encoding="utf-8")
    return path
