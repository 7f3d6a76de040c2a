"""A checkpoint's files, judged before any of them is loaded.

Owns the way from the option ``model`` to a folder whose ``config.json`` is JSON and whose weights
are complete safetensors, or to a GGUF file. Everything wrong with a file is a CheckpointError that
names the file, never its path. Called by ``read_model`` and ``weigh``, and by the readers of other
files: of tokenizers, adapters and EAGLE heads (``eagle``).
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from jitney.errors import MOST_OF_PATH, CheckpointError, ConfigError, LoadError, first_line, show
from jitney.execution.gguf_file import FLOATS, SUFFIX, GgufFile

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where older releases of modelopt say how weights are quantized."""

CONSOLIDATED = "consolidated.safetensors"
"""In Mistral's own layout, as a rule: with other names of tensors than transformers' modules have.
"""
_MISTRALS_OWN = "tok_embeddings.weight"
"""A name of a tensor in that layout."""
_ADAPTER = "adapter_model.safetensors"
_NUMBERED = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})[.]safetensors")
"""One of several files that belong together: their common name, its number, and how many."""

# Files that hold pickles: reading one runs whatever code it carries.
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})


class StoredTensor(NamedTuple):
    """What a weight file's header says of one tensor."""

    dtype: str
    """As safetensors names it, such as ``BF16``, or ggml, such as ``Q4_K``."""
    shape: list[int]
    num_bytes: int
    """What it takes in the file, scales between its values included."""
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """What was found in a folder that passed :func:`check_checkpoint`."""

    folder: Path
    config: dict[str, Any]
    """``config.json`` as it stands."""
    generation_config: dict[str, Any]
    """``generation_config.json``, or an empty dict if there is none."""
    weight_files: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    """By name, of all weight files; of a GGUF file by the names of transformers' module."""
    weights_dtype: str
    """The dtype that most values have, as safetensors names it; of a GGUF file as ggml does."""
    num_values: int
    """In all tensors together."""
    num_bytes: int
    """Of the weight files."""
    gguf: GgufFile | None = None
    lacks_index: bool = False
    """Whether the weight files have names under which transformers does not look for them, and no
    index that names them."""

    @property
    def config_name(self) -> str:
        """The file that ``config`` is from: a GGUF file itself if no config.json is beside it."""
        if self.gguf is not None and not (self.folder / CONFIG).exists():
            return self.weight_files[0]
        return CONFIG


def resolve_model(model: str) -> Path:
    """The folder or the GGUF file that the option ``model`` stands for.

    The option is a path, or the name of a model in the local hub cache. A folder that has a GGUF
    file and no safetensors stands for that file. Nothing is downloaded: a server should not fetch
    gigabytes because a name was mistyped. Raises ConfigError if nothing is found, and
    CheckpointError for a folder with several GGUF files.
    """
    path = Path(model)
    if path.is_file() and path.suffix == SUFFIX:
        return path
    folder = path if path.is_dir() else _cached_folder(model)
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files or any(folder.glob("*.safetensors")):
        return folder
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise CheckpointError(
            f"model {show(folder.name)} has {len(files)} GGUF files ({names}): name one of them"
        )
    return files[0]


def _cached_folder(model: str) -> Path:
    """The folder of a model in the local hub cache. Raises ConfigError if it is not there."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except (OSError, ValueError, HFValidationError):
        raise ConfigError(
            f"model {show(model, MOST_OF_PATH)} is neither a folder nor in the local hub cache, "
            "nor a GGUF file; `hf download` fetches a model of the hub"
        ) from None


def check_checkpoint(path: Path) -> Checkpoint:
    """Check every file that loading will read. ``path`` is a folder or a GGUF file. Raises
    CheckpointError naming file and reason, or UnsupportedModelError for a GGUF file with something
    that is not read.

    Weights are checked by their headers and sizes, which costs milliseconds and catches a cut-off
    copy, a git-lfs pointer, a missing shard or an overwritten beginning; a flipped bit inside a
    tensor cannot be seen here.
    """
    if path.suffix == SUFFIX and path.is_file():
        folder = path.parent
        contents = _contents_of_gguf(path)
    else:
        folder = path
        contents = _contents_of_safetensors(path)
    if not contents.tensors:
        raise CheckpointError(f"{contents.weight_files[0]} holds no tensors")
    generation_config: dict[str, Any] = {}
    if (folder / GENERATION_CONFIG).exists():
        generation_config = read_json(folder, GENERATION_CONFIG)

    values_by_dtype: Counter[str] = Counter()
    for tensor in contents.tensors.values():
        values_by_dtype[tensor.dtype] += math.prod(tensor.shape)
    return Checkpoint(
        folder=folder,
        config=contents.config,
        generation_config=generation_config,
        weight_files=contents.weight_files,
        tensors=contents.tensors,
        weights_dtype=max(values_by_dtype, key=values_by_dtype.__getitem__),
        num_values=values_by_dtype.total(),
        num_bytes=sum((folder / name).stat().st_size for name in contents.weight_files),
        gguf=contents.gguf,
        lacks_index=contents.gguf is None and not _is_found_by_transformers(folder),
    )


def _is_found_by_transformers(folder: Path) -> bool:
    """Whether the folder has weights under a name that transformers looks for."""
    return (folder / INDEX).exists() or (folder / WEIGHTS).exists()


class _Contents(NamedTuple):
    """The fields of a :class:`Checkpoint` that depend on the format of the weight files."""

    config: dict[str, Any]
    weight_files: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    gguf: GgufFile | None = None


def _contents_of_safetensors(folder: Path) -> _Contents:
    has_own_layout = (folder / CONSOLIDATED).exists() and not (folder / CONFIG).exists()
    if has_own_layout:
        raise _mistrals_own()
    config = read_json(folder, CONFIG)
    if not config.get("quantization_config") and (folder / MODELOPT_CONFIG).exists():
        stated = read_json(folder, MODELOPT_CONFIG).get("quantization")
        if isinstance(stated, dict) and stated.get("quant_algo"):
            config["quantization_config"] = {**stated, "quant_method": "modelopt"}
    files = _weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(_read_header(folder, file))
    if files == (CONSOLIDATED,) and _MISTRALS_OWN in tensors:
        raise _mistrals_own()
    return _Contents(config, files, tensors)


def _contents_of_gguf(file: Path) -> _Contents:
    folder = file.parent
    separate_config = None
    if (folder / CONFIG).exists():
        separate_config = read_json(folder, CONFIG)
    gguf = _read_gguf(file, separate_config)
    tensors = {
        name: StoredTensor(
            dtype=tensor.ggml_type,
            shape=tensor.shape,
            num_bytes=tensor.num_bytes,
            file=file.name,
        )
        for name, tensor in gguf.tensors.items()
    }
    config = dict(gguf.config)
    if any(tensor.dtype not in FLOATS for tensor in tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    return _Contents(
        config=config,
        weight_files=(file.name,),
        tensors=tensors,
        gguf=gguf,
    )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if the file cannot be read or holds something
    else."""
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {first_line(error, folder)}") from None
    return parse_json(data, name)


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError as :func:`read_json`."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} does not hold a JSON object")
    return value


def _read_gguf(file: Path, config: dict[str, Any] | None) -> GgufFile:
    """The file. ``config`` is the ``config.json`` beside it, if there is one. It replaces the
    configuration in the file's own fields."""
    try:
        return GgufFile(file, config)
    except (LoadError, MemoryError):
        raise
    except Exception as error:  # a broken file can raise anything
        beside = "" if config is None else f", or does not fit the {CONFIG} beside it"
        raise CheckpointError(
            f"{file.name} is truncated, corrupt or not a GGUF file{beside}: "
            f"{first_line(error, file.parent)}"
        ) from error


def _read_header(folder: Path, file: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. The library checks that the header adds up and
    that the file is as long as it says."""
    tensors = {}
    try:
        with safe_open(str(folder / file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                tensor = opened.get_slice(name)
                dtype = tensor.get_dtype()
                shape = tensor.get_shape()
                tensors[name] = StoredTensor(
                    dtype=dtype,
                    shape=shape,
                    num_bytes=math.prod(shape) * _bits_of(dtype) // 8,
                    file=file,
                )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated, corrupt or not a safetensors file: {first_line(error, folder)}"
        ) from None
    return tensors


def _bits_of(dtype: str) -> int:
    """What a value takes: the first number in a dtype's name, as in ``BF16`` and ``F8_E4M3``."""
    number = re.search("[0-9]+", dtype)
    if number is None:
        return 8  # BOOL
    return int(number[0])


def _weight_files(folder: Path) -> tuple[str, ...]:
    """The shards that the index names, or the one file, or those that :func:`_files_without_index`
    finds. Raises CheckpointError if there are none, or others than safetensors."""
    if not (folder / INDEX).exists():
        if (folder / WEIGHTS).exists():
            return (WEIGHTS,)
        return _files_without_index(folder)
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{INDEX} names {show(shard)}, which is not a file beside it")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} names {shard}, but only safetensors are read")
        if not (folder / shard).exists():
            raise CheckpointError(f"{shard} is missing, but {INDEX} names it")
    return tuple(sorted(set(weight_map.values())))


def _files_without_index(folder: Path) -> tuple[str, ...]:
    """The weight files of a folder that has them under other names, and no index: one file of any
    name, or all of a numbered row. Raises CheckpointError if there is neither."""
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    weights = [name for name in names if name != _ADAPTER]
    if len(weights) > 1 and CONSOLIDATED in weights:
        # A second copy of the same weights.
        weights.remove(CONSOLIDATED)
    if not weights:
        if names:
            raise CheckpointError(
                f"{_ADAPTER} is an adapter, and {WEIGHTS} is missing: option model is the model "
                "that it was made for, and option adapters the folder of its adapters"
            )
        raise _no_weights(folder)
    numbered = [_NUMBERED.fullmatch(name) for name in weights]
    first = numbered[0]
    if first is None:
        if len(weights) == 1:
            return (weights[0],)
        raise CheckpointError(
            f"{INDEX} is missing, and which of these belong to the model is not clear: "
            f"{', '.join(weights[:4])}"
        )
    common, _, count = first.groups()
    numbers = range(1, int(count) + 1)
    row = tuple(f"{common}-{number:05}-of-{count}.safetensors" for number in numbers)
    for name in row:
        if name not in weights:
            raise CheckpointError(f"{name} is missing, and so is {INDEX}")
    return row


def _mistrals_own() -> CheckpointError:
    return CheckpointError(
        f"{CONSOLIDATED} is in Mistral's own layout, which is not read: fetch the model's other "
        f"files (`hf download NAME --exclude '{CONSOLIDATED}'`) or, if it has none, convert it by "
        "transformers' script: `python convert_mistral_weights_to_hf.py --input_dir FOLDER "
        "--output_dir NEW`"
    )


def _no_weights(folder: Path) -> CheckpointError:
    """The error for a folder without safetensors."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if not pickles:
        return CheckpointError(f"{WEIGHTS} is missing, and so is {INDEX}")
    return CheckpointError(
        f"{pickles[0]} is a pickle, which can run code when it is read, and {WEIGHTS} is missing: "
        'only safetensors are read; convert the checkpoint where you trust it: `python -c "from '
        "transformers import AutoModelForCausalLM as M; "
        "M.from_pretrained('FOLDER').save_pretrained('NEW')\"`"
    )
