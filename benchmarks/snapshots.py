"""What snapshots of states cost and save: a hybrid with and without the prefix cache, by turns.

    python -m benchmarks.snapshots                  # Qwen 3.5's layers, 100 M parameters
    python -m benchmarks.snapshots --type lfm2

Both engines are in one process and have one thread; figures are CPU seconds, so other work on the
machine changes little. Three loads of greedy requests, 16 output tokens each:

- *new*: 8 prompts of 320 tokens that nobody has sent before. Snapshots are made and never used.
- *again*: the same prompts once more.
- *shared*: 8 prompts of 1,024 tokens that were sent before and 64 tokens of their own.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jitney.engine.assemble import load_runner
from jitney.engine.engine import Engine
from jitney.read_config import make_config

from benchmarks.engines.jitney import serve
from benchmarks.workloads import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Workload

_VOCAB_SIZE = 8192
_REQUESTS = 8
_OUTPUT = 16
_KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3
_SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": _KINDS,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 4},
}


class Seconds(NamedTuple):
    """CPU seconds of the three loads."""

    new: float
    again: float
    shared: float


def main() -> None:
    """Measure by turns and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", choices=list(_OWN), default="qwen3_5_text")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = _save(Path(folder), arguments.type)
        cached = _load(model, prefix_caching=True)
        plain = _load(model, prefix_caching=False)
    keys = itertools.count()
    print("| load | without, CPU s | with, CPU s | without ÷ with |\n|---|---|---|---|")
    found: list[tuple[Seconds, Seconds]] = []
    for turn in range(arguments.turns + 1):
        without = _measure(plain, turn, keys)
        with_cache = _measure(cached, turn, keys)
        found.append((without, with_cache))
    for load in Seconds._fields:
        pairs = [(getattr(a, load), getattr(b, load)) for a, b in found[1:]]  # one warms up
        without_s = statistics.median(pair[0] for pair in pairs)
        with_s = statistics.median(pair[1] for pair in pairs)
        ratios = sorted(pair[0] / pair[1] for pair in pairs)
        spread = f"{ratios[0]:.2f}–{ratios[-1]:.2f}"
        ratio = statistics.median(ratios)
        print(f"| {load} | {without_s:.2f} | {with_s:.2f} | {ratio:.2f} ({spread}) |")


def _measure(engine: Engine, turn: int, keys: Iterator[int]) -> Seconds:
    """Serve the three loads of this turn, whose tokens are in no other turn's."""
    random = np.random.RandomState(turn)
    new = [_draw(random, 320) for _ in range(_REQUESTS)]
    beginning = _draw(random, 1024)
    shared = [beginning + _draw(random, 64) for _ in range(_REQUESTS + 2)]
    seconds_of_new = _cpu_s(engine, new, keys)
    seconds_again = _cpu_s(engine, new, keys)
    for prompt in shared[:2]:  # the second one shows what is shared
        _cpu_s(engine, [prompt], keys)
    return Seconds(seconds_of_new, seconds_again, _cpu_s(engine, shared[2:], keys))


def _draw(random: np.random.RandomState, length: int) -> list[int]:
    ids: list[int] = random.randint(10, _VOCAB_SIZE - 10, length).tolist()
    return ids


def _cpu_s(engine: Engine, prompts: list[list[int]], keys: Iterator[int]) -> float:
    began = time.process_time()
    serve(engine, Workload("", prompts, [_OUTPUT] * len(prompts), "output"), keys)
    return time.process_time() - began


def _load(model: Path, *, prefix_caching: bool) -> Engine:
    config = make_config(
        {
            "model": str(model),
            "device": "cpu",
            "threads": 1,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "kv_cache_bytes": 1 << 29,
            "prefix_caching": prefix_caching,
        }
    )
    return Engine(config, load_runner(config))


def _save(folder: Path, model_type: str) -> Path:
    """A checkpoint of random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**_SHAPE, **_OWN[model_type])
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
