"""A step in the making: its rows, and what is left of its token budget. ``plan`` makes one for each
step and fills it."""

from dataclasses import dataclass, field, replace

from jitney.batch import Batch, Row
from jitney.core.planned_step import PlannedStep
from jitney.core.policy.seam import DraftChoice
from jitney.core.request import Sequence
from jitney.messages import StepStats


@dataclass(slots=True)
class StepPlan:
    """One step in the making."""

    now: float
    counts: StepStats
    """Lookups in the prefix cache are counted here."""
    ahead: bool
    """Whether another step is in flight while this one is planned."""
    tokens_left: int
    """What is left of the token budget."""
    min_prefill_tokens: int = 0
    """Decodes must leave this many of ``tokens_left`` to chunks."""
    num_samples: int = 0
    """Samples of all rows so far."""
    step: PlannedStep = field(default_factory=lambda: PlannedStep(Batch([])))

    def add_row(
        self,
        sequence: Sequence,
        token_ids: list[int],
        sample: tuple[int, ...],
        *,
        carried: int | None = None,
        choice: DraftChoice | None = None,
    ) -> None:
        """Add a row, and count its tokens as planned. ``sample``: the indices of the sequences that
        the row samples for; none if it does not reach the last known token. ``carried``: see
        :class:`Row`. ``choice``: which drafts are at the end of ``token_ids``, and what a draft
        model is asked for."""
        request = sequence.request
        message = request.message
        row = Row(
            key=message.key,
            index=sequence.index,
            token_ids=token_ids,
            start=sequence.num_planned,
            block_table=sequence.table,
            sample=sample,
            params=message.params,
            prompt=sequence.prompt,
            output=sequence.output,
            stop_ids=message.stop_ids,
            bad_words_ids=message.bad_words_ids,
        )
        # Fields with a default are set here, because each argument makes the call above slower.
        row.carried = carried
        row.slot = sequence.slot
        row.grammar = sequence.grammar
        row.adapter = request.adapter
        row.counts = sequence.counts
        row.named_tokens = request.named_tokens
        if choice is not None:
            row.drafts = len(choice.drafts)
            row.propose = choice.propose
            row.most_read = choice.most_read
        self.step.batch.rows.append(row)
        self.tokens_left -= len(token_ids)
        sequence.num_planned += len(token_ids)
        if not sample:
            return
        sequence.sample_index = self.num_samples
        self.num_samples += len(sample) + row.drafts
        # Most rows need no call: nothing depends on the values of their samples.
        if len(sample) > 1 or request.reads_output or row.drafts or row.propose:
            self._note_dependence(sequence, row)

    def _note_dependence(self, sequence: Sequence, row: Row) -> None:
        """Note for plans ahead that the sequence's next row depends on what this one samples."""
        # If all tokens that are ever computed are planned, no row follows. So nothing depends on
        # the samples.
        end_of_known = sequence.num_planned - row.drafts
        if end_of_known >= sequence.max_computed:
            return
        if len(row.sample) > 1:
            self.step.must_complete_first = True
        if sequence.request.reads_output or row.drafts or row.propose:
            self.step.host_reads_samples = True


def plain_row(row: Row, sequence: Sequence) -> Row:
    """A reverted row as it is executed again: without drafts, and with its token instead of a
    carried one."""
    assert sequence.num_planned == row.start, "a row does not follow what is computed"
    if row.carried is not None:  # the step that sampled the token is complete now
        return replace(row, token_ids=[sequence.output[-1]], carried=None)
    if row.drafts or row.propose:
        tokens = row.token_ids[: len(row.token_ids) - row.drafts]
        return replace(row, token_ids=tokens, drafts=0, propose=0)
    return row
