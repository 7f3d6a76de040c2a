"""A play whose steps take time: each takes what a linear cost says, which the scheduler has to
learn. One fast tier, and bulk."""

import random
from itertools import pairwise
from typing import Any

import pytest
from jitney.batch import Batch, StepOutput
from jitney.core.policy.cost import StepShape

from tests.core.play import Play

COST = StepShape(
    steps=10e-3, any_chunk=1e-3, tokens=0.4e-3, samples=0.4e-3, context=1e-6,
    drafting_rows=0.5e-3, draft_tokens=0.8e-3,
    asking_rows=0.5e-3, model_passes=0.5e-3, tokens_read=0.1e-3,
)  # fmt: skip
TARGET = 22  # ms: a step of one sequence takes 11
FAST = {"name": "fast", "gap_ms": TARGET}
BULK = {"name": "bulk", "share": 0.1, "aging_s": 5.0}
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def seconds_of(batch: Batch, output: StepOutput | None = None) -> float:
    shape = StepShape.of(batch, () if output is None else output.rows)
    return sum(a * b for a, b in zip(COST, shape, strict=True))


class Timed(Play):
    """A step takes time, which is known to the scheduler."""

    def __init__(self, fast: dict | None = None, bulk: dict | None = None, **options: Any) -> None:
        tiers = [FAST | (fast or {}), BULK | (bulk or {})]
        options = {"tiers": tiers, "num_blocks": 512, "block_size": 4, **options}
        super().__init__(**options)
        self.times: dict[int, list[float]] = {}
        self.taken: list[float] = []
        wait_for = self.runner.wait_for
        self.runner.wait_for = lambda step: self._after(step.batch, wait_for(step))
        if self.scheduler.config.tiers:
            self.teach(COST)

    def teach(self, cost: StepShape) -> None:
        chance = random.Random(1)
        for _ in range(400):
            rows, chunk = chance.randrange(1, 40), chance.choice([0, 0, 30, 200])
            context = chance.randrange(10_000)
            shape = StepShape(1.0, float(chunk > 0), rows + chunk, rows, context)
            self._learn(cost, shape)
            drafted, asked = chance.randrange(8), chance.randrange(8)
            drafts, passes = drafted * chance.randrange(8), (asked > 0) * chance.randrange(8)
            read = asked * chance.randrange(20)
            shape = shape._replace(
                drafting_rows=drafted,
                draft_tokens=drafts,
                asking_rows=asked,
                model_passes=passes,
                tokens_read=read,
            )
            self._learn(cost, shape)

    def _learn(self, cost: StepShape, shape: StepShape) -> None:
        self.scheduler.policies.cost.add(
            shape, sum(a * b for a, b in zip(cost, shape, strict=True))
        )

    def _after(self, batch: Batch, output: StepOutput) -> StepOutput:
        self.taken.append(seconds_of(batch, output))
        self.now += self.taken[-1]
        return output

    def _take(self, event: Any) -> None:
        super()._take(event)
        self.times.setdefault(event.key, []).append(self.now)

    def fast(self, prompt: list[int], **params: Any) -> int:
        return self.submit(prompt, tier="fast", **params)

    def bulk(self, prompt: list[int], **params: Any) -> int:
        return self.submit(prompt, tier="bulk", **params)

    def gaps(self, key: int) -> list[float]:
        return [1e3 * (b - a) for a, b in pairwise(self.times[key][:-1])]

    def tier_of(self, key: int) -> str:
        return self.submits[key].params.tier or "bulk"

    def bulk_rows(self, batch: Batch) -> list[int]:
        return [row.key for row in batch.rows if self.tier_of(row.key) == "bulk"]


def mixed(play: Timed) -> tuple[int, list[int]]:
    """One of the fast tier beside bulk with long prompts and many decodes."""
    crowd = [play.bulk([key] * 60, max_tokens=30) for key in range(24)]
    play.step(6)
    fast = play.fast([1, 2, 3], max_tokens=30)
    return fast, crowd


def first_come(overlap: bool) -> float:
    """The longest gap of the same without tiers, in ms."""
    play = Timed(overlap=overlap, tiers=[])
    for key in range(24):
        play.submit([key] * 60, max_tokens=30)
    play.step(6)
    key = play.submit([1, 2, 3], max_tokens=30, priority=-1)
    play.drain()
    return max(play.gaps(key)[1:])
