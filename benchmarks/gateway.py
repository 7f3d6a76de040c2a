"""What the OpenAI API costs: W1 through `jitney gateway` against plain gRPC; 1, 8 and 32 streams.

    python -m benchmarks.gateway

One server, one gateway and the clients share the machine's cores. Both ways have the same workers,
each with a connection of its own that it keeps. For each number of streams, runs over gRPC and
through the gateway take turns; the table shows medians. Each run is told on standard error when it
ends. A client reads raw bytes and counts events: what a library would parse is its own affair.
Latencies are as in benchmarks.served. The prompts are in the prefix cache before the first run: it
would pay for them alone, and the wait for a prefill would hide the gateway's share of the time to
the first token.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import aiohttp
import psutil
from jitney_server.server import TritonServer

from benchmarks.served import (
    MODEL,
    Served,
    add_engine_options,
    run_clients,
    run_streams,
    save_spelling_m100,
    write_model,
)
from benchmarks.workloads import Workload, w1, warm_up


def main() -> None:
    """Run both in turn and print the table."""
    arguments = _parse()
    model = save_spelling_m100(arguments.work_dir)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    print("| streams | way | output tokens/s | of gRPC | TTFT p50, ms | TTFT p95, ms "
          "| responses per token | gateway's CPU, ms per token | cores that waited |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="jitney-gateway-") as repository:
        write_model(Path(repository), model, threads, arguments.dtype)
        with TritonServer(Path(repository)) as server, _gateway(server) as (process, url):
            asyncio.run(_measure(arguments, server.grpc_url, url, process))


async def _measure(
    arguments: argparse.Namespace, grpc_url: str, url: str, gateway: psutil.Process
) -> None:
    """Both ways in turn, for each number of streams."""
    await run_streams(grpc_url, MODEL, w1(), 32)
    await run_events(url, warm_up(), 32)
    for streams in arguments.streams:
        workload = w1().head(arguments.requests or min(64, 8 * streams))
        runs: dict[str, list[Served]] = {"gRPC": [], "gateway": []}
        idle_s = dict.fromkeys(runs, 0.0)
        for _ in range(arguments.repeats):
            for way, run in (
                ("gRPC", partial(run_streams, grpc_url, MODEL, workload, streams)),
                ("gateway", partial(run_events, url, workload, streams)),
            ):
                before_s, idle_s[way] = (
                    sum(gateway.cpu_times()[:2]), idle_s[way] - psutil.cpu_times().idle,
                )  # fmt: skip
                served = await run()
                served.front_cpu_s = sum(gateway.cpu_times()[:2]) - before_s
                idle_s[way] += psutil.cpu_times().idle
                runs[way].append(served)
                _say(streams, way, runs)
        _print_rows(streams, runs, idle_s)


def _say(streams: int, way: str, runs: dict[str, list[Served]]) -> None:
    """A run that has ended."""
    run = runs[way][-1]
    number = len(runs[way])
    first_ms = 1000 * statistics.median(run.first_s)
    said = f"{run.tokens / run.seconds:.0f} tokens/s, TTFT p50 {first_ms:.1f} ms"
    print(f"{streams} streams, {way}, run {number}: {said}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, help="of W1; default: 8 a stream, at most 64")
    add_engine_options(parser)
    return parser.parse_args()


@contextmanager
def _gateway(server: TritonServer) -> Iterator[tuple[psutil.Process, str]]:
    """A gateway before ``server``: its process and its address."""
    command = [sys.executable, "-m", "jitney.cli", "gateway", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--server", server.grpc_url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield psutil.Process(process.pid), process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(30)


async def run_events(url: str, workload: Workload, streams: int) -> Served:
    """The workload through the gateway at ``url``."""
    return await run_clients(aiohttp.ClientSession, partial(_request, url=url), workload, streams)


async def _request(
    client: aiohttp.ClientSession, prompt: list[int], length: int, served: Served, url: str
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": length, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    last = began = time.perf_counter()
    usage = b""
    async with client.post(f"{url}/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if b'"choices":[]' in line:
                usage = line.removeprefix(b"data: ")
            else:
                last = served.note(began, last)
    served.tokens += json.loads(usage)["usage"]["completion_tokens"]


def _print_rows(streams: int, runs: dict[str, list[Served]], idle_s: dict[str, float]) -> None:
    """``idle_s`` of all cores, in all runs of a way."""
    rates = {
        way: statistics.median(r.tokens / r.seconds for r in each) for way, each in runs.items()
    }
    for way, each in runs.items():
        first = sorted(1000 * one for run in each for one in run.first_s)
        tokens = sum(run.tokens for run in each)
        per_token = sum(run.responses for run in each) / tokens
        share = "" if way == "gRPC" else f"{rates[way] / rates['gRPC']:.2f}"
        spent = "" if way == "gRPC" else f"{1000 * sum(r.front_cpu_s for r in each) / tokens:.2f}"
        p95 = first[int(0.95 * (len(first) - 1))]
        waited = idle_s[way] / sum(run.seconds for run in each)
        print(
            f"| {streams} | {way} | {rates[way]:.0f} | {share} | {statistics.median(first):.1f} "
            f"| {p95:.1f} | {per_token:.2f} | {spent} | {waited:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
