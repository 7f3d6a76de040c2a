"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

It has caches of its own, in which a sequence has the same block numbers as in the model's. It
computes nothing before a row asks for a proposal. Then it *reads* the row's tokens: one pass
computes K and V of those that it has not read yet. The logits of the last one give the first token
of the proposal, and each further token takes one more pass. So a draft model costs only what is
asked of it, and a block that sequences share is read once.

The runner calls it once for each step that was launched. Beside token ids, a draft model may need
:class:`DraftInputs`; an ordinary one has :class:`NoInputs`.

An *entry* is the K and V of one position in the draft model's caches. An ordinary draft model
computes entry p from the token at p, and a head (``eagle``) from the token at p + 1. For the tokens
a, b, c and d, each entry below stands for the token from which it is computed:

    position or number of the entry    0   1   2   3
    tokens                             a   b   c   d
    entries of an ordinary model       a   b   c   d      :attr:`DraftInputs.shift` is 0
    entries of a head                  b   c   d          :attr:`DraftInputs.shift` is 1

In this module ``first_entry`` and ``end_entry`` are numbers of entries. ``start`` and ``end`` of a
``Row`` are positions of tokens, except in the row that ``as_row`` makes for attention: there they
are numbers of entries.

*Forced tokens.* Where a grammar allows only one text, the scheduler appends the tokenizer's tokens
of that text (``batch.GrammarState.forced``). The mask allows other tokenizations too, so a step may
sample a token of one of these. The draft model reads that sample in the same step. Afterwards the
scheduler puts a forced token in its place, and the entry of the sample is wrong. There are two
cases. In both, a row has the token t at position 10 and the drafts d1 and d2 at 11 and 12, d1 is
sampled at 11, and after d1 the grammar forces a token at 12:

(a) d2 is sampled at 12, but another token f is forced. The next row begins at 12, with f. From its
    start one can tell that the entries of the tokens from 12 on are wrong.
(b) Another token s is sampled at 12, but d2 is forced. d2 is the row's draft, so it is accepted,
    because the model has its K and V already. The entry of s, at 12, is wrong. But the next row
    begins at 13, so its start suggests that the entry at 12 is right. Therefore, in a row with a
    grammar, the entry of the newest sample never counts as valid.
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
from jitney.execution.logits_processors import counts_of, is_penalized
from jitney.execution.machine import to_device
from jitney.execution.row_samples import end_of_output
from jitney.execution.sampler import SampledToken, sample


class DraftInputs(Protocol):
    """What a draft model needs beside token ids."""

    shift: int
    """1 if entry p is computed from the token at p + 1, else 0."""

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """The model computes this step, after these copies of blocks."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """The draft model is about to compute the tokens of ``meta``. ``predicted`` is None if they
        are tokens of the sequences. If they are the draft model's own proposals, it is what
        :meth:`predictions_at` returned after the pass before."""

    def predictions_at(self, token_indices: Tensor) -> Tensor | None:
        """The predictions that the last pass made beside logits, at the tokens with these indices
        in that pass. The caller hands them to :meth:`begin_pass` of the next pass, which computes
        the tokens that follow."""


class NoInputs:
    """The :class:`DraftInputs` of an ordinary draft model, which needs none."""

    shift = 0

    def step_launched(self, copies: Sequence[tuple[int, int]], meta: AttentionMetadata) -> None:
        """Keeps nothing."""

    def begin_pass(self, meta: AttentionMetadata, predicted: Tensor | None) -> None:
        """Gives nothing."""

    def predictions_at(self, token_indices: Tensor) -> None:
        """Predicts nothing beside logits."""


class DraftBytes(NamedTuple):
    """The memory that a draft model's :class:`DraftInputs` take, in bytes."""

    weights: int
    block: int
    """For each block of the cache."""


@dataclass(frozen=True, slots=True)
class _EntryRun:
    """Consecutive entries of one sequence, which a pass computes."""

    newest: Row
    """The row of the sequence's newest token. Its ``start`` and ``end`` are positions of tokens."""
    first_entry: int
    token_ids: list[int]
    """The tokens from which the entries are computed, one for each."""

    @property
    def end_entry(self) -> int:
        """The first entry behind the run."""
        return self.first_entry + len(self.token_ids)

    def as_row(self) -> Row:
        """The run as attention sees it: a row whose positions are those of the entries."""
        return replace(self.newest, token_ids=self.token_ids, start=self.first_entry)


@dataclass(slots=True)
class _Proposal:
    """A proposal in the making."""

    run: _EntryRun
    """What the next pass computes for it."""
    output: RowOutput
    """The output of the model's row: its ``proposal`` grows."""
    length: int
    """How many tokens are asked for."""

    @property
    def is_unfinished(self) -> bool:
        """Whether more tokens are asked for."""
        return len(self.output.proposal) < self.length

    def extend(self, token_id: int) -> None:
        """Add a token. If more are asked for, the next pass computes its entry."""
        self.output.proposal.append(token_id)
        if self.is_unfinished:
            self.run = _EntryRun(
                newest=row_of_next_token(self.run.newest, token_id),
                first_entry=self.run.end_entry,
                token_ids=[token_id],
            )


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
        inputs: DraftInputs,
    ) -> None:
        self._model = model
        self._caches = caches
        self._block_size = block_size
        self._inputs = inputs
        self._shift = inputs.shift
        self._tables = BlockTables()
        num_blocks = caches[0].keys.shape[0]
        self._valid = [0] * num_blocks
        """By block: how many of its entries are *valid*, counted from the first. These need not be
        computed again. (A head's entry for a block's last slot may be wrong all the same: see
        ``eagle``.)"""

    def follow(
        self, batch: Batch, meta: AttentionMetadata, outputs: Callable[[], list[RowOutput]]
    ) -> None:
        """A step was launched: make the proposals that its rows ask for, and set ``proposal``,
        ``read`` and ``unread`` in the outputs of these rows. ``outputs`` waits for the step."""
        self._invalidate(batch)
        self._inputs.step_launched(batch.copies, meta)
        if not any(row.propose for row in batch.rows):
            return  # without waiting for the step, so that the next one can be launched meanwhile

        row_outputs = outputs()
        try:
            next_pass = self._first_pass(batch.rows, row_outputs)
            while next_pass is not None:
                next_pass = self._run(next_pass)
        except BaseException:
            # Some entries count as valid that were never computed, and a pass that raised may have
            # written anything.
            self._valid = [0] * len(self._valid)
            raise

    def _first_pass(self, rows: list[Row], outputs: list[RowOutput]) -> _Pass | None:
        """The pass that reads the tokens of all rows that ask for a proposal. None if there is
        nothing to read."""
        proposals = []
        for row, output in zip(rows, outputs, strict=True):
            if not row.propose or not output.token_ids:
                continue
            run = self._plan_reading(row, output)
            if run is not None:
                proposals.append(_Proposal(run, output, row.propose))
        if not proposals:
            return None
        return _Pass(proposals, predicted=None)

    def _plan_reading(self, row: Row, output: RowOutput) -> _EntryRun | None:
        """The entries to compute in this step, before the first token of the proposal; None if
        there are none. Counts them as valid. Sets in ``output`` how many they are, and how many are
        left for later steps."""
        newest = row_of_newest_token(row, output)
        first_entry = self._first_unread(newest)
        first_token = first_entry + self._shift
        num_unread = newest.end - first_token
        output.read = min(num_unread, row.most_read)
        output.unread = num_unread - output.read
        if not output.read:
            return None
        tokens = _tokens(row, output, first_token, first_token + output.read)
        to_read = _EntryRun(newest, first_entry, tokens)

        reads_newest = not output.unread
        if row.grammar is not None and reads_newest:
            # A forced token may replace the newest sample, whose entry is the last one. In case (b)
            # of the module's docstring `_invalidate` would not forget that entry.
            valid_end = to_read.end_entry - 1
        else:
            valid_end = to_read.end_entry
        # Already now, because later rows of the same pass may share blocks with this one.
        self._count_as_valid(to_read, valid_end)
        return to_read

    def _run(self, this_pass: _Pass) -> _Pass | None:
        """Make a pass: compute the entries, and add a token to each proposal whose run is complete.
        Returns the pass for the proposals of which more tokens are asked for; None if there are
        none."""
        runs = [proposal.run for proposal in this_pass.proposals]
        device = self._model.device
        meta = build_metadata(
            [run.as_row() for run in runs],
            block_size=self._block_size,
            device=device,
            tables=self._tables,
        )
        ids = to_device([token for run in runs for token in run.token_ids], device)
        complete = [r for r, run in enumerate(runs) if self._is_complete(run)]
        # A model computes logits of at least one token: if no run is complete, of the last one of
        # run 0, and nobody reads them.
        with_logits = complete or [0]
        ends = meta.query_start[1:]
        last_indices = ends[to_device(with_logits, device)].long() - 1

        self._inputs.begin_pass(meta, this_pass.predicted)
        step = PagedStep(self._caches, meta)
        logits = self._model.forward(ids, meta.positions, last_indices, step)
        if not complete:
            return None

        samples = _sample_next([runs[r].newest for r in complete], logits)
        unfinished: list[_Proposal] = []
        indices_of_unfinished: list[int] = []
        for r, sampled, last_index in zip(complete, samples, last_indices.tolist(), strict=True):
            if sampled.error is not None:
                continue  # the proposal ends here
            proposal = this_pass.proposals[r]
            proposal.extend(sampled.token_id)
            if proposal.is_unfinished:
                unfinished.append(proposal)
                indices_of_unfinished.append(last_index)
        if not unfinished:
            return None
        predicted = self._inputs.predictions_at(to_device(indices_of_unfinished, device))
        return _Pass(unfinished, predicted)

    def _is_complete(self, run: _EntryRun) -> bool:
        """Whether the run ends with the entry of the newest token: only its logits give the next
        token."""
        return run.end_entry + self._shift == run.newest.end

    # ------------------------------------------------------------------ which entries are valid

    def _invalidate(self, batch: Batch) -> None:
        """Forget the entries of all slots that this step gives to other tokens in the model's
        caches."""
        size = self._block_size
        for _, destination in batch.copies:
            # Only the model's caches are copied: the draft model reads the copied block again.
            self._valid[destination] = 0
        for row in batch.rows:
            if row.grammar is not None:
                # The draft model may have read samples that forced tokens replaced afterwards. In
                # case (a) of the module's docstring the first of them stood at this row's start,
                # because the model has yet to compute the forced token. So the entries from there
                # on do not count. (`_plan_reading` has seen to case (b).)
                number, offset = divmod(max(row.start - self._shift, 0), size)
                block = row.block_table[number]
                self._valid[block] = min(self._valid[block], offset)
            # The blocks whose first slot lies in [start, end): this step begins to fill them. Until
            # now, they may have belonged to another sequence.
            first_block = math.ceil(row.start / size)
            stop_block = math.ceil(row.end / size)
            for block in row.block_table[first_block:stop_block]:
                self._valid[block] = 0

    def _first_unread(self, newest: Row) -> int:
        """The first entry that must be computed before a proposal: the first one that is not valid,
        and at the latest that of the sequence's ``newest`` token, because its logits are needed.
        All entries from there on are computed, even those that are valid: a run is contiguous."""
        size = self._block_size
        newest_entry = newest.start - self._shift
        for number in range(newest_entry // size + 1):
            num_valid = self._valid[newest.block_table[number]]
            if num_valid < size:
                return min(number * size + num_valid, newest_entry)
        return newest_entry

    def _count_as_valid(self, run: _EntryRun, end: int) -> None:
        """Count the run's entries before entry ``end`` as valid, and none from ``end`` on."""
        size = self._block_size
        for number in range(run.first_entry // size, (end - 1) // size + 1):
            block = run.newest.block_table[number]
            self._valid[block] = min(end - number * size, size)


def _sample_next(newest: list[Row], logits: Tensor) -> list[SampledToken]:
    """Sample the token that follows each of some sequences. ``newest`` are the rows of their newest
    tokens, parallel to ``logits``.

    The rows have the positions that the tokens have in the model, and random numbers depend on the
    position. So the draft model draws with the numbers that the model will use for the same
    position. From similar distributions both then draw the same id.
    """
    # A row that asks for a proposal samples for one sequence: ``sample`` has one index.
    pairs = [(row, row.sample[0]) for row in newest]
    return sample(logits, pairs).wait()


def row_of_newest_token(row: Row, output: RowOutput) -> Row:
    """The row of a sequence's newest token alone, after ``row`` gave this ``output``.

    It is a row for the sampler. Its ``output`` has the :func:`~jitney.execution.row_samples
    .end_of_output` and the tokens that ``row`` added. It has no logprobs, no grammar and no
    adapter: a draft model has none of these.
    """
    added = _added_tokens(row, output)
    counts = counts_of(row).after(added) if is_penalized(row) else None
    return replace(
        row,
        token_ids=added[-1:],
        start=_end_of_known(row) + len(added) - 1,
        params=msgspec.structs.replace(row.params, logprobs=None),
        grammar=None,
        adapter=None,
        drafts=0,
        output=end_of_output(row) + added,
        counts=counts,
    )


def row_of_next_token(row: Row, token: int) -> Row:
    """The row of one ``token`` that follows the newest token, whose row is ``row``."""
    counts = None if row.counts is None else row.counts.after([token])
    return replace(
        row, token_ids=[token], start=row.end, output=[*row.output, token], counts=counts
    )


def _end_of_known(row: Row) -> int:
    """The position after the row's known tokens, which drafts may follow."""
    return row.end - row.drafts


def _added_tokens(row: Row, output: RowOutput) -> list[int]:
    """The tokens that a row added to its sequence: the accepted drafts, and the token that was
    sampled behind the last of them."""
    drafts = row.token_ids[len(row.token_ids) - row.drafts :]
    added: list[int] = []
    for draft, sampled in zip(drafts, output.token_ids, strict=False):
        if draft != sampled:
            break
        added.append(draft)
    added.append(output.token_ids[len(added)])
    return added


def _tokens(row: Row, output: RowOutput, start: int, end: int) -> list[int]:
    """The tokens of a sequence at the positions [start, end), once ``row`` gave this ``output``.
    Only these are copied."""
    tokens = row.prompt[start:end]
    end_of_prompt = len(row.prompt)
    if end > end_of_prompt:
        first = max(start - end_of_prompt, 0)
        tokens += row.output[first : end - end_of_prompt]
    end_of_known = _end_of_known(row)
    if end > end_of_known:
        first = max(start - end_of_known, 0)
        tokens += _added_tokens(row, output)[first : end - end_of_known]
    return tokens
