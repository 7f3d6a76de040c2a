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
"""Key of a control that lists its false and its true value -> the type of the control's tensor."""


class TensorInfo(NamedTuple):
    """One tensor of the model file."""

    name: str
    data_type: str
    """A key of ``batch.NUMPY_TYPES``."""
    dims: tuple[int, ...]
    """The whole shape, a batch dimension included. -1 is a variable dimension, of any size."""
    symbols: tuple[str | None, ...] = ()
    """The name of each variable dimension that has one in the file, and None for the others.
    Dimensions with the same name have the same size. Empty if the file has no names."""

    def symbol(self, axis: int) -> str | None:
        """The name of a dimension; None if it has none."""
        return self.symbols[axis] if self.symbols else None

    @property
    def has_variable_rows(self) -> bool:
        """Whether the first dimension is variable."""
        return self.dims[:1] == (-1,)


@dataclass(frozen=True)
class Signature:
    """All tensors of a model."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    with_default: tuple[TensorInfo, ...] = ()
    """Inputs with a value in the file. A request may give another one."""

    @property
    def can_batch(self) -> bool:
        """Whether every tensor has a variable first dimension, as the server's batcher needs."""
        return all(info.has_variable_rows for info in (*self.inputs, *self.outputs))


def data_type_of(tensor: str, native: str, known: dict[str, str]) -> str:
    """The server's name of the model's type ``native``; raises UnsupportedModelError."""
    if native not in known:
        raise UnsupportedModelError(
            f"tensor {tensor!r} is of type {native}, which the server cannot carry to this "
            f"backend; it carries {', '.join(sorted(known))}"
        )
    return known[native]


def complete_config(config: Config, signature: Signature, max_batch_size: int) -> None:
    """Fill in what ``config`` leaves open, as the native backends do: the batch size and the
    scheduler, and the inputs and outputs.

    The batch size of a model that can batch:

    ===================================  =======================  ==================
    config lists                         config's max_batch_size  result
    ===================================  =======================  ==================
    inputs and outputs                   any                      stays as it is
    inputs only, outputs only, neither   above 0                  stays as it is
    inputs only, outputs only, neither   0 or absent              ``max_batch_size``
    ===================================  =======================  ==================

    Unlike with the native backends, a tensor that is listed may lack its ``dims`` or ``data_type``.
    """
    inputs = config.setdefault("input", [])
    outputs = config.setdefault("output", [])
    if not inputs or not outputs:
        _complete_batching(config, signature, max_batch_size)
    batching = config.get("max_batch_size", 0) > 0
    if not inputs and not config.get("batch_input"):
        controls = _controls(config)
        for info in signature.inputs:
            if info.name not in controls:
                inputs.append(_entry(info, batching))
    if not outputs:
        outputs += [_entry(info, batching) for info in signature.outputs]
    _complete_entries(inputs, (*signature.inputs, *signature.with_default), batching)
    _complete_entries(outputs, signature.outputs, batching)


def _complete_batching(config: Config, signature: Signature, max_batch_size: int) -> None:
    """Fill in the batch size and the scheduler. Raises ConfigError for a batch size above 0 if the
    model cannot batch."""
    given = config.get("max_batch_size", 0)
    if not signature.can_batch:
        if given > 0:
            infos = (*signature.inputs, *signature.outputs)
            fixed = next(info for info in infos if not info.has_variable_rows)
            raise ConfigError(
                f"max_batch_size is {given}, but the model cannot batch: the "
                f"first dimension of tensor {fixed.name!r} {show_dims(fixed.dims)} is fixed"
            )
        return
    if given == 0:
        config["max_batch_size"] = max_batch_size
    schedulers = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
    has_scheduler = any(name in config for name in schedulers)
    if config["max_batch_size"] > 1 and not has_scheduler:
        config["dynamic_batching"] = {}


def _entry(info: TensorInfo, batching: bool) -> Config:
    """The configuration of one tensor.

    The server takes no tensor without dimensions. So a tensor with no dimension but the batch is
    declared as [1]. If the model batches, a ``reshape`` tells the server to drop the 1. If it does
    not, the stand-in drops it itself.
    """
    dims = list(info.dims[1:] if batching else info.dims)
    entry: Config = {"name": info.name, "data_type": info.data_type, "dims": dims or [1]}
    if batching and not dims:
        entry["reshape"] = {"shape": []}
    return entry


def _complete_entries(entries: list[Config], infos: Iterable[TensorInfo], batching: bool) -> None:
    """Fill in what the listed tensors lack. Those that the model does not have are left to
    :func:`check_config`, which names them."""
    infos_by_name = {info.name: info for info in infos}
    for entry in entries:
        info = infos_by_name.get(entry["name"])
        if info is None:
            continue
        complete = _entry(info, batching)
        if entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID":
            entry["data_type"] = complete["data_type"]
        if not entry.get("dims"):
            entry["dims"] = complete["dims"]
            if "reshape" in complete:
                entry["reshape"] = complete["reshape"]


# ------------------------------------------------------------------------------- checks


def check_config(config: Config, signature: Signature) -> None:
    """Raise ConfigError unless the configuration fits the model."""
    for key in ("batch_input", "batch_output"):
        if config.get(key):
            raise ConfigError(f"{key} is not supported on the embedded server")
    if config.get("sequence_batching", {}).get("state"):
        raise ConfigError("sequence_batching.state is not supported on the embedded server")
    batching = config.get("max_batch_size", 0) > 0
    _check_inputs(config, signature, batching)
    outputs = {info.name: info for info in signature.outputs}
    for entry in config["output"]:
        info = _find("output", entry["name"], outputs)
        _check_tensor(entry, info, batching, is_output=True)


def _check_inputs(config: Config, signature: Signature, batching: bool) -> None:
    """Every input of the model must be listed, or be a control of the sequence batcher."""
    needed = {info.name for info in signature.inputs}
    known = {info.name: info for info in (*signature.inputs, *signature.with_default)}
    controls = _controls(config)
    listed = set(controls)
    for entry in config["input"]:
        name = entry["name"]
        info = _find("input", name, known)
        if entry.get("allow_ragged_batch"):
            raise ConfigError(f"input {name!r}: allow_ragged_batch is not supported here")
        _check_optional(entry, is_needed=name in needed)
        _check_tensor(entry, info, batching, is_output=False)
        listed.add(name)
    for name, entry in controls.items():
        _check_control(entry, _find("input", name, known), batching)
    missing = needed - listed
    if missing:
        names = ", ".join(repr(name) for name in sorted(missing))
        raise ConfigError(f"the model's input {names} is missing from the configuration")


def _check_optional(entry: Config, *, is_needed: bool) -> None:
    """An input is optional if, and only if, the model has a value for it."""
    name = entry["name"]
    is_optional = entry.get("optional", False)
    if is_optional and is_needed:
        raise ConfigError(
            f"input {name!r} is optional in the configuration, but the model needs it"
        )
    if not is_optional and not is_needed:
        raise ConfigError(
            f"input {name!r} has a default in the model: declare it with optional: true"
        )


def _find(kind: str, name: str, known: dict[str, TensorInfo]) -> TensorInfo:
    """The model's tensor of that name. ``kind`` is ``input`` or ``output``."""
    if name not in known:
        listed = ", ".join(map(repr, known)) or "none"
        raise ConfigError(
            f"the model has no {kind} {name!r}{nearest(name, known)}; it has {listed}"
        )
    return known[name]


def _check_tensor(entry: Config, info: TensorInfo, batching: bool, *, is_output: bool) -> None:
    """The type and the dimensions of a listed tensor must be the model's."""
    name = info.name
    if entry["data_type"] != info.data_type:
        raise ConfigError(
            f"tensor {name!r}: the configuration has data_type {entry['data_type']}, "
            f"but the model has {info.data_type}"
        )
    if batching and not info.has_variable_rows:
        raise ConfigError(
            f"tensor {name!r}: max_batch_size is above 0, but the first dimension of the model's "
            f"{show_dims(info.dims)} is not variable"
        )
    given = _dims_for_model(entry)
    is_scalar = not info.dims
    if is_scalar and set(given) <= {1}:
        return
    expected = info.dims[1:] if batching else info.dims
    if not _dims_fit(given, expected, is_output=is_output):
        batch = " (its first dimension is the batch)" if batching else ""
        raise ConfigError(
            f"tensor {name!r}: the configuration has dims {show_dims(given)}, "
            f"but the model has {show_dims(info.dims)}{batch}"
        )


def _dims_for_model(entry: Config) -> tuple[int, ...]:
    """The dimensions in which the model gets a tensor: those of ``reshape``, if there is one."""
    reshape = entry.get("reshape")
    dims = entry["dims"] if reshape is None else reshape.get("shape", [])
    # The server's JSON has 64-bit integers as text now and then.
    return tuple(int(dim) for dim in dims)


def _dims_fit(given: Sequence[int], expected: Sequence[int], *, is_output: bool) -> bool:
    """Whether the dimensions in a configuration fit those that the model has."""
    if len(given) != len(expected):
        return False
    for given_dim, expected_dim in zip(given, expected, strict=True):
        # A variable dimension of an input may be restricted to one size. One of an output may not:
        # the model decides on its size.
        is_restricted = expected_dim == -1 and not is_output
        if given_dim != expected_dim and not is_restricted:
            return False
    return True


def _controls(config: Config) -> dict[str, Config]:
    """Inputs that the sequence batcher adds to each request, by their names."""
    controls = config.get("sequence_batching", {}).get("control_input", [])
    return {control["name"]: control for control in controls}


def _check_control(entry: Config, info: TensorInfo, batching: bool) -> None:
    """A control is one value for each request, and the type of its values is the model's."""
    name = info.name
    dims_of_request = info.dims[1:] if batching else info.dims
    if dims_of_request != (1,):
        expected = (-1, 1) if batching else (1,)
        raise ConfigError(
            f"sequence control {name!r}: the model has {show_dims(info.dims)}, "
            f"but a control is {show_dims(expected)}"
        )
    for control in entry.get("control", []):
        # The type of a control: that of its false and its true value. A control without these, such
        # as a correlation id, names its type itself.
        type_ = control.get("data_type", info.data_type)
        for key, type_of_values in _CONTROL_VALUES.items():
            if control.get(key):
                type_ = type_of_values
        if type_ != info.data_type:
            raise ConfigError(
                f"sequence control {name!r}: the configuration has {type_}, "
                f"but the model has {info.data_type}"
            )


def show_dims(dims: Sequence[int]) -> str:
    """Such as ``[-1, 3]``."""
    return f"[{', '.join(map(str, dims))}]"
