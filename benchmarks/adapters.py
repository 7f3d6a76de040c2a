"""What adapters cost: W1 with none, with one and with 32 in turn, and 256 that come and go.

    python -m benchmarks.adapters                       # on q_proj and v_proj, PEFT's default
    python -m benchmarks.adapters --targets all

In one process, without a server. Two engines have the same model: one without option ``adapters``,
against which the ratios are, and one with it. Which way goes first changes from turn to turn. Then
requests draw their adapters from 256 of which ``--resident`` stay in memory: in rotation, which no
least-recently-used set can hold, and by Zipf's law, whose most frequent ones it can.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jitney.adapters.peft_files import CONFIG, WEIGHTS
from jitney.engine.assemble import adapter_pool, load_runner
from jitney.engine.engine import Engine
from jitney.messages import Finished, Submit
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from safetensors.torch import save_file

from benchmarks.engines.jitney import serve
from benchmarks.served import add_engine_options
from benchmarks.workloads import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    VOCAB_SIZE,
    save_m100,
    w1,
    warm_up,
)

RANK = 16
TARGETS = {
    "default": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
MANY = 256


def main() -> None:
    """Run the turns and print the tables."""
    arguments = _parse()
    root = arguments.work_dir / f"adapters-{arguments.targets}"
    engine = _engine(arguments, root)
    _save_adapters(root, engine.runner, TARGETS[arguments.targets])
    keys = itertools.count()
    if arguments.turns:
        _compare(arguments, _engine(arguments, None), engine, keys)
    if arguments.resident:
        _come_and_go(arguments, root, keys)


def _compare(
    arguments: argparse.Namespace, plain: Engine, engine: Engine, keys: Iterator[int]
) -> None:
    """W1 each way, in turn."""
    workload = w1() if arguments.requests is None else w1().head(arguments.requests)
    names = [f"a{number}" for number in range(MAX_NUM_SEQS)]
    ways: dict[str, tuple[Engine, Sequence[str | None]]] = {
        "without the option": (plain, [None]),
        "unused": (engine, [None]),
        "one for all": (engine, names[:1]),
        f"{len(names)} in turn": (engine, names),
    }
    for used, adapters in ways.values():
        serve(used, warm_up(), keys, adapters=adapters)
    serve(engine, w1().head(len(names)), keys, adapters=names)  # all are in memory now
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.turns):
        first = turn % len(ways)
        for way in [*ways, *ways][first : first + len(ways)]:
            used, adapters = ways[way]
            began = time.process_time()
            outcome = serve(used, workload, keys, adapters=adapters)
            spent = time.process_time() - began if arguments.cpu_time else outcome.seconds
            rates[way].append(outcome.output_tokens / spent)
            print(f"{way}: {rates[way][-1]:.0f}", file=sys.stderr)
    print(f"| rank {RANK}, {arguments.targets} targets | tokens a second | ratio, median (range) |")
    print("|---|---|---|")
    for way, found in rates.items():
        pairs = zip(found, rates["without the option"], strict=True)
        ratios = [one / other for one, other in pairs]
        middle = statistics.median(ratios)
        low = min(ratios)
        high = max(ratios)
        print(f"| {way} | {statistics.median(found):.0f} | {middle:.3f} ({low:.2f}–{high:.2f}) |")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4, help="of W1; 0: none")
    parser.add_argument("--targets", choices=TARGETS, default="default")
    parser.add_argument("--resident", type=int, default=64, help="0: leave the second part out")
    parser.add_argument(
        "--cpu-time", action="store_true", help="tokens a second of CPU time, on a busy machine"
    )
    parser.add_argument("--requests", type=int, help="only the first so many of W1, for a look")
    add_engine_options(parser)
    return parser.parse_args()


def _engine(
    arguments: argparse.Namespace, root: Path | None, resident: int = MAX_NUM_SEQS
) -> Engine:
    options: dict[str, object] = {
        "model": str(save_m100(arguments.work_dir / "m100").resolve()),
        "dtype": arguments.dtype,
        "threads": arguments.threads or len(os.sched_getaffinity(0)),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_bytes": 1 << 30,
        "prefix_caching": False,  # or every run but the first would find its prompts
    }
    if root is not None:
        options |= {"adapters": str(root.resolve()), "max_adapters": resident}
        options |= {"max_adapter_rank": RANK}
    config = make_config(options)
    runner = load_runner(config)
    return Engine(config, runner, adapters=adapter_pool(config, runner))


def _save_adapters(root: Path, runner: Any, targets: tuple[str, ...]) -> None:
    """Write MANY random adapters in PEFT's format, if they are not there."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    generator = torch.Generator().manual_seed(0)
    for number in range(MANY):
        folder = root / f"a{number}"
        if (folder / CONFIG).exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for path, (inputs, outputs) in runner.sites.items():
            if path.endswith(targets):
                for kind, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    value = 0.02 * torch.randn(shape, generator=generator)
                    tensors[f"base_model.model.{path}.lora_{kind}.weight"] = value.bfloat16()
        save_file(tensors, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _come_and_go(arguments: argparse.Namespace, root: Path, keys: Iterator[int]) -> None:
    """More adapters than stay in memory, by MAX_NUM_SEQS clients that ask again when answered."""
    engine = _engine(arguments, root, arguments.resident)
    count = 4 * MANY
    ranks = np.random.RandomState(3).zipf(1.3, 64 * count) - 1
    orders = {
        "in rotation": [number % MANY for number in range(count)],
        "by Zipf's law, 1.3": ranks[ranks < MANY][:count].tolist(),
    }
    print(f"\n| {MANY} adapters, {arguments.resident} in memory | hits | wait of the others, ms |")
    print("|---|---|---|")
    random = np.random.RandomState(2)
    for name, order in orders.items():
        adapters = iter(order)
        hits = 0
        waited = 0.0
        left = count
        running = 0
        while left:
            while running < MAX_NUM_SEQS and (number := next(adapters, None)) is not None:
                params = SamplingParams(
                    temperature=0.0, max_tokens=16, ignore_eos=True, seed=0, lora_name=f"a{number}"
                )
                prompt = random.randint(10, VOCAB_SIZE - 10, 32).tolist()
                engine.send(
                    Submit(key=next(keys), prompt=prompt, params=params, arrival=time.monotonic())
                )
                running += 1
            report = engine.step()
            if report is not None:
                ended = sum(isinstance(event, Finished) for event in report.events)
                running -= ended
                left -= ended
                hits += report.stats.adapter_hits
                waited += report.stats.adapter_wait_seconds
        mean = 1e3 * waited / max(1, count - hits)
        print(f"| {name} | {hits / count:.0%} | {mean:.1f} |", flush=True)


if __name__ == "__main__":
    main()
