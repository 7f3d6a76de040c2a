"""Reads and checks an adapter's files in PEFT's format, and makes factors of them. Called by
``pool``.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. A field that changes the
result in a way that Jitney does not compute is refused by name. PEFT itself is not needed.

The header of the weights' file is checked before the weights are read. So a file that is no adapter
of this model costs little, however large it is.
"""

import errno
import hashlib
import math
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from jitney.errors import (
    CheckpointError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
    first_line,
    nearest,
    show,
)
from jitney.execution.checkpoint import parse_json
from jitney.execution.low_rank import Factors, Site

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
_MOST_CONFIG_BYTES = 1 << 20
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own bound
_MOST_ITEM_BYTES = 8  # of one number in a tensor, whatever its dtype
_LASTING = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""Errors of the file system that say something of the files: they are missing or not readable. Any
other one may pass, for example EIO, EMFILE or ESTALE."""
_LARGEST = 1e308
"""A number of the configuration is at most this. JSON has larger integers: for one of these,
``alpha / rank`` would raise OverflowError."""
_MOST_WAYS = 10_000_000
"""Of matching one pattern with one path, by :func:`_most_ways`. They take less than a second. The
engine stands still meanwhile."""
_MOST_WAYS_IN_ALL = 1_000_000_000
"""The same for all patterns and paths together."""
_MOST_PARTS = 20
"""Most repetitions, and most groups, of a pattern whose ways are counted. More are too many."""
_POSITIVE = f"a number above 0 and at most {_LARGEST:g}"
_WHOLE = f"a whole number above 0 and at most {_LARGEST:g}"


class _Field(NamedTuple):
    """What a field of the configuration may be."""

    default: object
    """Its value if it is absent. Adapters with this value can be computed."""
    others: tuple[object, ...] = ()
    """Other values that can be computed."""


# PEFT's other fields matter for training alone, or say what the tensors' names and shapes say.
_FIELDS = {
    "peft_type": _Field("LORA"),
    "bias": _Field("none"),
    "use_dora": _Field(False),
    "lora_bias": _Field(False),
    "use_qalora": _Field(False),
    "use_bdlora": _Field(None, (False,)),
    "modules_to_save": _Field(None, ([],)),
    "target_parameters": _Field(None, ([],)),
    "trainable_token_indices": _Field(None, ([], {})),
    "alora_invocation_tokens": _Field(None, ([],)),
    "layer_replication": _Field(None, ([],)),
    # PEFT's other ways to initialise an adapter change the weights of the model itself.
    "init_lora_weights": _Field(True, (False, "gaussian", "eva", "orthogonal")),
}


class _Pair(NamedTuple):
    """The two tensors of a layer, checked."""

    a: Tensor
    """``lora_A.weight`` [rank, inputs]"""
    b: Tensor
    """``lora_B.weight`` [outputs, rank]"""


T = TypeVar("T")


class _FoundPair(NamedTuple, Generic[T]):
    """What was found of a layer in the file. ``T`` is a tensor; or its shape, if only the header
    was read."""

    a: T | None
    """Of ``lora_A.weight``. None: it is missing."""
    b: T | None
    """The same of ``lora_B.weight``."""


class _HeaderEntry(msgspec.Struct):
    """What the header says of one tensor."""

    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Where its bytes begin and end, counted from the end of the header."""


class _Header(NamedTuple):
    """The header of the weights' file."""

    num_bytes: int
    """Without the eight bytes that say this number."""
    entries: dict[str, _HeaderEntry]
    """By the tensor's name."""


class AdapterFiles(NamedTuple):
    """What was read."""

    sha256: str
    """Of both files together."""
    factors: dict[str, Factors]
    """In float32, by the layer's path."""


def read_adapter(folder: Path, sites: Mapping[str, Site], max_rank: int) -> AdapterFiles:
    """Read the adapter in ``folder``, for a model whose layers ``sites`` may have adapters.

    Each file is read once, and the sha256 is computed from the very bytes that become the factors.
    So they belong together even if the files change meanwhile. Raises InvalidArgumentError for
    files that are no adapter of this model, or that cannot be computed. The error names the field
    or tensor, its value, and what it must be. Raises UnavailableError for a fault of the file
    system that may pass.
    """
    config_bytes = _read(folder, CONFIG, most=_MOST_CONFIG_BYTES)
    config = _parse_config(config_bytes, folder)
    num_bytes = _check_header(folder, config, sites, max_rank)
    weights_bytes = _read(folder, WEIGHTS, most=num_bytes)
    tensors = _parse_weights(weights_bytes, folder)
    digest = hashlib.sha256(config_bytes)
    digest.update(weights_bytes)

    factors = {}
    for path, found in _pairs_of_layers(tensors, sites).items():
        rank = _rank_of(path, config, max_rank)
        pair = _check_pair(path, found, rank, sites[path])
        factors[path] = _make_factors(path, pair, rank, config)
    return AdapterFiles(digest.hexdigest(), factors)


def check_files(folder: Path, sites: Mapping[str, Site], max_rank: int) -> None:
    """Check the configuration and the header of the weights, as :func:`read_adapter` does before it
    reads the weights. Raises the same errors."""
    config = _parse_config(_read(folder, CONFIG, most=_MOST_CONFIG_BYTES), folder)
    _check_header(folder, config, sites, max_rank)


def _parse_config(data: bytes, folder: Path) -> Mapping[str, Any]:
    """The configuration, checked. Raises InvalidArgumentError."""
    try:
        config = parse_json(data, CONFIG)
    except CheckpointError as error:
        raise InvalidArgumentError(first_line(error, folder)) from None
    _check_config(config)
    return config


def _check_header(
    folder: Path, config: Mapping[str, Any], sites: Mapping[str, Site], max_rank: int
) -> int:
    """Check names and shapes of the weights, reading the header alone. Returns the file's size in
    bytes. Raises InvalidArgumentError."""
    size = _check_regular(folder, WEIGHTS)
    shapes = _read_shapes(folder, size)
    pairs = _pairs_of_layers(shapes, sites)
    for field in ("rank_pattern", "alpha_pattern"):
        _check_patterns(field, config.get(field) or {}, pairs)
    for path, found in pairs.items():
        rank = _rank_of(path, config, max_rank)
        for name, shape, expected in _expected_shapes(path, found, rank, sites[path]):
            _check_shape(name, shape, expected)
    return size


def _read_shapes(folder: Path, size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, by the header of the weights' file, which has ``size`` bytes.
    Raises InvalidArgumentError if the header is broken or does not account for the size.

    The format is that of safetensors: the length of the header in eight bytes, the header, which is
    a JSON object, and then the tensors."""
    header = _read_header(folder)
    header_size = 8 + header.num_bytes
    end_of_tensors = max((entry.data_offsets[1] for entry in header.entries.values()), default=0)
    expected_size = header_size + end_of_tensors
    if size != expected_size:
        raise InvalidArgumentError.of(f"the size of {WEIGHTS}", size, f"{expected_size:,} bytes")
    for name, entry in header.entries.items():
        num_bytes = entry.data_offsets[1] - entry.data_offsets[0]
        most = _MOST_ITEM_BYTES * math.prod(entry.shape)
        if not 0 <= num_bytes <= most:
            raise InvalidArgumentError.of(f"the bytes of {name}", num_bytes, f"at most {most:,}")
    return {name: entry.shape for name, entry in header.entries.items()}


def _read_header(folder: Path) -> _Header:
    """The header of the weights' file. Raises InvalidArgumentError if it is broken, and what
    :func:`_error_of` says."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > _MOST_HEADER_BYTES:
                bound = f"at most {_MOST_HEADER_BYTES:,} bytes"
                raise InvalidArgumentError.of(f"the header of {WEIGHTS}", num_bytes, bound)
            fields = msgspec.json.decode(file.read(num_bytes), type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)  # the format's one field that is no tensor
        entries = {
            name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in fields.items()
        }
    except OSError as error:
        raise _error_of(error, folder) from None
    except (ValueError, RecursionError) as error:  # also those of msgspec
        raise InvalidArgumentError(f"the header of {WEIGHTS} is broken: {error}") from None
    return _Header(num_bytes, entries)


def _check_regular(folder: Path, name: str) -> int:
    """The size of a file in bytes. Raises InvalidArgumentError if it is missing, or of a kind that
    may never end, such as a pipe."""
    try:
        status = (folder / name).stat()
    except FileNotFoundError:
        raise InvalidArgumentError(f"{name} is missing") from None
    except OSError as error:
        raise _error_of(error, folder) from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgumentError(f"{name} is no regular file")
    return status.st_size


def _read(folder: Path, name: str, most: int) -> bytes:
    """A file of at most so many bytes. Raises InvalidArgumentError."""
    size = _check_regular(folder, name)
    if size > most:
        raise InvalidArgumentError.of(f"the size of {name}", size, f"at most {most:,} bytes")
    try:
        with (folder / name).open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise _error_of(error, folder) from None


def _error_of(error: OSError, folder: Path) -> JitneyError:
    """What a request is told if a file could not be read: InvalidArgumentError if its files are
    at fault, UnavailableError if the fault may pass, so that a later load may succeed."""
    kind = InvalidArgumentError if error.errno in _LASTING else UnavailableError
    return kind(first_line(error, folder))


def _parse_weights(data: bytes, folder: Path) -> dict[str, Tensor]:
    try:
        return load(data)
    except SafetensorError as error:
        raise InvalidArgumentError(first_line(error, folder)) from None
    except KeyError as error:  # safetensors looks up the dtype's name in a table
        raise InvalidArgumentError(f"{WEIGHTS} has a tensor of dtype {error}") from None


# ------------------------------------------------------------------ the configuration


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for a field with a value that is not computed."""
    for name, field in _FIELDS.items():
        allowed = (field.default, *field.others)
        value = config.get(name, field.default)
        if not any(_is_same(value, each) for each in allowed):
            bound = " or ".join(repr(each) for each in allowed)
            raise InvalidArgumentError.of(name, value, bound)
    if not _is_rank(config.get("r")):
        raise InvalidArgumentError.of("r", config.get("r"), _WHOLE)
    if not _is_positive(config.get("lora_alpha")):
        raise InvalidArgumentError.of("lora_alpha", config.get("lora_alpha"), _POSITIVE)
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict) or not all(map(_is_rank, ranks.values())):
        raise InvalidArgumentError.of("rank_pattern", ranks, f"an object, each value {_WHOLE}")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(map(_is_positive, alphas.values())):
        raise InvalidArgumentError.of("alpha_pattern", alphas, f"an object, each value {_POSITIVE}")


def _is_same(value: object, allowed: object) -> bool:
    """Whether both are equal and of one type. ``==`` alone takes 0 for False."""
    return type(value) is type(allowed) and value == allowed


def _is_positive(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= _LARGEST


def _is_rank(value: object) -> bool:
    """Whether it is a whole number above 0. A float may be one, such as 8.0."""
    return _is_positive(value) and value % 1 == 0


def _check_patterns(field: str, patterns: Mapping[str, float], paths: Collection[str]) -> None:
    """Raise InvalidArgumentError for patterns that could take very long to match. Nothing ends a
    match, and the engine stands still meanwhile."""
    longest = max(map(len, paths))
    in_all = 0.0
    for pattern in patterns:
        ways = _most_ways(pattern, longest)
        if ways > _MOST_WAYS:
            bound = "one with fewer repetitions and alternatives, and no repeated group"
            raise InvalidArgumentError.of("a pattern", pattern, bound)
        in_all += ways * len(paths)
    if in_all > _MOST_WAYS_IN_ALL:
        raise InvalidArgumentError(f"{field} has patterns that take too long to match")


def _most_ways(pattern: str, length: int) -> float:
    """How many ways there are at most to match a pattern with a path of that length: those to share
    the path out among the repetitions (one is ``(.*\\.)?``), times those to choose an alternative
    in each group. A repeated group may have far more."""
    plain = re.sub(r"\\.", "x", pattern)
    if re.search(r"\)[*+{]", plain):
        return math.inf
    repetitions = 1 + len(re.findall(r"[*+{]|(?<!\()\?", plain))
    groups = plain.count("(") + 1
    if repetitions > _MOST_PARTS or groups > _MOST_PARTS:
        return math.inf
    alternatives = (1 + plain.count("|") / groups) ** groups
    return math.comb(length + repetitions, repetitions) * alternatives


def _stated_for(path: str, patterns: Mapping[str, float] | None, default: float) -> float:
    """The value of the first pattern that matches the end of ``path``, or ``default`` if none does.
    As in PEFT, a pattern is a regular expression for one or more whole parts of the path."""
    if not patterns:  # the field may be absent or null
        return default
    for key, value in patterns.items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", path)
        except (re.error, OverflowError):  # the latter for a number of repetitions
            raise InvalidArgumentError.of("a pattern", key, "a regular expression") from None
        if matches:
            return value
    return default


# ------------------------------------------------------------------ the tensors


def _pairs_of_layers(
    tensors: Mapping[str, T], sites: Mapping[str, Site]
) -> dict[str, _FoundPair[T]]:
    """What was found of each layer that the tensors name, by the layer's path. The paths are
    sorted. ``T``: see :class:`_FoundPair`."""
    of_kind: dict[str, dict[str, T]] = {"A": {}, "B": {}}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise InvalidArgumentError(
                f"tensor {show(name)} is of another kind: weights lora_A and lora_B alone are taken"
            )
        path, kind = match.groups()
        if path not in sites:
            raise _no_site(path, sites)
        of_kind[kind][path] = tensor

    paths = of_kind["A"].keys() | of_kind["B"].keys()
    if not paths:
        raise InvalidArgumentError(f"{WEIGHTS} holds no tensor")
    return {
        path: _FoundPair(of_kind["A"].get(path), of_kind["B"].get(path)) for path in sorted(paths)
    }


def _no_site(path: str, sites: Mapping[str, Site]) -> InvalidArgumentError:
    """The error for a layer that cannot have an adapter. It names the nearest one that can."""
    hint = nearest(path, sites)
    if not hint:
        names = sorted({each.rpartition(".")[2] for each in sites})
        hint = f" (these can: {', '.join(names)})"
    return InvalidArgumentError(f"{show(path)} cannot have an adapter{hint}")


def _rank_of(path: str, config: Mapping[str, Any], max_rank: int) -> int:
    """The rank that the configuration states for a layer. Raises InvalidArgumentError if it is out
    of bounds."""
    rank = int(_stated_for(path, config.get("rank_pattern"), default=config["r"]))
    if not 1 <= rank <= max_rank:
        raise InvalidArgumentError.of(f"r of {path}", rank, f"from 1 to {max_rank}")
    return rank


def _expected_shapes(
    path: str, found: _FoundPair[T], rank: int, site: Site
) -> list[tuple[str, T | None, tuple[int, int]]]:
    """The name of each of a layer's two tensors, what was found of it, and the shape it must
    have."""
    return [
        (f"{path}.lora_A.weight", found.a, (rank, site.inputs)),
        (f"{path}.lora_B.weight", found.b, (site.outputs, rank)),
    ]


def _check_pair(path: str, found: _FoundPair[Tensor], rank: int, site: Site) -> _Pair:
    """The pair, checked. Raises InvalidArgumentError if it does not have that rank."""
    expected_a, expected_b = _expected_shapes(path, found, rank, site)
    a = _check_tensor(*expected_a)
    b = _check_tensor(*expected_b)
    return _Pair(a, b)


def _check_tensor(name: str, tensor: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """The tensor, checked. Raises InvalidArgumentError for one that is missing, or has another
    shape or values that are not finite."""
    _check_shape(name, None if tensor is None else tuple(tensor.shape), shape)
    assert tensor is not None
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
        raise InvalidArgumentError(f"{name} must hold finite numbers of floating point")
    return tensor


def _check_shape(name: str, shape: tuple[int, ...] | None, expected: tuple[int, int]) -> None:
    """Raise InvalidArgumentError for a tensor that is missing or has another shape."""
    if shape != expected:
        raise InvalidArgumentError.of(f"the shape of {name}", shape, str(expected))


def _make_factors(path: str, pair: _Pair, rank: int, config: Mapping[str, Any]) -> Factors:
    """The factors of a pair. B is multiplied by the adapter's scale, and transposed as
    :class:`Factors` has it. Raises InvalidArgumentError if that makes a value infinite."""
    alpha = _stated_for(path, config.get("alpha_pattern"), default=config["lora_alpha"])
    # Rank-stabilized LoRA (Kalajdzievski 2023) divides by the root of the rank.
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    scaled_b = pair.b.float() * (alpha / divisor)
    if not bool(torch.isfinite(scaled_b).all()):
        bound = "so small that lora_B times it stays finite in float32"
        raise InvalidArgumentError.of(f"lora_alpha of {path}", alpha, bound)
    return Factors(a=pair.a.float(), b=scaled_b.T.contiguous())
