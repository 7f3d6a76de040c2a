"""What an engine tells its front before it makes a step."""

from collections.abc import Iterable

from jitney.core.policy.prices import Prices
from jitney.core.policy.speculation import Speculation
from jitney.engine.engine import Engine
from jitney.engine.wire import RowOwner
from jitney.messages import Emitted, Finished, Submit
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_grammar import FakeGrammar, FakeState
from tests.fake_runner import FakeRunner
from tests.inline import make_at_once


def test_a_front_knows_whose_grammar_is_asked_about_drafts() -> None:
    """The grammar is native code, which may end the engine: outside a step, nobody would be blamed
    for that, and every further engine would end in the same way."""
    named: set[tuple[int, int]] = set()
    was_named: list[bool] = []

    def before_step(in_flight: Iterable[RowOwner], new: Iterable[RowOwner]) -> None:
        named.clear()
        named.update((owner.key, owner.index) for owner in [*in_flight, *new])

    class Asked(FakeState):
        def num_allowed(self, token_ids: list[int]) -> int:
            was_named.append((7, 0) in named)
            return super().num_allowed(token_ids)

    class Grammar(FakeGrammar):
        def begin(self, may_end: bool) -> FakeState:
            return Asked(self)

    config = make_config({"model": "m", "block_size": 4, "speculation": {"max_drafts": 4}})
    runner = FakeRunner(num_blocks=64, choose=lambda row, index: 0)
    engine = make_at_once(
        Engine(config, runner, lambda: 0.0, before_step=before_step, compile_grammar=Grammar)
    )
    drafts = engine.scheduler.policies.drafts
    assert isinstance(drafts, Speculation)
    drafts._prices = lambda some: Prices(0.0)  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=30, seed=1)
    every_token = "0,1,2,3,4,5,6:30"
    engine.send(Submit(key=7, prompt=[0, 0], params=params, arrival=0.0, grammar=every_token))
    has_ended = False
    while not has_ended:
        report = engine.step()
        assert report is not None
        named.clear()  # as the front does at a report
        has_ended = any(isinstance(event, Finished) for event in report.events)
    assert was_named
    assert all(was_named)


def test_a_front_knows_whose_grammar_accepts_the_output_of_a_resumed_request() -> None:
    """The engine may end in that call, before any step names the request."""
    named: dict[int, list[int]] = {}
    was_named: list[bool] = []

    def note_making(number: int, kind: str, keys: list[int]) -> None:
        named[number] = keys

    class Accepting(FakeState):
        def accept(self, token_ids: list[int]) -> None:
            if token_ids == [0, 8]:
                was_named.append([7] in named.values())
            super().accept(token_ids)

    class Grammar(FakeGrammar):
        def begin(self, may_end: bool) -> FakeState:
            return Accepting(self)

    config = make_config({"model": "m", "block_size": 4})
    runner = FakeRunner(num_blocks=64, choose=lambda row, index: 0)
    engine = make_at_once(
        Engine(config, runner, lambda: 0.0, note_making=note_making, compile_grammar=Grammar)
    )
    resumed = Submit(
        key=7,
        prompt=[0, 0],
        params=SamplingParams(max_tokens=30, seed=1),
        arrival=0.0,
        grammar="0,1,2,3,4,5,6:30",
        emitted=[Emitted([0, 8])],
        first_token=0.0,
    )
    engine.send(resumed)
    engine.step()
    assert was_named == [True]
