"""A head proposes tokens from the model's own hidden states (Li et al. 2024, EAGLE).

A head is a checkpoint of few layers, of the model's vocabulary and hidden size, with a matrix
beside it. At position p it reads the model's hidden state there, times the matrix, plus its own
embedding of the token at p + 1. It predicts the hidden state of p + 1, and so the token at p + 2.
Further tokens follow from what it has predicted.

So a head is a draft model (``draft``) with inputs of its own: one hidden state for each slot of the
KV cache, kept because the head reads them only once a row asks. A full block can be shared by
sequences that go on differently. The head's last entry in it was then computed from the next token
of only one of them; for the others it is wrong, which costs them a proposal at most.

No other module knows of hidden states. :class:`OpenModel` reads them from the outside, and only
where the loader asks for one, with drafter ``eagle``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import AttentionMetadata
from jitney.execution.checkpoint import resolve_model
from jitney.execution.interface import LoadedModel, PagedFunction

WEIGHT = "hidden.weight"


def is_asked_for(config: EngineConfig) -> bool:
    """Whether option ``speculation`` names a head."""
    return config.speculation is not None and config.speculation.drafter == "eagle"


def refuse_on_gpu(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for a head that would not run on a CPU."""
    if is_asked_for(config) and device.type != "cpu":
        raise ConfigError.of("speculation.drafter", "eagle", "another one on a GPU")


def read_weight(config: EngineConfig, target: LoadedModel, head: LoadedModel) -> Tensor:
    """The matrix [hidden size, hidden size] of the head that option ``speculation`` names, from its
    file ``hidden.safetensors``. Raises ConfigError if it is no head of ``target``."""
    assert config.speculation is not None
    name = config.speculation.model
    assert name is not None
    size = target.config.hidden_size
    own_size = head.config.hidden_size
    if own_size != size:
        bound = f"a head of hidden size {size:,}, not {own_size:,}"
        raise ConfigError.of("speculation.model", name, bound)

    path = resolve_model(name) / "hidden.safetensors"
    weight = load_file(path).get(WEIGHT) if path.is_file() else None
    if weight is None or weight.shape != (size, size):
        bound = f"a folder with {WEIGHT} [{size}, {size}] in hidden.safetensors"
        raise ConfigError.of("speculation.model", name, bound)
    return weight.to(target.device, target.dtype)


def block_bytes(weight: Tensor, block_size: int) -> int:
    """Bytes of the hidden states of a block's tokens, for a head with this matrix."""
    return block_size * weight[0].nbytes


class OpenModel:
    """Reads a model's last hidden states, and adds to its embeddings: opens what is between them.

    Made before the module is rearranged for speed: the embedding that it puts in keeps kernels from
    running a whole step as one native call, in which there would be no output layer to watch.
    Afterwards, :meth:`follow` gives the model whose steps it reads.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.states: Tensor | None = None
        """[T, hidden size] of the last step: what the last norm gave. The next step may overwrite
        it."""
        self._embedding = _AddingEmbedding(module.get_input_embeddings())
        self._indices: Tensor | None = None
        """While a step runs: the tokens whose logits are asked for."""
        module.set_input_embeddings(self._embedding)

    def follow(self, model: LoadedModel) -> LoadedModel:
        """The model, its output layer watched from now on.

        The module is asked for the logits of every token, so that the output layer is given every
        state; the hook before that layer then leaves it those that were really asked for.
        """
        step = model.forward

        def forward(
            ids: Tensor, positions: Tensor, indices: Tensor, paged: PagedFunction
        ) -> Tensor:
            self._indices = indices
            try:
                every = torch.arange(len(ids), device=ids.device)
                return step(ids, positions, every, paged)
            finally:
                self._indices = None

        output_layer: Any = model.module.get_output_embeddings()
        output_layer.register_forward_pre_hook(self._before_output)
        return replace(model, forward=forward)

    def add(self, states: Tensor) -> None:
        """Add ``states`` [T, hidden size] to the embeddings of the next step's tokens."""
        self._embedding.added = states

    def _before_output(self, layer: nn.Module, given: tuple[Tensor]) -> tuple[Tensor] | None:
        """Keep the states of all tokens, and hand on those whose logits are asked for."""
        if self._indices is None:
            return None
        (states,) = given
        self.states = states.reshape(-1, states.shape[-1])
        return (states[..., self._indices, :],)


class _AddingEmbedding(nn.Module):
    """The embedding, plus what was set for this call."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.added: Tensor | None = None

    @property
    def weight(self) -> Any:
        """The embedding's own."""
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(ids)
        if self.added is None:
            return embedded
        added = self.added
        self.added = None
        return embedded + added


class HeadInputs:
    """What a head reads beside tokens: a ``draft.DraftInputs``. Owns the hidden states by slot."""

    shift = 1

    def __init__(
        self,
        weight: Tensor,
        target: OpenModel,
        head: OpenModel,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self._weight = weight
        self._target = target
        self._head = head
        shape = (num_blocks, block_size, len(weight))
        self._kept = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """Make the step's copies of blocks, then keep the states of its tokens."""
        if copies:
            sources = [source for source, _ in copies]
            destinations = [destination for _, destination in copies]
            self._kept[destinations] = self._kept[sources]
        states = self._target.states
        assert states is not None, "the model's output layer is not called as a module"
        self._kept.flatten(0, 1)[meta.slot_mapping] = states

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """Add states [T, hidden size] to the head's embeddings: those that it ``predicted`` itself,
        or those that the model's steps left in the tokens' slots."""
        states = predicted
        if states is None:
            states = self._kept.flatten(0, 1)[meta.slot_mapping]
        self._head.add(states @ self._weight.T)

    def predicted(self, tokens: Tensor) -> Tensor:
        """The states that the last pass predicted behind these ``tokens``, indices of its own."""
        states = self._head.states
        assert states is not None
        return states[tokens]
