"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

It has caches of its own, in which a sequence has the same block numbers as in the model's. It
computes nothing before a row asks for a proposal. Then it *reads* the row's tokens: one pass
computes K and V of those that it has not read yet. The logits of the last one give the first token
of the proposal, and each further token takes one more pass. So a draft model costs only what is
asked of it, and a block that sequences share is read once.

The runner calls it once for each step that was launched. Beside token ids, a draft model may need
:class:`DraftInputs`; an ordinary one has :class:`NoInputs`.

An *entry* is the K and V of one position of a sequence. An ordinary draft model computes entry p
from the token at p, and a head (``eagle``) from the token at p + 1: :attr:`DraftInputs.shift` is 0
or 1. In this module, a row that is made for a pass counts entries: it starts at entry ``start``,
and its first token is the one at ``start + shift``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec
from torch import Tensor

from jitney.batch import Batch, Row, RowOutput
from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample


class DraftInputs(Protocol):
    """What a draft model needs beside token ids."""

    shift: int
    """1 if entry p is computed from the token at p + 1, else 0."""

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """The model computes this step, after these copies of blocks."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """The draft model is about to compute these tokens. ``predicted`` is set if they are its
        own proposals: it is what :meth:`predictions_at` returned for them."""

    def predictions_at(self, tokens: Tensor) -> Tensor | None:
        """What the last pass predicted at these ``tokens``, as indices among its own. It is given
        to the pass that computes the tokens behind them."""


class NoInputs:
    """The :class:`DraftInputs` of an ordinary draft model, which needs none."""

    shift = 0

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """Keeps nothing."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """Gives nothing."""

    def predictions_at(self, tokens: Tensor) -> None:
        """Predicts nothing but tokens."""


@dataclass(slots=True)
class _Proposal:
    """A proposal in the making."""

    row: Row
    """The tokens that the next pass computes for it."""
    output: RowOutput
    """The output of the model's row: its ``proposal`` grows."""
    length: int
    """How many tokens are asked for."""


class _Pass(NamedTuple):
    """A pass of the draft model that is still to be made."""

    proposals: list[_Proposal]
    predicted: Tensor | None
    """The argument of :meth:`DraftInputs.begin_pass`."""


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
        num_blocks = caches[0].keys.shape[0]
        self._valid = [0] * num_blocks
        """By block: how many of its first slots have a valid entry. An entry is valid if it was
        computed from the sequence whose K and V the model's caches hold there."""

    def follow(
        self, batch: Batch, meta: AttentionMetadata, outputs: Callable[[], list[RowOutput]]
    ) -> None:
        """A step was launched: make the proposals that its rows ask for, and set ``proposal``,
        ``read`` and ``unread`` in the outputs of these rows. ``outputs`` waits for the step."""
        self._invalidate(batch)
        self._inputs.step_launched(batch.copies, meta)
        if not any(row.propose for row in batch.rows):
            return  # without waiting for the step, so that the next one can be launched meanwhile

        proposals = []
        for row, output in zip(batch.rows, outputs(), strict=True):
            if not row.propose or not output.token_ids:
                continue
            to_read = self._plan_reading(row, output)
            if to_read is not None:
                proposals.append(_Proposal(to_read, output, row.propose))
        next_pass = _Pass(proposals, predicted=None) if proposals else None
        try:
            while next_pass is not None:
                next_pass = self._run(next_pass)
        except BaseException:
            self._valid = [0] * len(self._valid)  # a pass that raised may have written anything
            raise

    def _plan_reading(self, row: Row, output: RowOutput) -> Row | None:
        """The row of the tokens to read in this step; None if there are none. Sets in ``output``
        how many they are, and how many are left for later steps."""
        unread = self._unread(newest(row, output))
        output.read = min(len(unread.token_ids), row.most_read)
        output.unread = len(unread.token_ids) - output.read
        if not output.read:
            return None
        to_read = replace(unread, token_ids=unread.token_ids[: output.read])

        valid_end = to_read.end
        if row.grammar is not None and not output.unread:
            # The last token to read is the one that the model has just sampled. The grammar may
            # force another token at its position. If that one was a draft, it is accepted, and the
            # next row begins behind it: then ``_invalidate`` does not reach its entry.
            valid_end -= 1
        # Already now, because later rows of the same pass may share blocks with this one.
        self._count_as_valid(to_read, valid_end)
        return to_read

    def _run(self, this_pass: _Pass) -> _Pass | None:
        """Make a pass: compute the rows, and add a token to each proposal whose row is complete.
        Returns the pass for the proposals of which more tokens are asked for; None if there are
        none."""
        rows = [proposal.row for proposal in this_pass.proposals]
        device = self._model.device
        meta = build_metadata(
            rows,
            block_size=self._block_size,
            device=device,
            tables=self._tables,
        )
        ids = to_device([token for row in rows for token in row.token_ids], device)
        complete = [r for r, row in enumerate(rows) if self._is_complete(row)]
        # The last token of each complete row. A model computes logits of at least one token: if no
        # row is complete, those of row 0, which nobody reads.
        ends = meta.query_start[1:]
        last_tokens = ends[to_device(complete or [0], device)].long() - 1

        self._inputs.begin_pass(meta, this_pass.predicted)
        step = PagedStep(self._caches, meta)
        logits = self._model.forward(ids, meta.positions, last_tokens, step)
        if not complete:
            return None

        # A row that asks for a proposal samples for one sequence: ``sample`` has one index.
        pairs = [(self._as_sampled(rows[r]), rows[r].sample[0]) for r in complete]
        samples = sample(logits, pairs).wait()
        unfinished: list[_Proposal] = []
        tokens_of_unfinished: list[int] = []
        for r, sampled, last_token in zip(complete, samples, last_tokens.tolist(), strict=True):
            if sampled.error is not None:
                continue  # the proposal ends here
            proposal = this_pass.proposals[r]
            tokens = proposal.output.proposal
            tokens.append(sampled.token_id)
            if len(tokens) < proposal.length:
                proposal.row = behind(proposal.row, sampled.token_id)
                unfinished.append(proposal)
                tokens_of_unfinished.append(last_token)
        if not unfinished:
            return None
        predicted = self._inputs.predictions_at(to_device(tokens_of_unfinished, device))
        return _Pass(unfinished, predicted)

    def _is_complete(self, row: Row) -> bool:
        """Whether the row has the last token that is known, so that its logits give a new one."""
        num_known = len(row.prompt) + len(row.output)
        return row.end + self._shift == num_known

    def _as_sampled(self, row: Row) -> Row:
        """The row as the sampler sees it: with positions of tokens, not of entries.

        Random numbers depend on the position. So the draft model draws with the numbers that the
        model will use for the same position, and from similar distributions both draw the same id.
        """
        return replace(row, start=row.start + self._shift)

    # ------------------------------------------------------------------ which entries are valid

    def _invalidate(self, batch: Batch) -> None:
        """Forget the entries of all slots that this step gives to other tokens in the model's
        caches."""
        size = self._block_size
        for _, destination in batch.copies:
            # A fork copies a block in the model's caches alone.
            self._valid[destination] = 0
        for row in batch.rows:
            if row.grammar is not None:
                # In the step before, this draft model may have read drafts that the model sampled
                # too, although the grammar forced other tokens at their positions. The first of
                # these other tokens is the row's first token.
                number, offset = divmod(max(row.start - self._shift, 0), size)
                block = row.block_table[number]
                self._valid[block] = min(self._valid[block], offset)
            # The blocks whose first slot lies in [start, end): this step begins to fill them. Until
            # now, they may have belonged to another sequence.
            first_block = math.ceil(row.start / size)
            stop_block = math.ceil(row.end / size)
            for block in row.block_table[first_block:stop_block]:
                self._valid[block] = 0

    def _unread(self, row: Row) -> Row:
        """``row`` is one token, the newest of its sequence. Returns the row of all tokens up to it
        that are not read. The newest is always among them, because its logits are needed.

        ``row`` counts positions of tokens; the row that is returned counts entries.
        """
        size = self._block_size
        newest_entry = row.start - self._shift
        first_entry = newest_entry
        for number in range(newest_entry // size + 1):
            num_valid = self._valid[row.block_table[number]]
            if num_valid < size:
                first_missing = number * size + num_valid
                first_entry = min(first_missing, newest_entry)
                break
        # From entries back to positions of tokens.
        first_token = first_entry + self._shift
        end_token = row.end
        known = row.prompt + row.output
        return replace(row, token_ids=known[first_token:end_token], start=first_entry)

    def _count_as_valid(self, row: Row, end: int) -> None:
        """Count the row's entries up to ``end`` as valid."""
        size = self._block_size
        for number in range(row.start // size, (end - 1) // size + 1):
            self._valid[row.block_table[number]] = min(end - number * size, size)


def newest(row: Row, output: RowOutput) -> Row:
    """The row of the newest token alone: the one that the model sampled behind the last draft that
    it accepted.

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
