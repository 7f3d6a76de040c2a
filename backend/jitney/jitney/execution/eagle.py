"""A head proposes tokens from the model's own hidden states (Li et al. 2024, EAGLE).

It is a checkpoint of few layers, of the model's vocabulary and hidden size, and a matrix beside it.
At position p it takes the model's hidden state there, times the matrix, plus its own embedding of
the token at p + 1, and predicts the hidden state there, and so the token at p + 2. From then on it
is fed with what it has predicted.

So it is a draft model whose inputs are kept for it: one hidden state for each slot of the KV cache,
because it reads them only once a row asks. Of a full block that another sequence finds, the last
entry may be for another token behind it, which costs a proposal at most. Part of the runner.
"""

import torch
from torch import Tensor

from jitney.errors import ConfigError
from jitney.execution.attention import AttentionMetadata
from jitney.execution.checkpoint import resolve_model
from jitney.execution.interface import HiddenStates, LoadedModel

WEIGHT = "hidden.weight"


def read_weight(name: str, target: LoadedModel) -> Tensor:
    """The matrix [hidden size, hidden size] of the head in folder ``name``, from its file
    ``hidden.safetensors``. Raises ConfigError if it is no head of ``target``."""
    from safetensors.torch import load_file

    path, size = resolve_model(name) / "hidden.safetensors", target.config.hidden_size
    found = load_file(path).get(WEIGHT) if path.is_file() else None
    if found is None or found.shape != (size, size):
        bound = f"a folder with {WEIGHT} [{size}, {size}] in hidden.safetensors"
        raise ConfigError.of("speculation.model", name, bound)
    return found.to(target.device, target.dtype)


class HeadInputs:
    """Owns the model's hidden states, by slot."""

    def __init__(self, weight: Tensor, num_blocks: int, block_size: int) -> None:
        self.states = HiddenStates()
        """Where the model puts those of the step that it computes."""
        self._weight = weight
        self._kept = torch.zeros(
            (num_blocks, block_size, len(weight)), dtype=weight.dtype, device=weight.device
        )

    def keep(self, copies: list[tuple[int, int]], meta: AttentionMetadata) -> None:
        """A step was launched: take its states, after its copies."""
        if copies:
            sources, destinations = zip(*copies, strict=True)
            self._kept[list(destinations)] = self._kept[list(sources)]
        assert self.states.kept is not None, "the model keeps its hidden states"
        self._kept.flatten(0, 1)[meta.slot_mapping] = self.states.kept

    def of(self, meta: AttentionMetadata) -> Tensor:
        """The states [T, hidden size] at the slots of a pass."""
        return self._kept.flatten(0, 1)[meta.slot_mapping]

    def enter(self, states: Tensor) -> HiddenStates:
        """What a pass adds to its embeddings, and keeps."""
        return HiddenStates(states @ self._weight.T)
