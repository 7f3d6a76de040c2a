"""Weights that a checkpoint stores in 8 or 4 bits, as floats: which tensors a weight is stored in,
and what they mean. Called by ``dequantized_weights``.

A weight is told by its own tensors, as each layer of a checkpoint may be of another kind:

- e4m3 of ``fp8``, ``fbgemm_fp8`` and ``modelopt``: ``weight``, and ``weight_scale_inv`` or
  ``weight_scale``. A weight is ``weight * scale``, with a scale for all of it, for each output, or
  for each block of outputs and inputs.
- NVFP4 of ``modelopt``: ``weight``, two e2m1 to a byte, ``weight_scale`` in e4m3 for each 16 inputs
  and ``weight_scale_2`` for all. The weight is their product.
- MXFP4 of gpt-oss: ``…_blocks``, two e2m1 to a byte, and ``…_scales``, a power of 2 for each 32
  inputs.
- ``bitsandbytes`` in 4 bits: ``weight``, two indices to a byte, of the 16 numbers ``quant_map``,
  and a factor ``absmax`` for each block of neighbours. The factors may be rounded to bytes in turn.
- ``bitsandbytes`` in 8 bits: ``weight``, and ``SCB``, the largest value of each output. A number
  ``weight_format`` says in which order the values are stored.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from jitney.errors import CheckpointError, show
from jitney.execution.checkpoint import Checkpoint, StoredTensor

StoredTensors = Mapping[str, Tensor]
"""The tensors of a weight, by what they are for."""

_NVFP4_GROUP = 16
_MXFP4_BYTES = 16
"""Bytes of a block of MXFP4, which has one scale."""
_MXFP4_BIAS = 127
_E4M3_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_QUANT_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NOT_READ = (
    ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".activation_scale",
    ".input_scale_ub", ".weight_format",
)  # fmt: skip
"""Ends of the names of tensors that have no part in any weight."""
_FEW_BITS = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})
"""Types of stored tensors that are no floats as they are."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class StoredWeight:
    """A weight, not read yet."""

    shape: list[int]
    """Of the weight as floats."""
    tensors: Mapping[str, str]
    """What a tensor is for -> its name in the checkpoint."""
    decode: Callable[[StoredTensors, torch.dtype], Tensor]
    """The weight in that dtype."""


class TensorFiles:
    """Reads tensors of a checkpoint. They are views of the mapped files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[str, Any] = {}

    def slice(self, name: str) -> Any:
        """A tensor that is read when it is indexed, as safetensors has it."""
        return self._file_of(name).get_slice(name)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of(name).get_tensor(name)
        return tensor

    def floats(self, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
        """The weight in ``dtype``."""
        tensors = {purpose: self.read(name) for purpose, name in weight.tensors.items()}
        return weight.decode(tensors, dtype)

    def _file_of(self, name: str) -> Any:
        file = self._checkpoint.tensors[name].file
        if file not in self._opened:
            path = self._checkpoint.folder / file
            self._opened[file] = safe_open(str(path), framework="pt").__enter__()
        return self._opened[file]


class LazyWeight:
    """A weight in place of a tensor of the checkpoint. transformers indexes it to read it."""

    def __init__(self, files: TensorFiles, weight: StoredWeight, dtype: torch.dtype) -> None:
        self._files = files
        self._weight = weight
        self._dtype = dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._files.floats(self._weight, self._dtype)[index]

    def get_shape(self) -> list[int]:
        return self._weight.shape

    def get_dtype(self) -> str:
        """Any name of floats: transformers only asks whether to cast it."""
        return "F32"


def find_stored_weights(
    checkpoint: Checkpoint, block_size: Sequence[int] | None
) -> dict[str, StoredWeight]:
    """The weights that are stored in few bits, by the names that they would have as floats.

    ``block_size`` is that of e4m3 in blocks: outputs and inputs. Raises CheckpointError for a
    tensor that is missing or has another shape than it must.
    """
    found: dict[str, StoredWeight] = {}
    for name, stored in checkpoint.tensors.items():
        if name.endswith("_blocks"):
            found[name.removesuffix("_blocks")] = _mxfp4(name, stored, checkpoint)
        elif name.endswith(".weight"):
            weight = _of_linear(name, stored, checkpoint, block_size)
            if weight is not None:
                found[name] = weight
    taken = {name for weight in found.values() for name in weight.tensors.values()}
    for name, stored in checkpoint.tensors.items():
        if name in taken or name.endswith(_NOT_READ) or stored.dtype not in _FEW_BITS:
            continue
        raise CheckpointError(
            f"{stored.file}: tensor {name} is of type {stored.dtype}, and it is not known what it "
            "belongs to"
        )
    return found


def plain_tensors(checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]) -> list[str]:
    """The names of all tensors that belong to no stored weight."""
    taken = {name for weight in weights.values() for name in weight.tensors.values()}
    return [
        name for name in checkpoint.tensors if name not in taken and not name.endswith(_NOT_READ)
    ]


def _of_linear(
    name: str, stored: StoredTensor, checkpoint: Checkpoint, block_size: Sequence[int] | None
) -> StoredWeight | None:
    """The weight whose values are in the tensor ``name``. None: they are floats."""
    for state in _QUANT_STATES:
        if f"{name}.{state}" in checkpoint.tensors:
            return _bitsandbytes_4(name, f"{name}.{state}", checkpoint)
    if stored.dtype == "F8_E4M3":
        return _e4m3(name, stored, checkpoint, block_size)
    if stored.dtype == "I8":
        return _bitsandbytes_8(name, stored, checkpoint)
    if stored.dtype != "U8":
        return None
    layer = name.removesuffix(".weight")
    if f"{layer}.weight_scale" in checkpoint.tensors:
        return _nvfp4(name, stored, checkpoint)
    raise CheckpointError(
        f"{stored.file} lacks {layer}.weight_scale, or {name}.{_QUANT_STATES[0]}, for {name}, "
        "which is of type U8"
    )


# ------------------------------------------------------------------ 8 bits


def _e4m3(
    name: str, stored: StoredTensor, checkpoint: Checkpoint, block_size: Sequence[int] | None
) -> StoredWeight:
    _check_dimensions(name, stored, 2)
    layer = name.removesuffix(".weight")
    names = [f"{layer}.{end}" for end in _E4M3_SCALES if f"{layer}.{end}" in checkpoint.tensors]
    if not names:
        expected = "weight_scale" if block_size is None else "weight_scale_inv"
        raise CheckpointError(f"{stored.file} lacks {layer}.{expected}, the scale of {name}")
    scale = names[0]
    shape = checkpoint.tensors[scale].shape
    outputs, inputs = stored.shape
    tensors = {"weight": name, "scale": scale}
    for_all = shape in ([], [1], [1, 1])
    for_outputs = shape in ([outputs], [outputs, 1])
    if for_all or for_outputs:
        return StoredWeight(stored.shape, tensors, _decode_rows)

    if block_size is None:
        expected_shape = f"[] or [{outputs}, 1], as there is no weight_block_size"
        raise CheckpointError.of(f"the shape of {scale}", shape, expected_shape)
    block_rows, block_columns = block_size
    blocks = [-(-outputs // block_rows), -(-inputs // block_columns)]
    if shape != blocks:
        bound = f"{blocks}, for blocks of {block_rows} × {block_columns} in {outputs} × {inputs}"
        raise CheckpointError.of(f"the shape of {scale}", shape, bound)

    def decode(found: StoredTensors, dtype: torch.dtype) -> Tensor:
        by_row = _scale_of(found["scale"]).repeat_interleave(block_rows, 0)[:outputs]
        by_value = by_row.repeat_interleave(block_columns, 1)[:, :inputs]
        return (found["weight"].float() * by_value).to(dtype)

    return StoredWeight(stored.shape, tensors, decode)


def _decode_rows(found: StoredTensors, dtype: torch.dtype) -> Tensor:
    """e4m3 with a scale for each output, or for all."""
    return (found["weight"].float() * _scale_of(found["scale"]).reshape(-1, 1)).to(dtype)


def _scale_of(stored: Tensor) -> Tensor:
    """float32 of a scale, which may be a float of any type, or the exponent of a power of 2."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - _MXFP4_BIAS)
    return stored.float()


def _bitsandbytes_8(name: str, stored: StoredTensor, checkpoint: Checkpoint) -> StoredWeight:
    _check_dimensions(name, stored, 2)
    largest = f"{name.removesuffix('.weight')}.SCB"
    _check_shape(largest, checkpoint, [stored.shape[0]], stored.file)
    layout = f"{name.removesuffix('.weight')}.weight_format"
    if layout in checkpoint.tensors:
        number = int(TensorFiles(checkpoint).read(layout))
        if number != 0:  # tiles, as some kernels want them
            raise CheckpointError.of(layout, number, "0, for rows one behind the other")

    def decode(found: StoredTensors, dtype: torch.dtype) -> Tensor:
        scale = found["largest"].float() / 127
        return (found["weight"].float() * scale.unsqueeze(1)).to(dtype)

    return StoredWeight(stored.shape, {"weight": name, "largest": largest}, decode)


# ------------------------------------------------------------------ 4 bits


def _nvfp4(name: str, stored: StoredTensor, checkpoint: Checkpoint) -> StoredWeight:
    _check_dimensions(name, stored, 2)
    layer = name.removesuffix(".weight")
    outputs, row_bytes = stored.shape
    inputs = 2 * row_bytes
    tensors = {"weight": name, "scale": f"{layer}.weight_scale"}
    groups = [outputs, -(-inputs // _NVFP4_GROUP)]
    _check_shape(tensors["scale"], checkpoint, groups, stored.file)
    scale_type = checkpoint.tensors[tensors["scale"]].dtype
    if scale_type != "F8_E4M3":
        raise CheckpointError.of(f"the type of {tensors['scale']}", scale_type, "F8_E4M3")
    tensors["global_scale"] = f"{layer}.weight_scale_2"
    _check_shape(tensors["global_scale"], checkpoint, [], stored.file)
    factors = f"{layer}.pre_quant_scale"
    if factors in checkpoint.tensors:
        _check_shape(factors, checkpoint, [inputs], stored.file)
        tensors["factors"] = factors
    pairs = _pairs([*_E2M1, *(-value for value in _E2M1)])

    def decode(found: StoredTensors, dtype: torch.dtype) -> Tensor:
        scale = found["scale"].float() * found["global_scale"].float()
        by_value = scale.repeat_interleave(_NVFP4_GROUP, 1)[:, :inputs]
        weight = _unpack(found["weight"], pairs) * by_value
        if "factors" in found:
            weight = weight * found["factors"].float()
        return weight.to(dtype)

    return StoredWeight([outputs, inputs], tensors, decode)


def _mxfp4(name: str, stored: StoredTensor, checkpoint: Checkpoint) -> StoredWeight:
    """Of experts: [experts, outputs, groups, bytes]. Their module has inputs before outputs."""
    _check_dimensions(name, stored, 4)
    scales = f"{name.removesuffix('_blocks')}_scales"
    experts, outputs, groups, num_bytes = stored.shape
    if num_bytes != _MXFP4_BYTES:
        bound = f"[{experts}, {outputs}, {groups}, {_MXFP4_BYTES}]"
        raise CheckpointError.of(f"the shape of {name}", stored.shape, bound)
    _check_shape(scales, checkpoint, [experts, outputs, groups], stored.file)
    pairs = _pairs([*_E2M1, *(-value for value in _E2M1)])

    def decode(found: StoredTensors, dtype: torch.dtype) -> Tensor:
        # One expert at a time: as floats of 32 bits, all of a layer's take gigabytes.
        weights = []
        for blocks, exponents in zip(found["blocks"], found["scales"], strict=True):
            values = _unpack(blocks, pairs) * _scale_of(exponents).unsqueeze(-1)
            weights.append(values.flatten(1).t().to(dtype))
        return torch.stack(weights)

    shape = [experts, 2 * groups * num_bytes, outputs]
    return StoredWeight(shape, {"blocks": name, "scales": scales}, decode)


def _bitsandbytes_4(name: str, state_name: str, checkpoint: Checkpoint) -> StoredWeight:
    stored = checkpoint.tensors[name]
    state = _read_state(state_name, checkpoint)
    shape = _whole_numbers(state_name, "shape", state.get("shape"), 2)
    block_size = _whole_numbers(state_name, "blocksize", [state.get("blocksize")], 1)[0]
    outputs, inputs = shape
    num_values = outputs * inputs
    if 2 * stored.num_bytes != num_values:
        bound = f"{num_values // 2}, for {outputs} × {inputs} values of 4 bits"
        raise CheckpointError.of(f"the size in bytes of {name}", stored.num_bytes, bound)
    blocks = -(-num_values // block_size)
    tensors = {
        "weight": name,
        "state": state_name,
        "numbers": f"{name}.quant_map",
        "factors": f"{name}.absmax",
    }
    _check_shape(tensors["numbers"], checkpoint, [16], stored.file)
    _check_shape(tensors["factors"], checkpoint, [blocks], stored.file)
    nested_size = 0
    offset = 0.0
    if "nested_blocksize" in state:
        sizes = [state["nested_blocksize"]]
        nested_size = _whole_numbers(state_name, "nested_blocksize", sizes, 1)[0]
        offset = _number(state_name, "nested_offset", state.get("nested_offset"))
        tensors["nested_numbers"] = f"{name}.nested_quant_map"
        tensors["nested_factors"] = f"{name}.nested_absmax"
        _check_shape(tensors["nested_numbers"], checkpoint, [256], stored.file)
        nested_blocks = [-(-blocks // nested_size)]
        _check_shape(tensors["nested_factors"], checkpoint, nested_blocks, stored.file)

    def decode(found: StoredTensors, dtype: torch.dtype) -> Tensor:
        factors = found["factors"]
        if nested_size:
            nested = found["nested_factors"].float().repeat_interleave(nested_size)[:blocks]
            numbers = found["nested_numbers"].float()
            factors = numbers[factors.int()] * nested + offset
        pairs = _pairs(found["numbers"].float().tolist(), high_first=True)
        # The bytes may be stored as floats of 16 bits: what counts are their bits.
        values = _unpack(found["weight"].contiguous().view(torch.uint8).flatten(), pairs)
        values = values * factors.float().repeat_interleave(block_size)[:num_values]
        return values.view(outputs, inputs).to(dtype)

    return StoredWeight(shape, tensors, decode)


def _read_state(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """What bitsandbytes says of a weight: JSON, in a tensor of bytes."""
    data = bytes(TensorFiles(checkpoint).read(name).tolist())
    try:
        state = json.loads(data.decode())
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise CheckpointError.of(name, data[:40], "a JSON object")
    return state


def _pairs(numbers: Sequence[float], *, high_first: bool = False) -> Tensor:
    """float32 [256, 2]: the two values that a byte stands for, each half an index of ``numbers``.
    The first is in the low half, or in the high one."""
    all_bytes = torch.arange(256)
    halves = (all_bytes >> 4, all_bytes & 15) if high_first else (all_bytes & 15, all_bytes >> 4)
    return torch.tensor(numbers)[torch.stack(halves, 1)]


def _unpack(stored: Tensor, pairs: Tensor) -> Tensor:
    """float32 [..., 2 n] of bytes [..., n]."""
    return functional.embedding(stored.int(), pairs).flatten(-2)


# ------------------------------------------------------------------ checks


def _check_dimensions(name: str, stored: StoredTensor, number: int) -> None:
    if len(stored.shape) != number:
        bound = f"of {number} dimensions"
        raise CheckpointError.of(f"the shape of {name}", stored.shape, bound)


def _check_shape(name: str, checkpoint: Checkpoint, shape: list[int], file: str) -> None:
    """Raise CheckpointError if the tensor is missing from the file, or has another shape. One value
    may have no dimension, or one."""
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise CheckpointError(f"{file} lacks {name}")
    if stored.shape != shape and not (shape == [] and stored.shape == [1]):
        raise CheckpointError.of(f"the shape of {name}", stored.shape, str(shape))


def _whole_numbers(state: str, field: str, values: Any, count: int) -> list[int]:
    """``count`` numbers of at least 1, of a field of bitsandbytes' state."""
    is_list = isinstance(values, list) and len(values) == count
    if is_list and all(type(value) is int and value >= 1 for value in values):
        return list(values)
    bound = f"{count} whole numbers of at least 1" if count > 1 else "at least 1"
    shown = values[0] if count == 1 and is_list else values
    raise CheckpointError.of(f"{field} in {state}", shown, bound)


def _number(state: str, field: str, value: Any) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise CheckpointError(f"{field} in {state} is {show(value)}, but must be a number")
