"""How many sequences of given lengths run at once in steady state, by arithmetic.

Every running sequence makes one token a step. So at a random step the chance to find a certain
request running is proportional to its output, and each of its output tokens is as likely as any
other to be the one it makes. Therefore

    blocks in use = sequences that run * mean blocks of a sequence

where the mean is taken over all steps of all requests. That holds with preemption, too: a preempted
sequence keeps its tokens.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from jitney.config import EngineConfig

from jitney_measure.lengths import Counts, Lengths

_GROWN = 0.1
"""About the share of its output that a sequence has made when it is preempted."""
_ROUNDS = 4
"""Rounds of the loop that balances preemptions and running sequences."""
_NEARLY_ALL = 0.9
"""If a larger share of the streams' requests runs, the streams are the limit: there are no more
requests to run."""
_NORMAL = NormalDist()

Limit = Literal["the cache", "the token budget", "max_num_seqs", "streams"]


@dataclass(frozen=True)
class EngineLimits:
    """What bounds the batch."""

    num_blocks: int
    max_num_seqs: int
    budget: int
    """Tokens of a step, at least ``max_num_seqs``."""
    streams: int | None
    """Requests at a time, each followed by the next; None: a queue that never ends."""

    def scaled(self, share: float) -> "EngineLimits":
        """All limits times ``share``: a smaller batch of the same kind, with coarser numbers."""
        seqs = _scaled(self.max_num_seqs, share)
        return EngineLimits(
            num_blocks=_scaled(self.num_blocks, share),
            max_num_seqs=seqs,
            budget=max(seqs, _scaled(self.budget, share)),
            streams=None if self.streams is None else _scaled(self.streams, share),
        )


def _scaled(limit: int, share: float) -> int:
    return max(1, round(share * limit))


@dataclass(frozen=True)
class SteadyState:
    """Means over the steps of the steady state."""

    running: float
    """Sequences."""
    used: float
    """Share of the blocks that they hold."""
    preemptions: float
    """For each request, to a factor of about two."""
    limit: Limit
    """What bounds the running ones."""
    in_cache: float
    """Sequences if the cache were the only limit."""
    work: float
    """Prompt tokens to compute for each token of output."""


def expect(config: EngineConfig, lengths: Lengths, limits: EngineLimits) -> SteadyState:
    """The steady state of ``lengths``, none of which exceeds the context, with the block size,
    ``eviction`` and ``watermark`` of ``config``, and nothing found in the prefix cache."""
    mean_prompt = float(lengths.prompt.mean())
    mean_output = float(lengths.output.mean())
    preempts = config.eviction == "preempt"
    watermark = math.ceil(config.watermark * limits.num_blocks) if preempts else 0
    blocks = _blocks(lengths, config.block_size, preempts=preempts)
    in_cache = _sequences_in_cache(blocks, limits.num_blocks, watermark)
    # N sequences need blocks independently of each other, so the deviation of their blocks is
    # √(N * variance). Divided by the mean blocks of a sequence, it is the deviation of the number
    # of sequences that fit.
    deviation = math.sqrt(blocks.variance * in_cache) / blocks.allocated
    most_preemptions = 0.0
    if preempts:
        most_preemptions = _preemptions_in_full_cache(
            growth=mean_output / config.block_size,
            prompt=float(blocks.to_admit.mean()),
            watermark=watermark,
        )
    variation = float(lengths.prompt.var()) / mean_prompt**2
    # Preemptions make work. With more work fewer sequences run, which preempts less. ``damped`` is
    # the value that a round starts from, ``preemptions`` the one that follows from it. Four rounds,
    # each half way from the one to the other, come near the balance.
    damped = 0.0
    for _ in range(_ROUNDS):
        # After a preemption the prompt and the output so far are computed again.
        recomputed = damped * (mean_prompt + _GROWN * mean_output)
        work = (mean_prompt + recomputed) / mean_output
        beside_cache = _without_cache(limits, work, mean_output, variation)
        running, chance_cache_limits = _mean_of_smaller(beside_cache.running, in_cache, deviation)
        preemptions = most_preemptions * chance_cache_limits
        damped = (damped + preemptions) / 2
    return SteadyState(
        running=running,
        used=running * blocks.filled / limits.num_blocks,
        preemptions=preemptions,
        limit=beside_cache.limit if beside_cache.running < in_cache else "the cache",
        in_cache=in_cache,
        work=work,
    )


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a sequence. Means are over all steps of all requests."""

    to_admit: Counts
    """Of each request: blocks that must be free before it runs."""
    filled: float
    """Mean of the blocks with tokens."""
    allocated: float
    """Mean of the blocks that no other sequence can have: with preemption those with tokens,
    without it all that the sequence will need."""
    variance: float
    """Of the allocated blocks."""


def _blocks(lengths: Lengths, block_size: int, *, preempts: bool) -> _Blocks:
    steps = lengths.output.sum()
    sums = _sum_blocks(lengths, block_size)
    filled = float(sums.blocks.sum() / steps)
    if preempts:
        to_admit = -(-lengths.prompt // block_size)
        allocated = filled
        mean_square = float(sums.squares.sum() / steps)
    else:
        # The whole sequence is reserved when it is admitted, and kept for each of its steps.
        to_admit = -(-(lengths.prompt + lengths.output - 1) // block_size)
        allocated = float((to_admit * lengths.output).sum() / steps)
        mean_square = float((to_admit**2 * lengths.output).sum() / steps)
    variance = max(0.0, mean_square - allocated**2)
    return _Blocks(to_admit=to_admit, filled=filled, allocated=allocated, variance=variance)


@dataclass(frozen=True)
class _BlockSums:
    """Of each request, summed up over its steps."""

    blocks: Counts
    """The blocks with tokens."""
    squares: Counts
    """The squares of their numbers."""


def _sum_blocks(lengths: Lengths, block_size: int) -> _BlockSums:
    """A step has the prompt and what was made before it: from ``prompt`` to ``prompt + output - 1``
    tokens. With S for :func:`_sums_up_to`, the sum over these numbers is
    S(prompt + output - 1) - S(prompt - 1)."""
    to_last = _sums_up_to(lengths.prompt + lengths.output - 1, block_size)
    before_first = _sums_up_to(lengths.prompt - 1, block_size)
    return _BlockSums(
        blocks=to_last.blocks - before_first.blocks,
        squares=to_last.squares - before_first.squares,
    )


def _sums_up_to(tokens: Counts, block_size: int) -> _BlockSums:
    """The sums of ceil(i / block_size) and of its square, for i from 1 to ``tokens``."""
    full, rest = np.divmod(tokens, block_size)
    # Full blocks in closed form: 1 + 2 + … + n, and 1 + 4 + … + n², each block_size times. In the
    # last block there are `rest` tokens.
    in_full = block_size * full * (full + 1) // 2
    squares_in_full = block_size * full * (full + 1) * (2 * full + 1) // 6
    return _BlockSums(
        blocks=in_full + rest * (full + 1),
        squares=squares_in_full + rest * (full + 1) ** 2,
    )


def _sequences_in_cache(blocks: _Blocks, num_blocks: int, watermark: int) -> float:
    """How many sequences a full cache holds."""
    # Some blocks are free because the first request of the queue waits for more. It is admitted
    # once `needed` blocks are free. Until then the free blocks grow from 0 to `needed`: needed / 2
    # on average. A request that needs more blocks waits longer, in proportion. So the mean over
    # time is the mean of needed / 2 with the weights needed:
    #     sum(needed * needed / 2) / sum(needed)
    needed = blocks.to_admit
    mean_free = float((needed**2).sum() / needed.sum()) / 2
    return max(1.0, (num_blocks - watermark - mean_free) / blocks.allocated)


def _preemptions_in_full_cache(*, growth: float, prompt: float, watermark: int) -> float:
    """How often a request is preempted if the cache is always full. An estimate, which the tests
    hold against the scheduler's own count: they allow a factor of two.

    ``growth``: blocks that a request adds to those of its ``prompt`` on average.
    """
    # No block is free in a full cache, so each block that a request wants comes from a preemption.
    # Preemptions of a request = blocks that it wants / blocks that one preemption returns.
    returned = prompt + _GROWN * growth
    without_watermark = growth / returned
    # With a watermark, its blocks are used first, and only if they run out is a request preempted.
    # The number of blocks wanted before a sequence ends is assumed to be exponential with the mean
    # ``growth``. So this is the chance that it exceeds the watermark.
    runs_out = math.exp(-watermark / growth)
    return runs_out * without_watermark


@dataclass(frozen=True)
class _Bounded:
    """How many sequences run, and what bounds them."""

    running: float
    limit: Limit


def _without_cache(limits: EngineLimits, work: float, output: float, variation: float) -> _Bounded:
    """The sequences that run if the cache is no limit.

    A request's prompt is computed in what the decodes leave of the budget, one prompt after the
    other. Then the request makes ``output`` tokens. That is a closed network with a queue and a
    delay, and this its mean value analysis (Reiser and Lavenberg, 1980). ``variation``:
    (deviation / mean)² of the lengths of prompts.
    """
    # With d decodes a step has d tokens of output and d * work of prompts: d * (1 + work) = budget.
    # One more sequence is in prefill.
    most = limits.budget / (1 + work) + 1
    # With more streams than may run, requests always wait, as in a queue that never ends.
    if limits.streams is None or limits.streams > limits.max_num_seqs:
        if most < limits.max_num_seqs:
            return _Bounded(most, "the token budget")
        return _Bounded(float(limits.max_num_seqs), "max_num_seqs")
    waiting = _waiting_for_prefill(limits.budget, limits.streams, work, output, variation)
    running = min(most, limits.streams - waiting)
    if running > _NEARLY_ALL * limits.streams:
        return _Bounded(running, "streams")
    return _Bounded(running, "the token budget")


def _waiting_for_prefill(
    budget: int, streams: int, work: float, output: float, variation: float
) -> float:
    """Of ``streams`` requests, how many wait for the prompts of others. All times are in steps."""
    queue = 0.0  # requests whose prompt waits or is computed
    rate = 0.0  # requests that end in a step
    load = 0.0  # the share of the time in which a prompt is computed
    # The analysis starts with one request at a time, and takes one more in each round.
    for requests in range(1, streams + 1):
        # ``service``: the steps that one prompt of ``work * output`` tokens takes. By Little's law
        # ``rate * output`` requests decode, a token each; the rest of the budget is for prompts.
        service = work * output / max(1.0, budget - rate * output)
        # ``residence``: the steps from a request's arrival until its prompt is computed. It is the
        # sum of its own service, one for each of the ``queue - load`` that wait, and what is left
        # of the one that is under way: with chance ``load`` there is one, of which
        # (1 + variation) / 2 is left on average. ``queue`` and ``load`` are those of the round
        # before: what an arriving request finds.
        under_way = load * (1 + variation) / 2
        residence = service * (1 + max(0.0, queue - load + under_way))
        # Little's law, for the whole loop and for the queue.
        rate = requests / (output + residence)
        queue = rate * residence
        load = min(1.0, rate * service)
    return max(0.0, queue - load)


def _mean_of_smaller(fixed: float, mean: float, deviation: float) -> tuple[float, float]:
    """The mean of the smaller of two numbers, ``fixed`` and one from a normal distribution; and the
    chance that the second is the smaller."""
    if not deviation:
        return min(fixed, mean), float(mean < fixed)
    z = (fixed - mean) / deviation
    below = _NORMAL.cdf(z)
    return fixed * (1 - below) + mean * below - deviation * _NORMAL.pdf(z), below
