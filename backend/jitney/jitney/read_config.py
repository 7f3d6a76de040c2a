"""Reads and checks the engine's options: the file ``model.json`` of a model version, the
``parameters`` of its ``config.pbtxt``, which replace the file's, or a dictionary.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import inspect

from jitney.config import EngineConfig, SpeculationConfig, TierConfig
from jitney.errors import MOST_OF_PATH, ConfigError, nearest, show
from jitney.field_types import describe_range, describe_type, field_at_fault, kind_of, may_be_none

_log = logging.getLogger(__name__)
S = TypeVar("S", bound=msgspec.Struct)

REMOVED_OPTIONS: dict[str, str] = {
    "refuse_late": "now a request that has no token when its deadline passes ends at the deadline",
}
"""Options that are accepted and ignored for one version, with a warning when the model is loaded.
The value says how Jitney behaves without the option; the warning shows it."""

# What transformers' apply_chat_template takes for itself: a client may neither send a template of
# its own nor change how one is applied.
_NOT_TEMPLATE_PARAMETERS = frozenset({
    "conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "sanitize_control_tokens",
})  # fmt: skip


# --------------------------------------------------------------------------- reading


def load_config(path: Path, parameters: Mapping[str, str] | None = None) -> EngineConfig:
    """Read ``model.json``. Paths in it are relative to its folder, and come back absolute.

    ``parameters`` are options as text, which replace those of the file: see :func:`from_text`.
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


def from_text(key: str, text: str) -> object:
    """The value of an option that is written as text: a string as it stands, all else as in JSON
    (``64``, ``true``, ``[1, 2]``). If the option may be None, ``null`` means None, also where its
    value is a string. :func:`make_config` checks the value."""
    if key not in EngineConfig.__struct_fields__:
        return text  # make_config() refuses the key
    if text == "null" and may_be_none(EngineConfig, key):
        return None
    if isinstance(kind_of(EngineConfig, key), (inspect.StrType, inspect.LiteralType)):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text  # make_config() refuses it, because it is of a wrong type


def _with_absolute_paths(config: EngineConfig, folder: Path) -> EngineConfig:
    """``config`` with its paths made absolute. A model that names nothing in ``folder`` stays as it
    is: it may be an id."""
    changes: dict[str, object] = {}
    model = _find_path("model", config.model, folder)
    if model is not None:
        changes["model"] = model

    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        draft_model = _find_path("speculation.model", speculation.model, folder)
        if draft_model is not None:
            changes["speculation"] = msgspec.structs.replace(speculation, model=draft_model)

    if config.adapters is not None:
        changes["adapters"] = _absolute("adapters", config.adapters, folder)
    return msgspec.structs.replace(config, **changes)


def check_models_exist(config: EngineConfig) -> None:
    """Raise ConfigError if the checkpoint of ``config``, or that of its draft model, is not on this
    machine. Takes milliseconds, where an engine that looks for it needs many seconds to start."""
    names = {"model": config.model}
    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        names["speculation.model"] = speculation.model
    for option, name in names.items():
        is_path = os.path.exists(name.encode())  # as bytes: see _bytes_of_path
        if not is_path and not _is_in_hub_cache(name):
            raise ConfigError(
                f"option {option} is {show(name, MOST_OF_PATH)}, which is neither a folder nor a "
                f"GGUF file, nor the id of a model in the local hub cache; `hf download` fetches a "
                f"model of the hub"
            )


def _is_in_hub_cache(name: str) -> bool:
    """Whether the hub's cache has a snapshot of the model NAME or OWNER/NAME."""
    from huggingface_hub import constants  # its import is fast, that of the library is not

    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())


def _find_path(option: str, name: str, folder: Path) -> str | None:
    """The absolute path of the file or folder ``name`` in ``folder``. None: there is none, but
    ``name`` may be an id of the hub.

    Raises ConfigError in two cases, because an engine would find out much later:

    - there is no such file, and ``name`` can only be a path;
    - the system refuses to look, because the name is too long or permission is missing.
    """
    if _exists(option, name, folder):
        return _absolute(option, name, folder)
    if _can_only_be_path(name):
        shown = show(name, MOST_OF_PATH)
        raise ConfigError(
            f"option {option} is {shown}, but must be a folder or a GGUF file that exists, or the "
            f"id of a model in the local hub cache"
        )
    return None


def _exists(option: str, name: str, folder: Path) -> bool:
    """Whether there is a file or folder ``name`` in ``folder``. Raises ConfigError if the system
    refuses to look."""
    try:
        os.stat(_bytes_of_path(folder, name))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError:  # no path can have this name
        return False
    except OSError as error:
        bound = f"a path that can be looked up ({error.strerror})"
        raise ConfigError.of(option, name, bound) from None
    return True


def _absolute(option: str, name: str, folder: Path) -> str:
    """The absolute path of ``name`` in ``folder``, with links resolved. It need not exist. Raises
    ConfigError if it is not UTF-8."""
    try:
        return os.path.realpath(_bytes_of_path(folder, name)).decode()
    except UnicodeDecodeError:
        raise ConfigError.of(option, name, "a path in UTF-8") from None


def _bytes_of_path(folder: Path, name: str) -> bytes:
    """The path of ``name`` in ``folder``. It is bytes, because in the server's stub Python takes
    names of files for ASCII, whatever the locale. So a name with other letters can be used only as
    bytes."""
    return os.path.join(os.fsencode(folder), name.encode())


def _can_only_be_path(name: str) -> bool:
    """Whether ``name`` is no id of the hub, which is NAME or OWNER/NAME."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(".gguf")


# --------------------------------------------------------------------------- the struct


def make_config(options: dict[str, object]) -> EngineConfig:
    """Check ``options`` and make the struct. Raises ConfigError as :func:`load_config` does."""
    options = _without_removed(options)
    _check_names(options, EngineConfig)
    if "model" not in options:
        raise ConfigError("option model is missing: it names the checkpoint's folder")
    if options.get("attention") == "flashinfer":
        raise ConfigError("option attention is 'flashinfer', which was removed: set 'gpu'")
    config = _convert(_with_nested_structs(options), EngineConfig)

    _check_pairs(config)
    # The default of max_num_seqs may be above the token budget: the scheduler then lowers it.
    if "max_num_seqs" in options:
        _check_token_budget(config)
    _check_chat_template_parameters(config)
    _check_cuda_graph_sizes(config)
    if config.device == "cpu":
        _check_no_gpu_options(config)
    _check_tiers(config.tiers)
    _check_default_tier(config)
    return config


def _without_removed(options: dict[str, object]) -> dict[str, object]:
    """The options without those of :data:`REMOVED_OPTIONS`. Warns of each that was given."""
    for name in REMOVED_OPTIONS.keys() & options.keys():
        _log.warning("option %s was removed and is ignored: %s", name, REMOVED_OPTIONS[name])
    return {name: value for name, value in options.items() if name not in REMOVED_OPTIONS}


def _with_nested_structs(options: dict[str, object]) -> dict[str, object]:
    """The options that are objects, or lists of objects, as structs. Each is converted by itself,
    so that a message names the key inside it."""
    converted = dict(options)
    speculation = _as_dict(options.get("speculation"), SpeculationConfig)
    if isinstance(speculation, dict):
        converted["speculation"] = _make_speculation(speculation)
    tiers = options.get("tiers")
    if isinstance(tiers, (list, tuple)):
        converted["tiers"] = [_make_tier(index, given) for index, given in enumerate(tiers)]
    return converted


def _as_dict(given: object, struct: type[msgspec.Struct]) -> object:
    """The fields of ``given`` as a dict, if it is a ``struct`` that somebody made in Python: its
    fields may have any values, so they are checked like those of a file. Anything else is returned
    unchanged."""
    return msgspec.structs.asdict(given) if isinstance(given, struct) else given


def _make_speculation(given: dict[str, object]) -> SpeculationConfig:
    _check_names(given, SpeculationConfig, prefix="speculation.")
    config = _convert(given, SpeculationConfig, prefix="speculation.")
    needs_model = config.drafter in ("draft_model", "eagle")
    if needs_model and config.model is None:
        raise ConfigError(f"option speculation.model must be given with drafter {config.drafter!r}")
    if config.model is not None and not needs_model:
        bound = f"left out with drafter {config.drafter!r}"
        raise ConfigError.of("speculation.model", config.model, bound)
    if config.ngram_max < config.ngram_min:
        bound = f"at least ngram_min, {config.ngram_min}"
        raise ConfigError.of("speculation.ngram_max", config.ngram_max, bound)
    return config


def _make_tier(index: int, given: object) -> TierConfig:
    given = _as_dict(given, TierConfig)
    if not isinstance(given, dict):
        raise ConfigError.of(f"tiers[{index}]", given, "an object")
    _check_names(given, TierConfig, prefix=f"tiers[{index}].")
    if "name" not in given:
        raise ConfigError(f"option tiers[{index}].name is missing")
    return _convert(given, TierConfig, prefix=f"tiers[{index}].")


def _check_names(
    options: Mapping[str, object], struct: type[msgspec.Struct], prefix: str = ""
) -> None:
    """Raise ConfigError if a key of ``options`` is no field of ``struct``. If the options are
    nested in others, ``prefix`` is their path, such as ``speculation.``: the message shows it
    before the key."""
    for key in options:
        if key not in struct.__struct_fields__:
            near = nearest(key, struct.__struct_fields__)
            raise ConfigError(f"option {prefix + key!r} is unknown{near}")


def _convert(options: Mapping[str, object], struct: type[S], prefix: str = "") -> S:
    try:
        return msgspec.convert(options, struct)
    except msgspec.ValidationError as error:
        key = field_at_fault(error)
        bound = describe_type(struct, key)
        # msgspec's text for a value of the right type that is out of range: "Expected `int` >= 1",
        # "Expected `str` of length >= 1".
        if re.search("` (of length )?[<>]", str(error)):
            bound = describe_range(struct, key)
        raise ConfigError.of(prefix + key, options.get(key), bound) from None


# --------------------------------------------------------------------------- checks of the whole


def _check_pairs(config: EngineConfig) -> None:
    """Options that exclude each other, on any device."""
    if config.kv_cache_bytes is not None and config.kv_cache_fraction is not None:
        raise ConfigError("options kv_cache_bytes and kv_cache_fraction exclude each other")
    if config.adapters is not None and config.compile:
        raise ConfigError("options adapters and compile exclude each other")
    if config.compile and config.batch_invariant:
        raise ConfigError("options compile and batch_invariant exclude each other")


def _check_token_budget(config: EngineConfig) -> None:
    """The budget must allow a token for every running sequence in one step."""
    tokens = config.max_num_batched_tokens
    if tokens is not None and tokens < config.max_num_seqs:
        bound = f"at least max_num_seqs, {config.max_num_seqs}"
        raise ConfigError.of("max_num_batched_tokens", tokens, bound)


def _check_chat_template_parameters(config: EngineConfig) -> None:
    for name in config.chat_template_parameters:
        if name in _NOT_TEMPLATE_PARAMETERS:
            raise ConfigError(f"option chat_template_parameters must not hold {name!r}")


def _check_cuda_graph_sizes(config: EngineConfig) -> None:
    sizes = config.cuda_graph_sizes
    if sizes is None:
        return
    if config.cuda_graphs == "never":
        raise ConfigError("options cuda_graph_sizes and cuda_graphs 'never' exclude each other")
    if not sizes:
        raise ConfigError.of("cuda_graph_sizes", [], "one size or more, or left out")
    for size in sizes:
        if not 1 <= size <= config.max_num_seqs:
            bound = f"numbers from 1 to max_num_seqs, {config.max_num_seqs}"
            raise ConfigError.of("cuda_graph_sizes", list(sizes), bound)


def _check_no_gpu_options(config: EngineConfig) -> None:
    """For ``device`` 'cpu'. With ``auto``, the load of the model checks the same."""
    for key in ("compile", "cuda_graph_sizes"):
        value = getattr(config, key)
        if value:
            raise ConfigError.of(key, value, "left out with device 'cpu'")
    if config.cuda_graphs == "load":
        raise ConfigError.of("cuda_graphs", "load", "'lazy' or 'never' with device 'cpu'")


def _check_tiers(tiers: tuple[TierConfig, ...]) -> None:
    """What one tier must be in view of the others."""
    names: set[str] = set()
    largest_gap = 0.0
    for index, tier in enumerate(tiers):
        if tier.name in names:
            raise ConfigError.of(f"tiers[{index}].name", tier.name, "another than those before it")
        names.add(tier.name)
        if tier.gap_ms is None:
            continue
        if tier.gap_ms < largest_gap:
            bound = f"at least that of the tiers above, {largest_gap}"
            raise ConfigError.of(f"tiers[{index}].gap_ms", tier.gap_ms, bound)
        largest_gap = tier.gap_ms

    # The first tier takes what the shares of the others leave.
    total = sum(tier.share for tier in tiers[1:])
    if total > 1.0:
        raise ConfigError(
            f"option tiers: the shares below the first tier add up to {total:g}, "
            "but must be at most 1"
        )


def _check_default_tier(config: EngineConfig) -> None:
    names = [tier.name for tier in config.tiers]
    if config.default_tier is None or config.default_tier in names:
        return
    bound = "left out without tiers"
    if names:
        bound = "one of " + ", ".join(repr(name) for name in names)
    raise ConfigError.of("default_tier", config.default_tier, bound)
