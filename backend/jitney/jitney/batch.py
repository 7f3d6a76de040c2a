"""One step, as the scheduler hands it to the runner and gets it back: a batch of rows, and for each
row its output. Data only.

The two share a process, so a row refers to the scheduler's own lists and to objects that cross no
border: the state of a grammar, a loaded adapter, the counts of tokens.
"""

from dataclasses import dataclass, field
from typing import Protocol

from jitney.errors import JitneyError
from jitney.messages import Logprob
from jitney.named_tokens import NamedTokens
from jitney.sampling_params import SamplingParams
from jitney.token_counts import TokenCounts


class GrammarState(Protocol):
    """Where one sequence is in its grammar. It depends on the sequence's output alone: a resumed
    sequence reaches the same state by accepting its tokens again."""

    error: str | None
    """Why the sequence cannot go on, such as a limit that was reached. Its mask then allows no
    token."""

    @property
    def ended(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""

    def accept(self, token_ids: list[int]) -> None:
        """Advance by these tokens of the output."""

    def forced(self) -> list[int]:
        """The next tokens where the grammar allows only one text; empty as a rule. They are the
        tokens that the tokenizer makes of that text, each allowed after those before it, and all in
        the model's vocabulary."""

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, counted from the first, the grammar allows in this order."""

    def after(self, token_ids: list[int]) -> "GrammarState":
        """A new state: this one advanced by these tokens, all of which must be allowed."""

    def mask(self) -> bytes:
        """One bit for each token id: whether it may be next. The lowest bit of a byte comes first;
        the length is a multiple of four bytes."""


class Grammar(Protocol):
    """A compiled grammar. Sequences share it."""

    def begin(self, may_end: bool) -> GrammarState:
        """The state of an empty output. If not ``may_end``, no mask ever allows an end of sequence
        (``ignore_eos``)."""


class Adapter(Protocol):
    """A loaded adapter. It stays while a request that names it is open."""

    @property
    def version(self) -> str:
        """Differs for different contents of the adapter's files. The prefix cache includes it in
        the hash of a prompt's first block, so that no block of another version is found."""


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: the tokens at positions [start, start + len(token_ids)).

    ``block_table``, ``prompt`` and ``output`` are the scheduler's own lists, because copying them
    in every step would cost too much. The runner never changes them, and reads them only until its
    ``launch`` returns: afterwards the scheduler may append to them or clear them.
    """

    key: int
    """The request's."""
    index: int
    """The sequence's, among those of the request."""
    token_ids: list[int]
    start: int
    block_table: list[int]
    """Position p lives in block ``block_table[p // block_size]`` at offset ``p % block_size``."""
    sample: tuple[int, ...]
    """Indices of the sequences that the row samples for: empty in the middle of a prompt,
    ``(index,)`` as a rule, ``range(n)`` when this row completes the prompt of a request with
    n > 1."""
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    """Tokens generated so far, without the carried token and the drafts; empty when ``sample`` has
    more than one index. To count the generated tokens of a row that samples, carried token and
    drafts included, use ``end - len(prompt)``, not ``len(output)``."""
    stop_ids: frozenset[int]
    bad_words_ids: list[list[int]]
    carried: int | None = None
    """Set if the row's one token is still being sampled by the step before, which is in flight. It
    is the index of that token among all samples of that step, counted row by row. ``token_ids`` is
    then ``[0]``, to be replaced on the device, and ``output`` lacks the token."""
    grammar: GrammarState | None = None
    """Its mask holds for every token that the row samples. Like ``output``, it may be read only
    until ``launch`` returns."""
    drafts: int = 0
    """So many of ``token_ids``, the last ones, are drafts, which are not part of ``output``. Then
    ``sample`` has one index, and the row samples ``drafts + 1`` tokens: one in place of the first
    draft, and one after each draft, as if the drafts up to there were output."""
    propose: int = 0
    """How many tokens a draft model is to propose after the newest token of the output. If it is
    set, ``sample`` has one index, and the block table has slots for so many more."""
    most_read: int = 0
    """How many tokens of prompt and output the draft model may compute in this step before it
    proposes. If tokens are left uncomputed after so many, it proposes nothing."""
    adapter: Adapter | None = None
    counts: TokenCounts | None = None
    """Of prompt and output, if a penalty depends on them. Like ``output``, they may be read only
    until ``launch`` returns. The scheduler sets them in every row that needs them. If another
    caller does not, the sampler counts all tokens of the row anew, which takes time."""
    slot: int | None = None
    """What the sequence holds beside its blocks, if the model has slots. A row whose ``start`` is 0
    begins with an empty slot; any other goes on from what the slot holds, which is the past of the
    tokens before ``start``. (For the first row of a sequence it may be the copy of a snapshot, made
    by ``Batch.slot_copies``.)"""
    named_tokens: NamedTokens | None = None
    """Those of ``params``, ``stop_ids`` and ``bad_words_ids``, if a sample depends on them. The
    scheduler sets them in every row that needs them. If another caller does not, the sampler makes
    them anew in each step."""

    @property
    def num_samples(self) -> int:
        """Tokens that the row samples."""
        return len(self.sample) + self.drafts

    @property
    def end(self) -> int:
        """Context length after this step."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Batch:
    """One step."""

    rows: list[Row]
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before the rows are computed: (source, destination), K and V of all layers."""
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    """Slots to copy before the rows are computed: (source, destination). All sources are read
    before any destination is written."""
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    """Slots to copy after the rows are computed: (source, destination)."""
    released_slots: list[int] = field(default_factory=list)
    """Slots that nobody holds any more: what they hold may be freed, before anything else is done.
    A hint. Not every slot that is released is named: it may have been given to another sequence
    already, or its step was reverted."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class RowOutput:
    """The output of one row. ``token_ids`` and ``logprobs`` are parallel to ``Row.sample``. If the
    row has drafts, they hold the sample in place of the first draft, then the sample after that
    draft, and so on. The samples after one that differs from its draft may be missing.
    """

    token_ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    """Per sampled token, if ``params.logprobs`` is set: the candidates at its position."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """If ``params.prompt_logprobs`` is set and the row computed prompt tokens: the candidates for
    prompt[q], for each q with start < q <= end and q < len(prompt). (The row computes positions
    start to end - 1, and the logits of each are for the position after it.)"""
    proposal: list[int] = field(default_factory=list)
    """What a draft model proposes after the newest token: at most ``Row.propose`` tokens."""
    read: int = 0
    """How many tokens of prompt and output, the newest one included, the draft model computed in
    this step before it proposed: at most ``Row.most_read``."""
    unread: int = 0
    """How many tokens it still has to compute before it can propose."""
    error: JitneyError | None = None
    """Set if only this row could not be served, e.g. because its logits are not finite: why. It
    ends the request."""


@dataclass(slots=True)
class StepOutput:
    """The output of one step."""

    rows: list[RowOutput]
    """Parallel to ``Batch.rows``."""
