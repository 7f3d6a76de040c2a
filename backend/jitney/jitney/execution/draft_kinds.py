"""The kinds of draft models, as the loader sees them: what one adds to loading, beside a second
model. An ordinary draft model adds nothing, a head (``eagle``) reads the model's hidden states.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from jitney.config import EngineConfig
from jitney.execution import eagle
from jitney.execution.draft import DraftInputs, NoInputs
from jitney.execution.interface import LoadedModel
from jitney.execution.memory import DraftBytes

Wrap = Callable[[LoadedModel], LoadedModel]
"""Called with a model once an accelerator has rearranged it."""


class DraftKind(Protocol):
    """One kind, for one load. The methods stand in the order in which a load calls them. Those that
    need both models are called only if there is a draft model."""

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError if the kind does not run there."""

    def open(self, model: LoadedModel) -> Wrap:
        """Called with the model, then with its draft model, each before an accelerator rearranges
        it. May change the module. Returns what completes the change."""

    def join(self, config: EngineConfig, model: LoadedModel, draft: LoadedModel) -> None:
        """Read what joins the two models. Raises ConfigError or CheckpointError."""

    def added_bytes(self, hidden_size: int, dtype: torch.dtype, block_size: int) -> DraftBytes:
        """For a model of this hidden size and dtype."""

    def inputs(self, num_blocks: int, block_size: int) -> DraftInputs:
        """What the draft model will read beside token ids. Allocates what is kept for each slot."""


class Ordinary:
    """No draft model, or one that reads token ids alone."""

    def check_device(self, device: torch.device) -> None:
        """Runs on any."""

    def open(self, model: LoadedModel) -> Wrap:
        """Changes nothing."""
        return _unchanged

    def join(self, config: EngineConfig, model: LoadedModel, draft: LoadedModel) -> None:
        """Reads nothing."""

    def added_bytes(self, hidden_size: int, dtype: torch.dtype, block_size: int) -> DraftBytes:
        """None."""
        return DraftBytes(weights=0, block=0)

    def inputs(self, num_blocks: int, block_size: int) -> NoInputs:
        """None."""
        return NoInputs()


def _unchanged(model: LoadedModel) -> LoadedModel:
    return model


def kind_of(config: EngineConfig) -> DraftKind:
    """The kind that option ``speculation`` asks for."""
    if config.speculation is not None and config.speculation.drafter == "eagle":
        return eagle.HeadKind()
    return Ordinary()
