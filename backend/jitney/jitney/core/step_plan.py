"""A step in the making: its rows, and what is left of its token budget. ``plan`` makes one for each
step and fills it."""

from dataclasses import dataclass, field

from jitney.batch import Batch, Row
from jitney.core.policy.seam import DraftChoice
from jitney.core.request import Sequence
from jitney.core.step_in_flight import StepInFlight
from jitney.messages import StepStats


@dataclass(slots=True)
class StepPlan:
    """One step in the making."""

    now: float
    counts: StepStats
    """Lookups in the prefix cache are counted here."""
    ahead: bool
    """Whether another step is in flight meanwhile."""
    tokens_left: int
    """What is left of the token budget."""
    kept_for_prefill: int
    """Of the tokens that are left, those that no decode may take."""
    num_samples: int = 0
    """Samples of all rows so far."""
    step: StepInFlight = field(default_factory=lambda: StepInFlight(Batch([])))

    def add_row(
        self,
        sequence: Sequence,
        token_ids: list[int],
        sample: tuple[int, ...],
        *,
        carried: int | None = None,
        choice: DraftChoice | None = None,
    ) -> None:
        """Add a row, and count its tokens as planned. ``choice``: the drafts at the end of
        ``token_ids``, and what a draft model is asked for."""
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
        # Fields with a default are set here: the call takes time for each name in it.
        row.carried = carried
        row.grammar = sequence.grammar
        row.adapter = request.adapter
        if choice is not None:
            row.drafts = len(choice.drafts)
            row.propose = choice.propose
            row.most_read = choice.read
        self.step.batch.rows.append(row)
        self.tokens_left -= len(token_ids)
        sequence.num_planned += len(token_ids)
        if not sample:
            return
        sequence.sample_index = self.num_samples
        self.num_samples += len(sample) + row.drafts
        forks = len(sample) > 1
        host_reads = request.reads_output or row.drafts > 0 or row.propose > 0
        if forks or host_reads:
            self._note_dependence(sequence, row, forks=forks, host_reads=host_reads)

    def _note_dependence(
        self, sequence: Sequence, row: Row, *, forks: bool, host_reads: bool
    ) -> None:
        """What follows this row depends on what it samples: note that for plans ahead."""
        # If the sample is the last token by length, nothing follows.
        if sequence.num_planned - row.drafts >= sequence.limit:
            return
        if forks:
            self.step.must_complete_first = True
        if host_reads:
            self.step.host_reads_samples = True
