"""What a draft model adds to a load, beside a second model. An ordinary one adds nothing. A head
(``eagle``) reads the model's hidden states: it adds a tap in each of the two models, and a matrix.
Called by the loader and by ``weigh``.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from jitney.config import EngineConfig
from jitney.execution import eagle
from jitney.execution.draft import DraftBytes, DraftInputs, NoInputs
from jitney.execution.interface import LoadedModel

FinishModel = Callable[[LoadedModel], LoadedModel]
"""Called with a model once an accelerator has rearranged it, or if none fits. Returns the model to
run."""


class DraftSetup(Protocol):
    """The setup of drafts in one load. It keeps state from call to call. The methods stand in the
    order in which a load calls them. The last three are called only if there is a draft model."""

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError if the draft model does not run there."""

    def before_rearranging(self, model: LoadedModel) -> FinishModel:
        """Called with the model, then with its draft model, each before an accelerator rearranges
        it. May change the module."""

    def join(self, config: EngineConfig, model: LoadedModel, draft: LoadedModel) -> None:
        """Read what joins the two models. Raises ConfigError or CheckpointError."""

    def added_bytes(self, hidden_size: int, dtype: torch.dtype, block_size: int) -> DraftBytes:
        """For a model of this hidden size and dtype. ``weigh`` calls it, too."""

    def inputs(self, num_blocks: int, block_size: int) -> DraftInputs:
        """What the draft model will read beside token ids. Allocates what is kept for each slot."""


class OrdinarySetup:
    """No draft model, or one that reads token ids alone."""

    def check_device(self, device: torch.device) -> None:
        """Runs on any."""

    def before_rearranging(self, model: LoadedModel) -> FinishModel:
        """Changes nothing."""
        return _unchanged

    def join(self, config: EngineConfig, model: LoadedModel, draft: LoadedModel) -> None:
        """Reads nothing."""

    def added_bytes(self, hidden_size: int, dtype: torch.dtype, block_size: int) -> DraftBytes:
        """No bytes."""
        return DraftBytes(weights=0, block=0)

    def inputs(self, num_blocks: int, block_size: int) -> NoInputs:
        """Nothing but token ids."""
        return NoInputs()


def _unchanged(model: LoadedModel) -> LoadedModel:
    return model


def setup_for(config: EngineConfig) -> DraftSetup:
    """The setup that option ``speculation`` asks for, without any state yet."""
    if config.speculation is not None and config.speculation.drafter == "eagle":
        return eagle.HeadSetup()
    return OrdinarySetup()
