"""Two kinds of traffic at once: bulk work that fills batches, and a few urgent requests.

shared       both through one dynamic batcher
priority     both through one batcher with two priority levels: the urgent overtake in the queue
own tier     the urgent have a copy of the model to themselves, without a batcher

Owns this mix and its rows of the results. The bulk is a closed loop, the urgent are Poisson
arrivals.
"""

import asyncio
from dataclasses import dataclass

from benchmarks.batching.arrivals import poisson
from benchmarks.batching.load import Reply, closed_loop, open_loop
from benchmarks.batching.outcomes import Run, Summary, summarize
from benchmarks.batching.subjects import Subject
from benchmarks.batching.targets import Connection, ServerTarget

BULK = 64
"""Bulk requests under way at once: two batches of 32, one in the model and one waiting."""
URGENT_SHARE = 0.1
"""Of the unbatched capacity."""
URGENT, USUAL = 1, 2
"""Priorities; the lower number goes first."""
SEED = 22


@dataclass(frozen=True)
class Mix:
    """One way to serve both."""

    name: str
    urgent: Summary
    bulk: Summary


async def measure_mixes(
    connection: Connection,
    subject: Subject,
    capacity: float,
    seconds: float,
    *,
    shared: str,
    prioritized: str,
    plain: str,
) -> list[Mix]:
    """The three ways, each for so many seconds; the last arguments are names of models."""
    ways = {
        "shared": (
            ServerTarget(connection, shared, subject),
            ServerTarget(connection, shared, subject),
        ),
        "priority": (
            ServerTarget(connection, prioritized, subject, priority=URGENT),
            ServerTarget(connection, prioritized, subject, priority=USUAL),
        ),
        "own tier": (
            ServerTarget(connection, plain, subject),
            ServerTarget(connection, shared, subject),
        ),
    }
    mixes = []
    rate = URGENT_SHARE * capacity
    for name, (urgent, bulk) in ways.items():
        await closed_loop(bulk, BULK, 0.3)
        (run, replies), (bulk_run, bulk_replies) = await _together(urgent, bulk, rate, seconds)
        urgent.check(replies)
        bulk.check(bulk_replies)
        mixes.append(
            Mix(
                name,
                summarize(f"{name}: urgent", "rate", rate, run),
                summarize(f"{name}: bulk", "concurrency", BULK, bulk_run),
            )
        )
    return mixes


async def _together(
    urgent: ServerTarget, bulk: ServerTarget, rate: float, seconds: float
) -> tuple[tuple[Run, list[Reply]], tuple[Run, list[Reply]]]:
    """Both loads at the same time. The processor time of each run is that of both."""
    bulk_task = asyncio.ensure_future(closed_loop(bulk, BULK, seconds))
    urgent_result = await open_loop(urgent, poisson(rate, seconds, SEED))
    return urgent_result, await bulk_task
