"""The ways to batch a language model, under the same arrivals, prompts and output lengths.

static     batches of fixed size, gathered on the client's side, through transformers' ``generate``
dynamic    the server's dynamic batcher in front of the same ``generate``
in-flight  our backend

Every mode runs at most SIZE sequences at a time, in bf16, on the same number of threads. Owns the
requests, the repository with the three models, and their targets.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jitney_server.server import TritonServer
from tritonclient.grpc import service_pb2

from benchmarks.batching.arrivals import poisson
from benchmarks.batching.load import Reply, closed_loop, open_loop, run_precisely
from benchmarks.batching.one_call import Results
from benchmarks.batching.outcomes import Run, Summary, batches_between, summarize
from benchmarks.batching.plan import Plan
from benchmarks.batching.static_queue import StaticQueue
from benchmarks.batching.targets import Connection

SIZE = 8
WINDOW_US = 50_000
PROMPT_TOKENS = (16, 128)
OUTPUT_TOKENS = (8, 96)
SEED = 21
_REQUESTS = 512

_GENERATE = """
name: "{name}"
backend: "python"
max_batch_size: {size}
# Ragged: prompts of different lengths share a batch; the model pads them.
input [
  {{ name: "input_ids" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }},
  {{ name: "prompt_tokens" data_type: TYPE_INT32 dims: [1] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [1] }}
]
output [{{ name: "output_ids" data_type: TYPE_INT32 dims: [-1] }}]
{batching}
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "checkpoint" value: {{ string_value: "{checkpoint}" }} }}
parameters {{ key: "threads" value: {{ string_value: "{threads}" }} }}
"""


@dataclass(frozen=True)
class Chat:
    """What request ``i`` asks: ``prompts[i % n]``, and exactly ``lengths[i % n]`` tokens."""

    prompts: list[np.ndarray]
    lengths: list[int]

    def prompt(self, number: int) -> np.ndarray:
        """i32 [length]"""
        return self.prompts[number % len(self.prompts)]

    def length(self, number: int) -> int:
        """Tokens to make."""
        return self.lengths[number % len(self.lengths)]


def make_chat(vocab_size: int, count: int = _REQUESTS) -> Chat:
    """Random prompts; both lengths uniform between their bounds, so that they matter."""
    random = np.random.default_rng(SEED)
    prompt_lengths = random.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count)
    lengths = random.integers(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1, count)
    prompts = [random.integers(10, vocab_size - 10, n).astype(np.int32) for n in prompt_lengths]
    return Chat(prompts, lengths.tolist())


def measure_language(checkpoint: Path, vocab_size: int, plan: Plan, threads: int) -> Results:
    """Start the server with the three models, run every load on each, stop it."""
    with tempfile.TemporaryDirectory(prefix="batching-") as folder:
        _write_repository(Path(folder), checkpoint.resolve(), threads)
        with TritonServer(Path(folder)) as server:
            return run_precisely(_measure(make_chat(vocab_size), plan, server.grpc_url))


async def _measure(chat: Chat, plan: Plan, url: str) -> Results:
    async with Connection(url) as connection:
        targets: dict[str, GenerateTarget | StaticGenerateTarget | InFlightTarget] = {
            f"static {SIZE}": StaticGenerateTarget(connection, "static", chat),
            f"dynamic {SIZE}, {WINDOW_US // 1000} ms": GenerateTarget(connection, "dynamic", chat),
            f"in-flight {SIZE}": InFlightTarget(connection, "inflight", chat),
        }
        for target in targets.values():
            await closed_loop(target, SIZE, 0.1)
        capacity = await _static_capacity(next(iter(targets.values())))
        results = Results("language", capacity)
        for step, share in enumerate(plan.language_rates):
            arrivals = poisson(share * capacity, plan.language_seconds, SEED + step)
            for mode, target in targets.items():
                before = await target.batches()
                run, replies = await open_loop(target, arrivals)
                results.runs.append(
                    await _sum_up(
                        mode, "rate", share * capacity, chat, target, before, run, replies
                    )
                )
        for concurrency in plan.language_concurrencies:
            for mode, target in targets.items():
                before = await target.batches()
                run, replies = await closed_loop(target, concurrency, plan.language_seconds)
                results.runs.append(
                    await _sum_up(
                        mode, "concurrency", concurrency, chat, target, before, run, replies
                    )
                )
        return results


async def _static_capacity(target: Any) -> float:
    """Requests per second of full static batches, one after the other."""
    began = time.perf_counter()
    run, _ = await open_loop(target, np.zeros(2 * SIZE))
    return len(run.latencies) / (time.perf_counter() - began)


async def _sum_up(
    mode: str, load: str, level: float, chat: Chat, target: Any, before: dict[int, int],
    run: Run, replies: Sequence[Reply],
) -> Summary:  # fmt: skip
    for reply in replies:
        if reply.data != chat.length(reply.number):
            raise RuntimeError(
                f"{mode}: {reply.data} tokens came instead of {chat.length(reply.number)}"
            )
    batches = batches_between(before, await target.batches())
    print(".", end="", file=sys.stderr, flush=True)
    tokens = sum(chat.length(reply.number) for reply in replies)
    return summarize(mode, load, level, run, batches=batches, tokens=tokens)


# --------------------------------------------------------------------------- targets


class GenerateTarget:
    """One prompt a request, to ``generate`` behind the dynamic batcher."""

    waiting = 0

    def __init__(self, connection: Connection, model: str, chat: Chat) -> None:
        self._connection = connection
        self._model = model
        self._chat = chat

    async def send(self, number: int) -> Reply:
        """The answer is the number of tokens that came."""
        return (await self._send_batch([number]))[0]

    def flush(self) -> None:
        """Nothing is held back."""

    async def batches(self) -> dict[int, int]:
        """From the server's statistics."""
        return await self._connection.batches(self._model)

    async def _send_batch(self, numbers: Sequence[int]) -> list[Reply]:
        prompts = [self._chat.prompt(number) for number in numbers]
        ids = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        tensors = {
            "input_ids": ids,
            "prompt_tokens": np.array([[len(prompt)] for prompt in prompts], np.int32),
            "max_tokens": np.array([[self._chat.length(n)] for n in numbers], np.int32),
        }
        request = service_pb2.ModelInferRequest(model_name=self._model)
        for name, array in tensors.items():
            request.inputs.add(name=name, datatype="INT32", shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        response = await self._connection.stub.ModelInfer(request)
        made = np.frombuffer(response.raw_output_contents[0], np.int32).reshape(len(numbers), -1)
        return [
            Reply(number, int((row >= 0).sum())) for number, row in zip(numbers, made, strict=True)
        ]


class StaticGenerateTarget:
    """Full batches out of a queue on the client's side, to ``generate`` without a batcher."""

    def __init__(self, connection: Connection, model: str, chat: Chat) -> None:
        self._model = GenerateTarget(connection, model, chat)
        self._queue: StaticQueue[Reply] = StaticQueue(SIZE, self._model._send_batch)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.waiting

    async def send(self, number: int) -> Reply:
        """Wait in the queue for company."""
        return await self._queue.send(number)

    def flush(self) -> None:
        """The last batch leaves as it is."""
        self._queue.flush()

    async def batches(self) -> dict[int, int]:
        """From the server's statistics."""
        return await self._model.batches()


class InFlightTarget:
    """One stream a request, to our backend; it notes when the first token came."""

    waiting = 0

    def __init__(self, connection: Connection, model: str, chat: Chat) -> None:
        self._connection = connection
        self._model = model
        self._chat = chat

    async def send(self, number: int) -> Reply:
        """The answer is the number of tokens that came."""
        first_at, tokens = None, 0
        async for response in self._connection.stub.ModelStreamInfer(self._request(number)):
            if response.error_message:
                raise RuntimeError(response.error_message)
            if first_at is None:
                first_at = time.perf_counter()
            names = [output.name for output in response.infer_response.outputs]
            raw = response.infer_response.raw_output_contents
            if "num_output_tokens" in names:
                part = raw[names.index("num_output_tokens")]
                tokens += int(np.frombuffer(part, np.uint32).sum())
        return Reply(number, tokens, first_at)

    def flush(self) -> None:
        """Nothing is held back."""

    async def batches(self) -> dict[int, int]:
        """The server sees no batches of a decoupled model: the engine makes them, every step."""
        return {}

    async def _request(self, number: int) -> AsyncIterator[service_pb2.ModelInferRequest]:
        parameters = {
            "temperature": 0,
            "max_tokens": self._chat.length(number),
            "ignore_eos": True,
        }
        text = json.dumps(parameters).encode()
        request = service_pb2.ModelInferRequest(model_name=self._model)
        prompt = self._chat.prompt(number)
        for name, kind, count, raw in (
            ("input_ids", "INT32", len(prompt), prompt.tobytes()),
            ("stream", "BOOL", 1, b"\x01"),
            ("return_num_output_tokens", "BOOL", 1, b"\x01"),
            ("sampling_parameters", "BYTES", 1, len(text).to_bytes(4, "little") + text),
        ):
            request.inputs.add(name=name, datatype=kind, shape=[count])
            request.raw_input_contents.append(raw)
        yield request


# --------------------------------------------------------------------------- the repository


def _write_repository(repository: Path, checkpoint: Path, threads: int) -> None:
    source = Path(__file__).parent / "generate_model" / "model.py"
    batcher = f"dynamic_batching {{ max_queue_delay_microseconds: {WINDOW_US} }}"
    for name, batching in (("static", ""), ("dynamic", batcher)):
        version = repository / name / "1"
        version.mkdir(parents=True)
        shutil.copy(source, version / "model.py")
        config = _GENERATE.format(
            name=name, size=SIZE, batching=batching, checkpoint=checkpoint, threads=threads
        )
        (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    version = repository / "inflight" / "1"
    version.mkdir(parents=True)
    options = {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "threads": threads,
        "max_num_seqs": SIZE,
        "kv_cache_bytes": 1 << 30,
    }
    (version / "model.json").write_text(json.dumps(options), encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(
        'backend: "jitney"\ninstance_group [{ kind: KIND_CPU count: 1 }]\n', encoding="utf-8"
    )
