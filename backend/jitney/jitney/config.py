"""The engine's options: one flat frozen struct, read from a model version's ``model.json`` and the
``parameters`` of its ``config.pbtxt``, which come first.

Options that depend on the device or the checkpoint are ``None`` here and are derived once, at load,
by whoever knows both (the runner); everything else is final after :func:`load_config`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import inspect

from jitney.errors import ConfigError, nearest

Quantization = Literal["none", "fp8", "int8", "int4"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of ``model.json``; docs/options.md has the same table for users."""

    # -- the model
    model: str
    """A folder, relative to the version folder, or the id of a model in the local hub cache."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations. ``auto``: the checkpoint's, if the device supports it."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    attention: Literal["auto", "reference", "cpu", "gpu"] = "auto"
    """``auto``: the fast kernel of the device, if it can be built. ``reference``: plain torch."""
    threads: int | None = None
    """CPU threads of one instance. None: the cores this process may use."""
    prepack: bool = True
    """Prepack linear layers for the CPU, if the operators for it exist."""
    fuse: bool = True
    """Replace norms, projections and gated activations by fused kernels, where they fit."""
    quantization: Quantization = "none"
    """Quantize the linear layers while loading. ``fp8``: weights and activations; ``int8`` and
    ``int4``: only weights."""
    instances: int = 1
    """Instances that share this device: the default cache size is divided by it."""

    # -- the batch
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens. None: what the checkpoint was made for."""
    max_num_seqs: int = 256
    """Most sequences that run at once, all ``n`` of a request counted."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, at least ``max_num_seqs``. None: 512 on a CPU, 8,192 on a GPU."""

    # -- the step on a GPU
    overlap: bool = True
    """Plan and launch a step while the one before it still runs."""
    cuda_graphs: Literal["lazy", "load", "never"] = "lazy"
    """When decode steps are captured as CUDA graphs: at their first use, at load, or never."""
    cuda_graph_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are padded to. None: powers of two, then multiples of 16."""
    batch_invariant: bool = False
    """Fixed tiles and split sizes: a request's logits are bitwise the same in every batch."""
    compile: bool = False
    """Use ``torch.compile`` instead of ``fuse``: only on a GPU. Loading then takes minutes."""

    # -- the KV cache
    block_size: int = 16
    """Tokens in a block. The CPU's attention kernel needs a multiple of 16."""
    kv_cache_bytes: int | None = None
    """Size of the cache. None: a share of the free memory, ``kv_cache_fraction``."""
    kv_cache_fraction: float | None = None
    """Share of the memory left after loading; 1/64 of it stays free. None: 0.9 on a GPU; on a CPU
    0.25, at most 4 GiB."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"] = "auto"
    """``auto``: the activations' dtype. ``float8_e4m3``: a scale per head, only on a GPU."""
    prefix_caching: bool = True
    """Reuse the cached blocks of a prompt prefix that was computed before."""
    eviction: Literal["never", "preempt"] = "preempt"
    """``never`` admits a request only if its longest possible output fits beside that of all
    others; ``preempt`` if its prompt fits: if no block is free later, the last sequence is
    preempted and computed again."""
    watermark: float = 0.01
    """With ``preempt``: the share of all blocks that an admission must leave free."""

    # -- the queue
    max_queued: int = 1024
    """Requests that may wait; one more is refused as UNAVAILABLE."""
    aging_s: float = 10.0
    """Seconds of waiting that raise a request by one priority level, so that none starves."""

    # -- limits of requests and responses
    max_n: int = 128
    """Most sequences of one request."""
    max_logprobs: int = 20
    """Most candidates per position, in ``logprobs`` and ``prompt_logprobs``."""
    max_answer_entries: int = 2_000_000
    """Most entries of an answer that is not streamed: ``n`` × ``max_tokens`` × (``logprobs`` + 1)
    and (``prompt_logprobs`` + 1) per prompt token. One is some 130 bytes of the server's memory."""
    max_stop_strings: int = 64
    """Strings in ``stop``, and in ``bad_words``."""
    max_stop_length: int = 256
    """Characters of one stop string."""
    max_list_ids: int = 8192
    """Ids in any one list of a request (stop_token_ids, logit_bias, …)."""
    max_prompt_bytes: int | None = None
    """Longest prompt, in bytes, checked before tokenizing. None: 32 per token of
    ``max_model_len``, at least 65,536."""
    chat_template_parameters: tuple[str, ...] = ("add_generation_prompt", "enable_thinking")
    """Names that a client may pass to the chat template."""
    max_pending_tokens: int = 65536
    """Tokens of one request that may wait to be sent. Beyond it the request is cancelled."""
    send_share: float | None = None
    """Share of the time that sending may take. Above it several tokens of a stream share a
    response; 1 sends as fast as the server accepts them. None: 0.2 on a CPU, 1 on a GPU."""
    watchdog_s: float = 60.0
    """Seconds without a step, although work waits, after which the engine is started again. They
    count from zero for each kernel that a GPU's step compiles. With ``compile``, whose graphs can
    take minutes, set more."""
    cancel_sweep_s: float = 0.05
    """Seconds between two checks for clients that disconnected."""
    metrics_flush_s: float = 0.25
    """Seconds between two updates of the server's metrics."""
    drain_s: float = 5.0
    """Seconds that running requests have to finish after the model's process gets SIGTERM. Less
    than the server's exit timeout, so that clients of the others still get an error."""


# Option -> (least, most, how an error states the bound). None is always allowed where it is typed.
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "threads": (1, 4096, "from 1 to 4096"),
    "instances": (1, 1024, "from 1 to 1024"),
    "max_model_len": (1, math.inf, "at least 1"),
    "max_num_seqs": (1, 65536, "from 1 to 65536"),
    "max_num_batched_tokens": (1, 1 << 24, "from 1 to 16777216"),
    "block_size": (1, 1024, "from 1 to 1024"),
    "kv_cache_bytes": (1, math.inf, "at least 1"),
    "kv_cache_fraction": (1e-6, 1.0, "above 0 and at most 1"),
    "watermark": (0.0, 0.5, "from 0 to 0.5"),
    "max_queued": (0, math.inf, "at least 0"),
    "aging_s": (1e-3, math.inf, "at least 0.001"),
    "max_n": (1, 65536, "from 1 to 65536"),
    "max_logprobs": (0, 1 << 20, "from 0 to 1048576"),
    "max_answer_entries": (1, math.inf, "at least 1"),
    "max_stop_strings": (0, math.inf, "at least 0"),
    "max_stop_length": (1, math.inf, "at least 1"),
    "max_list_ids": (0, math.inf, "at least 0"),
    "max_prompt_bytes": (1, math.inf, "at least 1"),
    "max_pending_tokens": (1, math.inf, "at least 1"),
    "send_share": (0.01, 1.0, "from 0.01 to 1"),
    "watchdog_s": (0.1, 86400.0, "from 0.1 to 86400"),
    "cancel_sweep_s": (0.001, 10.0, "from 0.001 to 10"),
    "metrics_flush_s": (0.01, 60.0, "from 0.01 to 60"),
    "drain_s": (0.0, 3600.0, "from 0 to 3600"),
}

# What transformers' apply_chat_template takes for itself.
_NOT_TEMPLATE_PARAMETERS = frozenset({
    "conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "sanitize_control_tokens",
})  # fmt: skip


def load_config(path: Path, parameters: Mapping[str, str] | None = None) -> EngineConfig:
    """Read ``model.json``; ``model`` comes back absolute if it names a folder beside it.

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
    config = make_config(raw | given)
    folder = path.parent / config.model
    if folder.is_dir():
        config = msgspec.structs.replace(config, model=str(folder.resolve()))
    return config


def from_text(key: str, text: str) -> object:
    """The value of an option that is written as text: a string as it stands, all else as in JSON
    (``64``, ``true``, ``[1, 2]``, ``null`` for the default). :func:`make_config` checks it."""
    kinds = {each.encode_name: each.type for each in msgspec.structs.fields(EngineConfig)}
    if key not in kinds or isinstance(_kind(kinds[key]), (inspect.StrType, inspect.LiteralType)):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def make_config(options: dict[str, object]) -> EngineConfig:
    """Check ``options`` and make the struct. Raises ConfigError as :func:`load_config` does."""
    known = {field.encode_name for field in msgspec.structs.fields(EngineConfig)}
    for key in options:
        if key not in known:
            raise ConfigError(f"option {key!r} is unknown{nearest(key, known)}")
    if "model" not in options:
        raise ConfigError("option model is missing: it names the checkpoint's folder")
    for key, (low, high, bound) in _BOUNDS.items():
        value = options.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # its type is checked below
        if not low <= value <= high:
            raise ConfigError.of(key, value, bound)
    if options.get("kv_cache_bytes") is not None and options.get("kv_cache_fraction") is not None:
        raise ConfigError("options kv_cache_bytes and kv_cache_fraction exclude each other")
    if options.get("attention") == "flashinfer":
        raise ConfigError("option attention is 'flashinfer', which was removed: set 'gpu'")
    _check_template_names(options.get("chat_template_parameters"))
    try:
        config = msgspec.convert(options, EngineConfig)
    except msgspec.ValidationError as error:
        key = field_at_fault(error)
        raise ConfigError.of(key, options.get(key), describe_type(EngineConfig, key)) from None
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is not None and "max_num_seqs" in options and tokens < sequences:
        bound = f"at least max_num_seqs, {sequences}"
        raise ConfigError.of("max_num_batched_tokens", tokens, bound)
    _check_gpu_options(config)
    return config


def _check_gpu_options(config: EngineConfig) -> None:
    """What can be checked without the device; the rest is checked when the model is loaded."""
    sizes = config.cuda_graph_sizes
    if sizes is not None:
        if config.cuda_graphs == "never":
            raise ConfigError("options cuda_graph_sizes and cuda_graphs 'never' exclude each other")
        most = config.max_num_seqs
        if not all(1 <= size <= most for size in sizes):
            bound = f"numbers from 1 to max_num_seqs, {most}"
            raise ConfigError.of("cuda_graph_sizes", list(sizes), bound)
        if not sizes:
            raise ConfigError.of("cuda_graph_sizes", [], "one size or more; else set cuda_graphs")
    if config.compile and config.batch_invariant:
        raise ConfigError("options compile and batch_invariant exclude each other")
    if config.device != "cpu":
        return
    for key in ("compile", "cuda_graph_sizes"):
        if getattr(config, key):
            raise ConfigError.of(key, getattr(config, key), "left out with device 'cpu'")
    if config.cuda_graphs == "load":
        raise ConfigError.of("cuda_graphs", "load", "'lazy' or 'never' with device 'cpu'")


def _check_template_names(names: object) -> None:
    """A client may neither send a template of its own nor change how one is applied."""
    for name in names if isinstance(names, (list, tuple)) else ():
        if isinstance(name, str) and name in _NOT_TEMPLATE_PARAMETERS:
            raise ConfigError(f"option chat_template_parameters must not hold {name!r}")


def field_at_fault(error: msgspec.ValidationError) -> str:
    """The name of the field whose value has a wrong type, out of msgspec's error."""
    match = re.search(r"`\$\.(\w+)", str(error))
    assert match is not None, f"a field is at fault: {error}"
    return match[1]


def describe_type(struct: type[msgspec.Struct], name: str) -> str:
    """The type of a field for an error message: ``an integer``, ``a list of strings``, …"""
    (field,) = (each for each in msgspec.structs.fields(struct) if each.encode_name == name)
    return _describe(_kind(field.type))


def _kind(annotation: object) -> inspect.Type:
    """What an option is if it is not None."""
    kind = inspect.type_info(annotation)
    if isinstance(kind, inspect.UnionType):
        (kind,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType():
            return "one of " + ", ".join(repr(value) for value in kind.values)
        case inspect.VarTupleType():
            return f"a list of {_describe(kind.item_type).split()[-1]}s"
        case inspect.DictType():
            key, value = (_describe(each).split()[-1] for each in (kind.key_type, kind.value_type))
            return f"an object of {key}s and {value}s"
    return _DESCRIPTIONS[type(kind)]


_DESCRIPTIONS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
}
