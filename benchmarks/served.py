"""W1 through the real server over 32 concurrent gRPC streams, beside the engine alone.

    python -m benchmarks.served

Server, client and engine share the machine's cores, as in a small deployment. In-process and served
runs take turns, each in a separate process; the table shows medians. Latencies are measured by the
client: to the first response of a request, and between two responses of one request. Tokens made
while a response is being sent share the next one, so there are fewer responses than tokens.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import tritonclient.grpc.aio as grpc
from jitney_server.server import TritonServer

from benchmarks.engine import ROOT, Command
from benchmarks.workloads import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    VOCAB_SIZE,
    Workload,
    save_m100,
    w1,
    warm_up,
)

MODEL = "m100"
T = TypeVar("T")


@dataclass
class Served:
    """One run of a workload through the server."""

    seconds: float = 0.0
    tokens: int = 0
    responses: int = 0
    first_s: list[float] = field(default_factory=list)
    """Per request: from sending it to its first response."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two responses of one request."""
    front_cpu_s: float = 0.0
    """CPU seconds of the server and of the model's front, which is all but engine and client."""

    def note(self, began: float, last: float) -> float:
        """A response came to a request that began at ``began`` and had its last response, if any,
        at ``last``, else the same. Returns when."""
        now = time.perf_counter()
        self.responses += 1
        (self.first_s if last == began else self.gaps_s).append(now - last)
        return now


def main() -> None:
    """Run both in turn and print the table."""
    arguments = _parse()
    model = save_spelling_m100(arguments.work_dir)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    workload = w1() if arguments.requests is None else w1().head(arguments.requests)
    options = ["--dtype", arguments.dtype]
    options += ["--requests", str(arguments.requests)] if arguments.requests else []
    command = Command("jitney", sys.executable, model, ["W1"], arguments.repeats, options)
    alone: list[float] = []
    served: list[Served] = []
    for _ in range(arguments.repeats):
        alone.append(command.run(threads)["workloads"]["W1"]["figure"])
        served.append(_serve(model, workload, threads, arguments.streams, arguments.dtype))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    _print_table(alone, served)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32, help="requests under way at once")
    parser.add_argument("--requests", type=int, help="only the first so many of W1, for a look")
    add_engine_options(parser)
    return parser.parse_args()


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of m100 with text asks about its engine, and where m100 is kept."""
    parser.add_argument("--threads", type=int, help="of the engine; default: all cores")
    parser.add_argument("--dtype", default="auto", help="of the engine")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")


def save_spelling_m100(folder: Path) -> Path:
    """m100 in ``folder``, with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = save_m100(folder / "m100")
    save_tokenizer(model)
    return model


def save_tokenizer(model: Path) -> None:
    """A tokenizer for random ids: a byte-level one of 256 bytes and of short words, so that the
    server has text to decode, and grammars can be spelled."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"

    def word(number: int) -> str:
        text = ""
        while number:
            number, digit = divmod(number, len(letters))
            text += letters[digit]
        return "Ġ" + text

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [word(number) for number in range(len(tokens), VOCAB_SIZE)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )


# --------------------------------------------------------------------------- one served run


def _serve(model: Path, workload: Workload, threads: int, streams: int, dtype: str) -> Served:
    """Start a server with the model, warm it up, run the workload through it, stop it."""
    with tempfile.TemporaryDirectory(prefix="jitney-served-") as folder:
        write_model(Path(folder), model, threads, dtype)
        with TritonServer(Path(folder)) as server:
            asyncio.run(run_streams(server.grpc_url, MODEL, warm_up(), streams))
            before_s = _front_cpu_s(server)
            served = asyncio.run(run_streams(server.grpc_url, MODEL, workload, streams))
            served.front_cpu_s = _front_cpu_s(server) - before_s
            return served


def write_model(repository: Path, model: Path, threads: int, dtype: str) -> None:
    """The folder of MODEL in a repository: one instance of the checkpoint ``model`` on the CPU."""
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    options = {
        "model": str(model.resolve()),
        "dtype": dtype,
        "threads": threads,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_bytes": 1 << 30,
    }
    (version / "model.json").write_text(json.dumps(options), encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(
        'backend: "jitney"\ninstance_group [{ kind: KIND_CPU count: 1 }]\n', encoding="utf-8"
    )


def _front_cpu_s(server: TritonServer) -> float:
    """CPU seconds of the server's processes so far, but for the engine's and its fork server's."""
    leader = psutil.Process(server.pid)
    spent = 0.0
    for process in (leader, *leader.children(recursive=True)):
        if "jitney.engine.process" not in process.cmdline():
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


async def run_streams(url: str, model: str, workload: Workload, streams: int) -> Served:
    """The workload over gRPC, see :func:`run_clients`."""
    return await run_clients(
        lambda: grpc.InferenceServerClient(url), partial(_request, model=model), workload, streams
    )


async def run_clients(
    connect: Callable[[], AbstractAsyncContextManager[T]],
    request: Callable[[T, list[int], int, Served], Awaitable[None]],
    workload: Workload,
    streams: int,
) -> Served:
    """``streams`` workers, each a client with one request at a time, share the workload's.
    ``request`` makes one of a prompt and its output length, reads it to its end and notes it."""
    served = Served()
    waiting = list(zip(workload.prompts, workload.output_lengths, strict=True))[::-1]

    async def work() -> None:
        async with connect() as client:
            while waiting:
                await request(client, *waiting.pop(), served)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(streams)))
    served.seconds = time.perf_counter() - began
    if served.tokens != workload.output_tokens:
        raise RuntimeError(f"{served.tokens} tokens came instead of {workload.output_tokens}")
    return served


async def _request(
    client: grpc.InferenceServerClient,
    prompt: list[int],
    length: int,
    served: Served,
    model: str,
) -> None:
    parameters = {"temperature": 0, "max_tokens": length, "ignore_eos": True}
    inputs = [
        _tensor("input_ids", np.array(prompt, np.int32), "INT32"),
        _tensor("stream", np.array([True]), "BOOL"),
        _tensor("return_num_output_tokens", np.array([True]), "BOOL"),
        _tensor("sampling_parameters", np.array([json.dumps(parameters)], object), "BYTES"),
    ]

    async def requests():
        yield {"model_name": model, "inputs": inputs}

    last = began = time.perf_counter()
    got = 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise RuntimeError(str(error))
        last = served.note(began, last)
        got += int(result.as_numpy("num_output_tokens").sum())
    served.tokens += got


def _tensor(name: str, array: np.ndarray, kind: str) -> grpc.InferInput:
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


# --------------------------------------------------------------------------- the table


def _print_table(alone: list[float], served: list[Served]) -> None:
    rates = [run.tokens / run.seconds for run in served]
    ours = statistics.median(rates)
    engine = statistics.median(alone)
    run = min(served, key=lambda run: abs(run.tokens / run.seconds - ours))
    print("| W1 | output tok/s | first response p50 / p95, ms | gap p50 / p95, ms | responses | "
          "CPU s of server and front, for 1,000 responses |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    print(f"| engine in-process | {engine:,.1f} | – | – | – | – |")
    print(
        f"| served | {ours:,.1f} ({ours / engine:.2f} of in-process) | {_quantiles(run.first_s)} | "
        f"{_quantiles(run.gaps_s)} | {run.responses:,} for {run.tokens:,} tokens | "
        f"{1e3 * run.front_cpu_s / run.responses:.2f} |"
    )
    print(f"runs, in-process: {_list(alone)}; served: {_list(rates)}")


def _quantiles(seconds: list[float]) -> str:
    return " / ".join(f"{1e3 * q:,.0f}" for q in np.quantile(seconds, [0.5, 0.95]))


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:,.1f}" for value in values)


if __name__ == "__main__":
    main()
