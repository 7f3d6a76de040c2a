"""A loader for :class:`SupervisedEngine`: the arithmetic runner, with the vocabulary of the front's
tests."""

from jitney.config import EngineConfig
from jitney.engine.loading import EngineParts, LoadModel

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner

VOCAB = 320
"""Ids of the front's tests' tokenizer."""
LOADER = "tests.frontend.plain_runner:loader"


def loader() -> LoadModel:
    """For the fork server."""
    return load


def load(config: EngineConfig, tokenizer: bytes) -> EngineParts:
    """Its steps take long enough for a stream to have several responses."""
    runner = FakeRunner(vocab_size=VOCAB, num_blocks=512, max_model_len=2000, step_seconds=0.002)
    return EngineParts(runner, b"", FakeGrammar)
