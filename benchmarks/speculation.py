"""Speculative decoding on and off, by turns in one process: W1, and few streams.

    python -m benchmarks.speculation                    # n-grams, on m100
    python -m benchmarks.speculation --model FOLDER     # n-grams, on a checkpoint of yours
    python -m benchmarks.speculation --pair FOLDER      # n-grams and a draft model, on Python code

"repeats" are 1, 2 and 4 streams whose prompt is one piece of 48 random ids, four times; 192 tokens
of output each, greedy. A model of random weights falls into loops of its own: that is the text that
drafts are right about, in W1 as well. "W1, sampled" is W1 at temperature 1, where tokens of such a
model never repeat: what it shows is the cost.

With --pair the models are a target and its draft, trained together by

    python scripts/train_demo_model.py --pair FOLDER --steps 60 --batch-tokens 2048 \\
        --muon-rate 1e-3 --adam-rate 1e-3

"code" are prompts of 200 tokens of the standard library; "repeats" are prompts of 64 tokens of it,
three times.

Figures are output tokens a second; the ratio is the median of the rounds'. On a busy machine,
--cpu-time takes one thread, and counts its CPU seconds everywhere, in the engine as well.
"""

import argparse
import inspect
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jitney.config import make_config
from jitney.engine.assemble import load_runner
from jitney.engine.engine import Engine

from benchmarks.engines.jitney import serve
from benchmarks.workloads import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MODELS,
    VOCAB_SIZE,
    Workload,
    w1,
    warm_up,
)

STREAMS = (1, 2, 4)


def repeating(streams: int, vocab_size: int) -> Workload:
    """Prompts that repeat themselves."""
    random = np.random.RandomState(1240)
    pieces = [random.randint(10, vocab_size - 10, 48).tolist() for _ in range(streams)]
    prompts = [piece * 4 for piece in pieces]
    return Workload(f"repeats/{streams}", prompts, [192] * streams, "output")


def python_code(streams: int, tokenizer: Any, length: int, times: int) -> Workload:
    """Prompts from modules of the standard library: ``length`` tokens, so many times."""
    modules = (argparse, inspect, statistics, tempfile)[:streams]
    sources = [tokenizer(inspect.getsource(each)).input_ids for each in modules]
    prompts = [ids[2000 : 2000 + length] * times for ids in sources]
    name = "code" if times == 1 else "repeats"
    return Workload(f"{name}/{streams}", prompts, [192] * streams, "output")


def compare(
    engines: dict[str, Engine],
    workloads: list[tuple[str, Workload, float]],
    rounds: int,
    keys: Iterator[int],
    clock: Callable[[], float],
) -> None:
    """Run each workload (title, requests, temperature) on all engines by turns; print a table."""
    print("| workload | speculation | output tok/s | of off | steps |\n|---|---|---:|---:|---:|")
    for title, workload, temperature in workloads:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        steps: dict[str, int | None] = {}
        for _ in range(rounds):
            for name, engine in engines.items():
                began = clock()
                outcome = serve(engine, workload, keys, temperature=temperature)
                rates[name].append(workload.output_tokens / (clock() - began))
                steps[name] = outcome.steps
        for name, own in rates.items():
            ratio = statistics.median(b / a for a, b in zip(rates["off"], own, strict=True))
            rate = statistics.median(own)
            print(f"| {title} | {name} | {rate:.1f} | {ratio:.2f} | {steps[name]} |", flush=True)


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint; else m100 is made")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="of the model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of W1; 0: without it")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--pair", type=Path, help="a folder with a target and its draft")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--only", default="", help="workloads with this in their title")
    arguments = parser.parse_args()
    options: dict[str, object] = {
        "quantization": arguments.quantization,
        "threads": arguments.threads,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_bytes": 1 << 29,
        "prefix_caching": False,
    }
    clock: Callable[[], float] = time.monotonic
    if arguments.cpu_time:
        options["threads"], clock = 1, time.process_time
    keys = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.pair:
            options["model"] = str(arguments.pair / "target")
        else:
            options["model"] = arguments.model or str(MODELS["m100"](Path(folder) / "m100"))
        off = make_config(options)
        runner = load_runner(off)
        engines = {
            "off": Engine(off, runner, clock),
            "n-grams": Engine(make_config(options | {"speculation": {}}), runner, clock),
        }
        if arguments.pair:
            draft = {"drafter": "draft_model", "model": str(arguments.pair / "draft")}
            config = make_config(options | {"speculation": draft})
            engines["draft model"] = Engine(config, load_runner(config), clock)
    if arguments.pair:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
        forms = ((64, 3), (200, 1))
        some = [python_code(streams, tokenizer, *form) for form in forms for streams in STREAMS]
        workloads = [(each.name, each, 0.0) for each in some]
        workloads += [(f"{each.name}, temperature 0.7", each, 0.7) for each in some[3:]]
        first = some[-1]
    else:
        size = arguments.vocab_size
        some, first = [repeating(streams, size) for streams in STREAMS], warm_up(size)
        workloads = [(each.name, each, 0.0) for each in some]
        if arguments.requests:
            mixed = w1(size).head(arguments.requests)
            workloads += [(mixed.name, mixed, 0.0), (f"{mixed.name}, sampled", mixed, 1.0)]
    for engine in engines.values():
        serve(engine, first, keys)
    chosen = [each for each in workloads if arguments.only in each[0]]
    compare(engines, chosen, arguments.rounds, keys, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
