"""A model's tensors, as its file declares them, against ``config.pbtxt``.

:func:`complete_config` fills in what the configuration leaves open, as the native backends do;
:func:`check_config` refuses what contradicts the model, naming the tensor and both shapes. Both
work on the server's JSON form of the configuration and on nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitney.errors import ConfigError, UnsupportedModelError, nearest

Config = dict[str, Any]

_CONTROL_VALUES = {
    "bool_false_true": "TYPE_BOOL",
    "fp32_false_true": "TYPE_FP32",
    "int32_false_true": "TYPE_INT32",
}


class TensorInfo(NamedTuple):
    """One tensor of the model file."""

    name: str
    data_type: str
    """A key of ``batch.NUMPY_TYPES``."""
    dims: tuple[int, ...]
    """The whole shape, a batch dimension included; -1: any size."""
    symbols: tuple[str | None, ...] = ()
    """Names of the variable dimensions, where the file has any: equal names are equal sizes."""


@dataclass(frozen=True)
class Signature:
    """All tensors of a model."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    optional: tuple[TensorInfo, ...] = ()
    """Inputs that have a value in the file, which a request may replace."""

    @property
    def can_batch(self) -> bool:
        """Whether every tensor has a variable first dimension, as the server's batcher needs."""
        return all(info.dims[:1] == (-1,) for info in (*self.inputs, *self.outputs))


def data_type_of(tensor: str, native: str, known: dict[str, str]) -> str:
    """The server's name of the model's type ``native``; raises UnsupportedModelError."""
    if native not in known:
        raise UnsupportedModelError(
            f"tensor {tensor!r} is of type {native}, which the server cannot carry to this "
            f"backend; it carries {', '.join(sorted(known))}"
        )
    return known[native]


def complete_config(config: Config, signature: Signature, max_batch_size: int) -> None:
    """Fill in ``config``: batch size and scheduler, and the inputs and outputs if there are none.

    Like the native backends: a configuration with both inputs and outputs is left as it is, and
    ``max_batch_size`` is what a model gets that can batch and does not say how far. Beyond them, a
    listed tensor may leave out its ``dims`` or ``data_type``.
    """
    inputs = config.setdefault("input", [])
    outputs = config.setdefault("output", [])
    if not inputs or not outputs:
        _complete_batching(config, signature, max_batch_size)
    offset = 1 if config.get("max_batch_size", 0) > 0 else 0
    if not inputs and not config.get("batch_input"):
        controls = _controls(config)
        inputs += [_entry(i, offset) for i in signature.inputs if i.name not in controls]
    if not outputs:
        outputs += [_entry(info, offset) for info in signature.outputs]
    infos = {info.name: info for info in (*signature.inputs, *signature.optional)}
    for entry in inputs:
        _fill(entry, infos.get(entry["name"]), offset)
    infos = {info.name: info for info in signature.outputs}
    for entry in outputs:
        _fill(entry, infos.get(entry["name"]), offset)


def _complete_batching(config: Config, signature: Signature, max_batch_size: int) -> None:
    if not signature.can_batch:
        if config.get("max_batch_size", 0) > 0:
            fixed = next(i for i in (*signature.inputs, *signature.outputs) if i.dims[:1] != (-1,))
            raise ConfigError(
                f"max_batch_size is {config['max_batch_size']}, but the model cannot batch: the "
                f"first dimension of tensor {fixed.name!r} {show_dims(fixed.dims)} is fixed"
            )
        return
    if config.get("max_batch_size", 0) == 0:
        config["max_batch_size"] = max_batch_size
    schedulers = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
    if config["max_batch_size"] > 1 and not any(name in config for name in schedulers):
        config["dynamic_batching"] = {}


def _entry(info: TensorInfo, offset: int) -> Config:
    """The configuration of one tensor. One without dimensions beside the batch is declared [1]
    and reshaped by the server."""
    dims = list(info.dims[offset:])
    entry: Config = {"name": info.name, "data_type": info.data_type, "dims": dims or [1]}
    if not dims and offset:
        entry["reshape"] = {"shape": []}
    return entry


def _fill(entry: Config, info: TensorInfo | None, offset: int) -> None:
    if info is None:
        return  # check_config names it
    if entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID":
        entry["data_type"] = info.data_type
    if not entry.get("dims"):
        entry.update({key: v for key, v in _entry(info, offset).items() if key != "data_type"})


def check_config(config: Config, signature: Signature) -> None:
    """Raise ConfigError unless the configuration fits the model."""
    for key in ("batch_input", "batch_output"):
        if config.get(key):
            raise ConfigError(f"{key} is not supported on the embedded server")
    batching = config.get("max_batch_size", 0) > 0
    known = {info.name: info for info in (*signature.inputs, *signature.optional)}
    needed = {info.name for info in signature.inputs}
    controls = _controls(config)
    listed = set(controls)
    for entry in config["input"]:
        name = entry["name"]
        info = _find("input", name, known)
        if entry.get("allow_ragged_batch"):
            raise ConfigError(f"input {name!r}: allow_ragged_batch is not supported here")
        if entry.get("optional", False) != (name not in needed):
            raise ConfigError(
                f"input {name!r} is optional in the configuration, but the model needs it"
                if name in needed
                else f"input {name!r} has a default in the model: declare it with optional: true"
            )
        _check_tensor(entry, info, batching, exact=False)
        listed.add(name)
    for name, entry in controls.items():
        _check_control(entry, _find("input", name, known), batching)
    if needed - listed:
        names = ", ".join(repr(name) for name in sorted(needed - listed))
        raise ConfigError(f"the model's input {names} is missing from the configuration")
    outputs = {info.name: info for info in signature.outputs}
    for entry in config["output"]:
        _check_tensor(entry, _find("output", entry["name"], outputs), batching, exact=True)
    if config.get("sequence_batching", {}).get("state"):
        raise ConfigError("sequence_batching.state is not supported on the embedded server")


def _find(kind: str, name: str, known: dict[str, TensorInfo]) -> TensorInfo:
    if name not in known:
        raise ConfigError(
            f"the model has no {kind} {name!r}{nearest(name, known)}; it has "
            f"{', '.join(map(repr, known)) or 'none'}"
        )
    return known[name]


def _check_tensor(entry: Config, info: TensorInfo, batching: bool, *, exact: bool) -> None:
    """``exact``: a variable dimension of the model must be variable in the configuration too."""
    name = info.name
    if entry["data_type"] != info.data_type:
        raise ConfigError(
            f"tensor {name!r}: the configuration has data_type {entry['data_type']}, "
            f"but the model has {info.data_type}"
        )
    reshape = entry.get("reshape")
    dims = _integers(reshape.get("shape", []) if reshape is not None else entry["dims"])
    if batching and info.dims[:1] != (-1,):
        raise ConfigError(
            f"tensor {name!r}: max_batch_size is above 0, but the first dimension of the model's "
            f"{show_dims(info.dims)} is not variable"
        )
    expected = info.dims[1:] if batching else info.dims
    if not info.dims and set(dims) <= {1}:
        return  # a scalar, declared as [1]
    fits = len(dims) == len(expected) and all(
        there == here or (there == -1 and not exact)
        for here, there in zip(dims, expected, strict=True)
    )
    if not fits:
        batch = " (its first dimension is the batch)" if batching else ""
        raise ConfigError(
            f"tensor {name!r}: the configuration has dims {show_dims(dims)}, "
            f"but the model has {show_dims(info.dims)}{batch}"
        )


def _controls(config: Config) -> dict[str, Config]:
    """Inputs that the sequence batcher adds to each request, by their names."""
    controls = config.get("sequence_batching", {}).get("control_input", [])
    return {control["name"]: control for control in controls}


def _check_control(entry: Config, info: TensorInfo, batching: bool) -> None:
    """A control has one value for each request, of the type that its values are given in."""
    name = info.name
    if (info.dims[1:] if batching else info.dims) != (1,):
        expected = [-1, 1] if batching else [1]
        raise ConfigError(
            f"sequence control {name!r}: the model has {show_dims(info.dims)}, "
            f"but a control is {show_dims(expected)}"
        )
    for control in entry.get("control", []):
        given = {data_type for key, data_type in _CONTROL_VALUES.items() if control.get(key)}
        given = given or {control.get("data_type", info.data_type)}
        if info.data_type not in given:
            raise ConfigError(
                f"sequence control {name!r}: the configuration has {', '.join(sorted(given))}, "
                f"but the model has {info.data_type}"
            )


def _integers(dims: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(dim) for dim in dims)  # the server's JSON has them as text now and then


def show_dims(dims: Sequence[int]) -> str:
    """``[-1, 3]``."""
    return f"[{', '.join(map(str, dims))}]"
