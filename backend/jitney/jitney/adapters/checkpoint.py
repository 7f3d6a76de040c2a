"""An adapter's files in PEFT's format: read, judged, and made into factors.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. Whatever would change the
result and is not computed here is refused by name. PEFT itself is not needed.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from jitney.errors import CheckpointError, InvalidArgumentError, nearest, show
from jitney.execution.checkpoint import first_line, parse_json
from jitney.execution.low_rank import Factors, Site

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")

# What must be so; absent is fine. The others of PEFT's fields are of training, or told by tensors.
_FIXED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    # The others change the weights of the model itself.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


def read_adapter(
    folder: Path, sites: Mapping[str, Site], max_rank: int
) -> tuple[str, dict[str, Factors]]:
    """The sha256 of the files, and factors in float32, by the layer's path. Each file is read
    once: the sum and the factors are of the same bytes, whatever is written meanwhile or later.

    Raises InvalidArgumentError for what is no adapter of this model, or cannot be computed: it
    names the field or tensor, what it is and what it must be.
    """
    try:
        said = _read(folder, CONFIG)
        config = parse_json(said, CONFIG)
        weights = _read(folder, WEIGHTS)
        tensors = load(weights)
    except (CheckpointError, SafetensorError) as error:
        raise InvalidArgumentError(first_line(error, folder)) from None
    except KeyError as error:
        raise InvalidArgumentError(f"{WEIGHTS} has a tensor of dtype {error}") from None
    digest = hashlib.sha256(said)
    digest.update(weights)
    _check_config(config)
    found = _by_layer(tensors, sites)
    factors = {path: _factors(path, config, pair, sites[path], max_rank) for path, pair in found}
    return digest.hexdigest(), factors


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise InvalidArgumentError(f"{name} is missing") from None
    except OSError as error:
        raise InvalidArgumentError(first_line(error, folder)) from None


def _check_config(config: Mapping[str, Any]) -> None:
    for name, allowed in _FIXED.items():
        value = config.get(name, allowed[0])
        if not any(value == each and type(value) is type(each) for each in allowed):
            shown = " or ".join(repr(each) for each in allowed)
            raise InvalidArgumentError.of(name, value, shown)
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not _is_positive(value):
            raise InvalidArgumentError.of(name, value, "a number above 0")
    for name in ("rank_pattern", "alpha_pattern"):
        value = config.get(name) or {}
        numbers = value.values() if isinstance(value, dict) else [None]
        if not all(map(_is_positive, numbers)):
            raise InvalidArgumentError.of(name, value, "an object of numbers above 0")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _by_layer(
    tensors: Mapping[str, Tensor], sites: Mapping[str, Site]
) -> list[tuple[str, dict[str, Tensor]]]:
    """(path, {"A": …, "B": …}) of each layer that the tensors name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            kind = "weights lora_A and lora_B alone are taken"
            raise InvalidArgumentError(f"tensor {show(name)} is of another kind: {kind}")
        path, kind = match.groups()
        if path not in sites:
            known = {each.rpartition(".")[2] for each in sites}
            near = nearest(path, sites) or f" (these can: {', '.join(sorted(known))})"
            raise InvalidArgumentError(f"{show(path)} cannot have an adapter{near}")
        found.setdefault(path, {})[kind] = tensor
    if not found:
        raise InvalidArgumentError(f"{WEIGHTS} holds no tensor")
    return sorted(found.items())


def _factors(
    path: str, config: Mapping[str, Any], pair: Mapping[str, Tensor], site: Site, max_rank: int
) -> Factors:
    """Raises InvalidArgumentError for a rank or a shape that is not what it must be."""
    rank = int(_pattern(config.get("rank_pattern"), path, config["r"]))
    if not 1 <= rank <= max_rank:
        raise InvalidArgumentError.of(f"r of {path}", rank, f"from 1 to {max_rank}")
    for kind, shape in (("A", (rank, site.inputs)), ("B", (site.outputs, rank))):
        tensor, what = pair.get(kind), f"the shape of {path}.lora_{kind}.weight"
        got = None if tensor is None else tuple(tensor.shape)
        if tensor is None or got != shape:
            raise InvalidArgumentError.of(what, got, str(shape))
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
            bound = "finite numbers of floating point"
            raise InvalidArgumentError(f"{path}.lora_{kind}.weight must hold {bound}")
    alpha = _pattern(config.get("alpha_pattern"), path, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Factors(pair["A"].float(), (pair["B"].float() * scale).T.contiguous())


def _pattern(pattern: Mapping[str, float] | None, path: str, default: float) -> float:
    """PEFT's rule: the first key that is the path's end, or a regular expression for it."""
    for key, value in (pattern or {}).items():
        try:
            if re.match(rf"(.*\.)?({key})$", path):
                return value
        except re.error:
            raise InvalidArgumentError.of("a pattern", key, "a regular expression") from None
    return default
