"""What ``jitney plan`` chooses and shows."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.messages import Footprint
from rich.console import Console
from rich.table import Table

from jitney_measure.lengths import Lengths, Source
from jitney_measure.plots import sizing_plot
from jitney_measure.simulation import Observed, simulate
from jitney_measure.sizing import EngineLimits, Expected, expect

_out = Console(highlight=False)
_SHARE = 0.9
"""The cache's share of the memory that the weights leave: the engine's default on a GPU."""
_SPARE = 1 / 64
"""The share of that memory that stays free."""
_STEP_SHARE = 0.05
"""The share of it that the activations of a suggested token budget may take."""
_TOKENS = 600_000
"""About the output tokens of all requests of a simulation."""
_LEAST = 400
_MOST = 4000
"""Bounds on the number of these requests."""
_ROUNDS = 10
"""Requests of a simulation for each sequence that runs at once, at least."""


@dataclass(frozen=True)
class Sizes:
    """What was chosen for the options that were not given, and where the memory goes (bytes)."""

    config: EngineConfig
    limits: EngineLimits
    requests: Lengths
    """Within ``max_model_len``."""
    cut: float
    """Share of the requests that were longer."""
    memory: int
    steps: int
    cache: int


def sample(prompt: Source, output: Source) -> Lengths:
    """So many requests that a simulation takes seconds."""
    mean = float(Lengths.drawn(prompt, output, 1000).output.mean())
    return Lengths.drawn(prompt, output, int(min(max(_TOKENS / mean, _LEAST), _MOST)))


def choose(
    config: EngineConfig, given: Set[str], footprint: Footprint, requests: Lengths, memory: int,
    streams: int | None,
) -> Sizes:  # fmt: skip
    """Choose the options that are not ``given``. Raises InvalidArgumentError for a ``memory`` that
    does not hold the longest request."""
    totals = requests.prompt + requests.output
    context = footprint.max_model_len
    if "max_model_len" not in given:
        context = min(context, 256 * math.ceil(np.quantile(totals, 0.999) / 256))
    kept = requests.cut(context)
    left = memory - footprint.weights
    seqs = config.max_num_seqs
    budget = config.max_num_batched_tokens or 512
    for _ in range(4):  # more sequences take more memory of a step, which leaves less to the cache
        steps = budget * footprint.step_token + min(budget, seqs) * footprint.step_row
        most = min(left * (1 - _SPARE) - steps, left * (config.kv_cache_fraction or _SHARE))
        cache = config.kv_cache_bytes or int(most) // config.instances
        # The cache must hold the longest request, and fit beside the weights and a step.
        needed = max(math.ceil(context / config.block_size) * footprint.block, cache)
        if needed > min(cache, left - steps):
            sizes = (each / 2**30 for each in (footprint.weights, steps, needed))
            parts = "weights of {:.2f} GiB, {:.2f} for a step, a cache of {:.2f}".format(*sizes)
            raise InvalidArgumentError.of("memory", memory, f"enough for {parts}, and a reserve")
        blocks = cache // footprint.block
        free = expect(config, kept, EngineLimits(blocks, 1 << 40, 1 << 40, None))
        if "max_num_seqs" not in given:
            seqs = min(8 * math.ceil(1.1 * free.in_cache / 8), 65536)
        if config.max_num_batched_tokens is None:
            wanted = min(seqs, free.in_cache) * (1 + 2 * free.work)
            most = max(1.0, left * _STEP_SHARE / footprint.step_token)
            budget = 1 << int(min(max(math.ceil(math.log2(wanted)), 8), math.log2(most)))
        seqs = min(seqs, budget)
    config = msgspec.structs.replace(
        config, max_model_len=context, max_num_seqs=seqs, max_num_batched_tokens=budget,
        kv_cache_bytes=blocks * footprint.block, prefix_caching=False, speculation=None,
    )  # fmt: skip
    limits = EngineLimits(blocks, seqs, budget, streams)
    cut = float((totals > context).mean())
    return Sizes(config, limits, kept, cut, memory, steps, blocks * footprint.block)


def compare(sizes: Sizes, limits: EngineLimits) -> tuple[Expected, Observed, float]:
    """What is expected, what the simulation does, and the sequences that run by it.

    If so many run that a simulation would take long, it has smaller limits. Its sequences are then
    multiplied by the ratio of those that are expected with all limits and with the smaller ones.
    """
    config = sizes.config
    requests = sizes.requests
    expected = expect(config, requests, limits)
    longest = int((requests.prompt + requests.output).max())
    share = max(
        len(requests.prompt) / _ROUNDS / expected.running,
        2 * longest / config.block_size / limits.num_blocks,
    )
    scaled = limits.scaled(share) if share < 1 else limits
    there = expect(config, requests, scaled)
    observed = simulate(config, requests, scaled, round(there.running))
    return expected, observed, observed.running * expected.running / there.running


def show(footprint: Footprint, sizes: Sizes, out: Path) -> None:
    """Print the tables and the lines for model.json, and draw the picture."""
    limits = sizes.limits
    block = sizes.config.block_size
    memory = {
        f"weights in {footprint.dtype}": footprint.weights,
        f"activations of {limits.budget:,} tokens": sizes.steps,
        f"KV cache in {footprint.cache_dtype}": sizes.cache,
    }
    memory["left"] = sizes.memory - sum(memory.values())
    _print(
        ("memory", "GiB", "share"),
        [(k, f"{v / 2**30:,.3f}", f"{v / sizes.memory:.1%}") for k, v in memory.items()],
    )
    stored = sorted(footprint.tensors.items(), key=lambda item: -item[1][1])
    _print(
        ("tensors as they are stored", "number", "MiB, about"),
        [(name, f"{n:,}", f"{size / 2**20:,.1f}") for name, (n, size) in stored],
    )
    facts = {
        "bytes of a token": f"{footprint.block // block:,}",
        f"blocks of {block}": f"{limits.num_blocks:,}",
        "tokens": f"{limits.num_blocks * block:,}",
    }
    for percent in (50, 99):
        tokens = int(np.percentile(sizes.requests.prompt + sizes.requests.output, percent))
        fit = limits.num_blocks // max(1, math.ceil((tokens - 1) / block))
        facts[f"sequences of {tokens:,} tokens, p{percent}, that fit"] = f"{fit:,}"
    facts["requests cut to max_model_len"] = f"{sizes.cut:.1%}"
    _print(("KV cache", ""), list(facts.items()))
    _show_running(sizes, memory, out)


def _show_running(sizes: Sizes, memory: Mapping[str, int], out: Path) -> None:
    config = sizes.config
    limits = sizes.limits
    streams = dict.fromkeys((limits.streams, None))
    cases = {each: compare(sizes, replace(limits, streams=each)) for each in streams}
    _print(
        ("requests at a time", "run", "cache used", "preempted", "limit"),
        [
            (
                f"{each or 'a queue'}", f"{one.running:,.1f} / {running:,.1f}",
                f"{one.used:.0%} / {two.used:.0%}",
                f"{one.preemptions:.2f} / {two.preemptions:.2f}", one.limit,
            )
            for each, (one, two, running) in cases.items()
        ],
    )  # fmt: skip
    seconds = sum(two.seconds for _, two, _ in cases.values())
    most = cases[None][0]
    _out.print(
        f"Expected / simulated by the real scheduler, in {seconds:.1f} s. Preempted: times for "
        "each request.\n\n"
        f"Token budget {limits.budget:,}: beside {most.running:,.0f} decodes a step has "
        f"{most.running * most.work:,.0f} tokens of prompts. Where these are at most half of what "
        "the decodes leave, no prompt waits long; and its activations are to take at most "
        f"{_STEP_SHARE:.0%} of what the weights leave.\n\nFor model.json:\n"
    )
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
        _out.print(f'  "{name}": {getattr(config, name)},')
    ladder = [max(1, round(most.running * share / 8)) for share in range(1, 17)]
    curve = {n: expect(config, sizes.requests, replace(limits, streams=n)).running for n in ladder}
    points = [(each or ladder[-1], running) for each, (_, _, running) in cases.items()]
    plot = sizing_plot(memory, sizes.requests, curve, points)
    (out / "plan.png").write_bytes(plot.png)
    _out.print(f"\nPicture: {out / 'plan.png'}", soft_wrap=True)


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    _out.print(table, "")
