"""The messages that a front and its engine exchange. Data only.

- front -> engine: :class:`Submit`, :class:`Finish`, :class:`Cancel`;
- engine -> front: :class:`StepReport`, one per step: its events and its figures.

They hold ids, numbers and texts only, so that the engine may live in a thread or in a process of
its own. What scheduler and runner hand each other inside the engine is in :mod:`jitney.batch`.

A request is a ``Submit`` here. The front's ``ClientRequest`` is what a client asked for, before its
prompt is encoded; ``core.request.Request`` is a request in the engine, with its sequences; and
``OpenRequest`` is one that a caller of LLM has started.

At the end stand two descriptions of a model. :class:`ModelInfo` is sent once, at load.
:class:`Footprint` is sent to no front: the command that plans memory asks for it.

Every submitted request ends in exactly one terminal event: :class:`Finished`, :class:`Cancelled` or
:class:`Failed`. All times are seconds of the monotonic clock, which processes of one machine share.
"""

from typing import Literal

import msgspec

from jitney.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "deadline"]
Chunking = Literal["any", "whole"]
"""How a model lets its prompts be cut: anywhere; or never. Then a prompt is one row, in a step of
its own, and each later row of its sequence has one token."""

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
    """What the request emitted before, one entry for each of its ``n`` sequences. Empty for a new
    request. Not empty if an engine that has died had the request, or if the scheduler has taken it
    back (see ``core.taking_back``)."""
    first_token: float | None = None
    """When the request emitted its first token. If this is set, the request is *resumed*: its
    sequences go on after what they have emitted, as if they had been preempted."""
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


FrontMessage = Submit | Finish | Cancel
"""What a front sends to its engine."""

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
    """Of one request. Seconds since ``arrival``; None for what never happened or is not known.
    The counts are 0 if its engine died and no other engine took the request up before it ended."""

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
    """The figures of one tier: gauges after a step, and counts within it."""

    waiting: int = 0
    """Gauge: sequences."""
    running: int = 0
    """Gauge: sequences."""
    held_back: int = 0
    """Count: running sequences that got no row, or a smaller chunk than the token budget allowed,
    to keep the step within a tier's latency target."""
    overdue: int = 0
    """Count: requests that had waited for the whole aging time of their tier (see ``aging_s`` of a
    tier) before any of their sequences was admitted."""
    oldest_s: float = 0.0
    """Gauge: the longest wait of a sequence that waits now, in seconds since it arrived, or was
    preempted or forked."""


class StepStats(msgspec.Struct, array_like=True, kw_only=True):
    """The figures of one step. Gauges say how things stand after it; counts say what happened
    within it, and the front adds them up. During a step the scheduler keeps its counts in an object
    of this class, and increments them there.

    Rows and tokens are counted by the call of ``step()`` that applied their output. With overlap
    that is the call after the one that launched them.
    """

    # Gauges.
    waiting: int = 0
    """Requests of which no sequence runs. Those that wait for a grammar or an adapter are among
    them."""
    running: int = 0
    """Sequences."""
    queued: int = 0
    """What ``max_queued`` limits: requests of which no sequence was ever admitted. Those that wait
    for a grammar or an adapter are among them."""
    blocks_total: int = 0
    blocks_used: int = 0
    """Referenced by a live sequence."""
    blocks_cached: int = 0
    """Not referenced, but their content can still be found by its hash."""
    adapters_resident: int = 0
    steps_in_flight: int = 0
    """Steps that were launched and are not complete: with overlap usually one, else none."""
    # Counts.
    step_seconds: float = 0.0
    """Time of one call of ``step()``. With overlap the call launches a step and waits for the one
    before; in steady state that takes as long as one step on the device."""
    batch_sequences: int = 0
    """Sequences of the batch whose output was applied; 0 if none was."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed, also again after a preemption. Output that was computed
    again does not count."""
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
    """Prompt tokens that were looked up in the prefix cache, also again after a preemption."""
    preemptions: int = 0
    out_of_memory: int = 0
    """Steps that raised MemoryError."""
    adapter_loads: int = 0
    """Loads that have ended, with success or without."""
    adapter_hits: int = 0
    """Requests whose adapter was resident."""
    adapter_wait_seconds: float = 0.0
    """Sum over the requests whose wait for an adapter ended in this step."""
    tiers: list[TierStats] = []
    """Gauges and counts of each tier, in the order of option ``tiers``; empty without it."""

    def without_counts(self) -> "StepStats":
        """A copy with all gauges listed above and every count 0, for a report that belongs to no
        step."""
        tiers = [msgspec.structs.replace(tier, held_back=0, overdue=0) for tier in self.tiers]
        return StepStats(
            waiting=self.waiting,
            running=self.running,
            queued=self.queued,
            blocks_total=self.blocks_total,
            blocks_used=self.blocks_used,
            blocks_cached=self.blocks_cached,
            adapters_resident=self.adapters_resident,
            steps_in_flight=self.steps_in_flight,
            tiers=tiers,
        )


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What the engine reports after each step."""

    events: list[Event]
    """In the order in which they happened."""
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
    """Whether the runner's ``launch`` returns before the step's end, so that the next step can be
    planned meanwhile."""
    cache: str = "paged"
    """How layers keep their past: ``paged`` (K and V in blocks), ``latents`` (in blocks),
    ``indexed`` (latents and the keys of their index, in blocks), ``state`` (in slots), or some of
    these joined by ``+``; or ``opaque``, in transformers' own cache object, one for each
    sequence."""
    num_slots: int = 0
    """Most sequences that may hold a slot (see ``core.slots``); 0: the model has none."""
    num_snapshots: int = 0
    """Slots beside these, for snapshots (see ``core.snapshots``); 0: none are kept."""
    chunking: Chunking = "any"
    slowdown: float = 1.0
    """With opaque caches: how much longer eight sequences take, one after the other, than eight
    tokens in one pass."""
    sampling_defaults: dict[str, float] = {}
    """What the gateway and ``LLM`` fill in for sampling parameters that are left unset; empty with
    option ``generation_config`` none."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes of a device's memory, found from its files before any weight is read. All
    sizes are in bytes."""

    max_model_len: int
    """The option, or what the checkpoint was made for."""
    dtype: str
    cache_dtype: str
    weights: int
    """All weights, in the form in which they are loaded."""
    block: int
    """One KV block."""
    slot: int = 0
    """Of one slot: what a running sequence takes beside its blocks. 0: nothing."""
    snapshots: bool = False
    """Whether some slots are for snapshots (see ``core.snapshots``). Models with states that go on
    after one by single tokens alone have none, too, but that shows only at load."""
    cache: str = "paged"
    """The kind of the cache: see :class:`ModelInfo`."""
    expansion: float = 1.0
    """With option ``adapters``, latents are kept as keys and values: how many times as much these
    take. 1: the model keeps none so."""
    step_token: int
    """The activations for one token of a step; an estimate."""
    step_row: int
    """The logits of one sampled row."""
    tensors: dict[str, list[int]]
    """The tensors in the files. A key is the text ``name, dtype shape``, with ``*`` for the number
    of a layer, so that it stands for the tensors of all layers. The value is ``[number of tensors,
    bytes of all of them]``."""
