"""A request and its sequences, as the scheduler keeps them. Data only: the scheduler changes it.

A request of n > 1 runs as one sequence until its prompt is computed; sampling the first token
makes the other n − 1, its *forks*. From then on each sequence is scheduled, preempted and ended on
its own.
"""

import enum
from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter

from jitney.batch import Adapter, Grammar, GrammarState
from jitney.core.kv_cache import block_hash, root_hash
from jitney.messages import Logprob, Submit, Timing


class SequenceState(enum.Enum):
    """Whether a sequence is in a waiting queue, holds blocks, or has ended."""

    WAITING = enum.auto()
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
    aged_arrival: float
    """Arrival in seconds, plus what priority and tier add to it. Its sequences are ranked by it."""
    grammar: Grammar | None = None
    adapter: Adapter | None = None
    tier: int = 0
    """Index among the option ``tiers``; 0 without."""
    most_running: int = 1
    """Most sequences of its tier that may run at once; without tiers, of all."""
    num_running: int = field(default=0, init=False)
    """Its running sequences."""
    num_live: int = field(init=False)
    """Its sequences that have not ended, forks that it has yet to make included."""
    reads_output: bool = field(init=False)
    """Whether sampling a token depends on the output before it, which the host must know then."""
    takes_forced: bool = field(init=False)
    """Whether tokens that its grammar forces are appended without being sampled."""
    root: bytes = field(init=False)
    """Where the hashes of its blocks begin."""
    prompt_logprobs: list[list[Logprob] | None] = field(default_factory=lambda: [None], init=False)
    """One entry per prompt position, as far as they are known. The first is None: no token comes
    before it that could predict it."""
    first_scheduled: float | None = field(default=None, init=False)
    """When the first of its sequences was admitted."""
    first_token: float | None = field(default=None, init=False)
    """When its first token was made."""
    cached_prompt_tokens: int = field(default=0, init=False)
    computed_prompt_tokens: int = field(default=0, init=False)
    preempted: list[float] = field(default_factory=list, init=False)
    """When its sequences were preempted."""
    sequences: list["Sequence"] = field(init=False)

    def __post_init__(self) -> None:
        message = self.message
        self.num_live = message.params.n
        self.reads_output = _reads_output(message)
        self.takes_forced = _takes_forced(message)
        version = "" if self.adapter is None else self.adapter.version
        self.root = root_hash(message.params.cache_salt, version)
        self.sequences = [Sequence(self, 0)]
        if message.first_token is not None:
            self._resume(message)

    def _resume(self, message: Submit) -> None:
        """Continue a request of an engine that has ended: its sequences have output already."""
        self.first_token = message.first_token
        # The prompt's logprobs were sent with the first token, and are not collected again.
        self.prompt_logprobs = [None] * len(message.prompt)
        self.sequences = [Sequence(self, index) for index in range(message.params.n)]
        for sequence, emitted in zip(self.sequences, message.emitted, strict=True):
            sequence.output = list(emitted.ids)
            sequence.num_tokens += len(emitted.ids)
            sequence.cumulative_logprob = emitted.cumulative_logprob
            if emitted.ended:
                sequence.state = SequenceState.ENDED
                self.num_live -= 1
            elif sequence.grammar is not None:
                sequence.grammar.accept(sequence.output)

    @property
    def forks_due(self) -> int:
        """How many forks it has yet to make."""
        return self.message.params.n - len(self.sequences)

    @property
    def num_to_admit(self) -> int:
        """How many more sequences must be allowed to run before a waiting sequence of this request
        is admitted. That is one for itself. With ``eviction: never`` it is one more for each fork
        that is still to be made, but at most as many as can ever run at once."""
        # The request reserves no blocks with `eviction: preempt`, or if it is resumed. A resumed
        # request has no forks to make.
        if not self.reserved_blocks:
            return 1
        return min(1 + self.forks_due, self.most_running)

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix may be used. Not if the prompt's logprobs are asked for, until
        all of them are known: they come from computing the prompt."""
        asked = self.message.params.prompt_logprobs is not None
        return not asked or len(self.prompt_logprobs) == len(self.message.prompt)

    def count_prefill(self, sequence: "Sequence", num_cached: int) -> None:
        """Set the counts of prompt tokens: one of its sequences is about to be admitted, with
        ``num_cached`` tokens from the prefix cache."""
        if not sequence.output:
            # The prompt is computed, perhaps not for the first time. Each of its steps adds to the
            # count.
            self.cached_prompt_tokens = num_cached
            self.computed_prompt_tokens = 0
        elif self.first_scheduled is None:
            # The request is resumed: the prompt is recomputed together with output. The steps of a
            # sequence with output do not add to the count, so all of it is counted now.
            size = len(sequence.prompt)
            self.cached_prompt_tokens = min(num_cached, size)
            self.computed_prompt_tokens = size - self.cached_prompt_tokens
        # Else the sequence was preempted or is a fork: its prompt was counted before.

    def timing(self, now: float) -> Timing:
        """Seconds since arrival, for the terminal event at ``now``."""
        arrival = self.message.arrival
        # If the request is resumed, `first_scheduled` is when this engine scheduled it. Then it is
        # not known when it left the queue, only that this was before its first token.
        known_times = [at for at in (self.first_scheduled, self.first_token) if at is not None]
        queue_s = None
        if known_times:
            queue_s = min(known_times) - arrival
        first_token_s = None
        if self.first_token is not None:
            first_token_s = self.first_token - arrival
        return Timing(
            queue_s=queue_s,
            first_token_s=first_token_s,
            total_s=now - arrival,
            cached_prompt_tokens=self.cached_prompt_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens,
            preemptions=len(self.preempted),
            preempted_s=[at - arrival for at in self.preempted],
        )


def _reads_output(message: Submit) -> bool:
    """See :attr:`Request.reads_output`."""
    params = message.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or message.bad_words_ids
        or message.grammar
    )


def _takes_forced(message: Submit) -> bool:
    """See :attr:`Request.takes_forced`."""
    params = message.params
    if not message.grammar:
        return False
    if params.logprobs is not None:  # a forced token has none
        return False
    # A text can be made of different tokens. With any of these parameters, sampling might make a
    # forced text of other tokens than the tokenizer does.
    if message.bad_words_ids or params.logit_bias:
        return False
    return params.allowed_token_ids is None


@dataclass(slots=True, eq=False, repr=False)
class Drafting:
    """What ``policy.speculation`` knows of one sequence."""

    compared: float = 0.0
    """How many proposed tokens were compared with the output. The latest count most."""
    right: float = 0.0
    """How many of these were the same. The latest count most."""
    proposal: list[int] = field(default_factory=list)
    """Tokens that may follow the first ``made_at`` tokens of the sequence."""
    made_at: int = 0
    """``num_tokens`` when the proposal was made."""
    num_drafts: int = 0
    """How many tokens of the proposal the step that is being planned may compute as drafts."""
    propose: int = 0
    """How many tokens a draft model is to propose in that step, for the next one."""
    no_wait_steps: int = 0
    """For how many more steps the sequence does not wait for a pending token. Set when a step has
    no budget or blocks for its drafts."""
    ngrams: dict[int, int] = field(default_factory=dict)
    """Hash of an n-gram -> the position behind its latest occurrence in the first ``indexed``
    tokens."""
    indexed: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One stream of tokens over one block table.

    K and V of the positions [0, num_computed) are written. Steps in flight write those of
    [num_computed, num_planned). While the sequence lives, ``num_computed < num_tokens``, because
    its last token is yet to be computed.

    A row that computes the last known token samples the next one, and with drafts one more token
    behind each draft. A sample is *pending* until the step is complete. While any is, ``num_planned
    >= num_tokens``, and the pending samples are those of the positions [num_tokens, num_planned],
    both ends included:

    - one, if a step without drafts is in flight: ``num_planned == num_tokens``;
    - two, if two such steps are: ``num_planned == num_tokens + 1``;
    - d + 1, if a step with d drafts is: ``num_planned == num_tokens + d``.

    The next row begins at ``num_planned``. When a step is complete, its wrong drafts are subtracted
    from ``num_planned``.
    """

    request: Request
    index: int
    prompt: list[int] = field(init=False)
    output: list[int] = field(default_factory=list, init=False)
    grammar: GrammarState | None = field(default=None, init=False)
    """The state after ``output``."""
    table: list[int] = field(default_factory=list, init=False)
    """Blocks of positions 0, block_size, 2·block_size, …; empty unless RUNNING."""
    hashes: list[bytes] = field(default_factory=list, init=False)
    """Hashes of its leading full blocks, as far as they were asked for. They depend on the tokens
    alone, so they stay when it is preempted."""
    num_tokens: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_planned: int = field(default=0, init=False)
    """``num_computed``, plus the tokens that steps in flight compute."""
    limit: int = field(init=False)
    """The most tokens that are ever computed: all of the prompt and of the longest output, except
    the last token, which is only sampled."""
    prefill_end: int = field(default=0, init=False)
    """The sequence decodes once the positions [0, prefill_end) are computed. These are all tokens
    that it had when it was admitted, except the last one if that was output."""
    sample_index: int = field(default=0, init=False)
    """Of its latest row that samples: the index of the row's first sample among all samples of that
    row's step."""
    num_cached_blocks: int = field(default=0, init=False)
    """Leading blocks of the table that have been offered to the prefix cache."""
    cumulative_logprob: float = field(default=0.0, init=False)
    drafting: Drafting | None = field(default=None, init=False)
    num_read: int = field(default=0, init=False)
    """How many of its tokens the draft model had computed when it was asked last."""
    runner_proposal: list[int] = field(default_factory=list, init=False)
    """The tokens that the runner proposed to follow the last token. The first of them become
    ``drafting.proposal``."""
    reserved_blocks: int = field(default=0, init=False)
    """Blocks reserved for this sequence while it runs. Only with ``eviction: never``, and only in a
    resumed request: its sequences share no prompt, so each reserves blocks, the request none."""
    state: SequenceState = field(default=SequenceState.WAITING, init=False)
    waiting_since: float = field(default=0.0, init=False)
    """If the sequence waits: when its request arrived, or when it was preempted or forked."""
    level: int = field(default=0, init=False)
    """Lower levels come first. Policies alone set it: 0 without."""
    rank: tuple[float, int, int] = field(init=False)
    """Within a level, lower ranks come first. It never changes."""

    def __post_init__(self) -> None:
        request = self.request
        self.prompt = request.message.prompt
        if request.grammar is not None:
            ignores = request.message.params.ignore_eos
            self.grammar = request.grammar.begin(may_end=not ignores)
        self.num_tokens = len(self.prompt)
        self.limit = self.num_tokens + request.max_output - 1
        self.rank = (request.aged_arrival, request.message.key, self.index)

    @property
    def prefill_left(self) -> int:
        """How many known tokens a prompt or a recomputation has yet to plan; 0 for a decode. The
        last output token lies behind ``prefill_end``, but counts as long as anything before that is
        left: the last chunk of a recomputation computes it, too, if the budget allows."""
        planned = self.num_planned
        if planned >= self.prefill_end:
            return 0
        return self.num_tokens - planned

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at the positions [start, end)."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        if start >= size:
            return self.output[start - size : end - size]
        return self.prompt[start:] + self.output[: end - size]

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first ``count`` blocks, all of them full. Each is computed once."""
        hashes = self.hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.request.root
            hashes.append(block_hash(parent, self.tokens(start, start + block_size)))
        return hashes[:count] if len(hashes) > count else hashes


by_rank = attrgetter("level", "rank")
"""The key that lists of waiting and of running sequences are sorted by: ranks within levels."""


def remove_ranked(ranked: list[Sequence], sequence: Sequence) -> bool:
    """Take a sequence out of a list that is sorted by rank. False: it was not there."""
    index = bisect_left(ranked, by_rank(sequence), key=by_rank)
    if index == len(ranked) or ranked[index] is not sequence:
        return False
    del ranked[index]
    return True
