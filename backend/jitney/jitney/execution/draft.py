"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

Its K and V stand under the same block numbers as the model's, in caches of its own. It computes
nothing before a row asks for a proposal. Then it computes what it has not yet computed of that
row's tokens, and one further pass for each token of the proposal but the first. So it costs what is
asked of it, and a block that sequences share is computed once.

Called by the runner, once for each step that was launched. What else a draft model reads at each
token is its :class:`DraftInputs`; an ordinary one reads nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from torch import Tensor

from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample
from jitney.messages import Batch, Row, RowOutput


class DraftInputs(Protocol):
    """What a draft model reads beside tokens, at each token."""

    shift: int
    """How many fewer entries than known tokens it has: 1 if an entry reads the token behind it."""

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """The model computes this step, after these copies of blocks."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """The draft model is about to compute these tokens; ``predicted`` is what it predicted for
        them itself, if it did."""

    def predicted(self, tokens: Tensor) -> Tensor | None:
        """What the pass predicted behind these of its tokens, for the pass that computes them."""


class NoInputs:
    """Those of an ordinary draft model: a :class:`DraftInputs` without any."""

    shift = 0

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """Keeps nothing."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """Feeds nothing."""

    def predicted(self, tokens: Tensor) -> None:
        """Predicts nothing but tokens."""


@dataclass(slots=True)
class _Asked:
    """A row that asks for a proposal: the tokens to compute next, and where the proposal goes."""

    row: Row
    output: RowOutput


class DraftModel:
    """Owns the module and its caches."""

    def __init__(
        self,
        model: LoadedModel,
        caches: list[LayerCache],
        block_size: int,
        inputs: DraftInputs | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self._block_size = block_size
        self._inputs: DraftInputs = inputs or NoInputs()
        self._shift = self._inputs.shift
        self._tables = BlockTables()
        self._filled = [0] * caches[0].keys.shape[0]
        """By block: how many of its leading slots hold K and V of the tokens that the model's slots
        hold."""

    def follow(
        self, batch: Batch, meta: AttentionMetadata, outputs: Callable[[], list[RowOutput]]
    ) -> None:
        """A step was launched: set the proposals of the rows that ask for one, and how many tokens
        were read before. ``outputs`` waits for the step."""
        self._forget_overwritten(batch)
        self._inputs.step_launched(batch.copies, meta)
        if not any(row.propose for row in batch.rows):
            return  # without waiting: the step after this one may be launched meanwhile

        asked = []
        for row, output in zip(batch.rows, outputs(), strict=True):
            if not row.propose or not output.token_ids:
                continue
            unread = self._read(row, output)
            if output.read:
                asked.append(_Asked(unread, output))
        predicted = None
        try:
            while asked:
                asked, predicted = self._propose(asked, predicted)
        except BaseException:
            self._filled = [0] * len(self._filled)  # a pass that raised may have written anything
            raise

    def _read(self, row: Row, output: RowOutput) -> Row:
        """Note in ``output`` how many tokens of the row are read now, and how many later. Returns
        the row of those read now."""
        unread = self._unread(newest(row, output))
        output.read = min(len(unread.token_ids), row.most_read)
        output.unread = len(unread.token_ids) - output.read
        if not output.read:
            return unread
        del unread.token_ids[output.read :]
        end = unread.end
        if row.grammar is not None and not output.unread:
            end -= 1  # a grammar may force another token in the place of the newest one
        self._count_as_filled(unread, end)
        return unread

    def _propose(
        self, asked: list[_Asked], predicted: Tensor | None
    ) -> tuple[list[_Asked], Tensor | None]:
        """Compute these rows, and add a token to the proposals of those whose last known token is
        among what was computed. Returns the rows of the added tokens, where more are asked for, and
        what was predicted for them."""
        rows = [each.row for each in asked]
        device = self._model.device
        meta = build_metadata(rows, self._block_size, device, self._tables)
        ids = to_device([token for row in rows for token in row.token_ids], device)
        complete = [each for each in asked if self._is_complete(each.row)]
        complete_rows = [r for r, row in enumerate(rows) if self._is_complete(row)]
        # The last token of each complete row. Logits are computed of at least one token.
        last_tokens = meta.query_start[1:][to_device(complete_rows or [0], device)].long() - 1

        self._inputs.begin_pass(meta, predicted)
        step = PagedStep(self._caches, meta)
        logits = self._model.forward(ids, meta.positions, last_tokens, step)
        if not complete:
            return [], None

        further: list[_Asked] = []
        further_tokens: list[int] = []
        # Drawn by the same random numbers as the model's: like distributions then choose alike.
        pairs = [(self._as_drawn(each.row), each.row.sample[0]) for each in complete]
        samples = sample(logits, pairs).wait()
        for each, sampled, token in zip(complete, samples, last_tokens.tolist(), strict=True):
            if sampled.error is not None:
                continue
            proposal = each.output.proposal
            proposal.append(sampled.token_id)
            if len(proposal) < each.row.propose:
                further.append(_Asked(behind(each.row, sampled.token_id), each.output))
                further_tokens.append(token)
        if not further:
            return [], None
        return further, self._inputs.predicted(to_device(further_tokens, device))

    def _is_complete(self, row: Row) -> bool:
        """Whether the row ends with the last entry that its known tokens allow."""
        return row.end == len(row.prompt) + len(row.output) - self._shift

    def _as_drawn(self, row: Row) -> Row:
        """The row, at the position that the model will draw the same token for."""
        return replace(row, start=row.start + self._shift)

    def _forget_overwritten(self, batch: Batch) -> None:
        """Count nothing as filled where the model's tokens are about to differ."""
        size = self._block_size
        for _, destination in batch.copies:  # a copy goes on with another token
            self._filled[destination] = 0
        for row in batch.rows:
            if row.grammar is not None:  # it may have forced a token that was not the sampled one
                number, offset = divmod(max(row.start - self._shift, 0), size)
                block = row.block_table[number]
                self._filled[block] = min(self._filled[block], offset)
            first_begun = -(-row.start // size)
            last_begun = -(-row.end // size)
            for block in row.block_table[first_begun:last_begun]:  # blocks that this step begins
                self._filled[block] = 0

    def _unread(self, row: Row) -> Row:
        """The row of all tokens, up to its own, that are not computed."""
        size = self._block_size
        table = row.block_table
        start = row.start - self._shift
        for number in range(start // size + 1):
            filled = self._filled[table[number]]
            if filled < size:
                start = min(number * size + filled, start)
                break
        known = row.prompt + row.output
        return replace(row, token_ids=known[start + self._shift : row.end], start=start)

    def _count_as_filled(self, row: Row, end: int) -> None:
        """From now on the row's tokens below ``end`` count as computed, also for further rows of
        the same pass."""
        size = self._block_size
        for number in range(row.start // size, (end - 1) // size + 1):
            self._filled[row.block_table[number]] = min(end - number * size, size)


def newest(row: Row, output: RowOutput) -> Row:
    """The row of the newest token: the sample behind the last draft that equals its sample.

    A proposal follows the distribution alone. So it has neither the row's grammar nor its logprobs,
    nor its adapter, which is the model's alone.
    """
    known = len(row.token_ids) - row.drafts
    drafts = row.token_ids[known:]
    accepted = 0
    for draft, sampled in zip(drafts, output.token_ids, strict=False):
        if draft != sampled:
            break
        accepted += 1
    last_right = replace(
        row,
        token_ids=row.token_ids[: known + accepted],
        params=msgspec.structs.replace(row.params, logprobs=None),
        grammar=None,
        adapter=None,
        drafts=0,
        output=row.output + drafts[:accepted],
    )
    return behind(last_right, output.token_ids[accepted])


def behind(row: Row, token: int) -> Row:
    """The row of one more ``token``."""
    return replace(row, token_ids=[token], start=row.end, output=[*row.output, token])
