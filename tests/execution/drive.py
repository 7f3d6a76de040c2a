"""Runs requests through the real scheduler and runner, without an engine around them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jitney.batch import Adapter
from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.execution.load import LoadedRunner
from jitney.messages import Event, Failed, Finished, PromptLogprobs, Submit, Tokens
from jitney.read_config import make_config as make_engine_config
from jitney.sampling_params import SamplingParams


@dataclass
class Driven:
    """What came of one run."""

    outputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(index of the request, sequence index) -> tokens."""
    events: list[Event] = field(default_factory=list)
    timings: dict[int, Finished] = field(default_factory=dict)
    preemptions: int = 0
    hit_tokens: int = 0
    steps: int = 0


def drive(
    runner: LoadedRunner,
    requests: list[tuple[list[int], SamplingParams]],
    *,
    budget: int = 512,
    num_blocks: int | None = None,
    num_slots: int | None = None,
    stagger: int = 0,
    adapters: Mapping[int, Adapter] = MappingProxyType({}),
    **options: object,
) -> Driven:
    """Serve ``requests`` (prompt, parameters) until all have ended. Request i is submitted before
    step ``i * stagger``, with adapter i if there is one; its key is i. Fails the test if one of
    them fails."""
    info = runner.info
    config: EngineConfig = make_engine_config(
        {"model": "unused", "block_size": info.block_size, **options}
    )
    scheduler = Scheduler(
        config,
        num_blocks=num_blocks or info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_batched_tokens=budget,
        num_slots=num_slots or info.num_slots,
        num_snapshots=info.num_snapshots,
        chunking=info.chunking,
        forks_share_blocks=info.cache != "opaque",
    )
    driven = Driven()
    waiting = [
        Submit(key=key, prompt=prompt, params=params, arrival=float(key))
        for key, (prompt, params) in enumerate(requests)
    ]
    while waiting or scheduler.has_work:
        now = float(driven.steps)
        while waiting and waiting[0].key * stagger <= driven.steps:
            submit = waiting.pop(0)
            driven.events += scheduler.submit(submit, adapter=adapters.get(submit.key))
        scheduler.reset_counts()
        batch = scheduler.schedule(now)
        if batch.rows:
            driven.events += scheduler.update(batch, runner.execute(batch), now)
        stats = scheduler.stats()
        driven.preemptions += stats.preemptions
        driven.hit_tokens += stats.prefix_hit_tokens
        driven.steps += 1
        assert driven.steps < 5000, "the requests do not end"
    scheduler.check_integrity()
    for event in driven.events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Tokens):
            driven.outputs.setdefault((event.key, event.index), []).extend(event.ids)
        elif isinstance(event, Finished):
            driven.timings[event.key] = event
    return driven


def prompt_logprobs_of(driven: Driven, key: int) -> PromptLogprobs:
    """The one event of that kind of a request."""
    found = [e for e in driven.events if isinstance(e, PromptLogprobs) and e.key == key]
    assert len(found) == 1
    return found[0]
