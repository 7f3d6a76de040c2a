"""The engine's process is killed again and again under load: does any client notice but by a pause?

    python -m benchmarks.chaos --kills 100

32 streams of the demo model through the real server, mixed: greedy, sampled with a seed, n = 4,
penalties, logprobs, stop strings. The engine is killed at random moments, each with at least 16
requests open of which one in four has no token yet. Then the same requests are run without kills,
and every text, count and finish reason must be the same, ids where logprobs name them, and every
logprob within 1e-4.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc.aio as grpc
from jitney.server.server import TritonServer

ROOT = Path(__file__).resolve().parent.parent
MODEL = "pylm"
STREAMS = 32
LEAST_OPEN = 16
BURST = 16
"""Requests beside the streams that come just before a kill, so that some have no token yet."""
LONGEST_PAUSE_S = 5.0
LOGPROB_TOLERANCE = 1e-4

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "n": 4},
    {"temperature": 1, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "stop": ["return", "\n\n"], "ignore_eos": False},
)


@dataclass
class Answer:
    """All that one request got."""

    texts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""


@dataclass
class Run:
    """A number of requests, and what happened meanwhile."""

    answers: dict[int, Answer] = field(default_factory=dict)
    open: dict[int, Answer] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)
    """From a kill to the next tokens of each stream that was open and had some."""
    kills: list[float] = field(default_factory=list)
    not_ready: int = 0
    """Times that the model said it was not ready."""
    stopping: bool = False


def main() -> int:
    """Run both, print the result. Returns the exit status: 0 if nothing differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with TritonServer(ROOT / "model_repository", models=[MODEL]) as server:
        chaos = asyncio.run(_run(server, arguments.kills, arguments.seed, None))
        calm = asyncio.run(_run(server, 0, arguments.seed, len(chaos.answers)))
    differ = [key for key in chaos.answers if not _same(chaos.answers[key], calm.answers[key])]
    for key in differ[:5]:
        print(f"request {key}: {chaos.answers[key]}\nnot: {calm.answers[key]}", file=sys.stderr)
    p50, p95 = np.quantile(chaos.pauses_s or [0.0], [0.5, 0.95])
    print("| kills | requests | differ | kill to next token p50 / p95, s | said not ready |")
    print("|---|---|---|---|---|")
    print(
        f"| {len(chaos.kills)} | {len(chaos.answers):,} | {len(differ)} | {p50:.2f} / {p95:.2f} "
        f"| {chaos.not_ready} times |"
    )
    late = p95 > LONGEST_PAUSE_S or chaos.not_ready
    return 1 if differ or late or len(chaos.kills) < arguments.kills else 0


def _requests(seed: int) -> Iterator[tuple[int, list[int], dict[str, Any]]]:
    """Key, prompt and sampling parameters, without end."""
    chance = random.Random(seed)
    key = 0
    while True:
        prompt = [chance.randrange(10, 3000) for _ in range(chance.randint(128, 704))]
        params = {
            "max_tokens": chance.randint(32, 256), "seed": key, "ignore_eos": True,
            **KINDS[key % len(KINDS)],
        }  # fmt: skip
        yield key, prompt, params
        key += 1


async def _run(server: TritonServer, kills: int, seed: int, most: int | None) -> Run:
    """Requests from ``STREAMS`` clients, ``most`` of them or until ``kills`` kills are made."""
    run = Run()
    requests = _requests(seed)

    async def one(client: grpc.InferenceServerClient) -> bool:
        key, prompt, params = next(requests)
        if most is not None and key >= most:
            return False
        run.open[key] = Answer()
        await _ask(client, prompt, params, run.open[key])
        run.answers[key] = run.open.pop(key)
        return True

    async def work() -> None:
        async with grpc.InferenceServerClient(server.grpc_url) as client:
            while not run.stopping and await one(client):
                pass

    async def burst() -> None:
        async with grpc.InferenceServerClient(server.grpc_url) as client:
            await asyncio.gather(*(one(client) for _ in range(BURST)))

    clients = [asyncio.create_task(work()) for _ in range(STREAMS)]
    watch = asyncio.create_task(_watch_readiness(server, run))
    if most is None:
        await _kill(server, run, kills, random.Random(seed), burst)
        run.stopping = True
    await asyncio.gather(*clients)
    while run.open:
        await asyncio.sleep(0.1)
    watch.cancel()
    for answer in run.answers.values():
        for at in run.kills:
            before = [one for one in answer.times if one < at]
            after = [one for one in answer.times if one > at]
            if before and after:
                run.pauses_s.append(min(after) - at)
    return run


async def _kill(
    server: TritonServer,
    run: Run,
    kills: int,
    chance: random.Random,
    burst: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    bursts = []
    for _ in range(10 * kills):
        if len(run.kills) == kills:
            break
        await asyncio.sleep(chance.uniform(0.5, 1.5))
        bursts.append(asyncio.create_task(burst()))
        for _ in range(200):
            await asyncio.sleep(0.005)
            if _is_busy(run):
                break
        else:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = _engine(server)
            if engine is None or time.time() - engine.create_time() < 2.5:  # it may still load
                continue
            engine.kill()
            run.kills.append(time.monotonic())
    await asyncio.gather(*bursts)


def _is_busy(run: Run) -> bool:
    prefill = sum(not answer.times for answer in run.open.values())
    return len(run.open) >= LEAST_OPEN and 4 * prefill >= len(run.open)


def _engine(server: TritonServer) -> psutil.Process | None:
    """The engine of the only instance: below the server stand stub, nursery and engine."""
    assert server.pid is not None
    for stub in psutil.Process(server.pid).children():
        for nursery in stub.children():
            for engine in nursery.children():
                return engine
    return None


async def _watch_readiness(server: TritonServer, run: Run) -> None:
    async with grpc.InferenceServerClient(server.grpc_url) as client:
        while True:
            run.not_ready += not await client.is_model_ready(MODEL)
            await asyncio.sleep(0.1)


async def _ask(
    client: grpc.InferenceServerClient, prompt: list[int], params: dict[str, Any], answer: Answer
) -> None:
    """One request, read to its end."""
    flags = ["stream", "return_finish_reason", "return_num_output_tokens", "return_logprobs"]
    inputs = [_tensor(flag, np.array([True]), "BOOL") for flag in flags]
    inputs.append(_tensor("input_ids", np.array(prompt, np.int32), "INT32"))
    text = np.array([json.dumps(params)], object)
    inputs.append(_tensor("sampling_parameters", text, "BYTES"))
    n = params.get("n", 1)
    answer.texts, answer.counts = [""] * n, [0] * n

    async def requests():
        yield {"model_name": MODEL, "inputs": inputs}

    async for result, error in client.stream_infer(requests()):
        if error is not None:
            answer.error = str(error)
            return
        answer.times.append(time.monotonic())
        for index, piece in enumerate(result.as_numpy("text_output")):
            answer.texts[index] += piece.decode()
        for index, count in enumerate(result.as_numpy("num_output_tokens")):
            answer.counts[index] += int(count)
        answer.reasons = [reason.decode() for reason in result.as_numpy("finish_reason")]
        for piece in result.as_numpy("logprobs"):
            answer.logprobs += json.loads(piece) or []


def _tensor(name: str, array: np.ndarray, kind: str) -> grpc.InferInput:
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _same(one: Answer, other: Answer) -> bool:
    if (one.texts, one.reasons, one.counts, one.error) != (
        other.texts, other.reasons, other.counts, other.error,
    ):  # fmt: skip
        return False
    if one.error or [list(each) for each in one.logprobs] != [list(x) for x in other.logprobs]:
        return False
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return all(
        abs(mine[token]["logprob"] - theirs[token]["logprob"]) <= LOGPROB_TOLERANCE
        for mine, theirs in pairs
        for token in mine
    )


if __name__ == "__main__":
    sys.exit(main())
