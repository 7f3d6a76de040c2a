"""Speculative decoding on and off, by turns in one process: W1, and few streams.

    python -m benchmarks.speculation                    # n-grams, on m100
    python -m benchmarks.speculation --model FOLDER     # n-grams, on a checkpoint of yours
    python -m benchmarks.speculation --demo             # a draft model, on Python code
    python -m benchmarks.speculation --pair FOLDER      # the same, with models that were trained

"repeats" are 1, 2 and 4 streams whose prompt is one piece of 48 random ids, four times; 192 tokens
of output each, greedy. A model of random weights falls into loops of its own: that is the text that
drafts are right about, in W1 as well. "W1, sampled" is W1 at temperature 1, where tokens of such a
model never repeat: what it shows is the cost.

With --demo the draft model is the demo model, of 5 M parameters, and the model is the demo model
with layers behind its own, 30 M parameters in all, that change its output a little (--noise): a
stand-in for a pair that was trained together. Prompts are 200 tokens of the standard library; and
there is W1 with the lengths of its prompts and outputs, and text of the library in it.
With --pair the models are FOLDER/target and FOLDER/draft, as scripts/train_demo_model.py --pair
makes them, and FOLDER/head, if it is there, a head (EAGLE) for that target;
"repeats" are prompts of 64 tokens of the library, three times.

Figures are output tokens a second; the ratio is the median of the rounds'. On a busy machine,
--cpu-time takes one thread, and counts its CPU seconds everywhere, in the engine as well.
"""

import argparse
import ast
import inspect
import itertools
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jitney.engine.assemble import load_runner
from jitney.engine.engine import Engine
from jitney.read_config import make_config

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

PYLM = Path(__file__).parent.parent / "model_repository/pylm/1/checkpoint"
STREAMS = (1, 2, 4)


class TimedWorkload(NamedTuple):
    """Requests that all engines get by turns."""

    title: str
    workload: Workload
    temperature: float


def repeating(streams: int, vocab_size: int) -> Workload:
    """Prompts that repeat themselves."""
    random = np.random.RandomState(1240)
    pieces = [random.randint(10, vocab_size - 10, 48).tolist() for _ in range(streams)]
    prompts = [piece * 4 for piece in pieces]
    return Workload(f"repeats/{streams}", prompts, [192] * streams, "output")


def python_code(streams: int, length: int = 200, times: int = 1) -> Workload:
    """Prompts from modules of the standard library: so many tokens, so many times."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(PYLM)
    modules = (argparse, inspect, statistics, tempfile)[:streams]
    sources = [tokenizer(inspect.getsource(each)).input_ids for each in modules]
    prompts = [ids[2000 : 2000 + length] * times for ids in sources]
    name = "code" if times == 1 else "repeats"
    return Workload(f"{name}/{streams}", prompts, [192] * streams, "output")


def mixed_code(requests: int) -> Workload:
    """The first requests of W1 by their lengths, with text of the standard library in them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(PYLM)
    modules = (argparse, inspect, statistics, tempfile, ast, subprocess, tarfile)
    ids = [id for each in modules for id in tokenizer(inspect.getsource(each)).input_ids]
    like = w1().head(requests)
    lengths = [len(prompt) for prompt in like.prompts]
    begins = itertools.accumulate(lengths, initial=0)
    prompts = [ids[begin : begin + length] for begin, length in zip(begins, lengths, strict=False)]
    assert [len(prompt) for prompt in prompts] == lengths, "the modules are too short"
    return Workload(f"{like.name} of code", prompts, like.output_lengths, "output")


def deepen(folder: Path, layers: int, noise: float) -> Path:
    """The demo model with random layers behind its own, whose outputs are scaled by ``noise``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(PYLM)
    own = model.state_dict()
    config = model.config
    known = config.num_hidden_layers
    config.num_hidden_layers = layers
    deep: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    deep.load_state_dict(own, strict=False)
    with torch.no_grad():
        for layer in deep.model.layers[known:]:
            layer.self_attn.o_proj.weight.mul_(noise)
            layer.mlp.down_proj.weight.mul_(noise)
    deep.save_pretrained(folder)
    return folder


def compare(
    engines: dict[str, Engine],
    workloads: list[TimedWorkload],
    rounds: int,
    keys: Iterator[int],
    clock: Callable[[], float],
) -> None:
    """Run each workload on all engines by turns; print a table."""
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


def parse_arguments() -> argparse.Namespace:
    """Those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint; else m100 is made")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="of the model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of W1; 0: without it")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--pair", type=Path, help="a folder with a target and its drafters")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--only", default="", help="workloads with this in their title")
    parser.add_argument("--noise", type=float, default=10.0)
    return parser.parse_args()


def make_model(arguments: argparse.Namespace, folder: Path) -> Path:
    """The model that all engines run. It is in ``folder`` if it has to be made."""
    if arguments.pair:
        return Path(arguments.pair / "target")
    if arguments.demo:
        return deepen(folder, 43, arguments.noise)
    return Path(arguments.model) if arguments.model else MODELS["m100"](folder / "m100")


def speculations(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The settings of ``speculation`` that are measured, by the names that the table has."""
    found: dict[str, dict[str, str]] = {"n-grams": {}}
    if arguments.pair:
        draft = arguments.pair / "draft"
        found["draft model"] = {"drafter": "draft_model", "model": str(draft)}
        head = arguments.pair / "head"
        if head.exists():
            found["head"] = {"drafter": "eagle", "model": str(head)}
    elif arguments.demo:
        found["draft model"] = {"drafter": "draft_model", "model": str(PYLM)}
    return found


def load_engines(arguments: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Engine]:
    """An engine without speculation, "off", and one for each way to speculate."""
    options: dict[str, object] = {
        "quantization": arguments.quantization,
        "threads": 1 if arguments.cpu_time else arguments.threads,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_bytes": 1 << 29,
        "prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        options["model"] = str(make_model(arguments, Path(folder)))
        off = make_config(options)
        runner = load_runner(off)
        engines = {"off": Engine(off, runner, clock)}
        for name, speculation in speculations(arguments).items():
            config = make_config(options | {"speculation": speculation})
            # n-grams need no drafter of their own: both engines share the model.
            own = load_runner(config) if "drafter" in speculation else runner
            engines[name] = Engine(config, own, clock)
    return engines


def workloads_of_code(arguments: argparse.Namespace) -> list[TimedWorkload]:
    """For models that know Python code."""
    code = [python_code(streams) for streams in STREAMS]
    workloads = [TimedWorkload(each.name, each, 0.0) for each in code]
    if arguments.pair:
        repeated = [python_code(streams, 64, 3) for streams in STREAMS]
        workloads += [TimedWorkload(each.name, each, 0.0) for each in repeated]
    workloads += [TimedWorkload(f"{each.name}, sampled", each, 0.7) for each in code]
    if arguments.requests:
        workloads += greedy_and_sampled(mixed_code(arguments.requests))
    return workloads


def workloads_of_ids(arguments: argparse.Namespace) -> list[TimedWorkload]:
    """Random ids, for any model."""
    size = arguments.vocab_size
    repeats = [repeating(streams, size) for streams in STREAMS]
    workloads = [TimedWorkload(each.name, each, 0.0) for each in repeats]
    if arguments.requests:
        workloads += greedy_and_sampled(w1(size).head(arguments.requests))
    return workloads


def greedy_and_sampled(mixed: Workload) -> list[TimedWorkload]:
    """Many streams, at temperatures 0 and 1."""
    return [
        TimedWorkload(mixed.name, mixed, 0.0),
        TimedWorkload(f"{mixed.name}, sampled", mixed, 1.0),
    ]


def main() -> int:
    """Measure, and print a table."""
    arguments = parse_arguments()
    clock = time.process_time if arguments.cpu_time else time.monotonic
    engines = load_engines(arguments, clock)
    if arguments.demo or arguments.pair:
        workloads = workloads_of_code(arguments)
        first = workloads[0].workload
    else:
        workloads = workloads_of_ids(arguments)
        first = warm_up(arguments.vocab_size)
    keys = itertools.count()
    for engine in engines.values():
        serve(engine, first, keys)
    chosen = [each for each in workloads if arguments.only in each.title]
    compare(engines, chosen, arguments.rounds, keys, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
