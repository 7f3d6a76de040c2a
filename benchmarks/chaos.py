"""The engine's process is killed again and again under load: does any client notice but by a pause?

    python -m benchmarks.chaos --kills 100

32 streams of the demo model through the real server, mixed: greedy, sampled with a seed, n = 4,
penalties, logprobs, stop strings. The engine is killed at random moments, each with at least 16
requests open of which one in four has no token yet. Then the same requests are run without kills,
and every id, text, count and finish reason must be the same, and every logprob within 1e-4.

In float32, unless told otherwise. A context computed in one piece rounds otherwise than token by
token, which decides near ties: rarely in float32, often in bfloat16. So the first token that
differs is judged: noise as small as that rounding, on the logits that transformers computes there,
must bring forth both tokens (:func:`gap_of`). Any other difference is a defect, and the exit status
is 1.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import tritonclient.grpc.aio as grpc
from jitney.batch import Row
from jitney.execution.filters import choose_tokens
from jitney.execution.logits_processors import process_logits
from jitney.sampling_params import SamplingParams
from jitney_server.server import TritonServer
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
MODEL = "pylm"
STREAMS = 32
LEAST_OPEN = 16
BURST = 16
"""Requests beside the streams that come just before a kill, so that some have no token yet."""
FIRST_S = 2.5
"""An engine younger than this may still be loading: it is not killed."""
LONGEST_PAUSE_S = 5.0
LOGPROB_TOLERANCE = 1e-4
TIE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 1e-2}
"""Largest noise on the logits (:func:`gap_of`) that rounding may be."""
NOISES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2, 1e-1)
DRAWS = 256
NEAR_TIES = 0.01
"""Share of requests in which that may have happened."""

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "n": 4, "logprobs": 0},
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
    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[dict[str, dict[str, Any]]]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""


@dataclass
class Run:
    """A number of requests, and what happened meanwhile."""

    answers: dict[int, Answer] = field(default_factory=dict)
    open: dict[int, Answer] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)
    """After each kill, of each stream that was open and had some tokens: the longest time without
    any that began before the next kill."""
    kills: list[float] = field(default_factory=list)
    not_ready: int = 0
    """Times that the model said it was not ready."""
    stopping: bool = False


def main() -> int:
    """Run both, print the result. Returns the exit status: 0 if nothing is worse than allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(copy_model(Path(folder), dtype=arguments.dtype)) as server,
    ):
        chaos = asyncio.run(_run(server, arguments.kills, arguments.seed, None))
        calm = asyncio.run(_run(server, 0, arguments.seed, len(chaos.answers)))
    failed = sum(bool(answer.error) for answer in chaos.answers.values())
    ties = defects = 0
    requests = {
        key: rest for key, *rest in itertools.islice(_requests(arguments.seed), len(calm.answers))
    }
    for key, answer in chaos.answers.items():
        if found := differences(answer, calm.answers[key], *requests[key]):
            tie = all(gap is not None and gap <= TIE[arguments.dtype] for _, gap in found)
            ties += tie
            defects += not tie
            for text, gap in found:
                shown = "" if gap is None else f"; the gap is {gap:.0e}"
                print(
                    f"request {key}, {'tie' if tie else 'DEFECT'}: {text}{shown}", file=sys.stderr
                )
    p50, p95 = np.quantile(chaos.pauses_s or [0.0], [0.5, 0.95])
    print("| kills | requests | failed | ties | defects | longest pause p50 / p95, s | not ready |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {len(chaos.kills)} | {len(chaos.answers)} | {failed} | {ties} | {defects} "
        f"| {p50:.2f} / {p95:.2f} | {chaos.not_ready} times |"
    )
    fine = not (failed or defects or chaos.not_ready) and p95 <= LONGEST_PAUSE_S
    return 0 if fine and ties <= NEAR_TIES * len(chaos.answers) else 1


def copy_model(repository: Path, **options: Any) -> Path:
    """Copy the demo model into ``repository``, with these options changed; returns it."""
    shutil.copytree(ROOT / "model_repository" / MODEL, repository / MODEL)
    file = repository / MODEL / "1" / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    return repository


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
        await ask(client, prompt, params, run.open[key])
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
        for at, until in itertools.pairwise([*run.kills, float("inf")]):
            after = [one for one in answer.times if one > at]
            if after and answer.times[0] < at:
                gaps = itertools.pairwise([at, *after])
                run.pauses_s.append(max(end - begin for begin, end in gaps if begin < until))
    return run


async def _kill(
    server: TritonServer,
    run: Run,
    kills: int,
    chance: random.Random,
    burst: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    while len(run.kills) < kills:
        await asyncio.sleep(chance.uniform(0.5, 1.5))
        engine = engine_of(server)
        if engine is None or time.time() - engine.create_time() < FIRST_S:
            continue
        coming = asyncio.create_task(burst())
        while not _is_busy(run) and not coming.done():
            await asyncio.sleep(0.005)
        if not coming.done():
            engine.kill()
            run.kills.append(time.monotonic())
        await coming


def _is_busy(run: Run) -> bool:
    prefill = sum(not answer.times for answer in run.open.values())
    return len(run.open) >= LEAST_OPEN and 4 * prefill >= len(run.open)


def engine_of(server: TritonServer) -> psutil.Process | None:
    """The engine of the only instance: below the server stand stub, fork server and engine."""
    assert server.pid is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        for stub in psutil.Process(server.pid).children():
            for fork_server in stub.children():
                for engine in fork_server.children():
                    return engine
    return None


async def _watch_readiness(server: TritonServer, run: Run) -> None:
    async with grpc.InferenceServerClient(server.grpc_url) as client:
        while True:
            run.not_ready += not await client.is_model_ready(MODEL)
            await asyncio.sleep(0.1)


async def ask(
    client: grpc.InferenceServerClient, prompt: list[int], params: dict[str, Any], answer: Answer
) -> None:
    """One request, read to its end."""
    n = params.get("n", 1)
    flags = ["stream", "return_finish_reason", "return_num_output_tokens", "return_logprobs"]
    flags += ["return_output_ids"] * (n == 1)
    inputs = [_tensor(flag, np.array([True]), "BOOL") for flag in flags]
    inputs.append(_tensor("input_ids", np.array(prompt, np.int32), "INT32"))
    text = np.array([json.dumps(params)], object)
    inputs.append(_tensor("sampling_parameters", text, "BYTES"))
    answer.texts = [""] * n
    answer.counts = [0] * n
    answer.ids = [[] for _ in range(n)]
    answer.logprobs = [[] for _ in range(n)]

    async def requests():
        yield {"model_name": MODEL, "inputs": inputs}

    async for result, error in client.stream_infer(requests()):
        if error is not None:
            answer.error = str(error)
            continue
        answer.times.append(time.monotonic())
        for index, piece in enumerate(result.as_numpy("text_output")):
            answer.texts[index] += piece.decode()
        for index, count in enumerate(result.as_numpy("num_output_tokens")):
            answer.counts[index] += int(count)
        answer.reasons = [reason.decode() for reason in result.as_numpy("finish_reason")]
        for index, piece in enumerate(result.as_numpy("logprobs")):
            said = json.loads(piece) or []
            answer.logprobs[index] += said
            if n > 1:  # the chosen token comes first
                answer.ids[index] += [int(next(iter(each))) for each in said]
        if n == 1:
            answer.ids[0] += result.as_numpy("output_ids").tolist()


def _tensor(name: str, array: np.ndarray, kind: str) -> grpc.InferInput:
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def differences(
    one: Answer, calm: Answer, prompt: list[int], params: dict[str, Any]
) -> list[tuple[str, float | None]]:
    """What differs, in words, for each sequence; and the gap of the choice between the two tokens,
    None if it is not a token that differs first."""
    found: list[tuple[str, float | None]] = []
    for index, (mine, theirs) in enumerate(zip(one.ids, calm.ids, strict=True)):
        pairs = enumerate(zip(mine, theirs, strict=False))
        at = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(mine), len(theirs)))
        said = zip(one.logprobs[index][:at], calm.logprobs[index][:at], strict=True)
        if far := [k for k, pair in enumerate(said) if not _near(*pair)]:
            found.append((f"sequence {index}: logprobs of token {far[0]}", None))
        elif at < min(len(mine), len(theirs)):
            gap = gap_of((mine[at], theirs[at]), prompt, theirs[:at], index, params)
            text = f"sequence {index}: token {at} is {mine[at]}, without kills {theirs[at]}"
            found.append((text, gap))
        else:
            for name in ("ids", "counts", "reasons", "texts"):
                here = getattr(one, name)[index:][:1]
                there = getattr(calm, name)[index:][:1]
                if here != there:
                    found.append((f"sequence {index}: {name} {here}, without kills {there}", None))
    if one.error != calm.error:
        found.append((f"{one.error!r}, without kills {calm.error!r}", None))
    return found


def _near(mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> bool:
    """Whether both give every token that they share nearly the same logprob. Which is the last of
    the best may be a tie too."""
    shared = mine.keys() & theirs.keys()
    far = (abs(mine[key]["logprob"] - theirs[key]["logprob"]) for key in shared)
    return bool(shared) and max(far) <= LOGPROB_TOLERANCE


def gap_of(
    tokens: tuple[int, int],
    prompt: list[int],
    output: list[int],
    index: int,
    params: dict[str, Any],
) -> float:
    """Least noise (standard deviation) on the logits with which the sampler takes now the one of
    ``tokens`` behind ``output``, now the other; infinite if there is none in ``NOISES``.
    Transformers computes the logits, in float32."""
    chosen = SamplingParams(**{key: each for key, each in params.items() if key != "stop"})
    start = len(prompt) + len(output) - 1
    row = Row(0, index, [0], start, [], (index,), chosen, prompt, output, frozenset(), [])
    with torch.inference_mode():
        logits = _reference()(torch.tensor([prompt + output])).logits[:, -1].float()
        process_logits(logits, [row])
        random_bits = torch.Generator().manual_seed(0)
        noise = torch.randn((DRAWS, logits.shape[1]), generator=random_bits)
        for size in NOISES:
            made = choose_tokens(logits + size * noise, [(row, index)] * DRAWS)
            if set(tokens) <= set(made.tolist()):
                return size
    return math.inf


@functools.cache
def _reference() -> Any:
    folder = ROOT / "model_repository" / MODEL / "1" / "checkpoint"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


if __name__ == "__main__":
    sys.exit(main())
