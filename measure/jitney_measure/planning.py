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

from jitney_measure.lengths import Counts, Lengths, LengthSource
from jitney_measure.plots import sizing_plot
from jitney_measure.simulation import Observed, simulate
from jitney_measure.sizing import EngineLimits, Expected, expect

_out = Console(highlight=False)
_UNLIMITED = 1 << 40
_GIB = 2**30

# Three shares of the rest: the memory of an instance, less its weights.
_CACHE_SHARE = 0.9
"""What the cache gets: the engine's default on a GPU."""
_SPARE_SHARE = 1 / 64
"""What stays free."""
_STEP_SHARE = 0.05
"""What the activations of a suggested token budget may take."""

_FIRST_BUDGET = 512
"""The token budget with which the choice begins."""
_MIN_BUDGET = 256
"""The smallest token budget that is suggested, if its activations fit."""
_MAX_SEQS = 65536
_SEQS_MARGIN = 1.1
"""The suggested ``max_num_seqs`` is so many times the number of sequences that the cache holds on
average. At times the sequences are young and more of them fit."""
_CHOICE_ROUNDS = 4

_SIMULATED_OUTPUT_TOKENS = 600_000
"""About the output tokens of all requests of a simulation: it takes seconds."""
_MIN_REQUESTS = 400
_MAX_REQUESTS = 4000
_REQUESTS_PER_SEQUENCE = 10
"""The least requests of a simulation for each sequence that runs at once."""


@dataclass(frozen=True)
class Sizes:
    """What was chosen for the options that were not given, and where the memory goes (bytes).
    ``steps`` and ``cache`` are those of one instance."""

    config: EngineConfig
    limits: EngineLimits
    requests: Lengths
    """Within ``max_model_len``."""
    cut: float
    """Share of the requests that were longer."""
    memory: int
    steps: int
    """The activations of a step."""
    cache: int


def sample(prompt: LengthSource, output: LengthSource) -> Lengths:
    """As many requests as a simulation serves in seconds."""
    mean = float(Lengths.of_quantiles(prompt, output, 1000).output.mean())
    count = min(max(_SIMULATED_OUTPUT_TOKENS / mean, _MIN_REQUESTS), _MAX_REQUESTS)
    return Lengths.of_quantiles(prompt, output, int(count))


# --------------------------------------------------------------------------- the choice


def choose_sizes(
    config: EngineConfig,
    given: Set[str],
    *,
    footprint: Footprint,
    requests: Lengths,
    memory: int,
    streams: int | None,
) -> Sizes:
    """Choose the options that are not ``given``. Raises InvalidArgumentError for a ``memory`` that
    does not hold the longest request."""
    totals = requests.prompt + requests.output
    context = footprint.max_model_len
    if "max_model_len" not in given:
        context = min(context, _suggested_context(totals))
    choice = _Choice(config, given, footprint, requests.cut(context), memory, context)
    first = _Batch(config.max_num_seqs, config.max_num_batched_tokens or _FIRST_BUDGET)
    split = choice.split_memory(first)
    # More sequences take more memory of a step, which leaves less to the cache, in which fewer
    # sequences fit. After a few rounds the batch stays the same.
    for _ in range(_CHOICE_ROUNDS):
        split = choice.split_memory(choice.suggest_batch(split))
    batch = split.batch
    cache = split.num_blocks * footprint.block
    return Sizes(
        config=msgspec.structs.replace(
            config,
            max_model_len=context,
            max_num_seqs=batch.seqs,
            max_num_batched_tokens=batch.budget,
            kv_cache_bytes=cache,
            # For the simulation only: these two are not printed.
            prefix_caching=False,
            speculation=None,
        ),
        limits=EngineLimits(split.num_blocks, batch.seqs, batch.budget, streams),
        requests=choice.requests,
        cut=float((totals > context).mean()),
        memory=memory,
        steps=split.steps,
        cache=cache,
    )


def _suggested_context(totals: Counts) -> int:
    """What 99.9 % of the requests need, as a multiple of 256."""
    return 256 * math.ceil(np.quantile(totals, 0.999) / 256)


@dataclass(frozen=True)
class _Batch:
    """Two options: ``max_num_seqs`` and the token budget."""

    seqs: int
    budget: int


@dataclass(frozen=True)
class _Split:
    """How one instance uses its memory beside the weights."""

    batch: _Batch
    """The one for which the memory suffices."""
    steps: int
    """Bytes for the activations of a step."""
    num_blocks: int


@dataclass(frozen=True)
class _Choice:
    """What a choice is made from."""

    config: EngineConfig
    given: Set[str]
    footprint: Footprint
    requests: Lengths
    """Within ``context``."""
    memory: int
    context: int

    @property
    def rest(self) -> int:
        """Bytes that the weights leave to each instance."""
        return self.memory // self.config.instances - self.footprint.weights

    def split_memory(self, batch: _Batch) -> _Split:
        """The split for the batch or, if the memory does not suffice for that, for half of it, a
        quarter, and so on. Raises InvalidArgumentError if it does not suffice for the smallest."""
        logits_rows = min(batch.budget, batch.seqs)
        steps = batch.budget * self.footprint.step_token + logits_rows * self.footprint.step_row
        cache = self.config.kv_cache_bytes
        if cache is None:
            beside_steps = self.rest * (1 - _SPARE_SHARE) - steps
            share = self.rest * (self.config.kv_cache_fraction or _CACHE_SHARE)
            cache = int(min(beside_steps, share))
        # The cache must hold the longest request, and fit beside the weights and a step.
        longest = math.ceil(self.context / self.config.block_size) * self.footprint.block
        if longest <= cache <= self.rest - steps:
            return _Split(batch, steps, cache // self.footprint.block)
        smaller = self._halved(batch)
        if smaller == batch:
            raise self._too_small(steps, max(longest, cache))
        return self.split_memory(smaller)

    def _halved(self, batch: _Batch) -> _Batch:
        """Half of the options that are not given, from 1; the same batch if there is no smaller."""
        seqs = batch.seqs
        budget = batch.budget
        if "max_num_seqs" not in self.given:
            seqs = max(1, seqs // 2)
        # The engine takes no budget below max_num_seqs.
        if self.config.max_num_batched_tokens is None and budget > seqs:
            budget = max(seqs, budget // 2)
        return _Batch(seqs, budget)

    def _too_small(self, steps: int, cache: int) -> InvalidArgumentError:
        instances = self.config.instances
        of_each = "" if instances == 1 else f" for each of {instances} instances"
        return InvalidArgumentError.of(
            "memory",
            self.memory,
            f"enough for weights of {self.footprint.weights / _GIB:.2f} GiB, "
            f"{steps / _GIB:.2f} for a step, a cache of {cache / _GIB:.2f}, and a reserve"
            f"{of_each}",
        )

    def suggest_batch(self, split: _Split) -> _Batch:
        """The batch for the cache of ``split``. Options that are given stay."""
        cache_alone = EngineLimits(
            num_blocks=split.num_blocks, max_num_seqs=_UNLIMITED, budget=_UNLIMITED, streams=None
        )
        expected = expect(self.config, self.requests, cache_alone)
        seqs = split.batch.seqs
        budget = split.batch.budget
        if "max_num_seqs" not in self.given:
            seqs = min(8 * math.ceil(_SEQS_MARGIN * expected.in_cache / 8), _MAX_SEQS)
        if self.config.max_num_batched_tokens is None:
            budget = self._suggested_budget(min(seqs, expected.in_cache), expected.work)
            if "max_num_seqs" in self.given:
                budget = max(budget, seqs)  # the engine takes no budget below a given max_num_seqs
        return _Batch(min(seqs, budget), budget)

    def _suggested_budget(self, running: float, work: float) -> int:
        """A power of two with budget - decode_tokens >= 2 * prompt_tokens: the prompts take at most
        half of what the decodes leave, so no prompt waits long. Less if its activations would take
        more than their share."""
        decode_tokens = running  # one for each sequence
        prompt_tokens = running * work
        least = decode_tokens + 2 * prompt_tokens
        enough = max(_MIN_BUDGET, 2 ** math.ceil(math.log2(least)))
        most = max(1.0, self.rest * _STEP_SHARE / self.footprint.step_token)
        return min(enough, 2 ** math.floor(math.log2(most)))


# --------------------------------------------------------------------------- what comes of it


@dataclass(frozen=True)
class Comparison:
    """What is expected, beside what the simulation does."""

    expected: Expected
    observed: Observed
    simulated_running: float
    """Sequences that run by the simulation, with all limits."""


def compare(sizes: Sizes, limits: EngineLimits) -> Comparison:
    """A large batch is simulated in small: limits times ``share``, if that is below 1. ``share`` is
    the larger of two: the one at which the requests are just enough, and the one at which two of
    the longest just fit. The result is scaled up by expected(all limits) / expected(small
    limits)."""
    config = sizes.config
    requests = sizes.requests
    expected = expect(config, requests, limits)
    longest = int((requests.prompt + requests.output).max())
    # The largest share with enough requests for each sequence.
    share_for_sequences = len(requests.prompt) / _REQUESTS_PER_SEQUENCE / expected.running
    # The smallest share at which two of the longest requests fit.
    share_for_longest = 2 * longest / config.block_size / limits.num_blocks
    share = max(share_for_sequences, share_for_longest)
    simulated = limits.scaled(share) if share < 1 else limits
    expected_in_small = expect(config, requests, simulated)
    observed = simulate(config, requests, simulated, round(expected_in_small.running))
    scale = expected.running / expected_in_small.running
    return Comparison(expected, observed, observed.running * scale)


# --------------------------------------------------------------------------- the terminal


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
    # With the streams that were asked for, if any, and with a queue.
    cases = [None] if limits.streams is None else [limits.streams, None]
    comparisons = {each: compare(sizes, replace(limits, streams=each)) for each in cases}
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
    rows = []
    for name, (number, size) in sorted(footprint.tensors.items(), key=_negative_size):
        rows.append([name, f"{number:,}", f"{size / 2**20:,.1f}"])
    _print_table(["tensors as they are stored", "number", "MiB, about"], rows)


def _negative_size(tensor: tuple[str, list[int]]) -> int:
    _, (_, size) = tensor
    return -size


def _print_cache(footprint: Footprint, sizes: Sizes) -> None:
    num_blocks = sizes.limits.num_blocks
    block_size = sizes.config.block_size
    rows = [
        ["bytes of a token", f"{footprint.block // block_size:,}"],
        [f"blocks of {block_size}", f"{num_blocks:,}"],
        ["tokens", f"{num_blocks * block_size:,}"],
    ]
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
        f"its activations take at most {_STEP_SHARE:.0%} of the memory that the "
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
