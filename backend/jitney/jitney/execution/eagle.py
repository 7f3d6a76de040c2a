"""A head that proposes tokens from the model's own hidden states (Li et al. 2024, EAGLE).

It is a checkpoint of few layers, of the model's vocabulary and hidden size, and a matrix beside it.
At position p it takes the model's hidden state there, times the matrix, plus its own embedding of
the token at p + 1, and predicts the hidden state there, and so the token at p + 2. From then on it
is fed with what it has predicted. Its K and V stand under the same block numbers as the model's: of
a full block that another sequence finds, the last entry may be for another token behind it, which
costs a proposal at most. Part of the runner.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from jitney.errors import ConfigError
from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.checkpoint import resolve_model
from jitney.execution.draft import behind, newest
from jitney.execution.interface import HiddenStates, LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample
from jitney.messages import Batch, Row, RowOutput

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


class EagleHead:
    """Owns the module and its caches."""

    def __init__(
        self, model: LoadedModel, weight: Tensor, caches: list[LayerCache], block_size: int
    ) -> None:
        self.caches = caches
        self._hidden = HiddenStates()
        self.reads: HiddenStates | None = self._hidden
        self._model, self._weight = model, weight
        self._block_size = block_size
        self._tables = BlockTables()

    def follow(
        self,
        batch: Batch,
        ids: Tensor,
        meta: AttentionMetadata,
        outputs: Callable[[], list[RowOutput]],
    ) -> None:
        """See :class:`draft.Follower`. Each step's K and V are computed, as they are of the model's
        hidden states; the first proposals come with them."""
        behind_ids, asked, indices = ids.roll(-1), list[tuple[Row, RowOutput]](), []
        begin = 0
        for row, output in zip(batch.rows, outputs(), strict=True):
            if output.token_ids:
                first = newest(row, output)
                index = begin + first.start - 1 - row.start
                behind_ids[index] = first.token_ids[0]
                if row.propose:
                    asked.append((first, output))
                    indices.append(index)
            elif row.end < len(row.prompt):
                behind_ids[begin + len(row.token_ids) - 1] = row.prompt[row.end]
            begin += len(row.token_ids)
        hidden = self._hidden.kept
        assert hidden is not None, "the model keeps its hidden states"
        while True:
            meta = replace(meta, plans={}, adapted=[])  # those are the model's
            chosen = to_device(indices or [0], ids.device)
            step = HiddenStates(hidden @ self._weight.T)
            paged = PagedStep(self.caches, meta, step)
            logits = self._model.forward(behind_ids, meta.positions, chosen, paged)
            if not asked:
                return
            made = sample(logits, [(row, row.sample[0]) for row, _ in asked]).wait()
            further, indices = [], []
            for (row, output), each, index in zip(asked, made, chosen.tolist(), strict=True):
                if each.error is None:
                    output.proposal.append(each.token_id)
                    if len(output.proposal) < row.propose:
                        further.append((behind(row, each.token_id), output))
                        indices.append(index)
            if not further:
                return
            assert step.kept is not None
            asked, hidden = further, step.kept[to_device(indices, ids.device)]
            indices = list(range(len(asked)))
            places = [replace(row, start=row.start - 1) for row, _ in asked]
            meta = build_metadata(places, self._block_size, self._model.device, self._tables)
            behind_ids = to_device([row.token_ids[0] for row, _ in asked], ids.device)
