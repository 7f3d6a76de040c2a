"""The ways to batch a language model, under the same arrivals, prompts and output lengths.

static     full batches or nothing, through transformers' ``generate``
dynamic    the server's dynamic batcher in front of the same ``generate``
in-flight  our backend

Every mode runs at most SIZE sequences at a time, in bf16, on the same number of threads. Owns the
requests and the repository with the three models.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jitney_measure.record import Load
from jitney_measure.target import Target
from jitney_server.server import TritonServer

from benchmarks.batching.loads import Bench, Mode, rates, users
from benchmarks.batching.one_call import FULL_ONLY_US, Groups
from benchmarks.batching.plan import Plan
from benchmarks.batching.requests import write_entries, write_tensors

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
    """Prompts, and exactly how many tokens each is answered with."""

    prompts: list[np.ndarray]
    """i32 [length]"""
    lengths: list[int]

    def for_generate(self) -> list[dict[str, np.ndarray]]:
        """As requests to ``generate``."""
        made = []
        for prompt, length in zip(self.prompts, self.lengths, strict=True):
            counts = {"prompt_tokens": len(prompt), "max_tokens": length}
            tensors = {name: np.array([value], np.int32) for name, value in counts.items()}
            made.append({"input_ids": prompt, **tensors})
        return made

    def for_our_backend(self) -> list[dict[str, Any]]:
        """As streams of our backend."""
        made = []
        for prompt, length in zip(self.prompts, self.lengths, strict=True):
            parameters = {"temperature": 0, "max_tokens": length, "ignore_eos": True}
            made.append(
                {
                    "input_ids": {"content": prompt.tolist(), "shape": [len(prompt)]},
                    "stream": [True],
                    "return_num_output_tokens": [True],
                    "sampling_parameters": [json.dumps(parameters)],
                }
            )
        return made


def make_chat(vocab_size: int, count: int = _REQUESTS) -> Chat:
    """Random prompts; both lengths uniform between their bounds, so that they matter."""
    random = np.random.default_rng(SEED)
    prompt_lengths = random.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count)
    lengths = random.integers(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1, count)
    prompts = [random.integers(10, vocab_size - 10, n).astype(np.int32) for n in prompt_lengths]
    return Chat(prompts, lengths.tolist())


def measure_language(checkpoint: Path, vocab_size: int, plan: Plan, threads: int) -> Groups:
    """Start the server with the three models, run every load on each, stop it."""
    with tempfile.TemporaryDirectory(prefix="batching-") as name:
        folder = Path(name)
        _write_repository(folder / "models", checkpoint.resolve(), threads)
        with TritonServer(folder / "models") as server:
            target = Target.of(server.grpc_url, server.http_url, server.metrics_url)
            modes = _modes(target, make_chat(vocab_size), folder)
            bench = Bench(folder)
            static = modes[f"static {SIZE}"]
            full = bench.run(static, Load("concurrency", 2 * SIZE), plan.language_seconds)
            assert full.measured is not None
            capacity = full.measured.requests_per_s
            loads = rates([share * capacity for share in plan.language_rates])
            loads += users(plan.language_users)
            return {"modes": bench.compare(modes, loads, plan.language_seconds)}


def _modes(target: Target, chat: Chat, folder: Path) -> dict[str, Mode]:
    generate = write_tensors(folder / "generate.json", chat.for_generate())
    in_flight = write_entries(folder / "inflight.json", chat.for_our_backend())
    return {
        f"static {SIZE}": Mode(
            target=target, model=target.model("static"), data=generate, whole_batches=SIZE
        ),
        f"dynamic {SIZE}, {WINDOW_US // 1000} ms": Mode(
            target=target, model=target.model("dynamic"), data=generate
        ),
        f"in-flight {SIZE}": Mode(target=target, model=target.model("inflight"), data=in_flight),
    }


def _write_repository(repository: Path, checkpoint: Path, threads: int) -> None:
    source = Path(__file__).parent / "generate_model" / "model.py"
    for name, window_us in (("static", FULL_ONLY_US), ("dynamic", WINDOW_US)):
        batching = f"dynamic_batching {{ max_queue_delay_microseconds: {window_us} }}"
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
