"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

Its K and V stand under the same block numbers as the model's, in caches of its own. It computes
nothing before a row asks for a proposal. Then it *reads* those of the row's tokens that it has not
yet read: it computes their K and V. The last of them gives the first token of the proposal, and
each further token takes one further pass. So it costs what is asked of it, and a block that
sequences share is computed once.

Called by the runner, once for each step that was launched. What a draft model needs at each token
beside its id is its :class:`DraftInputs`; an ordinary one needs nothing else.

Positions are those of the sequence. An *entry* is what the caches hold for one position. A head
(``eagle``) computes entry p from the token at p + 1, so it has one entry fewer than there are known
tokens, and a row of its own starts ``shift`` = 1 before the token that it reads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from torch import Tensor

from jitney.batch import Batch, Row, RowOutput
from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample


class DraftInputs(Protocol):
    """What a draft model needs at each token beside its id."""

    shift: int
    """1 if entry p is computed from the token at p + 1, else 0: see the module's docstring."""

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """The model computes this step, after these copies of blocks."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """The draft model is about to compute these tokens. ``predicted`` is set if they are its
        own proposals: what :meth:`predicted` returned for them."""

    def predicted(self, tokens: Tensor) -> Tensor | None:
        """What the last pass predicted behind these ``tokens`` (indices among its own), to be given
        to the pass that computes the next ones."""


class NoInputs:
    """The :class:`DraftInputs` of an ordinary draft model, which needs none."""

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
        """By block: how many of its leading slots hold an entry for the very tokens for which the
        model's slots there hold K and V."""

    def follow(
        self, batch: Batch, meta: AttentionMetadata, outputs: Callable[[], list[RowOutput]]
    ) -> None:
        """A step was launched: set, in the outputs of the rows that ask for a proposal, the
        proposal and how many tokens were read for it. ``outputs`` waits for the step."""
        self._forget_overwritten(batch)
        self._inputs.step_launched(batch.copies, meta)
        if not any(row.propose for row in batch.rows):
            return  # without waiting for the step, so that the next one can be launched meanwhile

        asked = []
        for row, output in zip(batch.rows, outputs(), strict=True):
            if not row.propose or not output.token_ids:
                continue
            to_read = self._plan_reading(row, output)
            if to_read is not None:
                asked.append(_Asked(to_read, output))
        predicted = None
        try:
            while asked:
                asked, predicted = self._propose(asked, predicted)
        except BaseException:
            self._filled = [0] * len(self._filled)  # a pass that raised may have written anything
            raise

    def _plan_reading(self, row: Row, output: RowOutput) -> Row | None:
        """Note in ``output`` how many tokens of the row are read now, at most ``most_read``, and
        how many later. Returns the row of those to read now; None if there are none."""
        unread = self._unread(newest(row, output))
        output.read = min(len(unread.token_ids), row.most_read)
        output.unread = len(unread.token_ids) - output.read
        if not output.read:
            return None
        to_read = replace(unread, token_ids=unread.token_ids[: output.read])
        end = to_read.end
        if row.grammar is not None and not output.unread:
            end -= 1  # a grammar may force another token in the place of the newest one
        self._count_as_filled(to_read, end)
        return to_read

    def _propose(
        self, asked: list[_Asked], predicted: Tensor | None
    ) -> tuple[list[_Asked], Tensor | None]:
        """One pass: compute these rows, and add a token to each proposal whose row is complete.

        Returns the rows of the added tokens, where more are asked for, and the inputs that the pass
        predicted for them: the arguments of the next pass.
        """
        rows = [each.row for each in asked]
        device = self._model.device
        meta = build_metadata(rows, self._block_size, device, self._tables)
        ids = to_device([token for row in rows for token in row.token_ids], device)
        complete = [r for r, row in enumerate(rows) if self._is_complete(row)]
        # The last token of each complete row. A model computes logits of at least one token.
        last_tokens = meta.query_start[1:][to_device(complete or [0], device)].long() - 1

        self._inputs.begin_pass(meta, predicted)
        step = PagedStep(self._caches, meta)
        logits = self._model.forward(ids, meta.positions, last_tokens, step)
        if not complete:
            return [], None

        pairs = [(self._as_sampled(rows[r]), rows[r].sample[0]) for r in complete]
        samples = sample(logits, pairs).wait()
        further: list[_Asked] = []
        further_tokens: list[int] = []
        for r, sampled, token in zip(complete, samples, last_tokens.tolist(), strict=True):
            if sampled.error is not None:
                continue  # the proposal ends here
            proposal = asked[r].output.proposal
            proposal.append(sampled.token_id)
            if len(proposal) < rows[r].propose:
                further.append(_Asked(behind(rows[r], sampled.token_id), asked[r].output))
                further_tokens.append(token)
        if not further:
            return [], None
        return further, self._inputs.predicted(to_device(further_tokens, device))

    def _is_complete(self, row: Row) -> bool:
        """Whether the row ends with the last entry for which the token is known."""
        return row.end == len(row.prompt) + len(row.output) - self._shift

    def _as_sampled(self, row: Row) -> Row:
        """The row moved to the position for which the model will sample the same token. Both then
        use the same random numbers, so that similar distributions give the same token."""
        return replace(row, start=row.start + self._shift)

    def _forget_overwritten(self, batch: Batch) -> None:
        """Count as unread what the model's slots are about to hold other tokens for."""
        size = self._block_size
        for _, destination in batch.copies:
            # The copy is made in the model's caches alone, and goes on with a token of its own.
            self._filled[destination] = 0
        for row in batch.rows:
            if row.grammar is not None:
                # It may have forced a token in the place of the one that was sampled and read.
                number, offset = divmod(max(row.start - self._shift, 0), size)
                block = row.block_table[number]
                self._filled[block] = min(self._filled[block], offset)
            # Blocks whose first slot this step writes were another sequence's before.
            first = math.ceil(row.start / size)
            stop = math.ceil(row.end / size)
            for block in row.block_table[first:stop]:
                self._filled[block] = 0

    def _unread(self, row: Row) -> Row:
        """The row of all tokens up to the end of ``row`` that are not read. It has at least the
        last of them, whose pass gives the proposal's first token."""
        size = self._block_size
        start = row.start - self._shift
        for number in range(start // size + 1):
            filled = self._filled[row.block_table[number]]
            if filled < size:  # the first block with a missing entry
                start = min(number * size + filled, start)
                break
        known = row.prompt + row.output
        first_token = start + self._shift
        return replace(row, token_ids=known[first_token : row.end], start=start)

    def _count_as_filled(self, row: Row, end: int) -> None:
        """Count the row's tokens at positions below ``end`` as read: from now on, and so for the
        rows behind it in the same pass, which may share its blocks."""
        size = self._block_size
        for number in range(row.start // size, (end - 1) // size + 1):
            self._filled[row.block_table[number]] = min(end - number * size, size)


def newest(row: Row, output: RowOutput) -> Row:
    """The row of the newest token alone: what was sampled behind the last accepted draft.

    It has no logprobs, no grammar and no adapter: a draft model has none of these.
    """
    known = len(row.token_ids) - row.drafts
    drafts = row.token_ids[known:]
    accepted = 0
    for draft, sampled in zip(drafts, output.token_ids, strict=False):
        if draft != sampled:
            break
        accepted += 1
    last_accepted = replace(
        row,
        token_ids=row.token_ids[: known + accepted],
        params=msgspec.structs.replace(row.params, logprobs=None),
        grammar=None,
        adapter=None,
        drafts=0,
        output=row.output + drafts[:accepted],
    )
    return behind(last_accepted, output.token_ids[accepted])


def behind(row: Row, token: int) -> Row:
    """The row of one ``token`` that follows those of ``row``."""
    return replace(row, token_ids=[token], start=row.end, output=[*row.output, token])
