"""How many sequences of given lengths run at once in steady state, by arithmetic.

A sequence makes one token a step. So at a random moment a long output is met more often than a
short one, in proportion to its tokens, and at any of its tokens with equal chance. The blocks that
a running sequence holds on average, times the number that run, are the blocks in use. That holds
with preemption, too: a preempted sequence keeps its tokens.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jitney.config import EngineConfig

from jitney_measure.lengths import Counts, Lengths

_GROWN = 0.1
"""About the share of its output that a sequence has made when it is preempted."""
_NORMAL = NormalDist()


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
        blocks, seqs, budget = (
            max(1, round(share * each))
            for each in (self.num_blocks, self.max_num_seqs, self.budget)
        )
        streams = self.streams and max(1, round(share * self.streams))
        return EngineLimits(blocks, seqs, max(seqs, budget), streams)


@dataclass(frozen=True)
class Expected:
    """Means over the steps of the steady state."""

    running: float
    """Sequences."""
    used: float
    """Share of the blocks that they hold."""
    preemptions: float
    """For each request, to a factor of about two."""
    limit: str
    """What bounds the running ones."""
    in_cache: float
    """Sequences if the cache were the only limit."""
    work: float
    """Prompt tokens to compute for each token of output."""


def expect(config: EngineConfig, lengths: Lengths, limits: EngineLimits) -> Expected:
    """The steady state of ``lengths``, none of which exceeds the context, with the block size,
    ``eviction`` and ``watermark`` of ``config``, and nothing found in the prefix cache."""
    size = config.block_size
    prompt = lengths.prompt
    output = lengths.output
    preempts = config.eviction == "preempt"
    first = -(-prompt // size)
    last = -(-(prompt + output - 1) // size)
    blocks, squares = _held(prompt, output, size)
    used = float(blocks.sum() / output.sum())
    if not preempts:
        first = last
        blocks = last * output
        squares = last**2 * output  # all reserved at once
    watermark = math.ceil(config.watermark * limits.num_blocks) if preempts else 0
    # Beside the watermark, half of what the first request of the queue waits for is free, on
    # average. A long prompt waits for longer, so prompts are weighted by their blocks.
    free = watermark + float((first**2).sum() / first.sum()) / 2
    held = float(blocks.sum() / output.sum())
    in_cache = max(1.0, (limits.num_blocks - free) / held)
    # Of the number that fits: so many sequences have blocks that vary independently of each other.
    deviation = math.sqrt(max(0.0, float(squares.sum() / output.sum()) - held**2) * in_cache) / held
    growth = float(output.mean()) / size  # blocks
    most_preemptions = (
        # The chance to grow past the watermark before another one ends, and how often until then.
        math.exp(-watermark / growth) * growth / (float(first.mean()) + _GROWN * growth)
        if preempts
        else 0.0
    )
    mean_prompt = float(prompt.mean())
    mean_output = float(output.mean())
    variation = float(prompt.var()) / mean_prompt**2
    preemptions = 0.0
    # Preemptions make work, and work lets fewer sequences run, which preempts less. Four rounds,
    # each half way to the new value, come near the balance.
    for _ in range(4):
        recomputed = preemptions * (mean_prompt + mean_output / 2)
        work = (mean_prompt + recomputed) / mean_output
        most, limit = _without_cache(limits, work, mean_output, variation)
        running, short = _smaller(most, in_cache, deviation)
        preemptions = (preemptions + most_preemptions * short) / 2
    return Expected(
        running=running,
        used=running * used / limits.num_blocks,
        preemptions=most_preemptions * short,
        limit=limit if most < in_cache else "the cache",
        in_cache=in_cache,
        work=work,
    )


def _held(prompt: Counts, output: Counts, size: int) -> tuple[Counts, Counts]:
    """Of each request, the blocks it holds and their squares, summed up over its steps."""

    # Sums of ceil(i / size) and of its square, for i from 1 to tokens: of the full blocks in closed
    # form, and of the tokens in the last block.
    def sums(tokens: Counts) -> tuple[Counts, Counts]:
        full, rest = np.divmod(tokens, size)
        pairs = size * full * (full + 1)
        return pairs // 2 + rest * (full + 1), pairs * (2 * full + 1) // 6 + rest * (full + 1) ** 2

    last = sums(prompt + output - 1)
    before = sums(prompt - 1)
    return last[0] - before[0], last[1] - before[1]


def _without_cache(
    limits: EngineLimits, work: float, output: float, variation: float
) -> tuple[float, str]:
    """How many sequences run if the cache is no limit, and what is.

    Prompts pass through the rest of the budget one by one, and then make ``output`` tokens: mean
    value analysis of a closed network with a queue and a delay (Reiser and Lavenberg, 1980).
    ``variation``: of the prompts, the square of deviation over mean.
    """
    budget = limits.budget
    streams = limits.streams
    most = budget / (1 + work) + 1  # decodes whose prompts take all the rest, and a prompt
    if streams is None or streams > limits.max_num_seqs:
        if most < limits.max_num_seqs:
            return most, "the token budget"
        return float(limits.max_num_seqs), "max_num_seqs"
    # Times are in steps. `service`: to compute a request's prompt with the budget that decodes
    # leave; `residence`: the same, with the wait for the prompts before it; `rate`: requests that
    # end in a step; `queue`: requests in residence; `load`: the share of the time in which a prompt
    # is computed.
    queue = rate = load = 0.0
    for count in range(1, streams + 1):
        service = work * output / max(1.0, budget - rate * output)
        residence = service * (1 + max(0.0, queue - load * (1 - variation) / 2))
        rate = count / (output + residence)
        queue = rate * residence
        load = min(1.0, rate * service)
    # Those that wait do not run.
    running = min(most, streams - max(0.0, queue - load))
    return running, "streams" if running > 0.9 * streams else "the token budget"


def _smaller(fixed: float, mean: float, deviation: float) -> tuple[float, float]:
    """The mean of the smaller of two numbers, ``fixed`` and one from a normal distribution; and the
    chance that the second is the smaller."""
    if not deviation:
        return min(fixed, mean), float(mean < fixed)
    z = (fixed - mean) / deviation
    below = _NORMAL.cdf(z)
    return fixed * (1 - below) + mean * below - deviation * _NORMAL.pdf(z), below
