"""Runs that a real grammar forces, through the engine: a schema of fixed keys, random values."""

import json

import msgspec
import pytest
from jitney.engine.engine import Engine
from jitney.messages import Emitted, Finished, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams, StructuredOutputs
from jitney.text.grammar import GrammarCompiler, prove_grammar
from jitney.text.tokenizer import TokenizerData

from tests.fake_runner import FakeRunner
from tests.inline import make_at_once
from tests.text.test_intake import INFO
from tests.text.tiny_tokenizers import tiny

COMPILER = GrammarCompiler(TokenizerData(tiny("byte_level").to_str(), 1, None, {}), INFO)
PROPERTIES = {
    "identity": {"type": "string", "maxLength": 3},
    "coordinates": {"type": "array", "items": {"enum": [10, 25]}, "minItems": 2, "maxItems": 3},
    "confirmation": {"const": "yes, certainly"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
}
GRAMMAR = prove_grammar(StructuredOutputs(json=SCHEMA), COMPILER, 10_000, 20)
Streams = dict[tuple[int, int], list[int]]


class House:
    """An engine, and what has come of its requests."""

    def __init__(self, num_blocks: int, overlap: bool) -> None:
        config = make_config({"model": "m", "block_size": 4, "watermark": 0.0})
        runner = FakeRunner(num_blocks=num_blocks, vocab_size=INFO.vocab_size, overlap=overlap)
        self.runner = runner
        engine = Engine(config, runner, lambda: 0.0, compile_grammar=COMPILER)
        self.engine = make_at_once(engine)
        self.streams: Streams = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.forced = self.preemptions = self.open = 0

    def send(self, message: Submit) -> None:
        self.open += 1
        self.engine.send(message)

    def step(self) -> None:
        report = self.engine.step()
        assert report is not None
        self.engine.scheduler.check_integrity()
        assert self.runner.violations == []
        self.forced += report.stats.forced_tokens
        self.preemptions += report.stats.preemptions
        for event in report.events:
            self.open -= isinstance(event, Finished)
            if isinstance(event, Tokens):
                at = event.key, event.index
                self.streams.setdefault(at, []).extend(event.ids)
                if event.finish_reason:
                    self.reasons[at] = event.finish_reason


def submit(key: int, **params: object) -> Submit:
    given = SamplingParams(**{"max_tokens": 200, "seed": key, **params})
    return Submit(key=key, prompt=[1, 2, key], params=given, arrival=0.0, grammar=GRAMMAR)


def run(messages: list[Submit], num_blocks: int = 400, overlap: bool = False) -> House:
    house = House(num_blocks, overlap)
    for message in messages:
        house.send(message)
    while house.open:
        house.step()
    return house


def check(text: str) -> None:
    made = json.loads(text)
    assert list(made) == list(PROPERTIES)
    assert len(made["identity"]) <= 3
    assert set(made["coordinates"]) <= {10, 25}


MESSAGES = [submit(key, n=1 + key % 2, ignore_eos=bool(key % 3)) for key in range(6)]


@pytest.fixture(scope="module")
def alone() -> Streams:
    return {at: ids for each in MESSAGES for at, ids in run([each]).streams.items()}


def test_fewer_steps_than_tokens() -> None:
    house = run([submit(0)])
    (ids,) = house.streams.values()
    check(COMPILER.tokenizer.decode_str(ids))
    assert house.reasons == {(0, 0): "stop"}
    assert house.runner.batches == len(ids) - house.forced < 20 < house.forced


@pytest.mark.parametrize("overlap", [False, True])
def test_neither_neighbours_nor_preemption_change_a_token(alone: Streams, overlap: bool) -> None:
    house = run(MESSAGES, num_blocks=70, overlap=overlap)
    assert house.preemptions
    assert house.streams == alone
    for ids in house.streams.values():
        check(COMPILER.tokenizer.decode_str(ids))


@pytest.mark.parametrize("steps", range(1, 9))
def test_an_engine_that_takes_over_makes_the_same_tokens(alone: Streams, steps: int) -> None:
    first = House(400, overlap=False)
    for message in MESSAGES:
        first.send(message)
    while first.open and first.runner.batches < steps:
        first.step()
    resumed = []
    for message in MESSAGES:
        sequences = [(message.key, index) for index in range(message.params.n)]
        emitted = [Emitted(first.streams[at], 0.0, at in first.reasons) for at in sequences]
        resumed.append(msgspec.structs.replace(message, emitted=emitted, first_token=0.0))
    open_ones = [each for each in resumed if not all(one.ended for one in each.emitted)]
    second = run(open_ones)
    for at, ids in alone.items():
        assert first.streams[at] + second.streams.get(at, []) == ids


def test_with_logprobs_each_token_is_sampled() -> None:
    house = run([submit(0, logprobs=0)])
    (ids,) = house.streams.values()
    check(COMPILER.tokenizer.decode_str(ids))
    assert house.forced == 0
    assert house.runner.batches == len(ids)
