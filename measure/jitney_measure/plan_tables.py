"""What ``jitney plan`` prints and draws: the memory, the cache, the sequences that run, and the
lines for model.json.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jitney.config import EngineConfig
from jitney.messages import Footprint
from rich.console import Console
from rich.table import Table

from jitney_measure.planning import STEP_SHARE, Comparison, Sizes, compare
from jitney_measure.plots import sizing_plot
from jitney_measure.sizing import expect

_out = Console(highlight=False)
_GIB = 2**30


def show(footprint: Footprint, sizes: Sizes, out: Path) -> None:
    """Print the tables and the lines for model.json, and draw the picture."""
    instances = sizes.config.instances
    memory = {
        f"weights in {footprint.dtype}": instances * footprint.weights,
        f"activations of {sizes.limits.budget:,} tokens": instances * sizes.steps,
        f"KV cache in {footprint.cache_dtype}": instances * sizes.cache,
    }
    memory["left"] = sizes.memory - sum(memory.values())
    _print_memory(memory, sizes.memory)
    _print_tensors(footprint)
    _print_cache(footprint, sizes)
    limits = sizes.limits
    comparisons: dict[int | None, Comparison] = {}
    if limits.streams is not None:
        comparisons[limits.streams] = compare(sizes, limits)
    comparisons[None] = compare(sizes, replace(limits, streams=None))
    _print_running(comparisons)
    _print_options(sizes.config, limits.budget, comparisons)
    _draw(sizes, memory, comparisons, out / "plan.png")


def _print_memory(memory: Mapping[str, int], total: int) -> None:
    rows = []
    for name, size in memory.items():
        rows.append([name, f"{size / _GIB:,.3f}", f"{size / total:.1%}"])
    _print_table(["memory", "GiB", "share"], rows)


def _print_tensors(footprint: Footprint) -> None:
    """The largest first."""
    kinds = []
    for name, (number, size) in footprint.tensors.items():
        kinds.append(_TensorKind(name, number, size))
    rows = []
    for kind in sorted(kinds, key=lambda kind: kind.size, reverse=True):
        rows.append([kind.name, f"{kind.number:,}", f"{kind.size / 2**20:,.1f}"])
    _print_table(["tensors as they are stored", "number", "MiB, about"], rows)


class _TensorKind(NamedTuple):
    """How many tensors of a kind a checkpoint has, and their bytes."""

    name: str
    number: int
    size: int


def _print_cache(footprint: Footprint, sizes: Sizes) -> None:
    num_blocks = sizes.limits.num_blocks
    block_size = sizes.config.block_size
    rows = [
        ["bytes of a token", f"{footprint.block // block_size:,}"],
        [f"blocks of {block_size}", f"{num_blocks:,}"],
        ["tokens", f"{num_blocks * block_size:,}"],
    ]
    if footprint.cache != "paged":
        rows.insert(0, ["kind", footprint.cache])
    if footprint.expansion != 1.0:
        rows.append(["K and V of latents, for adapters", f"{footprint.expansion:.1f} × latents"])
    if footprint.slot:
        rows.append(["bytes of a sequence's states", f"{footprint.slot:,}"])
        rows.append(["slots for states", f"{sizes.limits.max_num_seqs:,}"])
        if sizes.num_snapshots:
            rows.append(["slots for snapshots of them", f"{sizes.num_snapshots:,}"])
    for percent in (50, 99):
        tokens = int(np.percentile(sizes.requests.prompt + sizes.requests.output, percent))
        blocks = max(1, math.ceil((tokens - 1) / block_size))  # the last token is never stored
        name = f"sequences of {tokens:,} tokens, p{percent}, that fit"
        rows.append([name, f"{num_blocks // blocks:,}"])
    rows.append(["requests cut to max_model_len", f"{sizes.cut:.1%}"])
    _print_table(["KV cache", ""], rows)


Comparisons = Mapping[int | None, Comparison]
"""By the requests at a time. The key None, a queue that never ends, is always present."""


def _print_running(comparisons: Comparisons) -> None:
    rows = []
    for streams, case in comparisons.items():
        expected = case.expected
        observed = case.observed
        rows.append(
            [
                "a queue" if streams is None else str(streams),
                f"{expected.running:,.1f} / {case.simulated_running:,.1f}",
                f"{expected.used:.0%} / {observed.used:.0%}",
                f"{expected.preemptions:.2f} / {observed.preemptions:.2f}",
                expected.limit,
            ]
        )
    _print_table(["requests at a time", "run", "cache used", "preempted", "limit"], rows)
    seconds = sum(case.observed.seconds for case in comparisons.values())
    _out.print(
        f"Expected / simulated by the real scheduler, in {seconds:.1f} s. Preempted: times for "
        "each request.\n"
    )


def _print_options(config: EngineConfig, budget: int, comparisons: Comparisons) -> None:
    expected = comparisons[None].expected
    _out.print(
        f"Token budget {budget:,}: beside {expected.running:,.0f} decodes a step has "
        f"{expected.running * expected.work:,.0f} tokens of prompts. No prompt waits long if these "
        "are at most half of what the decodes leave. A suggested budget keeps to that as long as "
        f"its activations take at most {STEP_SHARE:.0%} of the memory that the "
        "weights leave.\n\nFor model.json:\n"
    )
    options = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_bytes": config.kv_cache_bytes,
    }
    for name, value in options.items():
        _out.print(f'  "{name}": {value},')


def _draw(sizes: Sizes, memory: Mapping[str, int], comparisons: Comparisons, picture: Path) -> None:
    """The expected curve goes to twice as many streams as run with a queue."""
    with_queue = comparisons[None].expected.running
    curve = {}
    for eighths in range(1, 17):
        streams = max(1, round(with_queue * eighths / 8))
        limits = replace(sizes.limits, streams=streams)
        curve[streams] = expect(sizes.config, sizes.requests, limits).running
    # The queue has no number of streams: its point stands at the end of the axis.
    points = []
    for streams_or_queue, case in comparisons.items():
        points.append((streams_or_queue or max(curve), case.simulated_running))
    plot = sizing_plot(memory, sizes.requests, curve, points)
    picture.write_bytes(plot.png)
    _out.print(f"\nPicture: {picture}", soft_wrap=True)


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is of names, all others of figures."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    first, *others = heads
    table.add_column(first, justify="left")
    for head in others:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    _out.print(table, "")
