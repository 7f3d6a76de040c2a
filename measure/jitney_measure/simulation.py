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
    """Means over the steps of a simulation, without its warm-up."""

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
    """How long the whole simulation took."""


def simulate(
    config: EngineConfig, lengths: Lengths, limits: EngineLimits, at_first: int
) -> Observed:
    """Serve as many requests as ``lengths`` has, after a warm-up of a quarter as many.
    ``at_first`` sequences run already, each with a part of its output. The scheduler's clock is the
    number of requests that have ended."""
    began = time.monotonic()
    scheduler = Scheduler(
        replace(config, max_num_seqs=limits.max_num_seqs, max_queued=_NO_LIMIT),
        num_blocks=limits.num_blocks,
        max_model_len=int((lengths.prompt + lengths.output).max()),
        max_num_batched_tokens=limits.budget,
    )
    # None is a queue without end: more requests than can run.
    streams = limits.streams or 2 * at_first + 32
    rng = np.random.default_rng(0)
    prompts = lengths.prompt.tolist()
    outputs = lengths.output.tolist()
    total = len(prompts)
    keys = count()

    def submit_request(index: int, emitted: int, now: float) -> None:
        """The request at an index of ``lengths``, of which so many tokens are there already."""
        message = Submit(
            key=next(keys),
            prompt=[0] * prompts[index],
            params=SamplingParams(max_tokens=outputs[index], seed=0),
            arrival=now,
            emitted=[Emitted([0] * emitted)] if emitted else [],
            first_token=now if emitted else None,
        )
        refused = scheduler.submit(message)
        assert not refused, "lengths beyond the context or the cache are cut before"

    # In steady state a request is found running in proportion to its output, at any of its tokens.
    shares = lengths.output / lengths.output.sum()
    running_at_first = rng.choice(total, min(at_first, streams), p=shares).tolist()
    for index in running_at_first:
        submit_request(index, emitted=int(rng.integers(outputs[index])), now=-1.0)
    # The other streams begin with a request each.
    others = streams - len(running_at_first)
    for number in range(others):
        submit_request(number % total, emitted=0, now=-1.0)
    next_request = others
    warm_up = total // 4
    running = 0
    used = 0
    steps = 0
    ended = 0
    while ended < warm_up + total:
        batch = scheduler.schedule(float(ended))
        if ended < warm_up:
            scheduler.reset_counts()
        else:
            stats = scheduler.stats()
            running += stats.running
            used += stats.blocks_used
            steps += 1
        output = StepOutput([RowOutput([0] * len(row.sample)) for row in batch.rows])
        for event in scheduler.update(batch, output, float(ended)):
            if isinstance(event, Finished):
                submit_request(next_request % total, emitted=0, now=float(ended))
                next_request += 1
                ended += 1
    counted = ended - warm_up
    return Observed(
        running=running / steps,
        used=used / steps / limits.num_blocks,
        preemptions=scheduler.stats().preemptions / counted,
        requests=counted,
        steps=steps,
        seconds=time.monotonic() - began,
    )
