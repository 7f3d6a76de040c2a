"""What loading a model gives to an engine's process, whether the real loader
(:mod:`jitney.engine.assemble`) or one of the tests loads it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jitney.batch import Adapter
from jitney.config import EngineConfig
from jitney.engine.grammars import Compile
from jitney.engine.source import Source
from jitney.execution.protocols import Runner


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model, as an engine needs it."""

    runner: Runner
    tokenizer: bytes
    """The tokenizer's data, for the front; empty if the front had them already."""
    compile_grammar: Compile
    adapters: Source[Adapter] | None = None
    """None: the model takes no adapters."""


LoadModel = Callable[[EngineConfig, bytes], EngineParts]
"""Loads a model. The bytes are its tokenizer's data if the front has them, else empty. Raises a
JitneyError or MemoryError."""
