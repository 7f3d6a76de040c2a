"""The real scheduler over a runner that computes nothing: what a batch does with given lengths.

A closed loop: when a request ends, the next one follows at once. It begins in the middle, with
sequences of every age, so that what is measured is the steady state.
"""

import time
from dataclasses import dataclass
from itertools import count

import numpy as np
from jitney.batch import Batch, RowOutput, StepOutput
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
    requests = _Requests(scheduler, lengths)
    # None is a queue without end: more requests than can run.
    streams = limits.streams or 2 * at_first + 32
    requests.submit_first(streams, min(at_first, streams))
    total = len(lengths.prompt)
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
        ended += requests.complete(batch, float(ended))
    counted = ended - warm_up
    return Observed(
        running=running / steps,
        used=used / steps / limits.num_blocks,
        preemptions=scheduler.stats().preemptions / counted,
        requests=counted,
        steps=steps,
        seconds=time.monotonic() - began,
    )


class _Requests:
    """The requests of a simulation. They have the given lengths in turn, and then again from the
    first."""

    def __init__(self, scheduler: Scheduler, lengths: Lengths) -> None:
        self._scheduler = scheduler
        self._lengths = lengths
        self._prompts = lengths.prompt.tolist()
        self._outputs = lengths.output.tolist()
        self._keys = count()
        self._next = 0
        """The number of the request that comes next."""

    def submit_first(self, streams: int, running: int) -> None:
        """Submit a request for each of the ``streams``. Of these, ``running`` have a part of their
        output already."""
        rng = np.random.default_rng(0)
        # In steady state a request is found running in proportion to its output, at any of its
        # tokens.
        shares = self._lengths.output / self._lengths.output.sum()
        for index in rng.choice(len(self._outputs), running, p=shares).tolist():
            self._submit(index, emitted=int(rng.integers(self._outputs[index])), now=-1.0)
        for _ in range(streams - running):
            self._submit_next(-1.0)

    def complete(self, batch: Batch, now: float) -> int:
        """Complete a step, in which each sequence makes token 0. Each request that ends is followed
        by the next one. Returns how many have ended."""
        output = StepOutput([RowOutput([0] * len(row.sample)) for row in batch.rows])
        ended = 0
        for event in self._scheduler.update(batch, output, now):
            if isinstance(event, Finished):
                self._submit_next(now + ended)
                ended += 1
        return ended

    def _submit_next(self, now: float) -> None:
        self._submit(self._next % len(self._prompts), emitted=0, now=now)
        self._next += 1

    def _submit(self, index: int, emitted: int, now: float) -> None:
        """Submit a request of the lengths at ``index``. ``emitted``: how many of its tokens are
        there already."""
        message = Submit(
            key=next(self._keys),
            prompt=[0] * self._prompts[index],
            params=SamplingParams(max_tokens=self._outputs[index], seed=0),
            arrival=now,
            emitted=[Emitted([0] * emitted)] if emitted else [],
            first_token=now if emitted else None,
        )
        refused = self._scheduler.submit(message)
        assert not refused, "lengths beyond the context or the cache are cut before"
