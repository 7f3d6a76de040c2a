"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

Its K and V stand under the same block numbers as the model's, in caches of its own. It computes
nothing before a row asks for a proposal: then what it has not yet of that row's tokens, and further
passes for the proposal. So it costs what is asked of it, and what blocks have in common is computed
once. Part of the runner.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec
from torch import Tensor

from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.interface import HiddenStates, LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample
from jitney.messages import Batch, Row, RowOutput


class Follower(Protocol):
    """What learns of each step that the model computes, and proposes tokens."""

    caches: list[LayerCache]
    reads: HiddenStates | None
    """Where the model is to keep its hidden states."""

    def follow(
        self,
        batch: Batch,
        ids: Tensor,
        meta: AttentionMetadata,
        outputs: Callable[[], list[RowOutput]],
    ) -> None:
        """A step was launched, ids [T]: set the proposals of the rows that ask for one, and how
        many tokens were computed before. ``outputs`` waits for the step."""


class DraftModel:
    """Owns the module and its caches."""

    def __init__(
        self, model: LoadedModel, caches: list[LayerCache], block_size: int, most_tokens: int
    ) -> None:
        """It computes at most ``most_tokens`` in one pass; what is left of a row is for the next
        step that asks."""
        self.caches = caches
        self.reads: HiddenStates | None = None
        self._model = model
        self._block_size = block_size
        self._most_tokens = most_tokens
        self._tables = BlockTables()
        self._filled = [0] * caches[0].keys.shape[0]
        """By block: its leading slots whose K and V are of the tokens that the model's are of."""

    def follow(
        self,
        batch: Batch,
        ids: Tensor,
        meta: AttentionMetadata,
        outputs: Callable[[], list[RowOutput]],
    ) -> None:
        """See :class:`Follower`."""
        self._take_over(batch)
        if not any(row.propose for row in batch.rows):  # else the host must know the samples
            return
        asked, left = list[tuple[Row, RowOutput]](), self._most_tokens
        for row, output in zip(batch.rows, outputs(), strict=True):
            if row.propose and output.token_ids and left:
                known = self._catch_up(newest(row, output), left)
                output.caught = len(known.token_ids)
                left -= output.caught
                asked.append((known, output))
        try:
            while asked:
                asked = self._propose(asked)
        except BaseException:
            self._filled = [0] * len(self._filled)
            raise

    def _propose(self, asked: list[tuple[Row, RowOutput]]) -> list[tuple[Row, RowOutput]]:
        """Compute these rows, and add a token to the proposals of those that end with their last
        known one. Returns the rows of these tokens, where more are wanted."""
        rows, device = [row for row, _ in asked], self._model.device
        meta = build_metadata(rows, self._block_size, device, self._tables)
        ids = to_device([token for row in rows for token in row.token_ids], device)
        ready = [i for i, row in enumerate(rows) if row.end == len(row.prompt) + len(row.output)]
        indices = meta.query_start[1:][to_device(ready or [0], device)].long() - 1
        step = PagedStep(self.caches, meta)
        logits = self._model.forward(ids, meta.positions, indices, step)
        further = []
        # By the same numbers as the model's: from like distributions they choose alike.
        made = sample(logits, [(rows[i], rows[i].sample[0]) for i in ready]).wait() if ready else []
        for i, each in zip(ready, made, strict=True):
            row, output = asked[i]
            if each.error is None:
                output.proposal.append(each.token_id)
                if len(output.proposal) < row.propose:
                    further.append((behind(row, each.token_id), output))
        return further

    def _take_over(self, batch: Batch) -> None:
        """Blocks were copied; and what the model has written, the draft model has not."""
        sources = [self._filled[source] for source, _ in batch.copies]
        for (_, destination), count in zip(batch.copies, sources, strict=True):
            self._filled[destination] = count
        for row in batch.rows:
            first, offset = divmod(row.start, self._block_size)
            for block in row.block_table[first : (row.end - 1) // self._block_size + 1]:
                self._filled[block] = min(self._filled[block], offset)
                offset = 0

    def _catch_up(self, row: Row, most: int) -> Row:
        """The row of all tokens, up to its own, that are not computed, or of the first ``most``.
        From now on they count as computed, for further rows of the same pass too."""
        size, table, start = self._block_size, row.block_table, row.start
        for number in range(start // size + 1):
            if self._filled[table[number]] < size:
                start = min(number * size + self._filled[table[number]], start)
                break
        tokens = (row.prompt + row.output)[start : min(row.end, start + most)]
        end = start + len(tokens)
        for number in range(start // size, (end - 1) // size + 1):
            self._filled[table[number]] = min(end - number * size, size)
        return replace(row, token_ids=tokens, start=start)


def newest(row: Row, output: RowOutput) -> Row:
    """The row of the sample behind the drafts that equal their samples. Nothing but the choice
    counts: neither its grammar nor its logprobs; and adapters are the model's alone."""
    known, accepted = len(row.token_ids) - row.drafts, 0
    drafts = row.token_ids[known:]
    while drafts[accepted : accepted + 1] == output.token_ids[accepted : accepted + 1]:
        accepted += 1
    params = msgspec.structs.replace(row.params, logprobs=None)
    before = replace(
        row,
        params=params,
        grammar=None,
        adapter=None,
        drafts=0,
        output=row.output + drafts[:accepted],
    )
    before.token_ids = row.token_ids[: known + accepted]
    return behind(before, output.token_ids[accepted])


def behind(row: Row, token: int) -> Row:
    return replace(row, token_ids=[token], start=row.end, output=[*row.output, token])
