"""A draft model that proposes tokens from the model's hidden states (Li et al. 2024, EAGLE).

It is called a head: a checkpoint of few layers, of the model's vocabulary and hidden size, and a
matrix in a file of its own. The head's input at position p is the model's hidden state at p, times
the matrix, plus the head's own embedding of the token at p + 1. The head predicts the hidden state
at p + 1, and so the token at p + 2. For further tokens, its own predictions take the place of the
model's hidden states.

Like any draft model (``draft``) a head computes nothing before a row asks for a proposal. For that
:class:`HeadInputs` keeps the model's hidden states, one for each slot of the KV cache.

Sequences that share a full block may go on with different tokens. The head's entry for the block's
last slot was computed from the next token of one of them, and is wrong for the others. That can
cost them a proposal; an output never depends on it.

Only this module knows of hidden states. A load with drafter ``eagle`` has a :class:`HeadSetup`,
which installs a :class:`StateTap` in the model and another one in the head: from the outside, they
get hidden states out of a module and into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import CheckpointError, ConfigError, first_line
from jitney.execution.attention import AttentionMetadata
from jitney.execution.checkpoint import resolve_model
from jitney.execution.draft import DraftBytes
from jitney.execution.interface import LoadedModel, PagedFunction

WEIGHT = "hidden.weight"
_FILE = "hidden.safetensors"


def read_weight(config: EngineConfig, target: LoadedModel, head: LoadedModel) -> Tensor:
    """The matrix [hidden size, hidden size] of the head that option ``speculation`` names, from its
    file ``hidden.safetensors``. Raises ConfigError if it is no head of ``target``, and
    CheckpointError if the file is broken."""
    assert config.speculation is not None
    name = config.speculation.model
    assert name is not None
    size = target.config.hidden_size
    size_of_head = head.config.hidden_size
    if size_of_head != size:
        bound = f"a head of hidden size {size:,}, not {size_of_head:,}"
        raise ConfigError.of("speculation.model", name, bound)

    weight = _read_tensors(resolve_model(name)).get(WEIGHT)
    if weight is None or weight.shape != (size, size):
        bound = f"a folder with {WEIGHT} [{size}, {size}] in {_FILE}"
        raise ConfigError.of("speculation.model", name, bound)
    return weight.to(target.device, target.dtype)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the head's file; none if there is no such file."""
    path = folder / _FILE
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{_FILE} is truncated, corrupt or not a safetensors file: {first_line(error, folder)}"
        ) from None


class StateTap:
    """Gets hidden states out of a model, and into one: reads what the output layer is given, and
    adds to what the embedding gives.

    It is installed in two parts:

    1. Creating the tap, before an accelerator rearranges the module, replaces the embedding by one
       of a class that accelerators do not know. An accelerator that meets an unknown embedding does
       not run a whole step as one native call. So the output layer is called as a module, and its
       input can be read.
    2. :meth:`wrap`, called with the rearranged model, returns a model whose every step is read.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.last: Tensor | None = None
        """[T, hidden size] of the last step's tokens, behind the last norm. The next step may
        overwrite them. None if the output layer was not called as a module."""
        self._embedding = _AddingEmbedding(module.get_input_embeddings())
        self._indices: Tensor | None = None
        """While a step runs: the tokens whose logits are asked for."""
        module.set_input_embeddings(self._embedding)

    def wrap(self, model: LoadedModel) -> LoadedModel:
        """The model, its hidden states read in every step.

        The output layer gets only the states of tokens whose logits are asked for. So the model is
        asked for the logits of all tokens, and a hook in front of the output layer keeps all states
        and hands the layer those of the tokens that were really asked for.
        """
        step = model.forward

        def forward(
            ids: Tensor, positions: Tensor, indices: Tensor, paged: PagedFunction
        ) -> Tensor:
            self._indices = indices
            self.last = None  # or a step that bypasses the output layer would keep old states
            try:
                all_tokens = torch.arange(len(ids), device=ids.device)
                return step(ids, positions, all_tokens, paged)
            finally:
                self._indices = None

        output_layer: Any = model.module.get_output_embeddings()
        output_layer.register_forward_pre_hook(self._before_output)
        return replace(model, forward=forward)

    def add(self, states: Tensor) -> None:
        """Add ``states`` [T, hidden size] to the embeddings of the next step's tokens."""
        self._embedding.added = states

    def _before_output(self, layer: nn.Module, given: tuple[Tensor]) -> tuple[Tensor] | None:
        """The hook in front of the output layer; see :meth:`wrap`."""
        if self._indices is None:
            return None
        (states,) = given
        self.last = states.reshape(-1, states.shape[-1])
        return (states[..., self._indices, :],)


class _AddingEmbedding(nn.Module):
    """An embedding that adds ``added`` to its next result."""

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
        added = self.added
        if added is None:
            return embedded
        self.added = None
        return embedded + added


class HeadInputs:
    """What a head reads beside token ids: a ``draft.DraftInputs``. Owns the hidden states that are
    kept by slot."""

    shift = 1

    def __init__(
        self,
        weight: Tensor,
        model_tap: StateTap,
        head_tap: StateTap,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """``weight`` is the head's matrix; the taps are in the model and in the head."""
        self._weight = weight
        self._model_tap = model_tap
        self._head_tap = head_tap
        shape = (num_blocks, block_size, len(weight))
        self._kept = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        """By block and slot: the model's hidden state of the token there."""

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """Make the step's copies of blocks, then keep the states of its tokens."""
        if copies:
            sources = [source for source, _ in copies]
            destinations = [destination for _, destination in copies]
            self._kept[destinations] = self._kept[sources]
        states = self._model_tap.last
        assert states is not None, "the model's output layer is not called as a module"
        self._kept.flatten(0, 1)[meta.slot_mapping] = states

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """Give the head the states that go with the tokens of this pass: its own predictions, or
        the model's states, kept in the tokens' slots."""
        states = predicted
        if states is None:
            states = self._kept.flatten(0, 1)[meta.slot_mapping]
        self._head_tap.add(states @ self._weight.T)

    def predictions_at(self, token_indices: Tensor) -> Tensor:
        """The hidden states that the last pass predicted at these of its tokens."""
        states = self._head_tap.last
        assert states is not None
        return states[token_indices]


class HeadSetup:
    """What a head adds to a load: a ``draft_setup.DraftSetup``."""

    def __init__(self) -> None:
        self._taps: list[StateTap] = []
        """Of the model, then of the head."""
        self._weight: Tensor | None = None

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError on a GPU: a head runs on a CPU only."""
        if device.type != "cpu":
            raise ConfigError.of("speculation.drafter", "eagle", "another one on a GPU")

    def before_rearranging(self, model: LoadedModel) -> Callable[[LoadedModel], LoadedModel]:
        """Install a tap. Returns :meth:`StateTap.wrap`, for the rearranged model."""
        tap = StateTap(model.module)
        self._taps.append(tap)
        return tap.wrap

    def join(self, config: EngineConfig, model: LoadedModel, draft: LoadedModel) -> None:
        """Read the head's matrix; see :func:`read_weight`."""
        self._weight = read_weight(config, model, draft)

    def added_bytes(self, hidden_size: int, dtype: torch.dtype, block_size: int) -> DraftBytes:
        """The matrix, and the hidden states that are kept for a block's slots."""
        return DraftBytes(
            weights=hidden_size * hidden_size * dtype.itemsize,
            block=block_size * hidden_size * dtype.itemsize,
        )

    def inputs(self, num_blocks: int, block_size: int) -> HeadInputs:
        """Allocates a hidden state for each slot of the cache."""
        assert self._weight is not None
        of_model, of_head = self._taps
        return HeadInputs(
            weight=self._weight,
            model_tap=of_model,
            head_tap=of_head,
            num_blocks=num_blocks,
            block_size=block_size,
        )
