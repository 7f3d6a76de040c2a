"""Engines that die, beside a journal that does not: for tests of how requests go on."""

from collections.abc import Iterable
from typing import Any

from jitney.engine.engine import Engine
from jitney.engine.journal import Journal
from jitney.engine.wire import RowOwner
from jitney.messages import (
    Cancel,
    Cancelled,
    Event,
    Failed,
    Finish,
    Finished,
    PromptLogprobs,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.inline import make_at_once

BLOCK = 4


class Mortal:
    """An engine that is replaced whenever :meth:`crash` says so; what a client has got so far."""

    def __init__(self, num_blocks: int = 64, overlap: bool = False, **options: Any) -> None:
        self.num_blocks = num_blocks
        self.overlap = overlap
        self.config = make_config({"model": "fake", "block_size": BLOCK, **options})
        self.journal = Journal()
        self.now = 0.0
        self.at_work: list[RowOwner] = []
        self.streams: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], float | None] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.ends: dict[int, Finished | Cancelled | Failed] = {}
        self.engine = self.make()

    def make(self) -> Engine:
        runner = FakeRunner(num_blocks=self.num_blocks, block_size=BLOCK, overlap=self.overlap)
        engine = Engine(self.config, runner, lambda: self.now, self.note, FakeGrammar)
        return make_at_once(engine)

    def note(self, in_flight: Iterable[RowOwner], new: Iterable[RowOwner]) -> None:
        self.at_work = [*in_flight, *new]

    def send(self, message: Submit | Finish | Cancel) -> None:
        self.journal.note_message(message)
        self.send_due()

    def send_due(self) -> None:
        for message in self.journal.take_unsent():
            self.engine.send(message)

    def step(self, lost: bool = False) -> None:
        """A step; ``lost``: the engine dies before its report is sent."""
        self.now += 0.01
        report = self.engine.step()
        self.engine.scheduler.check_integrity()
        if lost or report is None:
            return
        for event in self.journal.note_report(report, self.now):
            self.take(event)
        self.send_due()

    def crash(self, from_elsewhere: bool = True) -> list[Failed]:
        failed = self.journal.note_death(self.at_work, from_elsewhere=from_elsewhere)
        self.engine = self.make()
        self.send_due()
        return failed

    def take(self, event: Event) -> None:
        assert event.key not in self.ends, "an event after the end"
        match event:
            case Tokens():
                at = event.key, event.index
                assert at not in self.reasons, "a token after the sequence's end"
                self.streams.setdefault(at, []).extend(event.ids)
                self.logprobs[at] = event.cumulative_logprob
                if event.finish_reason is not None:
                    self.reasons[at] = event.finish_reason
            case PromptLogprobs():
                assert event.key not in self.prompt_logprobs, "prompt logprobs came twice"
                self.prompt_logprobs[event.key] = event
            case _:
                self.ends[event.key] = event

    def drain(self) -> None:
        for _ in range(20_000):
            if not len(self.journal):
                return
            self.step()
        raise AssertionError("requests stay open")


def submit_of(key: int, prompt: list[int] | None = None, **params: Any) -> Submit:
    deadline = params.pop("deadline", None)
    return Submit(
        key=key,
        prompt=prompt or [1, 2, 3],
        params=SamplingParams(seed=key, **{"max_tokens": 8, **params}),
        arrival=0.0,
        deadline=deadline,
    )
