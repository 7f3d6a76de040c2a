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
    """What one sequence of a request has emitted. The front keeps it up to date."""

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
    """``bad_words`` as lists of token ids. Where the output ends with all but the last id of a
    list, that last id may not be sampled."""
    arrival: float
    deadline: float | None = None
    emitted: list[Emitted] = []
    """Not empty if an engine that has died had this request: one entry for each of its ``n``
    sequences. The request is then resumed as if it had been preempted."""
    first_token: float | None = None
    """When the request emitted its first token, if it has."""
    request_id: str = ""
    """The client's, for the log: it need not be unique."""
    grammar: str = ""
    """``structured_outputs`` as a grammar in the compiler's form, already checked; empty: none."""


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
    """When each of the preemptions was, in seconds since ``arrival``."""


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
    """Sequences."""
    running: int = 0
    """Sequences."""
    held_back: int = 0
    """A count: running sequences that got no row, or a smaller chunk than the token budget allowed,
    to keep the step within a tier's latency target."""
    overdue: int = 0
    """A count: requests that reached the full age of their tier before any of their sequences was
    admitted."""
    oldest_s: float = 0.0
    """The longest wait of a sequence that waits now: seconds since it arrived or was preempted."""


class StepStats(msgspec.Struct, array_like=True, kw_only=True):
    """Gauges after a step of the engine, and counts within it, which the front adds up. The
    scheduler counts in this object itself.

    Rows and tokens count in the call of ``step()`` that applied their output. With overlap that is
    the call after the one that launched them.
    """

    waiting: int = 0
    """Sequences, and requests that wait for a grammar or an adapter."""
    running: int = 0
    """Sequences."""
    queued: int = 0
    """What ``max_queued`` limits: requests of which no sequence was ever admitted. Those that wait
    for a grammar or an adapter are among them."""
    blocks_total: int = 0
    blocks_used: int = 0
    """Referenced by a live sequence."""
    blocks_cached: int = 0
    """Not referenced, content still findable by its hash."""
    step_seconds: float = 0.0
    """Time of one call of ``step()``. With overlap the call launches a step and waits for the one
    before; in steady state that takes as long as one step on the device."""
    batch_sequences: int = 0
    """0 if no output was applied."""
    prefill_tokens: int = 0
    generated_tokens: int = 0
    """Not counted are tokens of sequences that had ended before the output was applied."""
    forced_tokens: int = 0
    """Those of ``generated_tokens`` that a grammar forced."""
    draft_rows: int = 0
    """Rows with drafts."""
    draft_tokens: int = 0
    """Drafts that were computed."""
    accepted_tokens: int = 0
    """Those of ``draft_tokens`` that became output."""
    prefix_hit_tokens: int = 0
    """Those of ``prefix_query_tokens`` that were found in the prefix cache."""
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    preemptions: int = 0
    out_of_memory: int = 0
    """Steps that raised MemoryError."""
    adapters_resident: int = 0
    adapter_loads: int = 0
    """Loads that have ended, with success or without."""
    adapter_hits: int = 0
    """Requests whose adapter was resident."""
    adapter_wait_seconds: float = 0.0
    """Sum over the requests whose wait for an adapter ended in this step."""
    tiers: list[TierStats] = []
    """In the order of option ``tiers``; empty without that option."""


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
    """How many bytes a model takes of a device, found from its files before any weight is read."""

    max_model_len: int
    """The option, or what the checkpoint was made for."""
    dtype: str
    cache_dtype: str
    weights: int
    """In the form in which they are loaded."""
    block: int
    """One KV block."""
    step_token: int
    """Activations for one token of a step; an estimate."""
    step_row: int
    """Logits of one sampled row."""
    tensors: dict[str, list[int]]
    """The tensors in the files. The key is a text of name, dtype and shape, in which all layers are
    alike; the value is how many tensors there are, and their bytes together."""


# --------------------------------------------------------------------------- scheduler <-> runner


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
    """Tokens generated so far; empty when ``sample`` has more than one index. If ``carried`` is
    set, the newest token is not in it yet. With that token counted, the number of outputs is
    ``end - len(prompt)``."""
    stop_ids: frozenset[int]
    bad_words_ids: list[list[int]]
    carried: int | None = None
    """Set if the row's one token is still being sampled by the step before, which is in flight. It
    is the index of that token among all samples of that step, counted row by row. ``token_ids`` is
    then ``[0]``, to be replaced on the device, and ``output`` lacks the token."""
    grammar: GrammarState | None = None
    """Its mask holds for every token that the row samples. Like ``output``, it may be read only
    during ``execute`` or ``launch``."""
    drafts: int = 0
    """So many of ``token_ids``, the last ones, are drafts, which are not part of ``output``. Then
    ``sample`` has one index, and the row samples ``drafts + 1`` tokens: one in place of the first
    draft, and one after each draft, as if the drafts up to there were output."""
    propose: int = 0
    """How many tokens a draft model is to propose after the newest token of the output. The block
    table has slots for so many more."""
    most_read: int = 0
    """How many tokens of prompt and output the draft model may compute in this step before it
    proposes. If that leaves any that it has not computed, it proposes nothing."""
    adapter: Adapter | None = None

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
    """One step. Copies come first: (source, destination) blocks, all layers, K and V."""

    rows: list[Row]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class RowOutput:
    """The output of one row. ``token_ids`` and ``logprobs`` are parallel to ``Row.sample``. With
    drafts they hold the sample in place of the first draft, then the one after it, and so on; what
    follows a sample that differs from its draft may be missing.
    """

    token_ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    """Per sampled token, if ``params.logprobs`` is set: the candidates at its position."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """If ``params.prompt_logprobs`` is set and the row computed prompt tokens: the candidates for
    prompt[q], for each prompt position q with start < q <= end and q < len(prompt)."""
    proposal: list[int] = field(default_factory=list)
    """What a draft model proposes after the newest token: at most ``Row.propose`` tokens."""
    read: int = 0
    """How many tokens of prompt and output, the newest one included, the draft model computed in
    this step before it proposed: at most ``Row.most_read``."""
    unread: int = 0
    """How many tokens it still has to compute before it can propose."""
    error: JitneyError | None = None
    """Why this row alone could not be served, e.g. because its logits are not finite. It ends the
    request."""


@dataclass(slots=True)
class StepOutput:
    """Parallel to ``Batch.rows``."""

    rows: list[RowOutput]
