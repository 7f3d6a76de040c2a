"""Speculative decoding on and off, by turns in one process: W1, and few streams that repeat.

    python -m benchmarks.speculation                    # on m100
    python -m benchmarks.speculation --model FOLDER     # on a checkpoint of yours

"repeats" are 1, 2 and 4 streams whose prompt is one piece of 48 random ids, four times; 192 tokens
of output each, greedy. A model of random weights falls into loops of its own: that is the text that
drafts are right about, in W1 as well. "W1, sampled" is W1 at temperature 1, where tokens of such a
model never repeat: what it shows is the cost. Figures are output tokens a second; the ratio is the
median of the rounds'.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

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


def repeating(streams: int, vocab_size: int) -> Workload:
    """Prompts that repeat themselves."""
    random = np.random.RandomState(1240)
    pieces = [random.randint(10, vocab_size - 10, 48).tolist() for _ in range(streams)]
    prompts = [piece * 4 for piece in pieces]
    return Workload(f"repeats/{streams}", prompts, [192] * streams, "output")


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint; else m100 is made")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="of the model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of W1")
    parser.add_argument("--quantization", default="none")
    arguments = parser.parse_args()
    size = arguments.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(MODELS["m100"](Path(folder) / "m100"))
        options: dict[str, object] = {
            "model": model,
            "quantization": arguments.quantization,
            "threads": arguments.threads,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "kv_cache_bytes": 1 << 30,
            "prefix_caching": False,
        }
        configs = {"off": make_config(options), "on": make_config(options | {"speculation": {}})}
        runner = load_runner(configs["off"])
    keys = itertools.count()
    engines = {name: Engine(config, runner) for name, config in configs.items()}
    for engine in engines.values():
        serve(engine, warm_up(size), keys)
    some = [repeating(streams, size) for streams in (1, 2, 4)]
    print("| workload | off, tok/s | on, tok/s | on / off | steps off | steps on |")
    print("|---|---:|---:|---:|---:|---:|")
    mixed = w1(size).head(arguments.requests)
    for name, workload, temperature in (
        *((each.name, each, 0.0) for each in some),
        (mixed.name, mixed, 0.0),
        (f"{mixed.name}, sampled", mixed, 1.0),
    ):
        rates: dict[str, list[float]] = {"off": [], "on": []}
        steps = {}
        for _ in range(arguments.rounds):
            for switch, engine in engines.items():
                outcome = serve(engine, workload, keys, temperature=temperature)
                rates[switch].append(workload.output_tokens / outcome.seconds)
                steps[switch] = outcome.steps
        ratio = statistics.median(b / a for a, b in zip(rates["off"], rates["on"], strict=True))
        off, on = (statistics.median(each) for each in rates.values())
        counts = f"{steps['off']} | {steps['on']}"
        print(f"| {name} | {off:.1f} | {on:.1f} | {ratio:.2f} | {counts} |", flush=True)
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
