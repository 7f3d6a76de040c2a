"""What ``jitney plan`` chooses: the sizes of the engine, and how many sequences then run."""

import math
from collections.abc import Set
from dataclasses import dataclass

import msgspec
import numpy as np
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.messages import Footprint

from jitney_measure.lengths import Counts, Lengths, LengthSource
from jitney_measure.simulation import Observed, simulate
from jitney_measure.sizing import EngineLimits, SteadyState, expect

_UNLIMITED = 1 << 40
_GIB = 2**30

# Three shares of the rest: the memory of an instance, less its weights.
_CACHE_SHARE = 0.9
"""What the cache gets: the engine's default on a GPU."""
_SPARE_SHARE = 1 / 64
"""What stays free."""
STEP_SHARE = 0.05
"""What the activations of a suggested token budget may take."""

_SLOT_TOKENS = 1024
"""So many tokens of blocks are left beside each slot, as in the engine."""
_SLOT_SHARE = 1 / 4
"""Slots may take this share of the cache, even if fewer tokens are left beside each."""
_SNAPSHOT_SHARE = 1 / 8
"""What slots for snapshots may take of the cache, as in the engine."""
_SEQUENCE_SNAPSHOTS = 4
"""The most of them for each sequence that may run."""
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
    num_snapshots: int = 0
    """Slots for snapshots, beside those of sequences."""


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
    slots = split.num_slots + split.num_snapshots
    cache = split.num_blocks * footprint.block + slots * footprint.slot
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
        limits=EngineLimits(
            split.num_blocks, min(batch.seqs, split.num_slots), batch.budget, streams
        ),
        requests=choice.requests,
        cut=float((totals > context).mean()),
        memory=memory,
        steps=split.steps,
        cache=cache,
        num_snapshots=split.num_snapshots,
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
    num_slots: int
    """Sequences that can run at once by what they hold beside blocks: as many as may run, where
    they hold nothing."""
    num_snapshots: int


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
            left_by_steps = self.rest * (1 - _SPARE_SHARE) - steps
            share = self.rest * (self.config.kv_cache_fraction or _CACHE_SHARE)
            cache = int(min(left_by_steps, share))
        # The cache must hold the longest request, and fit beside the weights and a step.
        num_snapshots = self._num_snapshots(batch, cache)
        num_slots = self._num_slots(batch, cache - num_snapshots * self.footprint.slot)
        slots = (num_slots + num_snapshots) * self.footprint.slot
        most_blocks = math.ceil(self.context / self.config.block_size)
        longest = most_blocks * self.footprint.block + slots
        if longest <= cache <= self.rest - steps:
            num_blocks = batch.seqs * most_blocks  # where blocks cost nothing
            if self.footprint.block:
                num_blocks = (cache - slots) // self.footprint.block
            return _Split(batch, steps, num_blocks, num_slots, num_snapshots)
        smaller = self._halved(batch)
        if smaller == batch:
            raise self._too_small(steps, max(longest, cache))
        return self.split_memory(smaller)

    def _num_snapshots(self, batch: _Batch, cache: int) -> int:
        """The slots for snapshots of a cache of so many bytes. As in the engine, the longest
        request has room beside them."""
        footprint = self.footprint
        if not footprint.snapshots:
            return 0
        most_blocks = math.ceil(self.context / self.config.block_size)
        beside_one = max(0, cache - footprint.slot - most_blocks * footprint.block)
        share = int(cache * _SNAPSHOT_SHARE)
        most = _SEQUENCE_SNAPSHOTS * batch.seqs
        return min(most, min(share, beside_one) // footprint.slot)

    def _num_slots(self, batch: _Batch, cache: int) -> int:
        """The slots of a cache of so many bytes. As in the engine, each has blocks beside it."""
        if self.footprint.slot == 0:
            return batch.seqs
        blocks = math.ceil(min(_SLOT_TOKENS, self.context) / self.config.block_size)
        sequence = self.footprint.slot + blocks * self.footprint.block
        most = max(cache // sequence, int(cache * _SLOT_SHARE) // self.footprint.slot)
        return max(1, min(batch.seqs, most))

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
            eights = math.ceil(_SEQS_MARGIN * expected.in_cache / 8)
            seqs = min(8 * eights, _MAX_SEQS)
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
        most = max(1.0, self.rest * STEP_SHARE / self.footprint.step_token)
        return min(enough, 2 ** math.floor(math.log2(most)))


# --------------------------------------------------------------------------- what comes of it


@dataclass(frozen=True)
class Comparison:
    """What is expected, beside what the simulation does."""

    expected: SteadyState
    observed: Observed
    simulated_running: float
    """Sequences that run by the simulation, with all limits."""


def compare(sizes: Sizes, limits: EngineLimits) -> Comparison:
    """Compute what is expected within the limits, and simulate it.

    There are too few requests to simulate a large batch. So the simulation has only a share of all
    limits, and what it finds is scaled up: by as much as more sequences are expected within all
    limits than within that share of them.
    """
    config = sizes.config
    requests = sizes.requests
    expected = expect(config, requests, limits)
    longest = int((requests.prompt + requests.output).max())
    # The largest share with enough requests for each sequence.
    share_for_sequences = len(requests.prompt) / _REQUESTS_PER_SEQUENCE / expected.running
    # The smallest share at which two of the longest requests fit.
    share_for_longest = 2 * longest / config.block_size / limits.num_blocks
    # If both cannot be had, the longest requests must fit all the same.
    share = max(share_for_sequences, share_for_longest)
    simulated = limits.scaled(share) if share < 1 else limits
    expected_in_small = expect(config, requests, simulated)
    observed = simulate(config, requests, simulated, round(expected_in_small.running))
    scale = expected.running / expected_in_small.running
    return Comparison(expected, observed, observed.running * scale)
