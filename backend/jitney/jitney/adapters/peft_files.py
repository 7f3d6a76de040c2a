"""Reads and checks an adapter's files in PEFT's format, and makes factors of them. Called by
``pool``.

A folder holds ``adapter_config.json``, whose fields ``peft_config`` judges, and
``adapter_model.safetensors``. PEFT itself is not needed.

The header of the weights' file is checked before the weights are read. So a file that is no adapter
of this model costs little, however large it is.
"""

import errno
import hashlib
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from jitney.adapters.peft_config import StatedValues, check_config, check_patterns
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


class _Pair(NamedTuple):
    """The two tensors of a layer, checked."""

    a: Tensor
    """``lora_A.weight`` [rank, inputs]"""
    b: Tensor
    """``lora_B.weight`` [outputs, rank]"""


T = TypeVar("T")


class _Expected(NamedTuple, Generic[T]):
    """One of a layer's two tensors: what was found, and what it must be."""

    name: str
    found: T | None
    """As in :class:`_FoundPair`."""
    shape: tuple[int, int]
    """That it must have."""


class _ExpectedPair(NamedTuple, Generic[T]):
    """Both tensors of a layer."""

    a: _Expected[T]
    b: _Expected[T]


class _FoundPair(NamedTuple, Generic[T]):
    """What was found of a layer in the file. ``T`` is a tensor; or its shape, if only the header
    was read."""

    a: T | None
    """Of ``lora_A.weight``. None: it is missing."""
    b: T | None
    """The same of ``lora_B.weight``."""


class _HeaderEntry(msgspec.Struct):
    """What the header says of one tensor."""

    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=8)]
    """An adapter's tensors have two dimensions. To multiply a million of them would take minutes,
    in which the engine stands still."""
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

    stated = StatedValues(config)
    factors = {}
    for path, found in _pairs_of_layers(tensors, sites).items():
        rank = stated.rank_of(path, max_rank)
        pair = _check_pair(path, found, rank, sites[path])
        # Rank-stabilized LoRA (Kalajdzievski 2023) divides by the root of the rank.
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        factors[path] = _make_factors(path, pair, stated.alpha_of(path), divisor)
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
    check_config(config)
    return config


def _check_header(
    folder: Path, config: Mapping[str, Any], sites: Mapping[str, Site], max_rank: int
) -> int:
    """Check names and shapes of the weights, reading the header alone. Returns the file's size in
    bytes. Raises InvalidArgumentError, and what :func:`_error_of` says."""
    size = _check_regular(folder, WEIGHTS)
    shapes = _read_shapes(folder, size)
    pairs = _pairs_of_layers(shapes, sites)
    for field in ("rank_pattern", "alpha_pattern"):
        check_patterns(field, config.get(field) or {}, pairs)
    stated = StatedValues(config)
    for path, found in pairs.items():
        rank = stated.rank_of(path, max_rank)
        for each in _expected_pair(path, found, rank, sites[path]):
            _check_shape(each.name, each.found, each.shape)
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
    may never end, such as a pipe, and what :func:`_error_of` says."""
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
    """A file of at most so many bytes. Raises InvalidArgumentError if it is larger, and what
    :func:`_check_regular` and :func:`_error_of` say."""
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


def _expected_pair(path: str, found: _FoundPair[T], rank: int, site: Site) -> _ExpectedPair[T]:
    """What was found of a layer's two tensors, with the shapes that an adapter of this rank has."""
    return _ExpectedPair(
        a=_Expected(f"{path}.lora_A.weight", found.a, shape=(rank, site.inputs)),
        b=_Expected(f"{path}.lora_B.weight", found.b, shape=(site.outputs, rank)),
    )


def _check_pair(path: str, found: _FoundPair[Tensor], rank: int, site: Site) -> _Pair:
    """The pair, checked. Raises InvalidArgumentError if it does not have that rank."""
    expected = _expected_pair(path, found, rank, site)
    return _Pair(a=_check_tensor(expected.a), b=_check_tensor(expected.b))


def _check_tensor(expected: _Expected[Tensor]) -> Tensor:
    """The tensor, checked. Raises InvalidArgumentError for one that is missing, or has another
    shape or values that are not finite."""
    tensor = expected.found
    shape = None if tensor is None else tuple(tensor.shape)
    _check_shape(expected.name, shape, expected.shape)
    assert tensor is not None
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
        raise InvalidArgumentError(f"{expected.name} must hold finite numbers of floating point")
    return tensor


def _check_shape(name: str, shape: tuple[int, ...] | None, expected: tuple[int, int]) -> None:
    """Raise InvalidArgumentError for a tensor that is missing or has another shape."""
    if shape != expected:
        raise InvalidArgumentError.of(f"the shape of {name}", shape, str(expected))


def _make_factors(path: str, pair: _Pair, alpha: float, divisor: float) -> Factors:
    """The factors of a pair. B is multiplied by the adapter's scale, alpha / divisor, and
    transposed as :class:`Factors` has it. Raises InvalidArgumentError if that makes a value
    infinite."""
    scaled_b = pair.b.float() * (alpha / divisor)
    if not bool(torch.isfinite(scaled_b).all()):
        bound = "so small that lora_B times it stays finite in float32"
        raise InvalidArgumentError.of(f"lora_alpha of {path}", alpha, bound)
    return Factors(a=pair.a.float(), b=scaled_b.T.contiguous())
