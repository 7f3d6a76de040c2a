"""A request and its sequences, as the scheduler keeps them. Data only: the scheduler changes it.

A request of n > 1 runs as one sequence until its prompt is computed; sampling the first token
makes the other n − 1, its *forks*. From then on each sequence is scheduled, preempted and ended on
its own.
"""

import enum
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter

from jitney.batch import Adapter, Grammar, GrammarState
from jitney.core.drafting import Drafting, NgramIndex
from jitney.core.kv_cache import block_hash, root_hash
from jitney.messages import Logprob, Submit, Timing
from jitney.named_tokens import NamedTokens
from jitney.token_counts import TokenCounts, distinct


class SequenceState(enum.Enum):
    """Whether a sequence is in a waiting queue, holds blocks, or has ended."""

    WAITING = enum.auto()
    """Also before it is put into a queue. A fork that runs or ends as soon as it is made is never
    put there."""
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One submitted request: what its sequences share."""

    message: Submit
    max_output: int
    """Most output tokens of one sequence: max_tokens, or fewer where the context ends."""
    reserved_blocks: int
    """Blocks reserved for it while any sequence runs (``eviction: never``); else 0."""
    rank_s: float
    """Its sequences are ranked by this: arrival, plus what priority and tier add to it, in
    seconds."""
    grammar: Grammar | None = None
    adapter: Adapter | None = None
    tier: int = 0
    """Index among the option ``tiers``; 0 without."""
    most_running: int = 1
    """Most sequences of its tier that may run at once; without tiers, of all."""
    waits_for_all_forks: bool = False
    """With ``eviction: never``: it is admitted only when all of its sequences may run, or
    ``most_running`` of them if it has more. ``plan`` says why."""
    num_running: int = field(default=0, init=False)
    """Its running sequences."""
    num_live: int = field(init=False)
    """Its sequences that have not ended, forks that it has yet to make included."""
    reads_output: bool = field(init=False)
    """Whether sampling a token depends on the output before it. Then the host must know all of
    that output before it plans the row."""
    takes_forced: bool = field(init=False)
    """Whether tokens that its grammar forces are appended without being sampled."""
    root: bytes = field(init=False)
    """Parent hash of its first block. It depends on ``cache_salt`` and the adapter."""
    prompt_logprobs: list[list[Logprob] | None] = field(default_factory=lambda: [None], init=False)
    """One entry per prompt position, as far as they are known. The first is None: no token comes
    before it that could predict it."""
    is_queued: bool = field(default=True, init=False)
    """Whether none of its sequences has been admitted since it was submitted."""
    first_scheduled_at: float | None = field(default=None, init=False)
    """When the first of its sequences was admitted. If it was taken back, this stays the time of
    the first admission."""
    first_token_at: float | None = field(default=None, init=False)
    """When its first token was made."""
    cached_prompt_tokens: int = field(default=0, init=False)
    computed_prompt_tokens: int = field(default=0, init=False)
    penalized_prompt_ids: "array[int] | None" = field(default=None, init=False)
    """The distinct tokens of its prompt, for penalties. Empty if these depend on the output alone.
    None if there are no penalties."""
    named_tokens: NamedTokens | None = field(default=None, init=False)
    """The tokens that its parameters name; None if no sample depends on any."""
    prompt_ngrams: NgramIndex = field(default_factory=NgramIndex, init=False)
    """For drafts."""
    preempted_at: list[float] = field(default_factory=list, init=False)
    """When its sequences were preempted."""
    sequences: list["Sequence"] = field(init=False)

    def __post_init__(self) -> None:
        message = self.message
        self.num_live = message.params.n
        self.reads_output = _reads_output(message)
        self.takes_forced = _takes_forced(message)
        self.penalized_prompt_ids = _penalized_prompt_ids(message)
        self.named_tokens = _named_tokens(message)
        version = "" if self.adapter is None else self.adapter.version
        self.root = root_hash(message.params.cache_salt, version)
        self.sequences = [Sequence(self, 0)]
        if message.first_token is not None:
            self._resume(message)

    def _resume(self, message: Submit) -> None:
        """Continue a request of an engine that has ended, or one that was taken back: its sequences
        have output already."""
        self.first_token_at = message.first_token
        # The prompt's logprobs were sent with the first token, and are not collected again.
        self.prompt_logprobs = [None] * len(message.prompt)
        self.sequences = [Sequence(self, index) for index in range(message.params.n)]
        for sequence, emitted in zip(self.sequences, message.emitted, strict=True):
            sequence.output = list(emitted.ids)
            sequence.num_tokens += len(emitted.ids)
            if sequence.counts is not None:
                sequence.counts.add(emitted.ids)
            sequence.cumulative_logprob = emitted.cumulative_logprob
            if emitted.ended:
                sequence.state = SequenceState.ENDED
                self.num_live -= 1
            elif sequence.grammar is not None:
                sequence.grammar.accept(sequence.output)

    @property
    def num_forks_due(self) -> int:
        """How many forks it has yet to make."""
        return self.message.params.n - len(self.sequences)

    @property
    def least_admissible(self) -> int:
        """A waiting sequence of this request is admitted only if at least so many more may run:
        see ``RunningCounts.num_admissible``."""
        if not self.waits_for_all_forks:
            return 1
        return min(1 + self.num_forks_due, self.most_running)

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix may be used. Not if the prompt's logprobs are asked for, until
        all of them are known: they come from computing the prompt."""
        asked = self.message.params.prompt_logprobs is not None
        return not asked or len(self.prompt_logprobs) == len(self.message.prompt)

    def set_prompt_counts(self, sequence: "Sequence", num_cached: int) -> None:
        """One of its sequences is about to be admitted, with ``num_cached`` tokens from the prefix
        cache. Called before ``LiveRequests.admit``, which sets ``first_scheduled_at``."""
        if not sequence.output:
            # The prompt is computed, perhaps not for the first time. `outcome` adds each chunk to
            # `computed_prompt_tokens`.
            self.cached_prompt_tokens = num_cached
            self.computed_prompt_tokens = 0
            return
        if self.first_scheduled_at is not None:
            # The sequence was preempted or taken back, or is a fork: the prompt was counted before.
            return
        # The request is resumed: the prompt is recomputed together with its output. `outcome` does
        # not count the chunks of a sequence with output. So all of the prompt is counted now.
        size = len(sequence.prompt)
        self.cached_prompt_tokens = min(num_cached, size)
        self.computed_prompt_tokens = size - self.cached_prompt_tokens

    def take_over(self, before: "Request") -> None:
        """Go on with the figures of the same request as it was before it was taken back."""
        self.first_scheduled_at = before.first_scheduled_at
        self.cached_prompt_tokens = before.cached_prompt_tokens
        self.computed_prompt_tokens = before.computed_prompt_tokens
        self.preempted_at = before.preempted_at

    def timing(self, now: float) -> Timing:
        """Seconds since arrival, for the terminal event at ``now``."""
        arrival = self.message.arrival
        queue_s = None
        left_queue_at = self._left_queue_at()
        if left_queue_at is not None:
            queue_s = left_queue_at - arrival
        first_token_s = None
        if self.first_token_at is not None:
            first_token_s = self.first_token_at - arrival
        return Timing(
            queue_s=queue_s,
            first_token_s=first_token_s,
            total_s=now - arrival,
            cached_prompt_tokens=self.cached_prompt_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens,
            preemptions=len(self.preempted_at),
            preempted_s=[at - arrival for at in self.preempted_at],
        )

    def _left_queue_at(self) -> float | None:
        """When the request left the queue, as far as that is known. None: it has not left it."""
        scheduled_at = self.first_scheduled_at
        first_token_at = self.first_token_at
        if scheduled_at is None:
            return first_token_at
        if first_token_at is None:
            return scheduled_at
        # As a rule it is scheduled first. But if an earlier engine made the first token, this
        # engine scheduled it later. When the earlier one did is not known, except that it was
        # before the first token.
        return min(scheduled_at, first_token_at)


def _reads_output(message: Submit) -> bool:
    """See :attr:`Request.reads_output`."""
    return bool(_is_penalized(message) or message.bad_words_ids or message.grammar)


def _is_penalized(message: Submit) -> bool:
    """Whether sampling a token depends on how often each occurs."""
    params = message.params
    if params.presence_penalty or params.frequency_penalty:
        return True
    return params.repetition_penalty != 1.0


def _penalized_prompt_ids(message: Submit) -> "array[int] | None":
    """See :attr:`Request.penalized_prompt_ids`."""
    if not _is_penalized(message):
        return None
    if message.params.repetition_penalty != 1.0:
        return distinct(message.prompt)
    return array("q")  # the other penalties count the output alone


def _named_tokens(message: Submit) -> NamedTokens | None:
    """See :attr:`Request.named_tokens`."""
    params = message.params
    forbids_stops = bool(params.min_tokens and message.stop_ids)
    names_others = bool(params.allowed_token_ids or params.logit_bias or message.bad_words_ids)
    if forbids_stops or names_others:
        return NamedTokens.of(params, message.stop_ids, message.bad_words_ids)
    return None


def _takes_forced(message: Submit) -> bool:
    """See :attr:`Request.takes_forced`."""
    params = message.params
    if not message.grammar:
        return False
    if params.logprobs is not None:  # a forced token has none
        return False
    # A text can be made of different tokens. These parameters may forbid or penalize the
    # tokens that the tokenizer makes of a forced text.
    if message.bad_words_ids or params.logit_bias:
        return False
    return params.allowed_token_ids is None


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One stream of tokens over one block table.

        position  0               num_computed           num_planned
                  ├── K and V written ──┼── steps in flight ──┼── the next row …

    The values of the tokens at the positions [0, num_tokens) are known. While the sequence lives,
    ``num_computed < num_tokens``, because its last token is yet to be computed.

    A row that computes the last known token samples the next one, and with drafts one more token
    after each draft. A sample is *pending* until the step is complete. ``max(0, num_planned + 1 -
    num_tokens)`` samples are pending. They will be the tokens at the positions [num_tokens,
    num_planned + 1). With 8 known tokens, at the positions 0 to 7:

    ===========  =======================================  ================================
    num_planned  in flight                                pending samples: their positions
    ===========  =======================================  ================================
    7 or less    no step that samples for the sequence    0
    8            a step that computes position 7          1: 8
    9            such a step, and one for position 8      2: 8 and 9
    8 + d        a step for position 7 and d drafts       d + 1: 8 to 8 + d
    ===========  =======================================  ================================

    When a step is complete, its wrong drafts are subtracted from ``num_planned``.
    """

    request: Request
    index: int
    prompt: list[int] = field(init=False)
    output: list[int] = field(default_factory=list, init=False)
    grammar: GrammarState | None = field(default=None, init=False)
    """The state after ``output``."""
    counts: TokenCounts | None = field(default=None, init=False)
    """Of prompt and ``output``; None if no penalty depends on them."""
    table: list[int] = field(default_factory=list, init=False)
    """Blocks of positions 0, block_size, 2·block_size, …; empty unless RUNNING."""
    slot: int | None = field(default=None, init=False)
    """See ``slots``. None unless RUNNING, and for models without slots."""
    snapshot_at: int = field(default=0, init=False)
    """Up to this position it needs no further snapshot: it has begun here, or made its latest
    snapshot, or found one made by another."""
    cached_until: int = field(default=0, init=False)
    """If its model keeps snapshots: where the cached blocks of its prompt ended when it was
    admitted. It may have begun before that, at a snapshot. Others may share the tokens up to here,
    too."""
    hashes: list[bytes] = field(default_factory=list, init=False)
    """Hashes of its leading full blocks, as far as they were asked for. They depend on the tokens
    and on ``Request.root`` alone, so they stay when it is preempted."""
    num_tokens: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_planned: int = field(default=0, init=False)
    """``num_computed``, plus the tokens that steps in flight compute."""
    max_computed: int = field(init=False)
    """The most tokens that are ever computed: all of the prompt and of the longest output, except
    the last token, which is only sampled. So it may have ``max_computed + 1`` tokens."""
    decodes_from: int = field(default=0, init=False)
    """The sequence decodes once ``num_planned`` has reached this. Until then it has a prompt or a
    recomputation to compute. Three cases:

    - It was admitted without output: ``num_tokens`` at admission. The whole prompt comes first.
    - It was admitted with output: ``num_tokens - 1`` at admission. Its last token is output, so a
      row that computes that token alone is a decode.
    - It is a fork that ran as soon as it was made: 0. The prompt is computed already."""
    sample_index: int = field(default=0, init=False)
    """Index of the first sample of its latest row among all samples of that step. A row that is
    planned ahead has this index in place of its token, which is not known yet."""
    num_offered_blocks: int = field(default=0, init=False)
    """So many blocks, from the first of the table on, have been offered to the prefix cache
    (``KvCache.cache_block``)."""
    cumulative_logprob: float = field(default=0.0, init=False)
    drafting: Drafting | None = field(default=None, init=False)
    """What the policy of drafts notes of it; None if that is nothing yet. Its ``proposal`` is what
    the policy chooses drafts from, whichever drafter made it."""
    num_read: int = field(default=0, init=False)
    """How many of its tokens the draft model had read when it was asked last."""
    runner_proposal: list[int] = field(default_factory=list, init=False)
    """The tokens that the runner proposed to follow the last token. They are the raw material of
    ``drafting.proposal``: a ``RunnerDrafter`` takes the first ``max_drafts`` of them."""
    reserved_blocks: int = field(default=0, init=False)
    """Blocks reserved for this sequence while it runs. Only with ``eviction: never``, and only in a
    resumed request: its sequences share no prompt, so each reserves blocks, the request none."""
    state: SequenceState = field(default=SequenceState.WAITING, init=False)
    waiting_since: float = field(default=0.0, init=False)
    """If the sequence waits: when its request arrived, or when it was preempted or forked."""
    level: int = field(default=0, init=False)
    """Lower levels come first. Always 0 without the option ``tiers``."""
    rank: tuple[float, int, int] = field(init=False)
    """Within a level, lower ranks come first. It never changes, though the level may."""

    def __post_init__(self) -> None:
        request = self.request
        self.prompt = request.message.prompt
        if request.grammar is not None:
            ignores = request.message.params.ignore_eos
            self.grammar = request.grammar.begin(may_end=not ignores)
        if request.penalized_prompt_ids is not None:
            self.counts = TokenCounts(request.penalized_prompt_ids)
        self.num_tokens = len(self.prompt)
        self.max_computed = self.num_tokens + request.max_output - 1
        self.rank = (request.rank_s, request.message.key, self.index)

    @property
    def num_to_prefill(self) -> int:
        """How many known tokens a prompt or a recomputation has yet to plan; 0 for a decode."""
        planned = self.num_planned
        if planned >= self.decodes_from:
            return 0
        return self.num_tokens - planned

    @property
    def has_drafts_in_flight(self) -> bool:
        """Whether the step in flight has drafts of it. Asked only while at most one step is in
        flight: with two, ``num_planned`` is greater than ``num_tokens`` even without drafts."""
        return self.num_planned > self.num_tokens

    @property
    def num_tokens_left(self) -> int:
        """How many tokens it may still get."""
        return self.max_computed + 1 - self.num_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at the positions [start, end)."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        if start >= size:
            return self.output[start - size : end - size]
        return self.prompt[start:] + self.output[: end - size]

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first ``count`` blocks, all of them full. Each is computed once. The list
        may be the sequence's own: callers only read it."""
        hashes = self.hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.request.root
            hashes.append(block_hash(parent, self.tokens(start, start + block_size)))
        if len(hashes) > count:
            return hashes[:count]
        return hashes


order = attrgetter("level", "rank")
"""The key that waiting and running sequences are sorted by: by rank within each level."""


def remove_ordered(ordered: list[Sequence], sequence: Sequence) -> bool:
    """Take a sequence out of a list that is sorted by :data:`order`. False: it was not there."""
    index = bisect_left(ordered, order(sequence), key=order)
    if index == len(ordered) or ordered[index] is not sequence:
        return False
    del ordered[index]
    return True
