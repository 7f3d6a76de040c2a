"""The engine's options: one flat frozen struct. :mod:`jitney.read_config` reads and checks them.

An option whose default depends on the device or the checkpoint is ``None`` here. The loader
(``execution.load``) knows both and derives the value, once.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Quantization = Literal["none", "fp8", "int8", "int4"]


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Option ``speculation``: how a sequence's next tokens are guessed (drafted). One step verifies
    several drafts."""

    drafter: Literal["ngram", "draft_model", "eagle"] = "ngram"
    """``ngram`` looks for the last tokens earlier in prompt and output, and drafts what followed
    them there. ``draft_model`` asks a smaller model. ``eagle`` asks a head that reads the model's
    hidden states, on a CPU only."""
    model: str | None = None
    """The draft model, which has the same vocabulary: a folder, a GGUF file or an id, as option
    ``model``. For ``eagle``, the folder of the head."""
    max_drafts: Annotated[int, Meta(ge=1, le=64)] = 8
    """Most drafts of a sequence in one step."""
    ngram_min: Annotated[int, Meta(ge=1, le=32)] = 2
    """For ``ngram``: at least so many of the last tokens must match."""
    ngram_max: Annotated[int, Meta(ge=1, le=32)] = 3
    """For ``ngram``: at most so many of the last tokens are compared. The longest match is taken;
    of several that are equally long, the latest."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of option ``tiers``: the targets and limits of one kind of requests."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    ttft_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Target for the time to the first token."""
    gap_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Target for the time between two tokens. It may not be below that of a tier above."""
    share: Annotated[float, Meta(ge=0.01, le=1)] = 0.1
    """The tier gets at least this share of a step's time while it has work, even if a tier above
    then misses its targets.

    The share also limits the sequences of this tier that have waited long enough (``aging_s``,
    below) and so run as if they were of the first tier. They may be at most this share of all
    sequences that may run at once, and hold at most this share of the blocks. One sequence of the
    tier may always run so."""
    max_running: Annotated[int, Meta(ge=1)] | None = None
    """Most of its sequences that run at once. None: only ``max_num_seqs`` limits them."""
    max_queued: Annotated[int, Meta(ge=0)] | None = None
    """Most of its requests that may wait. None: only the option ``max_queued`` limits them."""
    aging_s: Annotated[float, Meta(ge=0.001, le=1e6)] = 60.0
    """A request counts as one of the first tier once it has waited for the sum of ``aging_s`` of
    its own tier and of all tiers between that and the first. So none starves. Without effect in the
    first tier."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of ``model.json``. docs/options.md is generated from their docstrings."""

    # -- the model
    model: str
    """A folder or a GGUF file, relative to the version folder, or the id of a model in the local
    hub cache."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations. ``auto``: the checkpoint's, if the device supports it; with
    weights of 8 or 4 bits on a CPU, bfloat16."""
    quantization: Quantization = "none"
    """Quantize the linear layers while loading. ``fp8``: weights and activations. ``int8`` and
    ``int4``: weights; on a CPU also activations, these to 8 bits."""
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """Longest prompt plus output, in tokens. None: what the checkpoint was made for; 32,768 if it
    does not say. With rotary scaling ``longrope`` it also chooses the factors, for all lengths: the
    short ones up to ``original_max_position_embeddings``, else the long ones."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling parameters that a client leaves unset. ``auto``: the gateway and ``LLM`` take them
    from the checkpoint's ``generation_config.json``: temperature, top_p, top_k, min_p and
    repetition_penalty. ``none``: they have the defaults that are documented. Requests of tensors
    always have those."""

    # -- the device
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """CPU threads of one instance. None: the cores this process may use."""
    instances: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Instances that share this device. The default size of the cache is divided by it."""

    # -- kernels
    attention: Literal["auto", "reference", "cpu", "gpu"] = "auto"
    """``auto``: the fast kernel of the device, if it can be built. ``reference``: plain torch."""
    fuse: bool = True
    """Replace norms, projections and gated activations by fused kernels, where they fit."""
    prepack: bool = True
    """Prepack linear layers for the CPU, if the operators for it exist."""
    compile: bool = False
    """Use ``torch.compile``: only on a GPU. Loading then takes minutes."""
    batch_invariant: bool = False
    """Use kernels with fixed tiles and split sizes, so that a request's logits are bitwise the same
    in every batch. A model is refused if one of its operations cannot do this."""

    # -- the step on a GPU
    overlap: bool = True
    """Plan and launch a step while the one before it still runs."""
    cuda_graphs: Literal["lazy", "load", "never"] = "lazy"
    """When decode steps are captured as CUDA graphs: at their first use, at load, or never."""
    cuda_graph_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are padded to. None: powers of two, then multiples of 16."""

    # -- the batch
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Most sequences that run at once, all ``n`` of a request counted."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    """Token budget of one step, at least ``max_num_seqs``. None: 512 on a CPU, 8,192 on a GPU."""

    # -- the KV cache
    kv_cache_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Size of the cache. None: a share of the free memory, ``kv_cache_fraction``."""
    kv_cache_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the memory left after loading. In any case 1/64 of that memory stays free. None: 0.9
    on a GPU; on a CPU 0.25, at most 4 GiB."""
    kv_cache_dtype: Literal[
        "auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3"
    ] = "auto"  # fmt: skip
    """``auto``: the activations' dtype. ``int8``: a scale per token and head, only on a CPU.
    ``float8_e4m3``: a scale per head, only on a GPU."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens in a block. The CPU's attention kernel needs a multiple of 16."""
    prefix_caching: bool = True
    """Reuse the cached blocks of a prompt prefix that was computed before."""
    eviction: Literal["never", "preempt"] = "preempt"
    """``never`` admits a request only if its longest possible output fits beside those of all
    others. ``preempt`` admits it if its prompt fits; when no block is free later, the sequence that
    came last is preempted, and computed again afterwards."""
    watermark: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    """With ``preempt``: the share of all blocks that an admission must leave free."""

    # -- speculative decoding
    speculation: SpeculationConfig | None = None
    """Draft tokens and verify several in one step: an object, see [speculation](speculation.md)."""

    # -- adapters
    adapters: str | None = None
    """A folder, relative to the version folder, with a folder for each LoRA adapter in PEFT's
    format. One that is put there later is found when a request first names it."""
    max_adapters: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Most adapters in memory. Memory for so many is reserved at load. A new one replaces the one
    that was used longest ago."""
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512)] = 32
    """Largest rank of an adapter."""

    # -- the queue
    max_queued: Annotated[int, Meta(ge=0)] = 1024
    """Requests that may wait; one more is refused as UNAVAILABLE. With ``tiers``, requests of tiers
    below that of the new request do not count."""
    aging_s: Annotated[float, Meta(ge=0.001)] = 10.0
    """Seconds of waiting that raise a request by one priority level, so that none starves."""
    min_priority: Annotated[int, Meta(ge=-1000, le=0)] = -1000
    """Most urgent ``priority`` that a request may ask for. 0: no request is more urgent than those
    that name no priority."""
    priority_preempts: bool = False
    """With ``eviction: preempt``: a request that waits preempts running ones of a lower priority,
    unless these have aged so far that they come before it. With ``tiers`` this holds among the
    requests of one tier; while that tier is at its ``max_running``, none of them is preempted for
    another. Without this option, ``priority`` decides only who is admitted next, and who makes way
    when no block is free."""
    tiers: tuple[TierConfig, ...] = ()
    """Kinds of requests, the most urgent first, with targets and limits of their own: a list of
    objects, see [tiers](tiers.md)."""
    default_tier: str | None = None
    """The tier of requests that name none. None: the last."""

    # -- limits of a request
    max_n: Annotated[int, Meta(ge=1, le=65536)] = 128
    """Most sequences of one request."""
    max_logprobs: Annotated[int, Meta(ge=0, le=1 << 20)] = 20
    """Most candidates per position, in ``logprobs`` and ``prompt_logprobs``."""
    max_answer_entries: Annotated[int, Meta(ge=1)] = 2_000_000
    """Most entries of an answer that is not streamed: ``n`` × ``max_tokens`` × (``logprobs`` + 1),
    plus ``prompt_logprobs`` + 1 for each prompt token. An entry takes some 130 bytes of the
    server's memory."""
    max_prompt_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Longest prompt, in bytes, checked before tokenizing. None: 32 per token of
    ``max_model_len``, at least 65,536."""
    max_stop_strings: Annotated[int, Meta(ge=0)] = 64
    """Strings in ``stop``, and in ``bad_words``."""
    max_stop_length: Annotated[int, Meta(ge=1)] = 256
    """Characters of one stop string."""
    max_list_ids: Annotated[int, Meta(ge=0)] = 8192
    """Ids in any one list of a request (stop_token_ids, logit_bias, …)."""

    # -- structured output
    max_grammar_bytes: Annotated[int, Meta(ge=1, le=1 << 24)] = 1_000_000
    """Largest schema, regex, list of choices or grammar of ``structured_outputs``."""
    max_grammar_depth: Annotated[int, Meta(ge=1, le=100)] = 64
    """Deepest nesting in ``structured_outputs``: of a schema's objects and lists, or of the
    brackets in a regex or a grammar."""
    grammar_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Seconds of processor time that the check of one grammar may take. Then the process that runs
    it is ended; it does nothing but check grammars."""
    grammar_cache: Annotated[int, Meta(ge=1)] = 64
    """Most grammars that are kept for further requests: the most recently used ones. The front
    notes that they passed their check; the engine keeps them in compiled form."""

    # -- chat
    chat_template_parameters: tuple[str, ...] = (
        "add_generation_prompt",
        "enable_thinking",
        "reasoning_effort",
    )
    """Names that a client may pass to the chat template."""
    tool_format: str | None = None
    """How the model writes calls of tools, for the gateway. None: as its chat template tells."""
    reasoning_format: str | None = None
    """How the model marks where its reasoning begins and ends, for the gateway. None: as its chat
    template tells."""

    # -- responses
    max_pending_tokens: Annotated[int, Meta(ge=1)] = 65536
    """Most tokens of one request that may wait to be sent. If more wait, it is cancelled."""
    send_share: Annotated[float, Meta(ge=0.01, le=1)] | None = None
    """Share of the time that sending may take. To keep to it, several tokens of a stream leave in
    one response. With 1, a response leaves as soon as the one before it has left. None: 0.2 on a
    CPU, 1 on a GPU."""
    cancel_sweep_s: Annotated[float, Meta(ge=0.001, le=10)] = 0.05
    """Seconds between two checks for clients that disconnected. If the checks would take more than
    a twentieth of the time, there are more seconds between them, up to 1. With thousands of
    requests that is not enough: then the checks take more of the time, up to a quarter."""

    # -- failure and shutdown
    watchdog_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0
    """The engine is started again if it makes no step for so many seconds although work waits. When
    a step on a GPU has to compile kernels, the count starts again at each of them. With
    ``compile``, a graph can take minutes: set more."""
    load_watchdog_s: Annotated[float, Meta(ge=0.1, le=86400)] = 120.0
    """A load is given up after so many seconds in which its processes sent no new message and
    computed next to nothing. If they compute but send no new message, it is given up after ten
    times as many, and in any case after a hundred times as many. A first load then fails. A later
    one is tried again, with pauses, and open requests end as ``UNAVAILABLE``. A request that waits
    for an adapter or a grammar also ends as ``UNAVAILABLE`` if that is not ready after so many
    seconds."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """Seconds that running requests have to finish after SIGTERM. ``jitney serve`` and our
    container have settings of their own for this (``--grace``, ``DRAIN_SECONDS``): this option
    holds where the server is started without either. Set it below the server's exit timeout:
    clients of unfinished requests then still get an error."""

    # -- observation
    trace_endpoint: str | None = None
    """``http://HOST:PORT`` of an OpenTelemetry collector (OTLP over gRPC), which gets the spans of
    each request. None: no spans are made."""
    metrics_flush_s: Annotated[float, Meta(ge=0.01, le=60)] = 0.25
    """Seconds between two updates of the server's gauges. Its other metrics are updated less often
    if that would take more than a hundredth of the time."""

    @property
    def most_samples(self) -> int:
        """Most rows of logits that a step has, unless its token budget allows fewer: one for each
        running sequence, and one for each of its drafts. The end of a prompt has one row, too: the
        first tokens of all ``n`` sequences are sampled from it."""
        drafts = 0 if self.speculation is None else self.speculation.max_drafts
        return self.max_num_seqs * (1 + drafts)

    def tier_of(self, name: str | None) -> int:
        """Index of a tier in ``tiers``. None is the default tier. 0 if the option is empty."""
        if not self.tiers:
            return 0
        name = name or self.default_tier
        if name is None:
            return len(self.tiers) - 1
        names = [tier.name for tier in self.tiers]
        return names.index(name)
