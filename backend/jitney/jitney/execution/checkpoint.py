"""A checkpoint's files, judged before any of them is loaded.

Owns the way from the option ``model`` to a folder whose ``config.json`` is JSON and whose weights
are complete safetensors. Everything wrong with a file is a CheckpointError that names the file,
never its path. Called by ``models.load_model`` (and, for the folder, by whoever reads the
tokenizer beside it).
"""

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.errors import CheckpointError, show

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Files that hold pickles: reading one runs whatever code it carries.
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What was found in a folder that passed :func:`check_checkpoint`."""

    folder: Path
    config: dict[str, Any]
    """``config.json`` as it stands."""
    generation_config: dict[str, Any]
    """``generation_config.json``, or an empty dict if there is none."""
    weight_files: tuple[str, ...]
    weights_dtype: str
    """Name of the safetensors dtype that most values have, such as ``BF16``."""
    num_values: int
    """In all tensors together."""
    num_bytes: int
    """Likewise, as they are stored."""


def resolve_folder(model: str) -> Path:
    """The folder that the option ``model`` stands for: itself, or the local hub cache's.

    Nothing is downloaded: a server should not fetch gigabytes because a name was mistyped. Raises
    CheckpointError if there is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except (OSError, ValueError, HFValidationError):
        raise CheckpointError(
            f"model {show(folder.name)} is neither a folder nor in the local hub cache; "
            f"`hf download` fetches a model of the hub"
        ) from None


def check_checkpoint(folder: Path) -> Checkpoint:
    """Check every file that loading will read. Raises CheckpointError naming file and reason.

    Weights are checked by their headers and sizes, which costs milliseconds and catches a cut-off
    copy, a git-lfs pointer, a missing shard or an overwritten beginning; a flipped bit inside a
    tensor cannot be seen here.
    """
    config = read_json(folder, CONFIG)
    generation_config = (
        read_json(folder, GENERATION_CONFIG) if (folder / GENERATION_CONFIG).exists() else {}
    )
    if (folder / INDEX).exists():
        files, counts = _check_shards(folder)
    elif (folder / WEIGHTS).exists():
        files = (WEIGHTS,)
        counts = _count_values(read_header(folder / WEIGHTS))
    else:
        raise CheckpointError(_why_no_weights(folder))
    if not counts:
        raise CheckpointError(f"{files[0]} holds no tensors")
    dtype = counts.most_common(1)[0][0]
    size = sum(count * _BITS.get(name, 8) for name, count in counts.items()) // 8
    return Checkpoint(folder, config, generation_config, files, dtype, counts.total(), size)


def tensor_entries(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Every tensor of the weight files: name -> {dtype, shape, data_offsets, file}."""
    return {
        name: {**entry, "file": file}
        for file in checkpoint.weight_files
        for name, entry in read_header(checkpoint.folder / file).items()
    }


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if it is missing, malformed or another value."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} does not hold a JSON object")
    return value


def read_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: name -> {dtype, shape, data_offsets}.

    The format (huggingface.co/docs/safetensors): 8 bytes, the length N of the header, little
    endian; N bytes of JSON; then the tensors' bytes back to back. Raises CheckpointError if the
    file is shorter or longer than its header says or the header does not add up.
    """
    name = path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length < 2 or length > _MAX_HEADER:
                raise CheckpointError(f"{name} is not a safetensors file ({size:,} bytes)")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None
    if len(raw) < length:
        raise CheckpointError(f"{name} is truncated: its header alone needs {8 + length:,} bytes")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{name} is corrupt: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{name} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    needed = 8 + length + _data_bytes(name, header)
    if size != needed:
        state = "truncated" if size < needed else "corrupt"
        raise CheckpointError(f"{name} is {state}: it has {size:,} bytes of {needed:,}")
    return header


def _data_bytes(name: str, header: dict[str, Any]) -> int:
    """Bytes of all tensors. Raises CheckpointError if they overlap, leave holes or misfit."""
    spans = []
    for tensor, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            values = _num_values(entry)
            bits = _BITS.get(entry["dtype"])
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"{name} is corrupt: its entry for {tensor} is broken") from None
        if bits is not None and values * bits != 8 * (end - begin):
            raise CheckpointError(f"{name} is corrupt: {tensor} has the wrong number of bytes")
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position or end < begin:
            raise CheckpointError(f"{name} is corrupt: its tensors overlap or leave holes")
        position = end
    return position


def _check_shards(folder: Path) -> tuple[tuple[str, ...], Counter[str]]:
    """Check the index and every shard it names; return the shards and the values per dtype."""
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map")
    tensors: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{INDEX} names {show(shard)}, which is not a file beside it")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} names {shard}, but only safetensors are read")
        tensors.setdefault(shard, set()).add(tensor)
    counts: Counter[str] = Counter()
    for shard in sorted(tensors):
        if not (folder / shard).exists():
            raise CheckpointError(f"{shard} is missing, but {INDEX} names it")
        header = read_header(folder / shard)
        absent = tensors[shard] - header.keys()
        if absent:
            raise CheckpointError(
                f"{shard} lacks {min(absent)} and {len(absent) - 1} other tensors of {INDEX}"
                if len(absent) > 1
                else f"{shard} lacks {min(absent)}, which {INDEX} places there"
            )
        counts += _count_values(header)
    return tuple(sorted(tensors)), counts


def _why_no_weights(folder: Path) -> str:
    """Why a folder without ``model.safetensors`` cannot be served."""
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is read, and {WEIGHTS} is "
            "missing: only safetensors are read; convert the checkpoint"
        )
    return f"{WEIGHTS} is missing, and so is {INDEX}"


def _num_values(entry: dict[str, Any]) -> int:
    values = 1
    for dimension in entry["shape"]:
        values *= int(dimension)
    return values


def _count_values(header: dict[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for entry in header.values():
        counts[entry["dtype"]] += _num_values(entry)
    return counts
