"""Checkpoints in formats that no kernel of ours multiplies as they are: e4m3 in blocks, MXFP4,
NVFP4, and those of bitsandbytes.

On a CPU the linear layers become ``int8``, rounded once more from the stored values. All else, such
as experts, which transformers stacks while it reads them, becomes floats of the model's dtype; on a
GPU everything does. The log says what that takes. Called by ``quantized_checkpoint``.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from jitney.errors import UnsupportedModelError, show
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.support import unservable
from jitney.execution.weights import count_bytes
from jitney.quantization import devices, eight_bits
from jitney.quantization.e4m3 import SIZE_STEP
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.stored_weights import (
    LazyWeight,
    StoredWeight,
    TensorFiles,
    find_stored_weights,
    plain_tensors,
)
from jitney.quantization.transformers_reading import read_as_stored, remove_quantizer_marks

_log = logging.getLogger(__name__)

METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes", "modelopt")
"""The methods whose weights are read here, as ``quantization_config.quant_method`` names them."""


@dataclass
class DequantizedWeights:
    """A ``WeightFormat``: ``execution.quantized`` explains its methods and attributes."""

    method: str
    checkpoint: Checkpoint
    weights: Mapping[str, StoredWeight]
    """Those that are stored in few bits, by the names that they would have as floats."""
    dtype: torch.dtype
    device: torch.device
    in_place = True
    _layers: list[str] = field(default_factory=list)
    """The linear layers that become ``int8``."""

    @classmethod
    def plan(
        cls,
        method: str,
        quantization_config: Mapping[str, Any],
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DequantizedWeights":
        """How the checkpoint is read. Raises CheckpointError for a missing tensor or a wrong shape,
        and UnsupportedModelError for a block size that is none."""
        block_size = _block_size(checkpoint, quantization_config)
        weights = find_stored_weights(checkpoint, block_size)
        if not weights:
            raise unservable(
                str(checkpoint.config["model_type"]),
                f"its quantization_config names {method}, and no tensor of its files is quantized",
            )
        return cls(method, checkpoint, weights, dtype, device)

    reads_itself = ()

    @property
    def given_tensors(self) -> dict[str, Any]:
        """See :class:`WeightFormat`, here and below."""
        files = TensorFiles(self.checkpoint)
        given = {name: files.slice(name) for name in plain_tensors(self.checkpoint, self.weights)}
        for name, weight in self.weights.items():
            given[name] = LazyWeight(files, weight, self.dtype)
        for layer in self._layers:
            del given[f"{layer}.weight"]
        return given

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        needed = count_bytes(skeleton)
        for layer in self._int8_layers(skeleton):
            outputs, inputs = self.weights[f"{layer}.weight"].shape
            needed -= outputs * inputs * self.dtype.itemsize
            needed += eight_bits.layer_bytes(outputs, inputs)
        return needed

    loaded_bytes = needed_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config, dtype=self.dtype)
        self._layers = self._int8_layers(skeleton)
        if self._layers:
            read_as_stored(hf_config, {layer: {} for layer in self._layers})
        else:
            vars(hf_config).pop("quantization_config", None)

    @torch.inference_mode()
    def after_reading(self, module: PreTrainedModel) -> None:
        """Make ``int8`` layers, one by one."""
        files = TensorFiles(self.checkpoint)
        largest_error = 0.0
        for layer in self._layers:
            linear: Any = module.get_submodule(layer)
            weight = files.floats(self.weights[f"{layer}.weight"], torch.float32)
            q, scale = Int8Linear.quantize_rows(weight)
            norm = weight.norm().item()
            if norm:
                error = (q * scale - weight).norm().item() / norm
                largest_error = max(largest_error, error)
            made = Int8Linear(weight=q, scale=scale.t(), bias=linear.bias, dtype=self.dtype)
            module.set_submodule(layer, made)
        remove_quantizer_marks(module)
        self._log_cost(module, largest_error)

    def _int8_layers(self, skeleton: PreTrainedModel) -> list[str]:
        """The layers that become ``int8``: linear ones, of sizes that the kernels take."""
        if not devices.has_integer_kernels(self.device):
            return []
        layers = []
        for path, module in skeleton.named_modules():
            weight = self.weights.get(f"{path}.weight")
            if weight is None or type(module) is not nn.Linear:
                continue
            fits = all(size % SIZE_STEP == 0 for size in weight.shape)
            if fits:
                layers.append(path)
        return layers

    def _log_cost(self, module: PreTrainedModel, largest_error: float) -> None:
        """Say what was made of the stored weights, and what that costs."""
        num_floats = len(self.weights) - len(self._layers)
        kinds = []
        if self._layers:
            error = f"rounding once more changed weights by up to {largest_error:.2%} of their norm"
            kinds.append(f"{len(self._layers)} computed as int8 ({error})")
        if num_floats:
            name = str(self.dtype).removeprefix("torch.")
            values = sum(
                math.prod(weight.shape)
                for path, weight in self.weights.items()
                if path.removesuffix(".weight") not in self._layers
            )
            kinds.append(f"{num_floats} as {name} ({values * self.dtype.itemsize:,} bytes)")
        _log.info(
            "the checkpoint is quantized: %s, %d weights: %s. All weights take %s bytes, in the "
            "files %s",
            self.method,
            len(self.weights),
            "; ".join(kinds),
            f"{count_bytes(module):,}",
            f"{self.checkpoint.num_bytes:,}",
        )


def _block_size(
    checkpoint: Checkpoint, quantization_config: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Outputs and inputs of a block that has one scale, by the configuration."""
    stated = quantization_config.get("weight_block_size")
    if stated is None:
        return None
    is_pair = isinstance(stated, list) and len(stated) == 2
    if not is_pair or not all(type(size) is int and size >= 1 for size in stated):
        raise _wrong_block_size(checkpoint, stated)
    rows, columns = stated
    return rows, columns


def _wrong_block_size(checkpoint: Checkpoint, stated: object) -> UnsupportedModelError:
    return unservable(
        str(checkpoint.config["model_type"]),
        f"its quantization_config.weight_block_size is {show(stated)}, but must be two whole "
        "numbers of at least 1",
    )
