"""The real scheduler over a runner that computes nothing: what a batch does with given lengths.

A closed loop: whoever ends is followed by the next request at once. It begins in the middle, with
sequences of every age, so that what is measured is the steady state.
"""

import time
from dataclasses import dataclass
from itertools import count

import numpy as np
from jitney.batch import RowOutput, StepOutput
from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.messages import Emitted, Finished, Submit
from jitney.sampling_params import SamplingParams
from msgspec.structs import replace

from jitney_measure.lengths import Lengths
from jitney_measure.sizing import EngineLimits

_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class Observed:
    """Means over the steps of a simulation."""

    running: float
    """Sequences."""
    used: float
    """Share of the blocks that sequences hold."""
    preemptions: float
    """For each request that ended."""
    requests: int
    """That ended."""
    steps: int
    seconds: float
    """That it took."""


def simulate(
    config: EngineConfig, lengths: Lengths, limits: EngineLimits, at_first: int
) -> Observed:
    """Serve as many requests as ``lengths`` has, and a quarter as many before, which do not count.
    ``at_first`` sequences run already, each with a part of its output. The scheduler's clock is the
    number of requests that have ended."""
    began = time.monotonic()
    scheduler = Scheduler(
        replace(config, max_num_seqs=limits.max_num_seqs, max_queued=_NO_LIMIT),
        num_blocks=limits.num_blocks,
        max_model_len=int((lengths.prompt + lengths.output).max()),
        max_num_batched_tokens=limits.budget,
    )
    streams = limits.streams or 2 * at_first + 32
    chance = np.random.default_rng(0)
    prompts = lengths.prompt.tolist()
    outputs = lengths.output.tolist()
    total = len(prompts)
    keys = count()

    def submit(which: int, made: int, now: float) -> None:
        message = Submit(
            key=next(keys),
            prompt=[0] * prompts[which],
            params=SamplingParams(max_tokens=outputs[which], seed=0),
            arrival=now,
            emitted=[Emitted([0] * made)] if made else [],
            first_token=now if made else None,
        )
        refused = scheduler.submit(message)
        assert not refused, "lengths beyond the context or the cache are cut before"

    # In steady state a request is met in proportion to its output.
    begun = chance.choice(total, min(at_first, streams), p=lengths.output / lengths.output.sum())
    for which in begun.tolist():
        submit(which, int(chance.integers(outputs[which])), -1.0)
    for which in range(streams - len(begun)):
        submit(which % total, 0, -1.0)
    next_one = streams - len(begun)
    running = used = steps = ended = 0
    while ended < total + total // 4:
        batch = scheduler.schedule(float(ended))
        if ended < total // 4:
            scheduler.reset_counts()
        else:
            stats = scheduler.stats()
            running += stats.running
            used += stats.blocks_used
            steps += 1
        output = StepOutput([RowOutput([0] * len(row.sample)) for row in batch.rows])
        for event in scheduler.update(batch, output, float(ended)):
            if isinstance(event, Finished):
                submit(next_one % total, 0, float(ended))
                next_one += 1
                ended += 1
    return Observed(
        running=running / steps,
        used=used / steps / limits.num_blocks,
        preemptions=scheduler.stats().preemptions / total,
        requests=ended,
        steps=steps,
        seconds=time.monotonic() - began,
    )
