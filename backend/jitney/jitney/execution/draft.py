"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

Its K and V stand under the same block numbers as the model's, in caches of its own. It computes
what a step computes, prompts as well, so that wherever the model's K and V are found, its own are
too.
Part of the runner.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.interface import HiddenStates, LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample
from jitney.messages import Row, RowOutput


class Follower(Protocol):
    """What computes each step that the model has computed, and proposes tokens."""

    caches: list[LayerCache]
    reads: HiddenStates | None
    """Where the model is to keep its hidden states."""

    def follow(
        self,
        rows: list[Row],
        ids: Tensor,
        meta: AttentionMetadata,
        outputs: Callable[[], list[RowOutput]],
    ) -> None:
        """Compute K and V of a step, ids [T], and set the proposals of the rows that ask for one.
        ``outputs`` waits for the step."""


class DraftModel:
    """Owns the module and its caches."""

    def __init__(self, model: LoadedModel, caches: list[LayerCache], block_size: int) -> None:
        self.caches = caches
        self.reads: HiddenStates | None = None
        self._model = model
        self._block_size = block_size
        self._tables = BlockTables()

    def follow(
        self,
        rows: list[Row],
        ids: Tensor,
        meta: AttentionMetadata,
        outputs: Callable[[], list[RowOutput]],
    ) -> None:
        """See :class:`Follower`."""
        self._forward(ids, replace(meta, plans={}, adapted=[]), to_device([0], ids.device))
        if not any(row.propose for row in rows):  # else the host must know the samples
            return
        pairs = zip(rows, outputs(), strict=True)
        asked = [(newest(row, each), each) for row, each in pairs if row.propose and each.token_ids]
        while asked:
            some = [row for row, _ in asked]
            meta = build_metadata(some, self._block_size, self._model.device, self._tables)
            ids = to_device([row.token_ids[0] for row in some], self._model.device)
            logits = self._forward(ids, meta, torch.arange(len(some), device=ids.device))
            # By the same numbers as the model's: from like distributions they choose alike.
            made = sample(logits, [(row, row.sample[0]) for row in some]).wait()
            further = []
            for (row, output), each in zip(asked, made, strict=True):
                if each.error is None:
                    output.proposal.append(each.token_id)
                    if len(output.proposal) < row.propose:
                        further.append((behind(row, each.token_id), output))
            asked = further

    def _forward(self, ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
        meta = replace(meta, adapted=[])  # they are the model's
        return self._model.forward(ids, meta.positions, indices, PagedStep(self.caches, meta))


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
