"""The messages of the system. Data only; every other module imports this one.

Three groups, by the border they cross:

- front -> engine: :class:`Submit`, :class:`Finish`, :class:`Cancel`: plain msgspec messages, ids
  and numbers only, so that the engine may live in a thread or in a process of its own;
- engine -> front: :class:`StepReport`, one per step, a list of events and a few gauges;
- scheduler <-> runner, inside the engine: :class:`Batch` and :class:`StepOutput`.

Every submitted request ends in exactly one terminal event: :class:`Finished`, :class:`Cancelled` or
:class:`Failed`. All times are seconds of the monotonic clock, which processes of one machine share.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from jitney.errors import JitneyError
from jitney.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "deadline"]

# --------------------------------------------------------------------------- front -> engine


class Emitted(msgspec.Struct, array_like=True):
    """What one sequence of a request has emitted; the front adds to it."""

    ids: list[int] = []
    cumulative_logprob: float = 0.0
    """Sum over ``ids``; 0 if no logprobs are asked for."""
    ended: bool = False


class Submit(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="submit"):
    """One checked request. ``key`` is the front's, unique for the engine's life; client ids never
    serve as keys."""

    key: int
    prompt: list[int]
    """Token ids, at least one."""
    params: SamplingParams
    """With a seed. Stop strings are the front's business: the engine never looks at ``stop``."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a sequence: the model's ends of sequence (unless ignored) and stop_token_ids."""
    bad_words_ids: list[list[int]] = []
    """``bad_words`` as token sequences: the last id of one may not follow the ids before it."""
    arrival: float
    deadline: float | None = None
    emitted: list[Emitted] = []
    """Set if an engine that has ended had accepted it, one for each of its ``n`` sequences: it goes
    on like a preempted one."""
    first_token: float | None = None
    """When it emitted its first token, if it has."""
    request_id: str = ""
    """The client's, for the log: it need not be unique."""
    grammar: str = ""
    """What ``structured_outputs`` became, checked; empty if there was none."""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """The front found a stop string: sequence ``index`` of the request ends with reason ``stop``.
    Tokens made after it are dropped by the front."""

    key: int
    index: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The client is gone or asked to stop. An unknown or ended key is ignored."""

    key: int


Message = Submit | Finish | Cancel

# --------------------------------------------------------------------------- engine -> front


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate at one position. ``rank`` counts from 1 over the whole vocabulary."""

    token_id: int
    logprob: float
    rank: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="tokens"):
    """New tokens of one sequence, and its end if this step ended it.

    A token of ``stop_ids`` that ends a sequence is included in ``ids`` (it was made and counts);
    the front leaves its text out, as vLLM does.
    """

    key: int
    index: int
    ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    """Per new token: the chosen one first, then the best ones (vLLM's set, without duplicates)."""
    cumulative_logprob: float | None = None
    """Sum over the sequence so far; None if no logprobs were asked for."""
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The id that ended the sequence, if it was one of ``stop_ids``."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt_logprobs"):
    """Per prompt token; None for the first, which nothing precedes. Comes before any Tokens."""

    key: int
    logprobs: list[list[Logprob] | None]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request. Seconds since ``arrival``; None for what never happened."""

    queue_s: float | None
    first_token_s: float | None
    total_s: float
    cached_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    preemptions: int = 0
    preempted_s: list[float] = []
    """When each of them was."""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Terminal: every sequence has ended; its last Tokens event has the finish reason."""

    key: int
    timing: Timing


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag="cancelled"):
    """Terminal: the request was cancelled; its blocks are free."""

    key: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Terminal: ``code`` is one of the names in ``errors``."""

    key: int
    code: str
    message: str


Event = Tokens | PromptLogprobs | Finished | Cancelled | Failed
TERMINAL = (Finished, Cancelled, Failed)


class TierStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of one tier: gauges after a step, and counts within it."""

    waiting: int = 0
    running: int = 0
    """Sequences."""
    held_back: int = 0
    """Running sequences that had no row, or less of a chunk than the token budget allowed, so that
    the step was within a target. A count."""
    overdue: int = 0
    """Requests of which nothing was admitted while they aged. A count."""
    oldest_s: float = 0.0
    """Seconds for which the sequence that waits longest does so: since its arrival, or since it was
    preempted."""


class StepStats(msgspec.Struct, array_like=True, kw_only=True):
    """Gauges after a step of the engine and counts within it, at which the scheduler counts. The
    front adds the counts up. Rows and tokens count in the step that applied their output, which
    with overlap is the next one."""

    waiting: int = 0
    """Sequences, and requests that wait for a grammar or an adapter."""
    running: int = 0
    """Sequences."""
    queued: int = 0
    """Requests of which nothing was ever admitted, those that wait for a grammar or an adapter
    included: what ``max_queued`` limits."""
    blocks_total: int = 0
    blocks_used: int = 0
    """Referenced by a live sequence."""
    blocks_cached: int = 0
    """Not referenced, content still findable by its hash."""
    step_seconds: float = 0.0
    """From the inbox to the events. With overlap: launching a step and waiting for the one before,
    which in steady state is the time of one."""
    batch_sequences: int = 0
    """0 if no output was applied."""
    prefill_tokens: int = 0
    generated_tokens: int = 0
    """Without surplus tokens, of sequences that had ended by then."""
    forced_tokens: int = 0
    """Of these, the ones that a grammar forced."""
    draft_rows: int = 0
    """Rows with drafts."""
    draft_tokens: int = 0
    """Computed beyond the tokens that were due."""
    accepted_tokens: int = 0
    """Of these, the ones that were right."""
    prefix_hit_tokens: int = 0
    """Found in the prefix cache, of those looked up."""
    prefix_query_tokens: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    """Steps that raised MemoryError."""
    adapters_resident: int = 0
    adapter_loads: int = 0
    """Ended, those that failed included."""
    adapter_hits: int = 0
    """Requests whose adapter was resident."""
    adapter_wait_seconds: float = 0.0
    """Of requests whose adapter was not."""
    tiers: list[TierStats] = []
    """In the option's order; empty without it."""


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What the engine reports after each step; the events in the order in which they happened."""

    events: list[Event]
    stats: StepStats


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the front must know of a loaded model."""

    vocab_size: int
    """Rows of the embedding, not the tokenizer's count."""
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_ids: frozenset[int]
    dtype: str
    device: str
    attention: str
    """Name of the attention function in use."""
    num_parameters: int
    kv_cache_bytes: int = 0
    """Size of the cache: ``num_blocks`` blocks."""
    max_num_batched_tokens: int = 512
    """The token budget of a step: the option, or the device's default."""
    overlap: bool = False
    """Whether the runner has ``launch``: a step may be planned while another is in flight."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes of a device, told from its files before any weight is read. Bytes."""

    max_model_len: int
    """The option, or what the checkpoint was made for."""
    dtype: str
    cache_dtype: str
    weights: int
    """As they are loaded."""
    block: int
    """One KV block."""
    step_token: int
    """Activations of each token of a step, estimated."""
    step_row: int
    """Logits of each sampled row."""
    tensors: dict[str, list[int]]
    """As they are stored, those of all layers together: name, dtype and shape -> number, bytes."""


# --------------------------------------------------------------------------- scheduler <-> runner


class GrammarState(Protocol):
    """Where one sequence is in its grammar. A function of its output alone, so that a sequence that
    goes on elsewhere comes to the same state by accepting its tokens again."""

    error: str | None
    """Why it can go on no more, such as a limit that was reached. Its mask allows nothing then."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow, the end of the sequence excepted."""

    def accept(self, token_ids: list[int]) -> None:
        """Go on by these tokens of the output."""

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves one text only, in the tokenizer's own
        spelling; empty as a rule. Allowed in this order, and within the model's vocabulary."""

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these, from the first on, may follow one another."""

    def after(self, token_ids: list[int]) -> "GrammarState":
        """The state that these tokens, all of them allowed, would lead to. This one stays."""

    def mask(self) -> bytes:
        """A bit for each id, the lowest of a byte first: whether it may be next. Whole words of 32
        bits."""


class Adapter(Protocol):
    """A loaded adapter. It stays while a request that names it is open."""

    @property
    def version(self) -> str:
        """Tells its files apart from all others: the prefix cache is rooted in it."""


class Grammar(Protocol):
    """A compiled grammar. Sequences share it."""

    def begin(self, may_end: bool) -> GrammarState:
        """The state of an empty output. Without ``may_end`` no mask has the ends of sequence."""


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: the tokens at positions [start, start + len(token_ids)).

    ``block_table``, ``prompt`` and ``output`` are the scheduler's own lists, because copying them
    in every step would cost too much. The runner reads them during ``execute`` or ``launch`` only
    and never changes them: afterwards the scheduler may append to them or clear them.
    """

    key: int
    index: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    """Position p lives in block ``block_table[p // block_size]`` at offset ``p % block_size``."""
    sample: tuple[int, ...]
    """Indices of the sequences to sample from the last row's logits: empty in the middle of a
    prompt, ``(index,)`` as a rule, ``range(n)`` when the prompt of a request with n > 1 is done."""
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    """Tokens made so far (empty when ``sample`` has more than one index). The last one is missing
    if ``carried`` is set: their number is ``end - len(prompt)`` in every case."""
    stop_ids: frozenset[int]
    bad_words_ids: list[list[int]]
    carried: int | None = None
    """Set if the row's one token is still being sampled by the step before, which is in flight: its
    index among that step's samples, numbered through its rows and, within a row, its ``sample``.
    ``token_ids`` is ``[0]`` then, to be replaced on the device, and ``output`` lacks the token."""
    grammar: GrammarState | None = None
    """Its mask holds for every token that the row samples. As ``output``, it is read only during
    ``execute`` or ``launch``."""
    drafts: int = 0
    """How many of ``token_ids``, the last ones, are drafts: not part of ``output``. Then ``sample``
    has one index, and a token is sampled before the first and behind each of them, as if those
    before it were output."""
    propose: int = 0
    """How many tokens a draft model is to propose behind the last good sample. The block table has
    slots for so many more."""
    most_read: int = 0
    """How many tokens it may compute before; while any are left, it proposes nothing."""
    adapter: Adapter | None = None

    @property
    def num_samples(self) -> int:
        """Tokens that it samples."""
        return len(self.sample) + self.drafts

    @property
    def end(self) -> int:
        """Context length after this step. Outputs before its sample: ``end - len(prompt)``."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Batch:
    """One step. Copies come first: (source, destination) blocks, all layers, K and V."""

    rows: list[Row]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class RowOutput:
    """The output of one row. The lists are parallel to ``Row.sample``; with drafts they hold what
    was sampled before the first draft, behind it, and so on, at least as far as drafts are right.
    """

    token_ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    """Per sampled sequence, if ``params.logprobs`` is set: the candidates at this position."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """If ``params.prompt_logprobs`` is set and the row computed prompt tokens: one entry per prompt
    position q with start < q <= end, q < len(prompt): the candidates for prompt[q]."""
    proposal: list[int] = field(default_factory=list)
    """What a draft model expects behind the last good sample: as many as ``Row.propose``, or fewer.
    """
    read: int = 0
    """Tokens that a draft model computed before: from the first one that it had not; the sampled
    one included."""
    unread: int = 0
    """Those that are left, because ``Row.most_read`` was less."""
    error: JitneyError | None = None
    """Why this row alone could not be served, e.g. because its logits are not finite. It ends the
    request."""


@dataclass(slots=True)
class StepOutput:
    """Parallel to ``Batch.rows``."""

    rows: list[RowOutput]
