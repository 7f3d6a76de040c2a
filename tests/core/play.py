"""A front without a server: submits to an engine over the fake runner and notes what comes back."""

import random
from typing import Any

from jitney.batch import Batch
from jitney.core.policy.prices import Prices
from jitney.core.policy.speculation import Speculation
from jitney.engine.engine import Engine
from jitney.messages import (
    Cancelled,
    Event,
    Failed,
    Finished,
    PromptLogprobs,
    StepReport,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.inline import make_at_once
from tests.prophet import Prophet
from tests.solo_stream import solo_stream

_RUNNER = (
    "max_model_len",
    "max_num_batched_tokens",
    "choose",
    "faults",
    "launch_faults",
    "overlap",
    "device",
    "num_slots",
    "num_snapshots",
    "cache",
    "chunking",
)


class Play:
    """One engine, its batches and its requests by key. Time stands still unless ``now`` is set.
    ``overlap`` gives it the runner that can."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, **options: Any) -> None:
        runner_options = {name: options.pop(name) for name in _RUNNER if name in options}
        self.runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, **runner_options)
        config = make_config({"model": "fake", "block_size": block_size, **options})
        self.now = 0.0
        self.engine = make_at_once(
            Engine(config, self.runner, clock=lambda: self.now, compile_grammar=FakeGrammar)
        )
        self.scheduler = self.engine.scheduler
        self.prophet: Prophet | None = None
        self.submits: dict[int, Submit] = {}
        self.streams: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.ends: dict[int, Finished | Cancelled | Failed] = {}
        self.order: list[int] = []  # keys, as they first got a token
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.batches: list[Batch] = []
        self._launch = self.runner.launch
        self.runner.launch = self._note_launch  # type: ignore[method-assign]

    def submit(
        self,
        prompt: list[int],
        *,
        deadline: float | None = None,
        stop_ids: frozenset[int] = frozenset(),
        bad_words_ids: list[list[int]] | None = None,
        grammar: str = "",
        **params: Any,
    ) -> int:
        """Send a request; its key."""
        key = len(self.submits)
        self.submits[key] = Submit(
            key=key,
            prompt=prompt,
            params=SamplingParams(seed=key, **params),
            stop_ids=stop_ids,
            bad_words_ids=bad_words_ids or [],
            arrival=self.now,
            deadline=deadline,
            grammar=grammar,
        )
        if self.prophet is not None:
            for index, stream in enumerate(self.run_alone(key)):
                self.prophet.streams[key, index] = [*stream, 0, 1, 2]
        self.engine.send(self.submits[key])
        return key

    def draft(self, chance: float, seed: int = 0) -> None:
        """Have each token of what is to come proposed, rightly with this probability, and all of
        it computed. For a play with the option ``speculation``."""
        drawn = random.Random(seed)
        speculation = self.scheduler.policies.drafts
        assert isinstance(speculation, Speculation)
        self.prophet = Prophet(lambda: drawn.random() < chance)
        if speculation.asks:
            self.runner.foresee = self.prophet.foresee
        else:
            speculation.drafter = self.prophet
        speculation._prices = lambda some: Prices(0.0)  # type: ignore[method-assign]

    def step(self, times: int = 1) -> StepReport | None:
        """Some steps, every invariant checked after each. The last one's report."""
        report = None
        for _ in range(times):
            report = self.engine.step()
            self.scheduler.check_integrity()
            assert self.runner.violations == []
            for event in report.events if report else []:
                self._take(event)
        return report

    def drain(self, most: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {most} steps")

    def run_alone(self, key: int) -> list[list[int]]:
        """What the request's streams must be."""
        submit = self.submits[key]
        return [solo_stream(submit, index) for index in range(submit.params.n)]

    def got(self, key: int) -> list[list[int]]:
        """What its streams are so far."""
        n = self.submits[key].params.n
        return [self.streams.get((key, index), []) for index in range(n)]

    def rows(self, which: int = -1) -> list[tuple[int, int, int, int]]:
        """(key, index, start, end) of the rows of a batch."""
        return [(row.key, row.index, row.start, row.end) for row in self.batches[which].rows]

    def _note_launch(self, batch: Batch) -> Any:
        self.batches.append(batch)
        return self._launch(batch)

    def _take(self, event: Event) -> None:
        assert event.key not in self.ends, "an event after the end"
        if isinstance(event, Tokens):
            where = (event.key, event.index)
            self.streams.setdefault(where, []).extend(event.ids)
            if event.key not in self.order:
                self.order.append(event.key)
            if event.finish_reason is not None:
                assert where not in self.reasons
                self.reasons[where] = event.finish_reason
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs[event.key] = event
        else:
            self.ends[event.key] = event


MODEL = {"drafter": "draft_model", "model": "m"}


def drafting(play: type[Play], chance: float = 1.0, drafter: dict | None = None, **options) -> Play:
    """Every proposal is computed. ``drafter``: MODEL has the runner make them."""
    speculation = {"max_drafts": 4, **(drafter or {})}
    made = play(**{"speculation": speculation, "block_size": 2, **options})
    made.draft(chance)
    return made


def overlapped(**options) -> Play:
    return Play(overlap=True, **options)


def carried(play: Play, which: int = -1) -> list[int | None]:
    return [row.carried for row in play.batches[which].rows]


def check_streams(play: Play, *keys: int) -> None:
    for key in keys:
        assert play.got(key) == play.run_alone(key)
        assert isinstance(play.ends[key], Finished)
