"""The ways to batch a model of one call per request, under the same loads.

none      the server without a batcher: every request is an execution of its own
static    full batches or nothing: a batcher that waits for the last row
dynamic   the server's dynamic batcher: at most so many rows, gathered for at most so long
naive     FastAPI, uvicorn and torch, one request at a time

Owns the server with all its variants of the model, the naive server beside it, and the mixes of
urgent requests and bulk work.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jitney_measure.record import Load, Result, now
from jitney_measure.target import Model, Target
from jitney_server.server import TritonServer
from tritonclient import grpc

from benchmarks.batching.loads import Bench, Mode, rates, users
from benchmarks.batching.plan import Plan
from benchmarks.batching.repository import Variant, write_variant
from benchmarks.batching.requests import write_payloads, write_rows
from benchmarks.batching.subjects import ROOT, Subject
from benchmarks.batching.tables import by_load, header, latency, line, number

STATIC = 8
"""Rows of a static batch."""
FULL_ONLY_US = 3_600_000_000
"""A window that never ends: the batch leaves when it is full."""
WINDOW_US = 2_000
LARGEST = 32
BULK = 64
"""Bulk requests under way at once: two batches of 32, one in the model and one waiting."""
URGENT_SHARE = 0.1
"""Of the unbatched capacity."""
URGENT = ("--request-parameter", "priority:1:int")
"""The first of two priority levels; whoever names none has the second."""
_NAIVE = ("--service-kind", "openai", "--endpoint", "predict", "--async")
"""The naive server takes JSON at /predict, which is how perf_analyzer asks OpenAI's servers too."""

Groups = dict[str, dict[str, Result]]
"""``modes``, ``grid`` and ``mixes`` -> mode -> what was measured."""


def measure(subject: Subject, plan: Plan, threads: int, *, naive: bool = True) -> Groups:
    """Start the servers, run every load on every mode, stop them."""
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="batching-")
        folder = Path(stack.enter_context(temporary))
        repository = folder / "models"
        for variant in variants(plan, threads):
            write_variant(repository, subject.folder, subject.config(), variant)
        server = stack.enter_context(TritonServer(repository))
        modes = _Modes(server, subject, folder)
        check_answers(server, subject, _dynamic(LARGEST, 0))
        bench = Bench(folder)
        compared = {
            "none": modes.of("none"),
            f"static {STATIC}": modes.of("static", whole_batches=STATIC),
            dynamic_name(STATIC, WINDOW_US): modes.of(_dynamic(STATIC, WINDOW_US)),
            dynamic_name(LARGEST, 0): modes.of(_dynamic(LARGEST, 0)),
        }
        if naive:
            address = stack.enter_context(_naive_server(subject.name, threads))
            compared["naive"] = modes.naive(address)

        four = bench.run(compared["none"], Load("concurrency", 4), plan.seconds)
        assert four.measured is not None
        capacity = four.measured.requests_per_s
        loads = rates([share * capacity for share in plan.rates]) + users(plan.users)
        grid = {
            dynamic_name(size, window): modes.of(_dynamic(size, window))
            for size in plan.sizes
            for window in plan.windows_us
        }
        grid_loads = rates([share * capacity for share in plan.grid_rates])
        return {
            "modes": bench.compare(compared, loads, plan.seconds),
            "grid": bench.compare(grid, grid_loads, plan.grid_seconds),
            "mixes": _mixes(bench, modes, URGENT_SHARE * capacity, plan.mix_seconds),
        }


def variants(plan: Plan, threads: int) -> list[Variant]:
    """Every copy of the model that the server has."""
    settings = {(STATIC, WINDOW_US), (LARGEST, 0)}
    for size in plan.sizes:
        settings |= {(size, window) for window in plan.windows_us}
    made = [Variant(_dynamic(size, window), size, window, threads) for size, window in settings]
    made.append(Variant("none", LARGEST, None, threads))
    made.append(Variant("static", STATIC, FULL_ONLY_US, threads))
    made.append(Variant("prioritized", LARGEST, 0, threads, priorities=2))
    return made


def dynamic_name(size: int, window_us: int) -> str:
    """The mode of one setting of the dynamic batcher, as the tables show it."""
    return f"dynamic {size}, {window_us / 1000:g} ms"


def _dynamic(size: int, window_us: int) -> str:
    """The variant of one setting."""
    return f"dynamic_{size}_{window_us}"


class _Modes:
    """Makes the modes of one subject."""

    def __init__(self, server: TritonServer, subject: Subject, folder: Path) -> None:
        self._target = Target.of(server.grpc_url, server.http_url, None)
        self._rows = write_rows(folder / "rows.json", subject)
        self._payloads = write_payloads(folder / "payloads.json", subject)

    def of(self, variant: str, *, whole_batches: int = 1, more: tuple[str, ...] = ()) -> Mode:
        """One row a request, to one of the server's variants."""
        return Mode(
            target=self._target,
            model=self._target.model(variant),
            data=self._rows,
            whole_batches=whole_batches,
            more=more,
        )

    def naive(self, address: str) -> Mode:
        """One row a request as JSON over HTTP."""
        return Mode(
            target=Target.of(address, address, None),
            model=Model(input=(), name="naive"),
            data=self._payloads,
            protocol="http",
            more=_NAIVE,
        )


def check_answers(server: TritonServer, subject: Subject, variant: str) -> None:
    """Raise RuntimeError unless the server answers every row as ONNX Runtime does."""
    client = grpc.InferenceServerClient(server.grpc_url)
    for row in range(len(subject.expected)):
        inputs = []
        for name, values in subject.rows.items():
            value = values[row : row + 1]
            kind = {"f": "FP32", "i": "INT64"}[value.dtype.kind]
            tensor = grpc.InferInput(name, list(value.shape), kind)
            inputs.append(tensor.set_data_from_numpy(value))
        answer = client.infer(variant, inputs).as_numpy(subject.output)
        subject.check(row, np.asarray(answer))
    client.close()


# --------------------------------------------------------------------------- urgent and bulk


def _mixes(bench: Bench, modes: _Modes, rate: float, seconds: float) -> dict[str, Result]:
    """Two kinds of traffic at once: bulk work that fills batches, and a few urgent requests.

    shared     both through one dynamic batcher
    priority   both through one batcher with two priority levels: the urgent overtake in the queue
    own copy   the urgent have a copy of the model to themselves, without a batcher
    """
    shared = modes.of(_dynamic(LARGEST, 0))
    prioritized = modes.of("prioritized")
    ways = {
        "shared": (shared, shared),
        "priority": (modes.of("prioritized", more=URGENT), prioritized),
        "own copy": (modes.of("none"), shared),
    }
    made = {}
    for name, (urgent, bulk) in ways.items():
        with ThreadPoolExecutor(1) as beside:
            # Longer than the urgent requests, which are never alone.
            under_way = beside.submit(bench.run, bulk, Load("concurrency", BULK), 3 * seconds + 2)
            time.sleep(1.0)
            urgent_point = bench.run(urgent, rates([max(rate, 1)])[0], seconds)
            bulk_point = under_way.result()
        made[name] = Result(
            title=name,
            model=urgent.model.name,
            language=False,
            address=urgent.target.grpc,
            server="Triton",
            perf_analyzer="",
            began=now(),
            options={},
            points=(urgent_point, bulk_point),
        )
    return made


# --------------------------------------------------------------------------- the naive server


@contextlib.contextmanager
def _naive_server(model: str, threads: int) -> Iterator[str]:
    """A process with the naive server; its HOST:PORT once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.batching.naive_server", model]
    command += ["--port", str(port), "--threads", str(threads)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        address = f"127.0.0.1:{port}"
        _wait_until_healthy(process, address)
        yield address
    finally:
        process.terminate()
        process.wait()


def _wait_until_healthy(
    process: "subprocess.Popen[bytes]", address: str, limit_s: float = 120
) -> None:
    deadline = time.monotonic() + limit_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the naive server ended with status {process.returncode}")
        with contextlib.suppress(OSError), opener.open(f"http://{address}/health", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the naive server was not ready within {limit_s:.0f} s")


# --------------------------------------------------------------------------- the tables


def tables(groups: Groups) -> str:
    """All tables of one model, with a line that says what their cells are."""
    cells = "Requests/s completed · p50 / p95 / p99, ms [rows of an execution]; in brackets: behind"
    parts = [cells]
    for group, what in (("modes", "mode"), ("grid", "dynamic batching")):
        results = groups.get(group, {})
        parts.append(by_load(results, "rate", f"{what}; requests/s offered"))
        parts.append(by_load(results, "concurrency", f"{what}; at once"))
    if groups.get("mixes"):
        parts.append(_mix_table(groups["mixes"]))
    return "\n\n".join(part for part in parts if part)


def _mix_table(mixes: Mapping[str, Result]) -> str:
    lines = [header(["", "urgent: p50 / p95 / p99, ms", "bulk, requests/s", "bulk: p50, ms"])]
    for name, result in mixes.items():
        urgent, bulk = result.points
        assert bulk.measured is not None
        rate = number(bulk.measured.requests_per_s)
        median = number(1e3 * bulk.measured.latency.at(50))
        lines.append(line([name, latency(urgent), rate, median]))
    return "\n".join(lines)
