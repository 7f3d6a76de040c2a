"""The engine's options: one flat frozen struct, read from a model version's ``model.json`` and the
``parameters`` of its ``config.pbtxt``, which come first.

Options that depend on the device or the checkpoint are ``None`` here and are derived once, at load,
by whoever knows both (the runner); everything else is final after :func:`load_config`.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from jitney.errors import ConfigError, nearest
from jitney.field_types import describe_range, describe_type, field_at_fault, kind_of

_log = logging.getLogger(__name__)
S = TypeVar("S", bound=msgspec.Struct)
Quantization = Literal["none", "fp8", "int8", "int4"]


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Option ``speculation``: tokens that are drafted, and computed together with the one due."""

    drafter: Literal["ngram", "draft_model", "eagle"] = "ngram"
    """``ngram``: what has followed the last tokens before, in prompt or output. ``draft_model``:
    what a smaller model expects. ``eagle``: what a head does that reads the model's hidden states;
    on a CPU alone."""
    model: str | None = None
    """The draft model, of the same vocabulary: a folder, a GGUF file or an id, as ``model``; or the
    head, a folder."""
    max_drafts: Annotated[int, Meta(ge=1, le=64)] = 8
    """Most drafts of a sequence in one step."""
    ngram_min: Annotated[int, Meta(ge=1, le=32)] = 2
    """Fewest tokens that must have occurred before."""
    ngram_max: Annotated[int, Meta(ge=1, le=32)] = 3
    """Most tokens that are compared: of matches the longest, of equal ones the latest is taken."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of option ``tiers``: a kind of requests, and what it may expect of the engine."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    ttft_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Target for the time to the first token."""
    gap_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Target for the time between two tokens, at least those of the tiers above."""
    share: Annotated[float, Meta(ge=0.01, le=1)] = 0.1
    """Least share of a step's time for this tier, if it has work, whatever the targets of others.
    """
    max_running: Annotated[int, Meta(ge=1)] | None = None
    """Most of its sequences that run at once. None: ``max_num_seqs`` alone counts."""
    max_queued: Annotated[int, Meta(ge=0)] | None = None
    """Of its requests, the most that may wait. None: the option ``max_queued`` alone counts."""
    aging_s: Annotated[float, Meta(ge=0.001, le=1e6)] = 60.0
    """Seconds of waiting that raise a request to the tier above, so that none starves. Of no use in
    the first tier."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of ``model.json``; docs/options.md has the same table for users."""

    # -- the model
    model: str
    """A folder or a GGUF file, relative to the version folder, or the id of a model in the local
    hub cache."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations. ``auto``: the checkpoint's, if the device supports it; with
    weights of 8 or 4 bits on a CPU, bfloat16."""
    quantization: Quantization = "none"
    """Quantize the linear layers while loading. ``fp8``, and ``int8`` and ``int4`` on a CPU:
    weights, and activations to 8 bits; ``int8`` and ``int4`` on a GPU: only weights."""
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """Longest prompt plus output, in tokens. None: what the checkpoint was made for."""

    # -- the device
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """CPU threads of one instance. None: the cores this process may use."""
    instances: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Instances that share this device: the default cache size is divided by it."""

    # -- kernels
    attention: Literal["auto", "reference", "cpu", "gpu"] = "auto"
    """``auto``: the fast kernel of the device, if it can be built. ``reference``: plain torch."""
    fuse: bool = True
    """Replace norms, projections and gated activations by fused kernels, where they fit: only on a
    CPU."""
    prepack: bool = True
    """Prepack linear layers for the CPU, if the operators for it exist."""
    compile: bool = False
    """Use ``torch.compile``: only on a GPU. Loading then takes minutes."""
    batch_invariant: bool = False
    """A request's logits are bitwise the same in every batch: fixed tiles and split sizes. A model
    with an operation that does not hold this is refused, by the operation's name. On a GPU it
    holds for attention alone."""

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
    """Share of the memory left after loading; 1/64 of it stays free. None: 0.9 on a GPU; on a CPU
    0.25, at most 4 GiB."""
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
    """``never`` admits a request only if its longest possible output fits beside that of all
    others; ``preempt`` if its prompt fits: if no block is free later, the last sequence is
    preempted and computed again."""
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
    """Most adapters in memory; the one used longest ago makes room. Memory is kept for so many."""
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512)] = 32
    """Largest rank of an adapter."""

    # -- the queue
    max_queued: Annotated[int, Meta(ge=0)] = 1024
    """Requests that may wait, those of lower tiers not counted; one more is refused as
    UNAVAILABLE."""
    aging_s: Annotated[float, Meta(ge=0.001)] = 10.0
    """Seconds of waiting that raise a request by one priority level, so that none starves."""
    min_priority: Annotated[int, Meta(ge=-1000, le=0)] = -1000
    """Most urgent ``priority`` that a request may ask for. 0: none before those that name none."""
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
    """Most entries of an answer that is not streamed: ``n`` × ``max_tokens`` × (``logprobs`` + 1)
    and (``prompt_logprobs`` + 1) per prompt token. One is some 130 bytes of the server's memory."""
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
    """Deepest nesting of its objects and lists, or of its brackets."""
    grammar_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Seconds that its check may take. It runs in a process of its own, which then ends."""
    grammar_cache: Annotated[int, Meta(ge=1)] = 64
    """Grammars that are kept, checked in front and compiled in the engine: those used last."""

    # -- chat
    chat_template_parameters: tuple[str, ...] = ("add_generation_prompt", "enable_thinking")
    """Names that a client may pass to the chat template."""
    tool_format: str | None = None
    """How the model writes calls of tools, for the gateway. None: as its chat template tells."""
    reasoning_format: str | None = None
    """How the model sets its reasoning off, for the gateway. None: as its chat template tells."""

    # -- responses
    max_pending_tokens: Annotated[int, Meta(ge=1)] = 65536
    """Tokens of one request that may wait to be sent. Beyond it the request is cancelled."""
    send_share: Annotated[float, Meta(ge=0.01, le=1)] | None = None
    """Share of the time that sending may take. Above it several tokens of a stream share a
    response; 1 sends as fast as the server accepts them. None: 0.2 on a CPU, 1 on a GPU."""
    cancel_sweep_s: Annotated[float, Meta(ge=0.001, le=10)] = 0.05
    """Seconds between two checks for clients that disconnected."""

    # -- failure and shutdown
    watchdog_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0
    """Seconds without a step, although work waits, after which the engine is started again. They
    count from zero for each kernel that a GPU's step compiles. With ``compile``, whose graphs can
    take minutes, set more."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """Seconds that running requests have to finish after the model's process gets SIGTERM. Less
    than the server's exit timeout, so that clients of the others still get an error."""

    # -- observation
    trace_endpoint: str | None = None
    """``http://HOST:PORT`` of an OpenTelemetry collector (OTLP over gRPC), which gets the spans of
    each request. None: none are made."""
    metrics_flush_s: Annotated[float, Meta(ge=0.01, le=60)] = 0.25
    """Seconds between two updates of the server's metrics."""

    @property
    def most_samples(self) -> int:
        """Tokens that a step may sample, unless its token budget allows fewer."""
        drafts = 0 if self.speculation is None else self.speculation.max_drafts
        return self.max_num_seqs * (1 + drafts)

    def tier_of(self, name: str | None) -> int:
        """Index of a tier among ``tiers``, the default's if None; 0 if there are none."""
        names = [tier.name for tier in self.tiers]
        name = name or self.default_tier
        if name is None:
            return max(len(names) - 1, 0)
        return names.index(name)


REMOVED_OPTIONS: dict[str, str] = {
    "refuse_late": "a request whose deadline passes before its first token ends then",
}
"""Options that are taken and ignored for one version, with a warning when the model is loaded.
Name -> what to know instead."""

# What transformers' apply_chat_template takes for itself: a client may neither send a template of
# its own nor change how one is applied.
_NOT_TEMPLATE_PARAMETERS = frozenset({
    "conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "sanitize_control_tokens",
})  # fmt: skip


def load_config(path: Path, parameters: Mapping[str, str] | None = None) -> EngineConfig:
    """Read ``model.json``; ``model`` comes back absolute if it names a folder or file beside it.

    ``parameters`` are options as text, each in place of the file's: see :func:`from_text`.
    Raises ConfigError for a missing or malformed file, an unknown key (naming the nearest known
    one), a wrong type or a value out of bounds.
    """
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing from the version folder") from None
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} must hold a JSON object of options")
    given = {key: from_text(key, text) for key, text in (parameters or {}).items()}
    return _with_absolute_paths(make_config(raw | given), path.parent)


def _with_absolute_paths(config: EngineConfig, folder: Path) -> EngineConfig:
    """Paths in ``model.json`` are relative to its folder. What names nothing there may be an id."""
    changes: dict[str, object] = {}
    if (folder / config.model).exists():
        changes["model"] = str((folder / config.model).resolve())

    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        drafter = folder / speculation.model
        if drafter.exists():
            resolved = str(drafter.resolve())
            changes["speculation"] = msgspec.structs.replace(speculation, model=resolved)

    if config.adapters is not None:
        changes["adapters"] = str((folder / config.adapters).resolve())
    return msgspec.structs.replace(config, **changes)


def from_text(key: str, text: str) -> object:
    """The value of an option that is written as text: a string as it stands, all else as in JSON
    (``64``, ``true``, ``[1, 2]``, ``null`` for the default). :func:`make_config` checks it."""
    known = key in EngineConfig.__struct_fields__
    if known and not isinstance(kind_of(EngineConfig, key), (inspect.StrType, inspect.LiteralType)):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
    return text


def make_config(options: dict[str, object]) -> EngineConfig:
    """Check ``options`` and make the struct. Raises ConfigError as :func:`load_config` does."""
    options = _without_removed(options)
    speculation = options.get("speculation")
    if isinstance(speculation, dict):
        options = options | {"speculation": _make_speculation(speculation)}
    tiers = options.get("tiers")
    if isinstance(tiers, (list, tuple)):
        options = options | {"tiers": [_make_tier(i, given) for i, given in enumerate(tiers)]}

    _check_names(options, EngineConfig)
    if "model" not in options:
        raise ConfigError("option model is missing: it names the checkpoint's folder")
    if options.get("attention") == "flashinfer":
        raise ConfigError("option attention is 'flashinfer', which was removed: set 'gpu'")
    config = _convert(options, EngineConfig)

    _check_pairs(config)
    if "max_num_seqs" in options:  # its default is lowered to a smaller token budget
        _check_token_budget(config)
    _check_chat_template_parameters(config)
    _check_gpu_options(config)
    _check_tiers(config)
    return config


def _check_pairs(config: EngineConfig) -> None:
    """Options that exclude each other, on any device."""
    if config.kv_cache_bytes is not None and config.kv_cache_fraction is not None:
        raise ConfigError("options kv_cache_bytes and kv_cache_fraction exclude each other")
    if config.adapters is not None and config.compile:
        raise ConfigError("options adapters and compile exclude each other")
    if config.compile and config.batch_invariant:
        raise ConfigError("options compile and batch_invariant exclude each other")


def _check_token_budget(config: EngineConfig) -> None:
    """Every running sequence may get a token in one step."""
    tokens = config.max_num_batched_tokens
    if tokens is not None and tokens < config.max_num_seqs:
        bound = f"at least max_num_seqs, {config.max_num_seqs}"
        raise ConfigError.of("max_num_batched_tokens", tokens, bound)


def _check_chat_template_parameters(config: EngineConfig) -> None:
    for name in config.chat_template_parameters:
        if name in _NOT_TEMPLATE_PARAMETERS:
            raise ConfigError(f"option chat_template_parameters must not hold {name!r}")


def _without_removed(options: dict[str, object]) -> dict[str, object]:
    """The options but for those of :data:`REMOVED_OPTIONS`, each of which is warned of."""
    for name in REMOVED_OPTIONS.keys() & options.keys():
        _log.warning("option %s was removed and is ignored: %s", name, REMOVED_OPTIONS[name])
    return {name: value for name, value in options.items() if name not in REMOVED_OPTIONS}


def _make_speculation(given: dict[str, object]) -> SpeculationConfig:
    _check_names(given, SpeculationConfig, "speculation.")
    made = _convert(given, SpeculationConfig, "speculation.")
    if (made.drafter != "ngram") != (made.model is not None):
        bound = "given with drafter 'draft_model' or 'eagle', and with these alone"
        raise ConfigError(f"option speculation.model must be {bound}")
    if made.ngram_max < made.ngram_min:
        bound = f"at least ngram_min, {made.ngram_min}"
        raise ConfigError.of("speculation.ngram_max", made.ngram_max, bound)
    return made


def _make_tier(index: int, given: object) -> TierConfig:
    if isinstance(given, TierConfig):
        return given
    if not isinstance(given, dict):
        raise ConfigError.of(f"tiers[{index}]", given, "an object")
    _check_names(given, TierConfig, f"tiers[{index}].")
    if "name" not in given:
        raise ConfigError(f"option tiers[{index}].name is missing")
    return _convert(given, TierConfig, f"tiers[{index}].")


def _check_tiers(config: EngineConfig) -> None:
    names: list[str] = []
    largest_gap = 0.0
    for index, tier in enumerate(config.tiers):
        if tier.name in names:
            raise ConfigError.of(f"tiers[{index}].name", tier.name, "another than those before it")
        names.append(tier.name)
        if tier.gap_ms is not None and tier.gap_ms < largest_gap:
            bound = f"at least that of the tiers above, {largest_gap}"
            raise ConfigError.of(f"tiers[{index}].gap_ms", tier.gap_ms, bound)
        largest_gap = max(largest_gap, tier.gap_ms or 0.0)

    lower = sum(tier.share for tier in config.tiers[1:])
    if lower > 1.0:
        raise ConfigError(
            f"option tiers: the shares below the first tier add up to {lower:g}, "
            "but must be at most 1"
        )
    if config.default_tier is not None and config.default_tier not in names:
        known = ", ".join(map(repr, names))
        bound = f"one of {known}" if names else "left out without tiers"
        raise ConfigError.of("default_tier", config.default_tier, bound)


def _check_names(options: Mapping[str, object], struct: type[msgspec.Struct], of: str = "") -> None:
    for key in options:
        if key not in struct.__struct_fields__:
            near = nearest(key, struct.__struct_fields__)
            raise ConfigError(f"option {of + key!r} is unknown{near}")


def _convert(options: Mapping[str, object], struct: type[S], of: str = "") -> S:
    try:
        return msgspec.convert(options, struct)
    except msgspec.ValidationError as error:
        key = field_at_fault(error)
        bound = describe_type(struct, key)
        if re.search("` [<>]", str(error)):  # of the right type, but out of range
            bound = describe_range(struct, key)
        raise ConfigError.of(of + key, options.get(key), bound) from None


def _check_gpu_options(config: EngineConfig) -> None:
    """What can be checked without the device; the rest is checked when the model is loaded."""
    if config.cuda_graph_sizes is not None:
        _check_graph_sizes(config, config.cuda_graph_sizes)
    if config.device != "cpu":
        return
    for key in ("compile", "cuda_graph_sizes"):
        if getattr(config, key):
            raise ConfigError.of(key, getattr(config, key), "left out with device 'cpu'")
    if config.cuda_graphs == "load":
        raise ConfigError.of("cuda_graphs", "load", "'lazy' or 'never' with device 'cpu'")


def _check_graph_sizes(config: EngineConfig, sizes: tuple[int, ...]) -> None:
    if config.cuda_graphs == "never":
        raise ConfigError("options cuda_graph_sizes and cuda_graphs 'never' exclude each other")
    if not sizes:
        raise ConfigError.of("cuda_graph_sizes", [], "one size or more; else set cuda_graphs")
    if not all(1 <= size <= config.max_num_seqs for size in sizes):
        bound = f"numbers from 1 to max_num_seqs, {config.max_num_seqs}"
        raise ConfigError.of("cuda_graph_sizes", list(sizes), bound)
