"""The ways to batch a model of one call per request, under the same loads.

none      the server without a batcher: every request is an execution of its own
static    the same model behind a queue on the client's side: a full batch or nothing
dynamic   the server's dynamic batcher: at most so many rows, gathered for at most so long
naive     FastAPI, uvicorn and torch, one request at a time

Owns the server with all its variants of the model, the naive server beside it, and the order of the
runs: at every load the modes take turns, so that a machine that drifts is the same for all of them.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from jitney_server.server import TritonServer

from benchmarks.batching.arrivals import poisson
from benchmarks.batching.load import Reply, closed_loop, open_loop, run_precisely
from benchmarks.batching.outcomes import Run, Summary, batches_between, from_json, summarize
from benchmarks.batching.plan import Plan
from benchmarks.batching.repository import Variant, write_variant
from benchmarks.batching.subjects import ROOT, Subject
from benchmarks.batching.targets import Connection, NaiveTarget, ServerTarget, StaticTarget
from benchmarks.batching.tiers import Mix, measure_mixes

STATIC = 8
"""Rows of a static batch."""
WINDOW_US = 2_000
LARGEST = 32
PLAIN = "plain"
"""The variant without a batcher: for ``none``, and behind the queue of ``static``."""
PRIORITIZED = "prioritized"
SEED = 20
_HTTP_CONNECTIONS = 256
_WARM_S = 0.5
_COUNTED_S = 5.0

AnyTarget = ServerTarget | StaticTarget | NaiveTarget


@dataclass(frozen=True)
class Cell:
    """A point of the grid: a batch size and a window at one load."""

    size: int
    window_us: int
    share: float
    """Of the unbatched capacity that is offered."""
    summary: Summary


@dataclass
class Results:
    """All that was measured for one model."""

    name: str
    capacity: float
    """Requests per second of the unbatched model in a closed loop of four."""
    runs: list[Summary] = field(default_factory=list)
    grid: list[Cell] = field(default_factory=list)
    mixes: list[Mix] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


def read_results(data: dict[str, Any]) -> Results:
    """The results that :meth:`Results.as_json` wrote."""
    cells = [Cell(**{**cell, "summary": from_json(cell["summary"])}) for cell in data["grid"]]
    runs = [from_json(run) for run in data["runs"]]
    mixes = [
        Mix(mix["name"], from_json(mix["urgent"]), from_json(mix["bulk"])) for mix in data["mixes"]
    ]
    return Results(data["name"], data["capacity"], runs, cells, mixes)


def dynamic_name(size: int, window_us: int) -> str:
    """The mode of one setting of the dynamic batcher, as the tables show it."""
    return f"dynamic {size}, {window_us / 1000:g} ms"


def measure(subject: Subject, plan: Plan, threads: int, *, naive: bool = True) -> Results:
    """Start the servers, run every load on every mode, stop them."""
    settings = {(STATIC, WINDOW_US), (LARGEST, 0)}
    settings |= {(size, window) for size in plan.sizes for window in plan.windows_us}
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batching-")))
        config = subject.config()
        write_variant(repository, subject.folder, config, Variant(PLAIN, LARGEST, None, threads))
        prioritized = Variant(PRIORITIZED, LARGEST, 0, threads, priorities=2)
        write_variant(repository, subject.folder, config, prioritized)
        for size, window in sorted(settings):
            variant = Variant(_variant(size, window), size, window, threads)
            write_variant(repository, subject.folder, config, variant)
        server = stack.enter_context(TritonServer(repository))
        url = stack.enter_context(_naive_server(subject.name, threads)) if naive else None
        return run_precisely(_measure(subject, plan, server.grpc_url, url))


async def _measure(subject: Subject, plan: Plan, url: str, naive_url: str | None) -> Results:
    async with Connection(url) as connection, _http() as http:
        bench = _Bench(connection, subject)
        targets: dict[str, AnyTarget] = {
            "none": bench.server(PLAIN),
            f"static {STATIC}": bench.static(),
            dynamic_name(STATIC, WINDOW_US): bench.server(_variant(STATIC, WINDOW_US)),
            dynamic_name(LARGEST, 0): bench.server(_variant(LARGEST, 0)),
        }
        if naive_url is not None:
            targets["naive"] = NaiveTarget(http, naive_url, subject)
        for target in targets.values():
            await bench.warm(target)
        capacity = (await bench.closed("none", targets["none"], 4, plan.seconds)).throughput
        results = Results(subject.name, capacity)
        behind: set[str] = set()
        for step, share in enumerate(plan.rates):
            arrivals_seed = SEED + step  # another stream at each rate, the same for every mode
            for mode in (mode for mode in targets if mode not in behind):
                summary = await bench.open(
                    mode, targets[mode], share * capacity, plan.seconds, arrivals_seed
                )
                results.runs.append(summary)
                if summary.behind:
                    behind.add(mode)
        for concurrency in plan.concurrencies:
            for mode in targets:
                results.runs.append(
                    await bench.closed(mode, targets[mode], concurrency, plan.seconds)
                )
        results.grid = await _grid(bench, plan, capacity)
        results.mixes = await measure_mixes(
            connection, subject, capacity, plan.mix_seconds,
            shared=_variant(LARGEST, 0), prioritized=PRIORITIZED, plain=PLAIN,
        )  # fmt: skip
        return results


async def _grid(bench: "_Bench", plan: Plan, capacity: float) -> list[Cell]:
    cells = []
    settings = [(size, window) for size in plan.sizes for window in plan.windows_us]
    targets = {setting: bench.server(_variant(*setting)) for setting in settings}
    for target in targets.values():
        await bench.warm(target)
    for share in plan.grid_rates:
        for (size, window), target in targets.items():
            mode = dynamic_name(size, window)
            summary = await bench.open(mode, target, share * capacity, plan.grid_seconds, SEED)
            cells.append(Cell(size, window, share, summary))
    return cells


class _Bench:
    """Runs a load on a target, checks every answer and sums it up. Prints a dot for each."""

    def __init__(self, connection: Connection, subject: Subject) -> None:
        self._connection = connection
        self._subject = subject

    def server(self, model: str) -> ServerTarget:
        """One of the server's variants."""
        return ServerTarget(self._connection, model, self._subject)

    def static(self) -> StaticTarget:
        """The queue in front of the variant without a batcher."""
        return StaticTarget(self._connection, PLAIN, self._subject, STATIC)

    async def warm(self, target: AnyTarget) -> None:
        """Not measured: every size of a batch is met once or more."""
        for concurrency in (1, LARGEST):
            await closed_loop(target, concurrency, _WARM_S / 2)

    async def open(
        self, mode: str, target: AnyTarget, rate: float, seconds: float, seed: int
    ) -> Summary:
        """Poisson arrivals."""
        before = await self._batches(target)
        run, replies = await open_loop(target, poisson(rate, seconds, seed))
        return await self._sum_up(mode, "rate", rate, target, before, run, replies)

    async def closed(
        self, mode: str, target: AnyTarget, concurrency: int, seconds: float
    ) -> Summary:
        """So many users who wait for their answers."""
        before = await self._batches(target)
        run, replies = await closed_loop(target, concurrency, seconds)
        return await self._sum_up(mode, "concurrency", concurrency, target, before, run, replies)

    async def _sum_up(
        self, mode: str, load: str, level: float, target: AnyTarget, before: dict[int, int],
        run: Run, replies: list[Reply],
    ) -> Summary:  # fmt: skip
        target.check(replies)
        batches = await self._executed(target, before, len(replies))
        if mode == "none" and set(batches) != {1}:
            raise RuntimeError(f"the model without a batcher ran batches of {sorted(batches)}")
        print(".", end="", file=sys.stderr, flush=True)
        return summarize(mode, load, level, run, batches=batches)

    async def _executed(
        self, target: AnyTarget, before: dict[int, int], expected: int
    ) -> dict[int, int]:
        """The executions that held these rows; the server counts one after it has answered it."""
        if target.model is None:
            return {}
        deadline = time.monotonic() + _COUNTED_S
        while True:
            batches = batches_between(before, await self._batches(target))
            rows = sum(size * count for size, count in batches.items())
            if rows == expected:
                return batches
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{target.model}: {rows} rows were executed, {expected} answered"
                )
            await asyncio.sleep(0.01)

    async def _batches(self, target: AnyTarget) -> dict[int, int]:
        return {} if target.model is None else await self._connection.batches(target.model)


def _variant(size: int, window_us: int) -> str:
    return f"dynamic_{size}_{window_us}"


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=_HTTP_CONNECTIONS)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@contextlib.contextmanager
def _naive_server(model: str, threads: int) -> Iterator[str]:
    """A process with the naive server; its address once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.batching.naive_server", model, "--port", str(port),
         "--threads", str(threads)],
        cwd=ROOT,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the naive server ended with status {process.returncode}")
        with contextlib.suppress(OSError), opener.open(f"{url}/health", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the naive server was not ready within {limit_s:.0f} s")
